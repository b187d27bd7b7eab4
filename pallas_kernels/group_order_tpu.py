"""The order of rows sorted by group on TPUs, and its inverse: two sorts in vector registers.

The second sort, of the first one's order, gives the inverse permutation: XLA estimates ten cycles for each number of a
gather of single numbers.

The sort is Batcher's bitonic sort. A position's lowest bits number the register, the next ones sublane and lane: half
of all comparisons are then of whole registers. The transposed result is in order. Keys of descending blocks are
complemented, so that all comparisons are alike.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES = 128, 8
LEAST, MOST = 16, 64  # registers of keys: at least one square to transpose, and not more code than compiles quickly
PADDING = jnp.iinfo(jnp.int32).max


def registers(count: int) -> int:
    """Number of registers for `count` keys, a power of two."""
    return max(LEAST, pl.next_power_of_2(pl.cdiv(count, LANES * SUBLANES)))


def unsupported(count: int, groups: int, bits: int) -> str | None:
    """Why the kernel cannot sort `count` choices by group; None if it can. bits: bits of the token and the choice."""
    size = registers(count)
    if size > MOST:
        return f"{count} choices are more than {MOST * LANES * SUBLANES}"
    if bits + max((groups + 1).bit_length(), (size * LANES * SUBLANES).bit_length() - 2) > 31:
        return f"keys of {count} choices, {groups} groups and numbers of {bits} bits have more than 31 bits"
    return None


def group_order(
    keys: jax.Array,
    groups: int,
    of_token: int,
    of_choice: int = 0,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sort the keys of M choices, int32 of any shape and order -> sorted keys [M], places [M] and sizes [E], int32.

    Keys differ. From the highest bit, a key has the group (E = `groups` for none), the token in `of_token` bits and the
    choice in `of_choice` bits. places: the positions in the sorted keys of the first choices of all tokens, in order,
    then of the second ones. sizes: number of choices of each group. Raises ValueError with the reason of `unsupported`.
    """
    if reason := unsupported(keys.size, groups, of_token + of_choice):
        raise ValueError(f"the TPU kernel does not sort these: {reason}")
    total, size = keys.size, registers(keys.size)
    keys = jnp.pad(keys.reshape(-1), (0, size * LANES * SUBLANES - total), constant_values=PADDING)
    rows, wide = size * SUBLANES, pl.cdiv(groups, LANES) * LANES
    out, sizes = pl.pallas_call(
        functools.partial(_kernel, groups=groups, of_token=of_token, of_choice=of_choice),
        out_shape=[
            jax.ShapeDtypeStruct((2 * rows, LANES), jnp.int32),
            jax.ShapeDtypeStruct((1, wide), jnp.int32),
        ],
        scratch_shapes=[pltpu.VMEM((size, SUBLANES, LANES), jnp.int32), pltpu.VMEM((rows, LANES), jnp.int32)],
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=12 * rows * LANES, transcendentals=0),
        interpret=interpret,
        name="group_order",
    )(keys.reshape(size, SUBLANES, LANES))
    keys, places = (out.reshape(-1)[at : at + total] for at in (0, rows * LANES))
    return keys, places & (rows * LANES - 1), sizes[0, :groups]


def _kernel(keys_ref, out_ref, sizes_ref, ref, linear_ref, *, groups, of_token, of_choice):
    """keys [V, 8, 128] -> keys and places [2 * 8 * V, 128], sizes [1, G]. Scratch: [V, 8, 128], [8 * V, 128]."""
    rows, bits = linear_ref.shape[0], of_token + of_choice
    ref[...] = keys_ref[...]

    def sort(n: jax.Array, _: None) -> None:
        key = _sorted(ref[...])
        _in_order(key, linear_ref, out_ref.at[pl.ds(n * rows, rows)])
        # The keys of the second sort: choice and token, centred on zero because they may take all remaining bits, then
        # the position.
        number = (key & ((1 << of_choice) - 1)) << of_token | key >> of_choice & ((1 << of_token) - 1)
        number = (number - (1 << bits >> 1)) << (rows * LANES - 1).bit_length()
        ref[...] = jnp.where(key == PADDING, PADDING, number | _positions(key.shape))

    lax.fori_loop(0, 2, sort, None)
    ends = _ends(out_ref.at[:rows], bits, sizes_ref.shape[1], groups)
    first = lax.broadcasted_iota(jnp.int32, ends.shape, 1) == 0
    sizes_ref[...] = ends - jnp.where(first, 0, pltpu.roll(ends, 1, 1))


