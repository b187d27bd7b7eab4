"""Two kernels of a decode layer on Trainium beside attention: norm and projection, and the feed-forward with its norm.

With few tokens, a layer takes as long as reading its weights once; these kernels do everything else in that time.
Tokens are the stationary side of every product, and weights stream past. The contracted dimension of size D is laid out
as lanes x tiles, k = lane * tiles + tile, with the most lanes that divide it, so that each lane reads whole rows and no
lane is empty.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import nki
import nki.isa as nisa
import nki.language as nl

from inferlib.nki_kernels.call import call, logical_cores

# Columns of one product, and tiles of the contracted dimension that are loaded at once.
COLUMNS, LOADED_TILES = 512, 16
TOKENS = 128
ACTIVATIONS = ("silu", "gelu_tanh")


def rmsnorm_matmul(x: jax.Array, weight: jax.Array, w: jax.Array, *, eps: float, lnc: int | None = None) -> jax.Array:
    """RMS norm of x [M, D] by weight [D] float32, times w [D, N] -> [M, N] in x's dtype; M at most 128.

    w: the query, key and value projections side by side. lnc: physical cores, which take columns in turn.
    """
    _check(x, weight, w)
    result = (jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype),)
    return call("rmsnorm_matmul", project, lnc, result, x, weight, w, eps=float(eps))[0]


def rmsnorm_mlp(
    x: jax.Array,
    weight: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    eps: float,
    activation: str = "silu",
    lnc: int | None = None,
) -> jax.Array:
    """y = (act(n gate) * (n up)) down with n the RMS norm of x [M, D] by weight [D] float32; M at most 128.

    gate, up [D, F], down [F, D], all in x's dtype -> [M, D]. lnc: physical cores, which share F and add their sums.
    """
    _check(x, weight, gate)
    if up.shape != gate.shape or down.shape != gate.shape[::-1] or {up.dtype, down.dtype} != {x.dtype}:
        raise ValueError(f"up {up.shape} {up.dtype} and down {down.shape} {down.dtype} do not match gate {gate.shape}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: the kernel has {', '.join(ACTIVATIONS)}")
    cores = logical_cores() if lnc is None else lnc
    half = -(-gate.shape[1] // cores)
    check_width(half)
    check_width(gate.shape[1] - half * (cores - 1))
    result = (jax.ShapeDtypeStruct(x.shape, x.dtype),)
    return call("rmsnorm_mlp", feed_forward, lnc, result, x, weight, gate, up, down, eps=float(eps), act=activation)[0]


def _check(x: jax.Array, weight: jax.Array, w: jax.Array) -> None:
    tokens, size = x.shape
    if tokens > TOKENS:
        raise ValueError(f"{tokens} tokens: the decode kernels take at most {TOKENS}")
    if weight.shape != (size,) or weight.dtype != jnp.float32:
        raise ValueError(f"norm weight {weight.shape} {weight.dtype} must be float32 [{size}]")
    if w.shape[0] != size or w.dtype != x.dtype:
        raise ValueError(f"w {w.shape} {w.dtype} must be [{size}, N] in x's dtype, {x.dtype}")
    check_width(size)


def check_width(size: int) -> None:
    """Refuse a sum that would leave most lanes of the Tensor engine empty."""
    if size < 1 or lanes_of(size) < min(size, 32):
        raise ValueError(f"a sum over {size} has no divisor from 32 to 128: lanes would be empty; pad it")


@nki.jit
def project(x, weight, w, eps):
    """(RMS norm of x [M, D]) times w [D, N] -> (y [M, N],)."""
    tokens, columns = x.shape[0], w.shape[1]
    y = nl.ndarray((tokens, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    turned = normed(x, weight, eps)
    turn = 0
    for start in range(0, columns, COLUMNS):
        stop = min(start + COLUMNS, columns)
        if turn % nl.num_programs() == nl.program_id(0):
            sums = nl.ndarray((tokens, stop - start), dtype=nl.float32, buffer=nl.psum)
            add_product(sums, turned, w, start, stop, 0, w.shape[0])
            rounded = nl.ndarray((tokens, stop - start), dtype=x.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=rounded, src=sums, engine=nisa.engine.scalar)
            nisa.dma_copy(dst=y[:, start:stop], src=rounded)
        turn = turn + 1
    return (y,)


@nki.jit
def feed_forward(x, weight, gate, up, down, eps, act):
    """The gated feed-forward of the RMS norm of x [M, D] -> (y [M, D],). Of two cores each takes half of F."""
    tokens, size = x.shape
    features = gate.shape[1]
    cores = nl.num_programs()
    y = nl.ndarray((tokens, size), dtype=x.dtype, buffer=nl.shared_hbm)
    half = (features + cores - 1) // cores
    first = nl.program_id(0) * half
    last = min(first + half, features)
    hidden = hide(normed(x, weight, eps), gate, up, first, last, act)
    sums = nl.ndarray((tokens, size), dtype=nl.float32, buffer=nl.sbuf)
    for start in range(0, size, COLUMNS):
        stop = min(start + COLUMNS, size)
        product = nl.ndarray((tokens, stop - start), dtype=nl.float32, buffer=nl.psum)
        add_product(product, hidden, down, start, stop, first, last)
        nisa.tensor_copy(dst=sums[:, start:stop], src=product, engine=nisa.engine.scalar)
    if cores == 2:
        other = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
        peer = 1 - nl.program_id(0)
        nisa.sendrecv(src=sums, dst=other, send_to_rank=peer, recv_from_rank=peer, pipe_id=0)
        nisa.tensor_tensor(dst=sums, data1=sums, data2=other, op=nl.add)
    if nl.program_id(0) == 0:
        rounded = nl.ndarray((tokens, size), dtype=x.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=rounded, src=sums)
        nisa.dma_copy(dst=y, src=rounded)
    return (y,)


def lanes_of(size):
    """The greatest divisor of a size that is at most 128."""
    lanes = min(size, 128)
    while size % lanes > 0:
        lanes = lanes - 1
    return lanes


def normed(x, weight, eps):
    """[lanes, tiles, M] in x's dtype: the RMS norm of x [M, D], transposed."""
    tokens, size = x.shape
    lanes = lanes_of(size)
    tiles = size // lanes
    loaded = nl.ndarray((tokens, size), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=loaded, src=x)
    scales = nl.ndarray((lanes, tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=scales, src=weight.reshape((lanes, tiles)))
    squares = nl.ndarray((tokens, size), dtype=nl.float32, buffer=nl.sbuf)
    total = nl.ndarray((tokens, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=squares,
        op=nl.square,
        data=loaded,
        reduce_op=nl.add,
        reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    nisa.activation(dst=total, op=nl.rsqrt, data=total, scale=1.0 / size, bias=eps)
    scaled = nl.ndarray((tokens, size), dtype=x.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=scaled, data=loaded, op0=nl.multiply, operand0=total)
    turned = nl.ndarray((lanes, tiles, tokens), dtype=x.dtype, buffer=nl.sbuf)
    for tile in range(tiles):
        moved = nl.ndarray((lanes, tokens), dtype=x.dtype, buffer=nl.psum)
        source = scaled[:, tile : tile + (lanes - 1) * tiles + 1 : tiles]
        nisa.nc_transpose(dst=moved, data=source, engine=nisa.engine.tensor)
        nisa.tensor_scalar(dst=turned[:, tile, :], data=moved, op0=nl.multiply, operand0=scales[:, tile : tile + 1])
    return turned


def add_product(sums, turned, w, start, stop, first, last):
    """sums [M, columns] = turned [lanes, tiles, M] times w[first:last, start:stop], whose rows lie as lanes x tiles."""
    lanes, tiles, _ = turned.shape
    rows = w[first:last, start:stop].reshape_dim(0, (lanes, tiles))
    for tile in range(0, tiles, LOADED_TILES):
        here = min(LOADED_TILES, tiles - tile)
        weights = nl.ndarray((lanes, here, stop - start), dtype=w.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=weights, src=rows[:, tile : tile + here, :])
        for i in range(here):
            nisa.nc_matmul(
                dst=sums, stationary=turned[:, tile + i, :], moving=weights[:, i, :], accumulate=tile + i > 0
            )


def hide(turned, gate, up, first, last, act):
    """[lanes, tiles, M]: act(x gate) * (x up) of features first to last, transposed as `add_product` wants it."""
    tokens = turned.shape[2]
    hidden = nl.ndarray((tokens, last - first), dtype=turned.dtype, buffer=nl.sbuf)
    for start in range(first, last, COLUMNS):
        stop = min(start + COLUMNS, last)
        opened = nl.ndarray((tokens, stop - start), dtype=nl.float32, buffer=nl.psum)
        raised = nl.ndarray((tokens, stop - start), dtype=nl.float32, buffer=nl.psum)
        add_product(opened, turned, gate, start, stop, 0, gate.shape[0])
        add_product(raised, turned, up, start, stop, 0, up.shape[0])
        gated = nl.ndarray((tokens, stop - start), dtype=nl.float32, buffer=nl.sbuf)
        if act == "silu":
            nisa.activation(dst=gated, op=nl.silu, data=opened)
        else:
            nisa.activation(dst=gated, op=nl.gelu_apprx_tanh, data=opened)
        nisa.tensor_tensor(dst=hidden[:, start - first : stop - first], data1=gated, data2=raised, op=nl.multiply)
    return turn(hidden)


def turn(loaded):
    """[M, D] in SBUF -> [lanes, tiles, M]."""
    tokens, size = loaded.shape
    lanes = lanes_of(size)
    tiles = size // lanes
    turned = nl.ndarray((lanes, tiles, tokens), dtype=loaded.dtype, buffer=nl.sbuf)
    for tile in range(tiles):
        moved = nl.ndarray((lanes, tokens), dtype=loaded.dtype, buffer=nl.psum)
        source = loaded[:, tile : tile + (lanes - 1) * tiles + 1 : tiles]
        nisa.nc_transpose(dst=moved, data=source, engine=nisa.engine.tensor)
        nisa.tensor_copy(dst=turned[:, tile, :], src=moved, engine=nisa.engine.scalar)
    return turned
