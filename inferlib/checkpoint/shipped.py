"""Checkpoints that are quantised as they are shipped, kept as they are: what `quantization_config` says of tensors.

Known are DeepSeek's fp8 (a scale for each 128 x 128), gpt-oss's MXFP4, and compressed-tensors: int8 and fp8 by channel,
tensor or group, and packed int4 by group. Activations stay in the model's dtype whatever the file says of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from inferlib.checkpoint.assemble import Piece
from inferlib.checkpoint.source import CheckpointError, TensorSource
from inferlib.models.abstract import WeightSpec
from inferlib.ops.quantized import SCHEMES, Scheme

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def _as_is(raw: np.ndarray) -> np.ndarray:
    return raw


def _nibbles_of_int32(raw: np.ndarray) -> np.ndarray:
    """[out, in / 8] int32, lowest nibble first, offset by 8 -> [out, in] int4."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    codes = (raw.view(np.uint32)[..., None] >> shifts & 15).astype(np.int8) - 8
    return codes.reshape(*raw.shape[:-1], -1).astype(ml_dtypes.int4)


def _nibbles_of_bytes(raw: np.ndarray) -> np.ndarray:
    """[..., blocks, 16] uint8, low nibble first -> [..., blocks * 32] e2m1."""
    codes = np.stack([raw & 15, raw >> 4], axis=-1)
    return codes.reshape(*raw.shape[:-2], -1).view(ml_dtypes.float4_e2m1fn)


@dataclass(frozen=True)
class Form:
    """How tensors are quantised. name: the tensor's of the values is that of the weight with the ending `whole`
    replaced by `values`, the scales' likewise. packed: elements in one stored item of the last dimension, or in one
    stored block of the last two. rows: that share a scale. transposed: the family has [in, out].
    """

    name: str
    scheme: Scheme
    whole: str = ".weight"
    values: str = ".weight"
    scales: str = ".weight_scale"
    dtype: np.dtype | None = None  # of the values, where a weight that is not quantised has the same name
    packed: int = 1
    unpack: Callable[[np.ndarray], np.ndarray] = _as_is
    rows: int = 1
    transposed: bool = False
    ignored: tuple[str, ...] = (".input_scale", ".weight_shape")


_MXFP4 = Form(
    "mxfp4",
    SCHEMES["mxfp4"],
    whole="",
    values="_blocks",
    scales="_scales",
    packed=32,
    unpack=_nibbles_of_bytes,
    transposed=True,
)


def form_of(config: Mapping[str, Any]) -> Form:
    """The form that a `quantization_config` describes. Raises CheckpointError naming what is not supported."""
    method = config.get("quant_method")
    match method:
        case "mxfp4":
            return _MXFP4
        case "fp8":
            if config.get("weight_block_size") != [128, 128] or config.get("fmt", "e4m3") != "e4m3":
                raise _unsupported(f"fp8 with weight_block_size {config.get('weight_block_size')}", "128 x 128 of e4m3")
            return Form("fp8_block", SCHEMES["fp8_block"], scales=".weight_scale_inv", dtype=_E4M3, rows=128)
        case "compressed-tensors":
            return _compressed_tensors(config)
    raise _unsupported(f"quant_method {method!r}", "mxfp4, fp8, compressed-tensors")


def _compressed_tensors(config: Mapping[str, Any]) -> Form:
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise _unsupported(f"compressed-tensors with {len(groups)} config_groups", "one")
    options = groups[0].get("weights") or {}
    kind, bits = options.get("type"), options.get("num_bits")
    strategy, packing = options.get("strategy"), config.get("format")
    if not options.get("symmetric", True):
        raise _unsupported("compressed-tensors with zero points (symmetric: false)", "symmetric weights")
    if options.get("actorder"):
        raise _unsupported(f"compressed-tensors with actorder {options['actorder']!r}", "weights in order")
    group = {"channel": None, "tensor": None, "group": options.get("group_size")}.get(strategy, 0)
    if group == 0:
        raise _unsupported(f"compressed-tensors with strategy {strategy!r}", "channel, tensor, group")
    name = f"{kind}{bits} by {strategy}"
    match kind, bits, packing:
        case "int", 4, "pack-quantized":
            scheme = Scheme("int4", group)
            return Form(name, scheme, values=".weight_packed", packed=8, unpack=_nibbles_of_int32)
        case "int", 8, "int-quantized" | "naive-quantized":
            return Form(name, Scheme("int8", group), dtype=np.dtype(np.int8))
        case "float", 8, "float-quantized" | "naive-quantized":
            return Form(name, Scheme("float8_e4m3fn", group), dtype=_E4M3)
    raise _unsupported(
        f"compressed-tensors of type {kind} with {bits} bits in format {packing!r}",
        "int 4 pack-quantized, int 8 int-quantized, float 8 float-quantized",
    )


def _unsupported(what: str, known: str) -> CheckpointError:
    return CheckpointError(f"quantization_config in config.json: {what} is not supported; supported: {known}")


