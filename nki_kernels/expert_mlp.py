"""The feed-forwards of the experts that few tokens choose, on Trainium: the weights of a chosen expert are read once.

All tokens go through every chosen expert, which takes less time than reading its weights; its outputs count for the
tokens that chose it. The list of chosen experts has a static length. The weights of a place that is not filled are not
read: their rows lie out of bounds, and the transfer skips them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import nki
import nki.isa as nisa
import nki.language as nl

from inferlib.attention_values import Shaped
from inferlib.nki_kernels.call import call
from inferlib.nki_kernels.decode_linear import ACTIVATIONS, COLUMNS, LOADED_TILES, TOKENS, check_width, lanes_of, turn


def unsupported(tokens: int, gate_up: Shaped, down: Shaped, dtype, activation: object) -> str | None:
    """Why the kernel cannot take `tokens` tokens of a dtype through gate_up [E, 2, D, F] and down [E, F, D], or None.

    activation: of the gate, by name.
    """
    (experts, halves, size, features), dtype = gate_up.shape, jnp.dtype(dtype)
    if halves != 2:
        return "it takes experts with gates"
    if activation not in ACTIVATIONS:
        return f"it has no activation {activation}"
    if {gate_up.dtype, down.dtype} != {dtype} or dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"it takes tokens and weights of float32, bfloat16 or float16, all alike, not {dtype}, {gate_up.dtype}"
    if tokens > TOKENS:
        return f"{tokens} tokens exceed {TOKENS}"
    if (experts + 1) * 2 * 128 >= 2**24:
        return f"{experts} experts: rows are found in float32, exact below 2**24"
    try:
        check_width(size)
        check_width(features)
    except ValueError as error:
        return str(error)
    return None if features % 2 == size % 2 == 0 else f"odd sizes {size} and {features}"


def expert_mlp(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    factors: jax.Array,
    *,
    activation: str = "silu",
    scale_input: bool = False,
    most: int | None = None,
    lnc: int | None = None,
) -> jax.Array:
    """The sum over experts of factors * ((act(x gate) * (x up)) down): x [T, D] -> [T, D], T at most 128.

    gate_up [E, 2, D, F], down [E, F, D], both in x's dtype; factors [T, E] float32, 0 where a token did not choose an
    expert; with scale_input they multiply x instead. Rows of x without a factor may hold anything. most: no more
    experts have a factor; by default E. lnc: physical cores, which take experts in turn and add their sums.
    Returns the sum in x's dtype, accumulated in float32. Raises ValueError for what `unsupported` names.
    """
    tokens, experts = factors.shape
    if reason := unsupported(tokens, gate_up, down, x.dtype, activation):
        raise ValueError(f"the Trainium kernel does not run these experts: {reason}")
    chosen = factors != 0
    x = jnp.where(jnp.any(chosen, axis=1)[:, None], x, 0)
    places = chosen_experts(jnp.any(chosen, axis=0), min(experts, most or experts))
    taken = jnp.take(factors.astype(jnp.float32), jnp.minimum(places, experts - 1), axis=1, mode="clip")
    taken = jnp.where(places < experts, taken, 0)
    ones = jnp.ones_like(taken)
    pair = (taken, ones) if scale_input else (ones, taken)
    columns = jnp.stack([*pair, (taken != 0).astype(jnp.float32)])
    result = (jax.ShapeDtypeStruct(x.shape, x.dtype),)
    return call("expert_mlp", kernel, lnc, result, x, gate_up, down, places, columns, act=activation)[0]


def chosen_experts(chosen: jax.Array, places: int) -> jax.Array:
    """[places] int32: the experts of which `chosen` [E] holds, ascending, then E. Trainium's compiler has no sort."""
    numbers = jnp.arange(chosen.size, dtype=jnp.int32)
    earlier = jnp.sum(chosen & (numbers < numbers[:, None]), axis=1, dtype=jnp.int32)
    at = chosen & (earlier == jnp.arange(places, dtype=jnp.int32)[:, None])
    return jnp.min(jnp.where(at, numbers, chosen.size), axis=1)


