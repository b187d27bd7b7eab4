"""Sort the choices of tokens by group, for grouped products, and find the way back."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inferlib.ops.choice import Choice


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
    result. Raises ValueError for numbers without `most`.
    """
    if numbers is None:
        most = ids.shape[0]
    elif most is None:
        raise ValueError("numbers of tokens need `most`, their upper bound")
    forms = {"default": partial(_by_xla, groups=groups)}
    choice = choose(ids.shape, groups, backend, most=most)
    if choice.name == "pallas_tpu":
        forms["tpu"] = partial(_by_kernel, groups=groups, bits=_bits(ids.shape, most))
    elif choice.reason and numbers is not None:  # the numbers have too many bits: sort without them
        order = group_order(ids, groups, backend=backend)
        return order._replace(tokens=numbers[order.tokens])
    return lax.platform_dependent(ids, numbers, **forms)


def _by_xla(ids: jax.Array, numbers: jax.Array | None, *, groups: int) -> GroupOrder:
    (tokens, chosen), flat = ids.shape, ids.reshape(-1)
    # A constant if it is small: computing it would take another kernel.
    pairs = (np if flat.size <= 1024 else jnp).arange(flat.size, dtype=np.int32)
    order = jnp.argsort(flat)
    token = jnp.asarray(pairs // chosen)[order] if numbers is None else numbers[order // chosen]
    ids = flat[order]
    sizes = jnp.sum(ids == jnp.arange(groups, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    places = jnp.argsort(order).reshape(tokens, chosen).T
    return GroupOrder(token, order % chosen, ids, places, sizes)


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
