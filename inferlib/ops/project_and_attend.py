"""Decode attention from the projection of queries, keys and values on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from inferlib.attention_values import MOST_STACKED, AttentionOptions, HeadTransforms, KvCache, QkvPartials
from inferlib.ops.choice import Choice
from inferlib.ops.interpreted import run_kernel


def choose(cache: KvCache, backend: str, queries: int = 1, *, unfit: str = "") -> Choice:
    """The implementation for a cache. "xla": the layer transforms the heads, and `decode_attention` follows.

    queries: of a KV head in a row, of all its new tokens. unfit: what the step or the layer has that the kernel does
    not take, such as "prompt chunks".
    """
    if backend == "xla":
        return Choice(backend)
    from inferlib.pallas_kernels.row_cells_gpu import unsupported_pages

    of_pages = unsupported_pages(cache.k.shape[-2], cache.columns)
    reasons = {
        unfit: True,
        f"more than {MOST_STACKED} queries of a KV head in a row": queries > MOST_STACKED,
        of_pages or "": True,
        "a stacked cache": cache.layer is not None,
        "keys and values in one cell": cache.v is None,
        "a cache of int8 or fp8": cache.scaled,
        "a cache of int4": cache.packed,
    }
    return Choice.of(backend, next((reason for reason, holds in reasons.items() if reason and holds), None))


def project_and_attend(
    qkv: jax.Array | QkvPartials,
    cache: KvCache,
    lengths: jax.Array,
    transforms: HeadTransforms,
    options: AttentionOptions,
    counts: jax.Array | None = None,
) -> tuple[jax.Array, KvCache]:
    """Attend from the projection of each row's C newest tokens, by one GPU kernel, which is interpreted on CPU.

    qkv [B * C, K, G + 2, h]: for each KV head G queries, a key and a value, row by row; or their partial sums. The
    result equals the steps of `transforms`, then `decode_attention` with new cells; see
    `pallas_kernels.qkv_attention_gpu`. lengths [B] int32: as in `decode_attention`. counts [B] int32: how many of a
    row's tokens are new, the last ones; None: all.
    Returns attention's output [B * C, K, G, h], of tokens that are not new anything, and the cache with the new cells.
    Raises ValueError for inputs that the kernel does not take.
    """
    from inferlib.pallas_kernels.qkv_attention_gpu import qkv_attention as kernel

    steps = dict(bias=transforms.bias, norms=transforms.norms, rope=transforms.rope)
    arrays: dict[str, Any] = dict(**steps, sinks=options.sinks)
    products = qkv
    if isinstance(qkv, QkvPartials):
        arrays |= {"squares": qkv.squares, "addend": qkv.addend}
        products = qkv.partials

    def run(products, k, v, lengths, counts, arrays, *, interpret: bool):
        if isinstance(qkv, QkvPartials):
            products = replace(qkv, partials=products, squares=arrays["squares"], addend=arrays["addend"])
        steps = replace(transforms, **{name: arrays[name] for name in ("bias", "norms", "rope")})
        weighing, of_call = replace(options, sinks=arrays["sinks"]), replace(cache, k=k, v=v)
        return kernel(products, of_call, lengths, steps, weighing, counts=counts, interpret=interpret)

    out, *new = run_kernel(run, products, cache.k, cache.v, lengths, counts, arrays)
    return out, cache.with_arrays(new)