@nki.jit
def kernel(x, gate_up, down, places, columns, act):
    """The weighted sum of the experts `places` [S] int32, E for none.

    x [T, D]; gate_up [E, 2, D, F]; down [E, F, D]; columns [3, T, S] float32: what multiplies the input of an expert,
    what its output, and 1 where a token chose it, else 0. Returns (y [T, D],).
    """
    tokens, size = x.shape
    y = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    loaded = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=loaded, src=x)
    turned = turn(loaded)
    opening = (rows_of(gate_up, 2), two_buffers(gate_up))
    closing = (rows_of(down, 1), two_buffers(down))
    gates = find_rows(places, gate_up, 2, 0)
    ups = find_rows(places, gate_up, 2, 1)
    downs = find_rows(places, down, 1, 0)
    before, after, counts = load_columns(columns)
    sums = nl.ndarray((tokens, size), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=sums, value=0.0)
    for s in range(nl.program_id(0), places.shape[0], nl.num_programs()):
        index = (gates[:, s : s + 1], ups[:, s : s + 1])
        hidden = hide(turned, opening, index, before[:, s : s + 1], (gate_up.shape[3], act))
        weight = (after[:, s : s + 1], counts[:, s : s + 1])
        add_outputs(sums, turn(hidden), closing, downs[:, s : s + 1], weight)
    if nl.num_programs() == 2:
        other = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
        peer = 1 - nl.program_id(0)
        nisa.sendrecv(src=sums, dst=other, send_to_rank=peer, recv_from_rank=peer, pipe_id=0)
        nisa.tensor_tensor(dst=sums, data1=sums, data2=other, op=nl.add)
    if nl.program_id(0) == 0:
        rounded = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=rounded, src=sums)
        nisa.dma_copy(dst=y, src=rounded)
    return (y,)


def inner_of(weights):
    """The dimension that a product with weights [..., K, N] sums over."""
    return weights.shape[len(weights.shape) - 2]


