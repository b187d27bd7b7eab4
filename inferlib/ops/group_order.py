"""Sort the choices of tokens by group, for grouped products, and find the way back."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inferlib.ops.by_platform import by_platform
from inferlib.ops.choice import Choice

_BLOCK = 1024  # choices that are compared with each other, in one kernel that takes as long as its launch
_MOST_PAIRWISE = 4 * _BLOCK


class GroupOrder(NamedTuple):
    """M = T * k choices, sorted by group, then token, then choice; choices of no group come last. All int32.

    tokens, choices, ids [M]: the token, the number of the choice (below k) and the group of each sorted choice. places
    [k, T]: the places of each token's choices in the sorted order. sizes [E]: number of choices of each group.
    """

    tokens: jax.Array
    choices: jax.Array
    ids: jax.Array
    places: jax.Array
    sizes: jax.Array


def choose(shape: tuple[int, ...], groups: int, backend: str, *, most: int | None = None) -> Choice:
    """The implementation that sorts ids [T, k] = `shape`. most: upper bound of the tokens' numbers; T by default."""
    if backend != "pallas_tpu":
        return Choice("xla")
    from inferlib.pallas_kernels.group_order_tpu import unsupported

    return Choice.of("pallas_tpu", unsupported(math.prod(shape), groups, sum(_bits(shape, most))))


def _bits(shape: tuple[int, ...], most: int | None) -> tuple[int, int]:
    """How many bits a token's number and a choice's number take."""
    tokens, choices = shape
    return ((tokens if most is None else most) - 1).bit_length(), (choices - 1).bit_length()


def group_order(
    ids: jax.Array, groups: int, *, numbers: jax.Array | None = None, most: int | None = None, backend: str = "xla"
) -> GroupOrder:
    """The order of ids [T, k] int32: numbers of E = `groups` groups, or E for none.

    numbers [T] int32: the tokens' numbers, ascending and below `most`; 0 to T - 1 by default. backend: the backend of
    the products. With "pallas_tpu", TPUs take the kernel if `choose` says so; other platforms take XLA, with the same
    result. NVIDIA GPUs count instead of sorting: XLA:GPU compiles every sort of a program anew, so a sort in each layer
    would take most of the time to compile a model with experts. Raises ValueError for numbers without `most`.
    """
    if numbers is None:
        most = ids.shape[0]
    elif most is None:
        raise ValueError("numbers of tokens need `most`, their upper bound")
    forms = {"default": partial(_by_sorting, groups=groups), "cuda": partial(_by_counting, groups=groups)}
    choice = choose(ids.shape, groups, backend, most=most)
    if choice.name == "pallas_tpu":
        forms["tpu"] = partial(_by_kernel, groups=groups, bits=_bits(ids.shape, most))
    elif choice.reason and numbers is not None:  # the numbers have too many bits: sort without them
        order = group_order(ids, groups, backend=backend)
        return order._replace(tokens=numbers[order.tokens])
    return by_platform(ids, numbers, **forms)


def _by_sorting(ids: jax.Array, numbers: jax.Array | None, *, groups: int) -> GroupOrder:
    (tokens, chosen), flat = ids.shape, ids.reshape(-1)
    order = jnp.argsort(flat)
    places = jnp.argsort(order).reshape(tokens, chosen).T
    return _in_order(order, places, flat, numbers, chosen, groups)


def _by_counting(ids: jax.Array, numbers: jax.Array | None, *, groups: int) -> GroupOrder:
    """A choice's place is the number of choices before it: of lower groups, and of its own that come first."""
    (tokens, chosen), flat = ids.shape, ids.reshape(-1)
    places = _places_by_pairs(flat) if flat.size <= _MOST_PAIRWISE else _places_by_blocks(flat, groups)
    numbered = jnp.arange(flat.size, dtype=jnp.int32)
    order = jnp.zeros_like(flat).at[places].set(numbered, unique_indices=True, mode="promise_in_bounds")
    return _in_order(order, places.reshape(tokens, chosen).T, flat, numbers, chosen, groups)


def _places_by_pairs(ids: jax.Array) -> jax.Array:
    number = jnp.arange(ids.size, dtype=jnp.int32)
    this, other = (ids[:, None], number[:, None]), (ids, number)
    before = (other[0] < this[0]) | ((other[0] == this[0]) & (other[1] < this[1]))
    return jnp.sum(before, axis=1, dtype=jnp.int32)


def _places_by_blocks(ids: jax.Array, groups: int) -> jax.Array:
    """Like `_places_by_pairs`, but compares only the pairs within a block."""
    blocks = jnp.pad(ids, (0, -ids.size % _BLOCK), constant_values=groups).reshape(-1, _BLOCK)
    counts = jnp.sum(blocks[:, :, None] == jnp.arange(groups + 1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    ends = jnp.cumsum(counts, axis=0)  # [blocks, E + 1]
    starts = ends - counts + (jnp.cumsum(ends[-1]) - ends[-1])  # of each block's choices of each group
    number = jnp.arange(_BLOCK, dtype=jnp.int32)
    earlier = (blocks[:, None] == blocks[:, :, None]) & (number < number[:, None])
    places = jnp.take_along_axis(starts, blocks, axis=1) + jnp.sum(earlier, axis=2, dtype=jnp.int32)
    return places.reshape(-1)[: ids.size]


def _in_order(
    order: jax.Array, places: jax.Array, ids: jax.Array, numbers: jax.Array | None, chosen: int, groups: int
) -> GroupOrder:
    """order [M]: the choices by group. ids [M]: of all choices, not in order."""
    # A constant if it is small: computing it would take another kernel.
    pairs = (np if ids.size <= 1024 else jnp).arange(ids.size, dtype=np.int32)
    token = (
        take_in_bounds(jnp.asarray(pairs // chosen), order)
        if numbers is None
        else take_in_bounds(numbers, lax.div(order, jnp.int32(chosen)))
    )
    sizes = jnp.sum(ids == jnp.arange(groups, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    return GroupOrder(token, lax.rem(order, jnp.int32(chosen)), take_in_bounds(ids, order), places, sizes)


def take_in_bounds(x: jax.Array, indices: jax.Array) -> jax.Array:
    """x[indices] for indices that are in bounds and not negative. The operations that would wrap negative ones would
    make every layer take longer to compile for GPUs."""
    return x.at[indices].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _by_kernel(ids: jax.Array, numbers: jax.Array | None, *, groups: int, bits: tuple[int, int]) -> GroupOrder:
    """bits: see `_bits`."""
    from inferlib.pallas_kernels import group_order_tpu

    (tokens, chosen), (token_bits, choice_bits) = ids.shape, bits
    numbers = jnp.arange(tokens, dtype=jnp.int32) if numbers is None else numbers
    choices = jnp.arange(chosen, dtype=jnp.int32)[:, None]
    keys = (ids.T << token_bits | numbers) << choice_bits | choices  # [k, T]: that lies in memory without padding
    keys, places, sizes = group_order_tpu.group_order(keys, groups, token_bits, choice_bits)
    token, choice = keys >> choice_bits & ((1 << token_bits) - 1), keys & ((1 << choice_bits) - 1)
    return GroupOrder(token, choice, keys >> token_bits + choice_bits, places.reshape(chosen, tokens), sizes)