def _positions(shape: tuple[int, ...]) -> jax.Array:
    register, sublane, lane = (lax.broadcasted_iota(jnp.int32, shape, d) for d in range(3))
    return register + shape[0] * (sublane + SUBLANES * lane)


def _sorted(x: jax.Array) -> jax.Array:
    """Sort x [V, 8, 128], V a power of two, by position."""
    low, at = x.shape[0].bit_length() - 1, _positions(x.shape)
    sublane, lane = (lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), d) for d in (0, 1))
    gray, x = at ^ at >> 1, x ^ -(at & 1)
    for merge in range(1, low + 11):
        x ^= gray << (32 - merge) >> 31  # undo the last merge's complement and apply this one's
        for bit in reversed(range(merge)):
            if bit < low:
                a, b = jnp.split(x.reshape(-1, 2, 1 << bit, SUBLANES, LANES), 2, axis=1)
                x = jnp.concatenate([jnp.minimum(a, b), jnp.maximum(a, b)], axis=1).reshape(x.shape)
                continue
            axis, index, by = (1, sublane, bit - low) if bit < low + 3 else (2, lane, bit - low - 3)
            upper, by = (index >> by & 1) == 1, 1 << by
            if axis == 1:
                y = jnp.where(upper, pltpu.roll(x, by, 1), pltpu.roll(x, SUBLANES - by, 1))
            else:
                taken = functools.partial(jnp.take_along_axis, axis=1, mode="promise_in_bounds")
                y = jnp.stack([taken(x[v], lane ^ by) for v in range(x.shape[0])])
            x = jnp.where((x < y) ^ upper, x, y)
    return x


def _in_order(x: jax.Array, linear_ref, out_ref) -> None:
    """Write x [V, 8, 128], in the order of positions, to out [8 * V, 128], row by row."""
    size = x.shape[0]
    for v in range(size):
        linear_ref[pl.ds(v, SUBLANES, stride=size)] = x[v]
    squares = size * SUBLANES // LANES
    for n in range(squares):
        out_ref[pl.ds(n, LANES, stride=squares)] = linear_ref[pl.ds(n * LANES, LANES)].T


def _ends(order_ref, bits: int, wide: int, groups: int) -> jax.Array:
    """[1, wide]: number of keys of each group and of lower ones: in whole rows, plus those in the next row."""
    rows = order_ref.shape[0]
    of = jnp.minimum(order_ref[...] >> bits, groups)
    row, group = (lax.broadcasted_iota(jnp.int32, (rows, wide), d) for d in (0, 1))
    whole = jnp.sum((of[:, LANES - 1 :] <= group).astype(jnp.int32), axis=0, keepdims=True)
    next_row = (row == whole).astype(jnp.float32).astype(jnp.bfloat16)

    def taken(x: jax.Array) -> jax.Array:
        x, options = x.astype(jnp.float32).astype(jnp.bfloat16), dict(preferred_element_type=jnp.float32)
        return lax.dot_general(x, next_row, (((0,), (0,)), ((), ())), **options)

    keys_at = taken(of >> 8) * 256 + taken(of & 255)  # [128, wide]: bfloat16 holds 8 bits
    fewer = (keys_at <= group[:LANES].astype(jnp.float32)).astype(jnp.int32)
    return jnp.minimum(whole * LANES + jnp.sum(fewer, axis=0, keepdims=True), rows * LANES)
