"""The order of choices by group: what products of groups are told, and the way back."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class GroupOrder(NamedTuple):
    """M = T * k choices sorted by group, those of no group last, and in each by token and choice; all int32.

    tokens, choices, ids [M]: of each in this order the token, which of its choices, and the group. places [k, T]: of
    each choice, in this order. sizes [E]: choices of each group.
    """

    tokens: jax.Array
    choices: jax.Array
    ids: jax.Array
    places: jax.Array
    sizes: jax.Array


def group_order(
    ids: jax.Array, groups: int, *, numbers: jax.Array | None = None, most: int = 0, backend: str = "xla"
) -> GroupOrder:
    """The order of ids [T, k] int32, each one of E = `groups` or that many for none.

    numbers [T] int32: what tokens are called, rising and below `most`; by default 0 to T - 1. backend: that of the
    products. By a kernel with "pallas_tpu", else XLA's form, which CPUs take too, as both give the same; so do more
    choices than the kernel takes. Raises ValueError for numbers without their bound.
    """
    if numbers is not None and most < 1:
        raise ValueError("numbers of tokens need `most`, which they are below")
    forms = {"default": partial(_by_xla, groups=groups)}
    if backend == "pallas_tpu":
        from inferlib.pallas_kernels.group_order_tpu import unsupported

        most = ids.shape[0] if numbers is None else most
        bits = (most - 1).bit_length(), (ids.shape[1] - 1).bit_length()
        if unsupported(ids.size, groups, sum(bits)) is None:
            forms["tpu"] = partial(_by_kernel, groups=groups, bits=bits)
        elif numbers is not None:  # which have too many bits
            order = group_order(ids, groups, backend=backend)
            return order._replace(tokens=numbers[order.tokens])
    return lax.platform_dependent(ids, numbers, **forms)


def _by_xla(ids: jax.Array, numbers: jax.Array | None, *, groups: int) -> GroupOrder:
    (tokens, chosen), flat = ids.shape, ids.reshape(-1)
    # A constant of few rows: to make it would take a kernel.
    pairs = (np if flat.size <= 1024 else jnp).arange(flat.size, dtype=np.int32)
    order = jnp.argsort(flat)
    token = jnp.asarray(pairs // chosen)[order] if numbers is None else numbers[order // chosen]
    ids = flat[order]
    sizes = jnp.sum(ids == jnp.arange(groups, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    places = jnp.argsort(order).reshape(tokens, chosen).T
    return GroupOrder(token, order % chosen, ids, places, sizes)


def _by_kernel(ids: jax.Array, numbers: jax.Array | None, *, groups: int, bits: tuple[int, int]) -> GroupOrder:
    """bits: of a token's number, and of a choice's."""
    from inferlib.pallas_kernels import group_order_tpu

    (tokens, chosen), (of_token, of_choice) = ids.shape, bits
    numbers = jnp.arange(tokens, dtype=jnp.int32) if numbers is None else numbers
    choices = jnp.arange(chosen, dtype=jnp.int32)[:, None]
    keys = (ids.T << of_token | numbers) << of_choice | choices  # by choice, as they lie without padding
    keys, places, sizes = group_order_tpu.group_order(keys, groups, of_token, of_choice)
    token, choice = keys >> of_choice & ((1 << of_token) - 1), keys & ((1 << of_choice) - 1)
    return GroupOrder(token, choice, keys >> of_token + of_choice, places.reshape(chosen, tokens), sizes)