class QuantizedSource:
    """A quantised checkpoint as a `TensorSource`: each weight by its own name and shape, in float32 if it is read.

    `values` and `scales` are what is stored. Raises CheckpointError if a weight has no scales.
    """

    def __init__(self, source: TensorSource, form: Form):
        self._source, self.form = source, form
        missing = [self._scales(name) for name in self._quantized if self._scales(name) not in self._present]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"the checkpoint lacks the scales of quantised weights: {missing[0]}{more}")

    @cached_property
    def _present(self) -> frozenset[str]:
        return frozenset(self._source.names())

    @cached_property
    def _quantized(self) -> frozenset[str]:
        """Names of the weights that are."""
        form = self.form
        return frozenset(
            name.removesuffix(form.values) + form.whole
            for name in self._present
            if name.endswith(form.values) and form.dtype in (None, self._source.dtype(name))
        )

    def _values(self, name: str) -> str:
        return name.removesuffix(self.form.whole) + self.form.values

    def _scales(self, name: str) -> str:
        return name.removesuffix(self.form.whole) + self.form.scales

    def holds(self, name: str) -> bool:
        """Whether this weight is quantised."""
        return name in self._quantized

    def names(self) -> Iterable[str]:
        parts = {part(name) for name in self._quantized for part in (self._values, self._scales)}
        plain = (name for name in self._present - parts if not name.endswith(self.form.ignored))
        return (*plain, *self._quantized)

    def shape(self, name: str) -> tuple[int, ...]:
        if not self.holds(name):
            return self._source.shape(name)
        shape = self._source.shape(self._values(name))
        if self.form.packed > 1:
            lead = shape[:-2] if self.form.unpack is _nibbles_of_bytes else shape[:-1]
            shape = (*lead, shape[len(lead)] * self.form.packed)
        return (*shape[:-2], shape[-1], shape[-2]) if self.form.transposed else shape

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32) if self.holds(name) else self._source.dtype(name)

    def nbytes(self, name: str) -> int:
        parts = (self._values(name), self._scales(name)) if self.holds(name) else (name,)
        return sum(self._source.nbytes(part) for part in parts)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        if not self.holds(name):
            return self._source.read(name, rows)
        values = self.values(name).astype(np.float32)
        scales, axis = self.scales(name).astype(np.float32), -2 if self.form.transposed else -1
        if self.form.scheme.group is not None:
            scales = np.repeat(scales, self.form.scheme.group, axis=axis).take(range(values.shape[axis]), axis=axis)
        return (values * scales)[rows or slice(None)]

    def values(self, name: str, rows: slice | None = None) -> np.ndarray:
        """[..., out, in] (or transposed) of the element type."""
        unpacked = self.form.unpack(np.ascontiguousarray(self._source.read(self._values(name), rows)))
        return unpacked.swapaxes(-1, -2) if self.form.transposed else unpacked

    def scales(self, name: str, rows: slice | None = None) -> np.ndarray:
        """[..., out, in / group], or [..., out, 1] of channels; transposed as the values are."""
        raw = self._source.read(self._scales(name))
        if self.form.scheme.scales == "float8_e8m0fnu":
            return raw[rows or slice(None)].view(ml_dtypes.float8_e8m0fnu).swapaxes(-1, -2)
        count, raw = self.shape(name)[0], raw.astype(np.float32)
        if raw.size == 1:
            raw = np.broadcast_to(raw.reshape(1, 1), (count, 1))
        elif self.form.rows > 1:
            raw = np.repeat(raw, self.form.rows, axis=0)[:count]
        return raw.reshape(count, -1)[rows or slice(None)]


def is_kept(source: TensorSource, weight: WeightSpec, pieces: Sequence[Piece]) -> bool:
    """Whether a weight is to be held as its tensors are stored."""
    held = isinstance(source, QuantizedSource) and source.holds(pieces[0].tensor)
    return held and weight.scheme is not None


def kept(
    scheme: Scheme,
    contracting: tuple[int, ...],
    values: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    lay_out: Callable[[Sequence[jax.Array], float], jax.Array],
) -> tuple[jax.Array, ...]:
    """The arrays of a weight whose values and scales are stored. Traceable.

    values: [out, in] each, as `lay_out` takes them with what to fill padding; scales: [out, in / group]. Every element
    takes its scale along, so that it ends where the element does.
    """
    whole = lay_out(values, 0)
    shape = scheme.arrays(whole.shape, (None,) * whole.ndim, contracting)["values"][0]
    exponents = scheme.scales == "float8_e8m0fnu"  # as codes: there is no zero to pad with

    def spread(scale: jax.Array, like: jax.Array) -> jax.Array:
        scale = lax.bitcast_convert_type(scale, jnp.uint8) if exponents else scale
        if scheme.group is None:
            return jnp.broadcast_to(scale, like.shape)
        return jnp.repeat(scale, scheme.group, axis=1)[:, : like.shape[1]]

    full = lay_out([spread(*pair) for pair in zip(scales, values, strict=True)], 127 if exponents else 1)
    at = contracting[-1]
    if scheme.group is None:
        for axis in reversed(contracting):
            full = lax.index_in_dim(full, 0, axis, keepdims=False)
    else:
        full = lax.slice_in_dim(full, 0, None, shape[at + 1], axis=at)
    if exponents:
        full = lax.bitcast_convert_type(full, jnp.float8_e8m0fnu)
    return whole.reshape(shape), full
