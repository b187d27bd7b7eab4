"""Which implementation of attention a layer takes."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from inferlib.models.config import Mixer, MlaSpec
from inferlib.models.recurrent import Recurrent
from inferlib.ops import decode_attention, mla_decode_attention, mla_prefill_attention, prefill_attention
from inferlib.ops.backend import Backend
from inferlib.ops.choice import Choice
from inferlib.ops.kv_cache import KvCache

Operation: TypeAlias = Literal["decode_attention", "prefill_attention"]


def choose_attention(
    spec: Mixer, operation: Operation, backend: Backend, *, scaled: bool, packed: bool = False
) -> Choice:
    """The implementation that a layer's attention takes, whatever the sizes of batch and cache. Recurrent layers do not
    attend: for them it is the backend's preference. scaled: the cache is quantised; packed: to four bits."""
    name = getattr(backend, operation)
    if isinstance(spec, Recurrent):
        return Choice(name)
    if isinstance(spec, MlaSpec):
        op = mla_decode_attention if operation == "decode_attention" else mla_prefill_attention
        return op.choose(spec.kv_rank, spec.rope.dim, name, scaled=scaled)
    op = decode_attention if operation == "decode_attention" else prefill_attention
    scales = _array(1) if scaled else None
    window = spec.window if spec.chunk is None else _array(1)
    keys, values = (_array(size, jnp.uint8 if packed else jnp.float32) for size in spec.cache_sizes)
    return op.choose(KvCache(keys, values, scales, scales), window, name)


def _array(size: int, dtype: jax.typing.DTypeLike = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct((1, 1, 1, size), dtype)
