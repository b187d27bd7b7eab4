"""States of recurrent layers behind a step whose tokens may not stand.

A step that verifies drafts leaves the states of recurrent layers as they were, and keeps what each layer's rule read of
every token: its inputs. Once it is known how many tokens of a row stand, the rule runs again over these alone. That
reads the state once more, and writes it once as a step of one token does. The states behind each of C tokens would be
written C times, and a state is far larger than the inputs of a token.

Shapes: B rows; C tokens of each; L layers of a scanned segment.
"""

from __future__ import annotations

from dataclasses import replace

import jax
from flax import nnx
from jax import lax

from inferlib.models.blocks import Block
from inferlib.models.decoder import Decoder
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.mixers.states import replayed


def replay(decoder: Decoder, caches: tuple[LayerCache, ...], counts: jax.Array) -> tuple[LayerCache, ...]:
    """The caches of a step that kept inputs, one for each block, with the first `counts` [B] tokens of each row in the
    states. Other caches stay as they are."""
    lengths = [segment.count for segment in decoder.segments for _ in segment.pattern]
    blocks = zip(decoder.blocks, lengths, caches, strict=True)
    return tuple(_of_block(block, length, cache, counts) for block, length, cache in blocks)


def _of_block(block: Block, length: int, cache: LayerCache, counts: jax.Array) -> LayerCache:
    """length: how many layers' weights the block has, stacked if they are several."""
    if not cache.inputs:
        return cache
    if length == 1:
        return replayed(block.attn.rule, cache, counts)
    # The rule reads plain arrays. Others are packed or quantised, and need no slice.
    graph, small, others = nnx.split(block.attn, lambda _, p: isinstance(p.get_value(), jax.Array), ...)

    def one(layer: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False)  # noqa: E731
        mixer = nnx.merge(graph, jax.tree.map(at, small), others)
        now = replace(cache, arrays=arrays, layer=layer, inputs=tuple(map(at, cache.inputs)))
        return replayed(mixer.rule, now, counts).arrays

    arrays = lax.fori_loop(0, length, one, cache.arrays)
    return replace(cache, arrays=arrays, inputs=())
