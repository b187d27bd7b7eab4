"""The attention operations with one keyword for each array and option, as cases of implementations pass them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from inferlib.ops import decode_attention as decode
from inferlib.ops import mla_decode_attention as mla_decode
from inferlib.ops import mla_prefill_attention as mla_prefill
from inferlib.ops import prefill_attention as prefill
from inferlib.ops.attention import AttentionOptions
from inferlib.ops.kv_cache import KvCache, LatentCache, NewCells
from inferlib.ops.mla_prefill_attention import Expansion
from inferlib.ops.project_and_attend import HeadTransforms, QkvPartials, project_and_attend

_OPTIONS = "scale", "window", "softcap", "sinks", "key_size"
_KV = "k_scales", "v_scales", "layer", "pages", "ring", "limit"
_LATENT = "scales", "layer", "pages", "limit"


def _take(named: dict, names: Sequence[str]) -> dict:
    return {name: named.pop(name) for name in names if name in named}


def decode_attention(q, k, v, lengths, *, new=None, written=None, **named) -> tuple[jax.Array, ...]:
    """out, lse and, with `new`, the cache's arrays."""
    cache, options = KvCache(k, v, **_take(named, _KV)), AttentionOptions(**_take(named, _OPTIONS))
    cells = None if new is None else NewCells(new, written)
    out, lse, cache = decode.decode_attention(q, cache, lengths, options, new=cells, **named)
    return (out, lse) if new is None else (out, lse, *cache.arrays)


def on_decode_kernel(kernel: Callable, **rest) -> Callable:
    """A decode kernel's entry point that takes one keyword for each array and option."""

    def run(q, k, v, lengths, *, new=None, written=None, **named):
        cache, options = KvCache(k, v, **_take(named, _KV)), AttentionOptions(**_take(named, _OPTIONS))
        named |= {} if new is None else {"new": NewCells(new, written)}
        return kernel(q, cache, lengths, options, **named, **rest)

    return run


def prefill_attention(q, k, v, rows, positions, **named) -> tuple[jax.Array, jax.Array]:
    cache, options = KvCache(k, v, **_take(named, _KV)), AttentionOptions(**_take(named, _OPTIONS))
    return prefill.prefill_attention(q, cache, rows, positions, options, **named)


def on_prefill_kernel(kernel: Callable) -> Callable:
    """A prefill kernel's entry point that takes one keyword for each array and option."""

    def run(q, k, v, rows, positions, **named):
        cache, options = KvCache(k, v, **_take(named, _KV)), AttentionOptions(**_take(named, _OPTIONS))
        return kernel(q, cache, rows, positions, options, **named)

    return run


def mla_decode_attention(q, rotary, latents, keys, lengths, *, new=None, **named) -> tuple[jax.Array, ...]:
    """out, lse and, with `new`, the cache's arrays."""
    cache, cells = LatentCache(latents, keys, **_take(named, _LATENT)), None if new is None else NewCells(new)
    out, lse, cache = mla_decode.mla_decode_attention(q, rotary, cache, lengths, new=cells, **named)
    return (out, lse) if new is None else (out, lse, *cache.arrays)


def mla_prefill_attention(q, k, v, latents, keys, rows, positions, *, weight_layer=None, **named):
    cache = LatentCache(latents, keys, **_take(named, _LATENT))
    return mla_prefill.mla_prefill_attention(q, Expansion(k, v, weight_layer), cache, rows, positions, **named)


def qkv_attention(qkv, k, v, lengths, arrays, *, counts=None, dtype=None, inputs=None, inputs_eps=0.0, **named):
    """out and the cache's arrays. With a dtype, qkv are partial sums. arrays: those of "bias", "norms", "rope", "sinks"
    "squares" and "addend" that a layer has."""
    cache, arrays = KvCache(k, v, **_take(named, _KV)), dict(arrays)
    options = AttentionOptions(**_take(named | _take(arrays, ["sinks"]), _OPTIONS))
    named = _take(named, ["eps", "offset"])
    if dtype is not None:
        squares, addend = (arrays.pop(name, None) for name in ("squares", "addend"))
        qkv = QkvPartials(qkv, dtype, squares, inputs, inputs_eps, addend)
    out, cache = project_and_attend(qkv, cache, lengths, HeadTransforms(**arrays, **named), options, counts)
    return out, *cache.arrays
