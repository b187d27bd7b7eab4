"""A row's state in a recurrent mixer: a `LayerCache` of arrays [N, ...], in a scanned segment [L, N, ...], which is
read and written in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.models.batch import StepBatch, rolled
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.ops.in_chunks import scan

States = tuple[jax.Array, ...]
# A rule takes inputs [P, C, ...] of C tokens for each of P rows, the states of the rows [P, ...], and the number of
# valid tokens [P], which come first. It returns outputs [P, C, ...] and the states after the valid tokens.
Rule = Callable[[list[jax.Array], States, jax.Array], tuple[jax.Array, States]]


def in_turn(
    rule: Rule, inputs: Sequence[jax.Array], batch: StepBatch, cache: LayerCache
) -> tuple[jax.Array, LayerCache]:
    """Run a step's tokens, inputs [T, ...] each, through a rule; returns outputs [T, ...] and the new cache. Tokens
    that are not valid change no state, and neither do several of a decode row, which may not stand: the cache keeps
    their inputs, see `replayed`."""
    (p, c), outs = batch.chunk_tokens.shape, []
    if split := math.prod((p, c)):
        chunks = [x[:split].reshape(p, c, *x.shape[1:]) for x in inputs]
        out, cache = _chunks_in_turn(rule, chunks, batch, cache)
        outs.append(out.reshape(split, *out.shape[2:]))
    if rows := batch.decode_tokens.shape[0]:
        of_rows = [x[split:].reshape(*batch.decode_tokens.shape, *x.shape[1:]) for x in inputs]
        if (counts := batch.decode_counts) is None:
            out, new = rule(of_rows, row_states(cache, rows), (batch.decode_lengths > 0).astype(jnp.int32))
            cache = with_row_states(cache, new)
        else:
            of_rows = [rolled(x, -counts) for x in of_rows]
            out, _ = rule(of_rows, row_states(cache, rows), counts)
            out, cache = rolled(out, counts), replace(cache, inputs=tuple(of_rows))
        outs.append(out.reshape(-1, *out.shape[2:]))
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs), cache


def _chunks_in_turn(
    rule: Rule, chunks: Sequence[jax.Array], batch: StepBatch, cache: LayerCache
) -> tuple[jax.Array, LayerCache]:
    """Run chunks [P, C, ...] through a rule one after the other, because a chunk may continue the one before it.
    Returns outputs [P, C, ...] and the new cache."""

    def one(arrays: States, of_chunk: tuple) -> tuple[States, jax.Array]:
        (row, start, length), inputs = of_chunk
        now = replace(cache, arrays=arrays)
        alone = batch._replace(chunk_rows=row[None], chunk_starts=start[None], chunk_lengths=length[None])
        out, new = rule([x[None] for x in inputs], chunk_state(now, alone), alone.chunk_lengths)
        return with_chunk_state(now, alone, new).arrays, out[0]

    table = batch.chunk_rows, batch.chunk_starts, batch.chunk_lengths
    if chunks[0].shape[0] == 1:
        arrays, out = one(cache.arrays, jax.tree.map(lambda x: x[0], (table, list(chunks))))
        return out[None], replace(cache, arrays=arrays)
    arrays, out = scan(one, cache.arrays, (table, list(chunks)))
    return out, replace(cache, arrays=arrays)


def replayed(rule: Rule, cache: LayerCache, counts: jax.Array) -> LayerCache:
    """The cache in whose states the first `counts` [B] of each row's tokens are, of which it kept the inputs."""
    _, new = rule(list(cache.inputs), row_states(cache, counts.size), counts)
    return replace(with_row_states(cache, new), inputs=())


def advance(
    by_chunks: Callable[..., tuple[jax.Array, jax.Array]],
    by_step: Callable[..., tuple[jax.Array, jax.Array]],
    inputs: Sequence[jax.Array],
    state: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Run C tokens for each of P rows, inputs [P, C, ...] each, through one of two forms of a rule: `by_step` for a
    single token, `by_chunks` for more. lengths [P]: the number of valid tokens. Returns outputs [P, C, ...] and the new
    state."""
    valid = jnp.arange(inputs[0].shape[1]) < lengths[:, None]
    if valid.shape[1] > 1:
        return by_chunks(*inputs, state, valid)
    out, state = by_step(*(x[:, 0] for x in inputs), state, valid[:, 0])
    return out[:, None], state


def row_states(cache: LayerCache, rows: int) -> States:
    """The states of the first rows, [B, ...] each."""
    return tuple(_read(x, cache.layer, 0, rows) for x in cache.arrays)


def with_row_states(cache: LayerCache, new: Sequence[jax.Array]) -> LayerCache:
    """The cache with the states of the first rows replaced."""
    return replace(cache, arrays=tuple(_write(x, cache.layer, 0, s) for x, s in zip(cache.arrays, new, strict=True)))


def chunk_state(cache: LayerCache, batch: StepBatch) -> States:
    """The states of the one chunk's row, [1, ...] each: zeros where a prompt starts."""
    cached = (_read(x, cache.layer, batch.chunk_rows[0], 1) for x in cache.arrays)
    return tuple(jnp.where(batch.chunk_starts[0] == 0, 0, x) for x in cached)


def with_chunk_state(cache: LayerCache, batch: StepBatch, new: Sequence[jax.Array]) -> LayerCache:
    """The cache with the states of the one chunk's row replaced, unless the chunk is absent."""
    (row,), (length,) = batch.chunk_rows, batch.chunk_lengths

    def put(x: jax.Array, state: jax.Array) -> jax.Array:
        return _write(x, cache.layer, row, jnp.where(length > 0, state, _read(x, cache.layer, row, 1)))

    return replace(cache, arrays=tuple(map(put, cache.arrays, new)))


def _read(x: jax.Array, layer: jax.Array | None, first: jax.Array | int, rows: int) -> jax.Array:
    if layer is None:
        return lax.dynamic_slice_in_dim(x, first, rows)
    return lax.dynamic_slice(x, (layer, first, *[0] * (x.ndim - 2)), (1, rows, *x.shape[2:]))[0]


def _write(x: jax.Array, layer: jax.Array | None, first: jax.Array | int, new: jax.Array) -> jax.Array:
    new = new.astype(x.dtype)
    if layer is None:
        return new if new.shape == x.shape else lax.dynamic_update_slice_in_dim(x, new, first, axis=0)
    return lax.dynamic_update_slice(x, new[None], (layer, first, *[0] * (x.ndim - 2)))