def rows_of(weights, halves):
    """[E * halves * lanes, tiles * N]: weights [E, (halves), K, N] as rows of which each lane reads one."""
    inner, columns = inner_of(weights), weights.shape[len(weights.shape) - 1]
    lanes = lanes_of(inner)
    return weights.reshape((weights.shape[0] * halves * lanes, inner // lanes * columns))


def two_buffers(weights):
    """Two tiles that parts of the weights fill in turn, cleared once: a transfer that is skipped writes nothing."""
    lanes = lanes_of(inner_of(weights))
    tiles = min(LOADED_TILES, inner_of(weights) // lanes)
    columns = min(COLUMNS, weights.shape[len(weights.shape) - 1])
    made = []
    for _ in range(2):
        tile = nl.ndarray((lanes, tiles, columns), dtype=weights.dtype, buffer=nl.sbuf)
        nisa.memset(dst=tile.view(nl.int32), value=0, engine=nisa.engine.gpsimd)
        made.append(tile)
    return made


def find_rows(places, weights, halves, half):
    """[lanes, S] int32: the row of `rows_of` that each lane reads of the experts `places`; out of reach for none."""
    lanes, n = lanes_of(inner_of(weights)), places.shape[0]
    rows = nl.ndarray((lanes, n), dtype=nl.int32, buffer=nl.sbuf)
    lane = nl.ndarray((lanes, n), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=places.ap(pattern=[[0, lanes], [1, n]]))
    nisa.iota(dst=lane, pattern=[[0, n]], offset=half * lanes, channel_multiplier=1)
    nisa.tensor_scalar(dst=rows, data=rows, op0=nl.multiply, operand0=float(halves * lanes))
    nisa.tensor_tensor(dst=rows, data1=rows, data2=lane, op=nl.add)
    return rows


def load_columns(columns):
    """The three columns of every place, [T, S] each in SBUF, the last as uint8."""
    _, tokens, n = columns.shape
    loaded = nl.ndarray((tokens, 3, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=loaded, src=columns.permute((1, 0, 2)))
    counts = nl.ndarray((tokens, n), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_copy(dst=counts, src=loaded[:, 2, :])
    return loaded[:, 0, :], loaded[:, 1, :], counts


def add_product(sums, turned, weights, index, start):
    """sums [T, columns] = turned [lanes, tiles, T] times the columns from `start` on of one expert's weights.

    weights: (rows of all experts, two buffers); index [lanes, 1]: the expert's rows.
    """
    rows, buffers = weights
    lanes, tiles, _ = turned.shape
    columns, width = sums.shape[1], rows.shape[1] // tiles
    for tile in range(0, tiles, LOADED_TILES):
        here = min(LOADED_TILES, tiles - tile)
        loaded = buffers[(start // COLUMNS + tile // LOADED_TILES) % 2][:, 0:here, 0:columns]
        nisa.dma_copy(
            dst=loaded,
            src=rows.ap(
                pattern=[[rows.shape[1], lanes], [width, here], [1, columns]],
                offset=tile * width + start,
                vector_offset=index,
                indirect_dim=0,
            ),
            oob_mode=nisa.oob_mode.skip,
        )
        for i in range(here):
            nisa.nc_matmul(dst=sums, stationary=turned[:, tile + i, :], moving=loaded[:, i, :], accumulate=tile + i > 0)


def hide(turned, weights, index, factor, kind):
    """[T, F]: act(factor * x gate) * (factor * x up) of one expert.

    index: (rows of gate, rows of up); factor [T, 1]; kind: (F, act).
    """
    tokens = turned.shape[2]
    features, act = kind
    hidden = nl.ndarray((tokens, features), dtype=turned.dtype, buffer=nl.sbuf)
    for start in range(0, features, COLUMNS):
        stop = min(start + COLUMNS, features)
        opened = nl.ndarray((tokens, stop - start), dtype=nl.float32, buffer=nl.psum)
        raised = nl.ndarray((tokens, stop - start), dtype=nl.float32, buffer=nl.psum)
        add_product(opened, turned, weights, index[0], start)
        add_product(raised, turned, weights, index[1], start)
        gate = nl.ndarray((tokens, stop - start), dtype=nl.float32, buffer=nl.sbuf)
        if act == "silu":
            nisa.activation(dst=gate, op=nl.silu, data=opened, scale=factor)
        else:
            nisa.activation(dst=gate, op=nl.gelu_apprx_tanh, data=opened, scale=factor)
        nisa.scalar_tensor_tensor(
            dst=hidden[:, start:stop], data=raised, op0=nl.multiply, operand0=factor, op1=nl.multiply, operand1=gate
        )
    return hidden


def add_outputs(sums, hidden, weights, index, weight):
    """sums [T, D] += factor * (hidden [lanes, tiles, T] times down) of the tokens that chose the expert.

    weight: (factor [T, 1], whether a token counts [T, 1] uint8).
    """
    tokens, size = sums.shape
    factor, counts = weight
    for start in range(0, size, COLUMNS):
        stop = min(start + COLUMNS, size)
        product = nl.ndarray((tokens, stop - start), dtype=nl.float32, buffer=nl.psum)
        add_product(product, hidden, weights, index, start)
        chosen = nl.ndarray((tokens, stop - start), dtype=nl.float32, buffer=nl.sbuf)
        nisa.select_reduce(dst=chosen, predicate=counts.broadcast(1, stop - start), on_true=product, on_false=0.0)
        nisa.scalar_tensor_tensor(
            dst=sums[:, start:stop],
            data=chosen,
            op0=nl.multiply,
            operand0=factor,
            op1=nl.add,
            operand1=sums[:, start:stop],
        )
