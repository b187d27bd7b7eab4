"""Cells of the cache that several KV heads share.

Where memory is tiled by 128 numbers, a cell of a key and a value of 80 numbers each would be padded to 256. The keys
and values of two heads take 384, a quarter less. Kernels see a joint cell as one key and one value: the queries of each
head are zero where the keys of the others lie, and of the output each head takes its values. Letters: K KV heads with G
query heads each, J = K / n cells of n heads, h the size of a head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MOST_QUERIES = 16  # heads of queries that meet a cell: with more, fewer tokens of a prompt would fit a tile


def heads_of_a_cell(heads: int, group: int, size: int, lanes: int) -> int:
    """How many of `heads` KV heads share a cell, for `group` query heads each. size: numbers of a key and its value.

    They are the fewest whose cells, multiples of `lanes`, are at most a fifth padding, or else those with least. Two
    and four are asked, with at most `MOST_QUERIES` query heads together: prefill attention takes longer the more there
    are, as the queries of a head meet the keys of all.
    """
    counts = [n for n in (1, 2, 4) if heads % n == 0 and (n == 1 or n * group <= MOST_QUERIES)]
    padding = {n: -(-n * size // lanes) * lanes / (n * size) for n in counts}
    return next((n for n in counts if padding[n] <= 1.25), min(counts, key=padding.__getitem__))


def joint_cells(x: jax.Array, count: int) -> jax.Array:
    """Keys or values [..., K, h] of `count` heads in each cell -> [..., J, n * h]."""
    *lead, heads, size = x.shape
    return x.reshape(*lead, heads // count, count * size)


def joint_queries(q: jax.Array, count: int) -> jax.Array:
    """Queries [..., K, G, h] -> [..., J, n * G, n * h], zero where other heads' keys lie."""
    if count == 1:
        return q
    *lead, heads, group, size = q.shape
    q = q.reshape(*lead, heads // count, count, group, 1, size)
    blocks = jnp.where(jnp.eye(count, dtype=bool)[:, None, :, None], q, 0)
    return blocks.reshape(*lead, heads // count, count * group, count * size)


def outputs_of_heads(out: jax.Array, lse: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The outputs [..., J, n * G, n * h] and log-sum-exps [..., J, n * G] of joint cells -> [..., K, G, h] and [..., K,
    G]."""
    if count == 1:
        return out, lse
    *lead, cells, queries, size = out.shape
    group = queries // count
    blocks = out.reshape(*lead, cells, count, group, count, size // count)
    heads = jnp.stack([blocks[..., i, :, i, :] for i in range(count)], axis=-3)
    shape = *lead, cells * count, group
    return heads.reshape(*shape, size // count), lse.reshape(shape)
