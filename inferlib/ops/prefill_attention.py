"""Attention of prefill chunks over their rows' cache, the chunk itself included."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp

from inferlib.ops.attention import AttentionOptions, masked_attention, slot_positions, visible
from inferlib.ops.by_platform import by_platform
from inferlib.ops.choice import Choice
from inferlib.ops.interpreted import run_kernel
from inferlib.ops.kv_cache import KvCache, Shaped, cells_of_rows, shape_of

# Implementations that read one layer of a stacked cache where it lies.
IN_PLACE = frozenset({"pallas_tpu"})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockList:
    """The blocks of positions that count, of those that queries see.

    numbers [P, K, T, M] int32: for each chunk, KV head and tile of `queries` tokens, at most M blocks of `keys`
    positions; block n begins at position n * keys, and negative numbers are no block.
    """

    numbers: jax.Array
    queries: int = field(metadata={"static": True})
    keys: int = field(metadata={"static": True})

    def holds(self, positions: jax.Array, width: int) -> jax.Array:
        """[P, K, C, S] bool, for key positions [P, S] and chunks of `width` tokens."""
        listed = self.numbers[..., None] == (positions // self.keys)[:, None, None, None]
        return jnp.repeat(jnp.any(listed, axis=3), self.queries, axis=2)[:, :, :width]


def choose(
    cache: KvCache,
    window: int | jax.Array | None,
    backend: str,
    q: Shaped | None = None,
    *,
    listed: BlockList | None = None,
    capped: bool = False,
    key_size: int | None = None,
) -> Choice:
    """The implementation for a cache, whose arrays may be shapes, as may the list of blocks.

    window: an array, or its shape, if it is each query's own. q: the queries [P, C, K, G, h]; None: they are not known
    yet, and what the kernels for TPUs and GPUs lack for their shapes is not asked. capped: logits have a softcap, or
    there are sinks, which matters for lists on GPUs. key_size: see `AttentionOptions`.
    """
    if backend == "xla":
        return Choice(backend)
    if backend == "pallas_tpu" and q is not None:
        from inferlib.pallas_kernels.prefill_attention_tpu import narrowed

        q = narrowed(q, key_size)
    return Choice.of(
        backend, _lacks(cache, window, backend, q, listed) or _lists_lack(cache, backend, q, listed, capped)
    )


def takes_lists(backend: str) -> bool:
    """Whether an implementation takes lists of blocks, on GPUs those of this process."""
    if backend == "pallas_gpu":
        from inferlib.pallas_kernels.prefill_attention_hopper_gpu import is_hopper

        return is_hopper()
    return backend != "nki"


def _lists_lack(cache: KvCache, backend: str, q: Shaped | None, listed: BlockList | None, capped: bool) -> str | None:
    if listed is None or q is None or backend != "pallas_gpu":
        return None
    from inferlib.pallas_kernels import prefill_attention_hopper_gpu as hopper

    if capped:
        return "lists of blocks with capped logits or sinks"
    return hopper.unsupported(shape_of(q), cache, AttentionOptions(1.0), lists=_gpu_lists(listed))


def _gpu_lists(listed: BlockList):
    from inferlib.pallas_kernels.prefill_attention_hopper_gpu import ListShape

    return ListShape(listed.queries, listed.keys, listed.numbers.shape[-1])


def _lacks(cache: KvCache, window, backend: str, q: Shaped | None, listed: BlockList | None) -> str | None:
    if listed is not None and not takes_lists(backend):
        return "lists of blocks"
    if cache.packed:
        return "a cache of int4"
    if cache.scaled and backend != "pallas_tpu":
        return "a cache of int8 or fp8"
    if backend == "pallas_gpu":
        from inferlib.pallas_kernels import prefill_attention_gpu

        return None if q is None else prefill_attention_gpu.unsupported(shape_of(q), cache)
    if cache.v is not None and cache.v.shape[-1] != cache.k.shape[-1] and backend != "pallas_tpu":
        return "values of another size than keys"
    if not isinstance(window, int | None):
        return "chunked attention"
    if q is None or backend != "pallas_tpu":
        return None
    from inferlib.pallas_kernels.prefill_attention_tpu import unsupported

    if listed is None:
        return unsupported(shape_of(q), cache)
    return unsupported(shape_of(q), cache, visits=listed.numbers.shape[-1], blocks=_tpu_blocks(q, cache, listed))


def _tpu_blocks(q: Shaped, cache: KvCache, listed: BlockList):
    """The largest blocks that fit the kernel's memory. Small listed blocks share a product, and a mask."""
    from inferlib.pallas_kernels.prefill_attention_tpu import Blocks, unsupported

    def of_size(most: int) -> Blocks:
        keys = max(most // listed.keys, 1) * listed.keys
        edge = math.gcd(keys, 512) if listed.keys < 512 else math.gcd(listed.keys, 256)
        return Blocks(listed.queries, keys, edge=edge, listed=listed.keys)

    sizes, count = map(of_size, (1024, 512)), listed.numbers.shape[-1]
    fit = (size for size in sizes if unsupported(shape_of(q), cache, visits=count, blocks=size) is None)
    return next(fit, of_size(512))


def prefill_attention(
    q: jax.Array,
    cache: KvCache,
    rows: jax.Array,
    positions: jax.Array,
    options: AttentionOptions,
    *,
    listed: BlockList | None = None,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """q [P, C, K, G, h]: chunk p holds the ascending `positions[p]`, [P, C] int32, of row rows[p].

    The chunk's own keys and values are in the cache already. In a ring there are at least as many slots as the window
    and the span of a chunk. Rows that do not exist (absent chunks) give garbage that the caller ignores.
    options.window: one for all queries, or [P, C] of each, which only "xla" and "pallas_gpu" take. listed: a query sees
    no position outside these blocks; "xla", "pallas_tpu" and, on Hopper GPUs, "pallas_gpu" take them.
    backend: "xla"; "nki" for the Trainium kernel (no scales); "pallas_gpu" (no scales, half precision)
    and "pallas_tpu", which read only blocks that are seen, and are interpreted on CPU. "xla" alone reads packed cells.
    Returns out [P, C, K, G, h] in q's dtype, lse [P, C, K, G] float32. Raises ValueError for what the backend does not
    take.
    """
    if backend != "xla" and cache.packed:
        raise ValueError(f"backend {backend!r} takes no packed cells; use xla")
    if backend in ("nki", "pallas_gpu") and cache.scaled:
        raise ValueError(f"backend {backend!r} takes no scales of keys and values; use xla")
    if listed is not None and not takes_lists(backend):
        where = " here, but on Hopper GPUs" if backend == "pallas_gpu" else ""
        raise ValueError(f"backend {backend!r} takes no list of blocks{where}; use xla")
    if backend == "pallas_gpu" and listed is not None:
        return _lists_by_gpu_kernel(q, cache, rows, positions, options, listed)
    if backend == "pallas_gpu":
        return _by_gpu_kernel(q, cache, rows, positions, options)
    if backend == "nki":
        from inferlib.nki_kernels.flash_prefill import flash_prefill

        return flash_prefill(q, cache, rows, positions, options)
    if backend == "pallas_tpu":
        return _by_tpu_kernel(q, cache, rows, positions, options, listed)
    return _by_xla(q, cache, rows, positions, options, listed)


def _by_gpu_kernel(q, cache: KvCache, rows, positions, options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    """The attention by the kernel for Hopper where that runs, else by the kernel for all GPUs, which CPUs interpret."""
    from inferlib.pallas_kernels import prefill_attention_gpu as every
    from inferlib.pallas_kernels import prefill_attention_hopper_gpu as hopper

    def run(kernel, q, k, v, rows, positions):
        return kernel(q, replace(cache, k=k, v=v), rows, positions, options)

    interpreted, best = partial(every.prefill_attention, interpret=True), every.prefill_attention
    if hopper.is_hopper() and hopper.unsupported(q, cache, options) is None:
        best = hopper.prefill_attention
    forms = dict(cpu=partial(run, interpreted), default=partial(run, best))
    return by_platform(q, cache.k, cache.v, rows, positions, **forms)


def _lists_by_gpu_kernel(
    q, cache: KvCache, rows, positions, options: AttentionOptions, listed: BlockList
) -> tuple[jax.Array, jax.Array]:
    from inferlib.pallas_kernels.prefill_attention_hopper_gpu import prefill_attention

    return prefill_attention(q, cache, rows, positions, options, visits=listed.numbers, lists=_gpu_lists(listed))


def _by_tpu_kernel(
    q, cache: KvCache, rows, positions, options: AttentionOptions, listed: BlockList | None
) -> tuple[jax.Array, jax.Array]:
    from inferlib.pallas_kernels import prefill_attention_tpu

    visits = blocks = None
    if listed is not None:
        visits = listed.numbers
        blocks = _tpu_blocks(prefill_attention_tpu.narrowed(q, options.key_size), cache, listed)

    def run(q, k, v, rows, positions, *, interpret: bool):
        of_call = replace(cache, k=k, v=v)
        return prefill_attention_tpu.prefill_attention(
            q, of_call, rows, positions, options, visits=visits, blocks=blocks, interpret=interpret
        )

    return run_kernel(run, q, cache.k, cache.v, rows, positions)


def _by_xla(
    q, cache: KvCache, rows, positions, options: AttentionOptions, listed: BlockList | None
) -> tuple[jax.Array, jax.Array]:
    cells = partial(cells_of_rows, cache, rows=rows)
    stored = slot_positions(positions[:, -1], cache.slots, cache.ring)
    seen = visible(positions, stored, options.window)
    if listed is not None:
        seen = seen[:, None] & listed.holds(stored, positions.shape[1])
    k, v = cells(cache.k), cells(cache.values)
    scales = cache.scales and (cells(cache.scales[0]), cells(cache.scales[1]))
    return masked_attention(q, k, v, seen, options, scales=scales)
