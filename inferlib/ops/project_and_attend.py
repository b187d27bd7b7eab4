"""Decode attention from the projection of queries, keys and values on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax

from inferlib.ops.attention import AttentionOptions
from inferlib.ops.choice import Choice
from inferlib.ops.kv_cache import KvCache


@dataclass(frozen=True)
class QkvPartials:
    """Partial sums of a projection that are not summed yet.

    partials [S, B, K, G + 2, h] float32, whose sum over S, rounded to dtype, is the projection. squares [B, n] float32:
    if the projected rows are an RMS norm without its factor, what sums to their squares before the norm; then inputs is
    the number of a row's inputs and eps the norm's.
    """

    partials: jax.Array
    dtype: jax.typing.DTypeLike
    squares: jax.Array | None = None
    inputs: int | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class HeadTransforms:
    """What turns projections into queries, keys and values, in this order.

    bias [K, G + 2, h] is added. norms: weights [h] of the RMS norms over a query's and over a key's head, with eps and
    an offset that is added to both weights. rope: cos and sin [B, r / 2] float32 that rotate queries and keys.
    """

    bias: jax.Array | None = None
    norms: tuple[jax.Array, jax.Array] | None = None
    rope: tuple[jax.Array, jax.Array] | None = None
    eps: float = 1e-6
    offset: float = 0.0


def choose(cache: KvCache, backend: str, *, unfit: str = "") -> Choice:
    """The implementation for a cache. "xla": the layer transforms the heads, and `decode_attention` follows.

    unfit: what the step or the layer has that the kernel does not take, such as "prompt chunks".
    """
    if backend == "xla":
        return Choice(backend)
    reasons = {
        unfit: True,
        "a stacked cache": cache.layer is not None,
        "keys and values in one cell": cache.v is None,
        "a cache of int8 or fp8": cache.scaled,
    }
    return Choice.of(backend, next((reason for reason, holds in reasons.items() if reason and holds), None))


def project_and_attend(
    qkv: jax.Array | QkvPartials,
    cache: KvCache,
    lengths: jax.Array,
    transforms: HeadTransforms,
    options: AttentionOptions,
) -> tuple[jax.Array, KvCache]:
    """qkv [B, K, G + 2, h], of each row's newest token G queries, a key and a value for each KV head, or its partial
    sums -> attention's output [B, K, G, h] and the cache with the new cells.

    The same as `HeadTransforms` and `decode_attention` with new cells one after the other, by one GPU kernel, which is
    interpreted on CPU; see `pallas_kernels.qkv_attention_gpu`. lengths [B] int32: as in `decode_attention`. Raises
    ValueError for what the kernel does not take.
    """
    from inferlib.pallas_kernels.qkv_attention_gpu import qkv_attention as kernel

    static: dict[str, Any] = dict(scale=options.scale, window=options.window, softcap=options.softcap)
    static |= dict(ring=cache.ring, limit=cache.limit, eps=transforms.eps, offset=transforms.offset)
    arrays = dict(bias=transforms.bias, norms=transforms.norms, rope=transforms.rope, sinks=options.sinks)
    if isinstance(qkv, QkvPartials):
        static |= dict(dtype=qkv.dtype, inputs=qkv.inputs, inputs_eps=qkv.eps)
        arrays["squares"], qkv = qkv.squares, qkv.partials

    def run(qkv, k, v, lengths, arrays, *, interpret: bool):
        return kernel(qkv, k, v, lengths, **arrays, **static, interpret=interpret)

    forms = {"cpu": partial(run, interpret=True), "default": partial(run, interpret=False)}
    out, *new = lax.platform_dependent(qkv, cache.k, cache.v, lengths, arrays, **forms)
    return out, cache.with_arrays(new)
