"""Checkpoints that are shipped quantised, and stay as they are: what `quantization_config` says about their tensors.

Known are fp8 with a scale for each 128 x 128 (DeepSeek's) or tensor (AutoFP8's, transformers'), gpt-oss's MXFP4,
AWQ's int4, GPTQ's int4 and int8 without act-order, and compressed-tensors: int8 and fp8 by channel, tensor or group,
and packed int4 and int8, also with zero points. Activations and the cache stay in their dtypes whatever files say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from einops import rearrange
from jax import lax

from inferlib.checkpoint.source import CheckpointError, TensorSource
from inferlib.models.abstract import WeightSpec
from inferlib.models.pieces import Piece
from inferlib.ops.quantized import SCHEMES, Scheme

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_INVERSE = ".weight_scale_inv"  # a factor of the values all the same
# The columns that AWQ's eight codes of an item are of, lowest first, are 0 2 4 6 1 3 5 7; so these are their places.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# Scales and zero points of a quantised cache, and of the queries that meet it, as tools have named them.
_CACHE_SCALES = re.compile(r".*\.self_attn\.(\w+\.)?([qkv]|kv|(?<=[qkv]_proj\.)output)_((global_)?scale|zero_point)")


@dataclass(frozen=True)
class Form:
    """How a checkpoint's tensors are quantised.

    A weight's name ends in `whole`; with that ending replaced by `values`, `scales` or `zeros` it is the name of the
    tensor of its values, scales or zero points. renamed: the ending of scales in some files, instead of `scales`.
    ignored: endings of other tensors. order: ending of the tensor that gives each input channel's group. rows: number
    of rows that share a scale. transposed: the last two dimensions are stored the other way round. blocks: the last two
    dimensions of packed values together are one dimension of the weight.

    Values and zero points whose stored dtype is not their own are packed along one dimension: codes from an item's
    lowest bits on, or at `places`. Codes of integers have an offset of half their range. zeros_less: zero points are
    stored less this number. fused: endings of tensors of all experts [E, out, in]; the names of their scales have no
    ".weight", and there is one scale for each expert or each half of it.
    """

    name: str
    scheme: Scheme
    whole: str = ".weight"
    values: str = ".weight"
    scales: str = ".weight_scale"
    renamed: str = ""
    fused: tuple[str, ...] = ()
    zeros: str = ""
    order: str = ""
    dtype: np.dtype | None = None  # of the values, where a weight that is not quantised has the same name
    rows: int = 1
    transposed: bool = False
    values_along: int = -1
    zeros_along: int = -1
    places: tuple[int, ...] = ()
    blocks: bool = False
    zeros_less: int = 0
    ignored: tuple[str, ...] = (".input_scale", "activation_scale", ".weight_shape")

    @property
    def element(self) -> np.dtype:
        return np.dtype(self.scheme.values)

    def unpacked(self, raw: np.ndarray, along: int, less: int = 0) -> np.ndarray:
        """Unpack a stored tensor into `element`s."""
        if raw.dtype in (self.element, np.int8):  # a whole tensor's zero point is never packed
            return raw.astype(self.element, copy=False)
        bits = jax.dtypes.itemsize_bits(self.element)
        codes = np.ascontiguousarray(np.moveaxis(raw, along, -1)).view(np.uint8)
        if bits == 4:
            codes = rearrange([codes & 15, codes >> 4], "half ... byte -> ... (byte half)")
        if self.places:
            words = rearrange(codes, "... (word place) -> ... word place", place=len(self.places))
            codes = rearrange(words[..., self.places], "... word place -> ... (word place)")
        codes = np.moveaxis(codes, -1, along)
        if jnp.issubdtype(self.element, jnp.floating):
            return codes.view(self.element)
        # Sums of fewer than eight bits wrap around, as does a zero point of 0, which is stored less 1.
        return ((codes + np.uint8(less) & (1 << bits) - 1).astype(np.int16) - (1 << bits - 1)).astype(self.element)


_MXFP4 = Form("mxfp4", SCHEMES["mxfp4"], whole="", values="_blocks", scales="_scales", transposed=True, blocks=True)
_INT32: dict[str, Any] = dict(values=".qweight", scales=".scales", zeros=".qzeros", order=".g_idx", transposed=True)


def form_of(config: Mapping[str, Any]) -> Form:
    """The form that a `quantization_config` describes. Raises CheckpointError naming what is not supported."""
    method = _object(config, "it").get("quant_method")
    match method:
        case "mxfp4":
            return _MXFP4
        case "fp8":
            return _fp8(config)
        case "awq":
            return _awq(config)
        case "gptq":
            return _gptq(config)
        case "compressed-tensors":
            return _compressed_tensors(config)
    raise _unsupported(f"quant_method {method!r}", "mxfp4, fp8, awq, gptq, compressed-tensors")


def _fp8(config: Mapping[str, Any]) -> Form:
    block, kind = config.get("weight_block_size"), config.get("fmt", "e4m3")
    if block not in ([128, 128], None) or kind != "e4m3":
        raise _unsupported(f"fp8 with weight_block_size {block} of {kind}", "[128, 128], or none, of e4m3")
    if block is None:
        fused = (".experts.gate_up_proj", ".experts.down_proj")
        return Form("float8 by tensor", Scheme("float8_e4m3fn"), renamed=_INVERSE, fused=fused, dtype=_E4M3)
    return Form("fp8_block", SCHEMES["fp8_block"], scales=_INVERSE, dtype=_E4M3, rows=128)


def _awq(config: Mapping[str, Any]) -> Form:
    """[in, out / 8], by AutoAWQ's GEMM kernel."""
    for key, known in (("bits", 4), ("version", "gemm"), ("zero_point", True)):
        value = config.get(key, known)
        if (value.lower() if isinstance(value, str) else value) != known:
            raise _unsupported(f"awq with {key} {value!r}", f"{known!r}")
    return Form("awq", Scheme("int4", _group("awq", config), zeros=True), places=_AWQ_PLACES, **_INT32)


def _gptq(config: Mapping[str, Any]) -> Form:
    """Values [in / 8, out], zero points [groups, out / 8]."""
    bits, layout = config.get("bits"), config.get("checkpoint_format") or "gptq"
    if bits not in (4, 8):
        raise _unsupported(f"gptq with {bits} bits", "4, 8")
    if layout not in ("gptq", "gptq_v2"):
        raise _unsupported(f"gptq with checkpoint_format {layout!r}", "gptq, gptq_v2")
    # The zero point of symmetric weights is the middle of the range, which is a code of 0 here.
    scheme = Scheme(f"int{bits}", _group("gptq", config), zeros=not config.get("sym", False))
    return Form("gptq", scheme, values_along=-2, zeros_less=int(layout == "gptq"), **_INT32)


def _group(method: str, options: Mapping[str, Any]) -> int | None:
    size = options.get("group_size")
    if not isinstance(size, int) or size < -1 or size == 0:
        raise _unsupported(f"{method} with group_size {size!r}", "a positive number or -1")
    return None if size == -1 else size


def _compressed_tensors(config: Mapping[str, Any]) -> Form:
    groups = _object(config.get("config_groups") or {}, "config_groups")
    if len(groups) != 1:
        raise _unsupported(f"compressed-tensors with {len(groups)} config_groups", "one")
    ((name, group),) = groups.items()
    options = _object(_object(group, name).get("weights"), f"weights of {name}")
    kind, bits = options.get("type"), options.get("num_bits")
    strategy, packing = options.get("strategy"), config.get("format")
    if options.get("actorder") not in (None, "weight", "static"):
        raise _unsupported(f"compressed-tensors with actorder {options['actorder']!r}", "weight, static")
    if strategy not in ("channel", "tensor", "group"):
        raise _unsupported(f"compressed-tensors with strategy {strategy!r}", "channel, tensor, group")
    size = _group("compressed-tensors", options) if strategy == "group" else None
    zeros = not options.get("symmetric", True)
    form = Form(
        f"{kind}{bits} by {strategy}{' with zero points' if zeros else ''}",
        Scheme(f"int{bits}" if kind == "int" else "float8_e4m3fn", size, zeros=zeros),
        zeros=".weight_zero_point" if zeros else "",
        zeros_along=-2,
    )
    match kind, bits, packing, zeros:
        case "int", 4 | 8, "pack-quantized", _:
            return replace(form, values=".weight_packed")
        case "int", 8, "int-quantized" | "naive-quantized", _:
            return replace(form, dtype=np.dtype(np.int8))
        case "float", 8, "float-quantized" | "naive-quantized", False:
            return replace(form, dtype=_E4M3)
    raise _unsupported(
        f"compressed-tensors of type {kind} with {bits} bits in format {packing!r}{' with zero points' * zeros}",
        "int 4 and 8 pack-quantized, int 8 int-quantized, float 8 float-quantized without zero points",
    )


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(
            f"quantization_config in config.json is damaged: {name} must be an object, not {value!r}; fetch it again"
        )
    return value


def _unsupported(what: str, known: str) -> CheckpointError:
    return CheckpointError(f"quantization_config in config.json: {what} is not supported; supported: {known}")


class QuantizedSource:
    """A quantised checkpoint as a `TensorSource` of whole weights; `read` dequantises them to float32.

    `values`, `scales` and `zeros` return what is stored. Raises CheckpointError if no weight is quantised, or one lacks
    scales or zero points, or has scales for other groups.
    """

    def __init__(self, source: TensorSource, form: Form):
        if form.renamed and any(name.endswith(form.renamed.removeprefix(form.whole)) for name in source.names()):
            form = replace(form, scales=form.renamed)
        self._source, self.form = source, form
        quantized = sorted(self._quantized)
        if not quantized:
            which = f"*{form.values} of {form.dtype}" if form.dtype else f"*{form.values}"
            raise CheckpointError(
                f"quantization_config in config.json says {form.name}, and no weight is quantised so "
                f"(no {which}): take it out of config.json if the weights are plain, else fetch all files again"
            )
        for kind, ending in {"scales": form.scales, "zero points": form.zeros}.items():
            tensors = [self._tensor(name, ending) for name in quantized if ending]
            if missing := [tensor for tensor in tensors if tensor not in self._present]:
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                raise CheckpointError(
                    f"the checkpoint lacks the {kind} of quantised weights: {missing[0]}{more}; fetch all its files "
                    "again, or quantise the original again"
                )
        for name in quantized:
            self._must_fit(name)

    def _must_fit(self, name: str) -> None:
        """Raise CheckpointError if its groups are not those of the form."""
        form, group, shape = self.form, self.form.scheme.group, self.shape(name)
        out, size = (shape[-1], shape[-2]) if form.blocks else shape[-2:]
        tensor = self._tensor(name, form.scales)
        count = math.prod(shape[:-2]) * -(-out // form.rows) * (1 if group is None else -(-size // group))
        stored = math.prod(self._source.shape(tensor))
        per_tensor = (1, shape[0], 2 * shape[0]) if len(shape) == 3 else (1,)
        if stored != count and (group is not None or stored not in per_tensor):
            of = "each whole row" if group is None else f"groups of {group}"
            raise CheckpointError(
                f"{tensor} has shape {self._source.shape(tensor)}, and {of} of a weight of {out} x {size}, as "
                f"quantization_config in config.json says, would have {count} scales: correct its group_size, or "
                "weight_block_size"
            )
        order = self._tensor(name, form.order)
        if form.order and order in self._present:
            groups = np.arange(size) // (group or size)
            if not np.array_equal(self._source.read(order), groups):
                raise CheckpointError(
                    f"{order} scatters groups over the input channels (act-order, desc_act: true), so that products "
                    "would have to gather the channels of their inputs, which is not supported: quantise the original "
                    "with desc_act false"
                )

    @cached_property
    def _present(self) -> frozenset[str]:
        return frozenset(self._source.names())

    @cached_property
    def _quantized(self) -> frozenset[str]:
        """Names of the quantised weights."""
        form = self.form
        return frozenset(
            name if name.endswith(form.fused) else name.removesuffix(form.values) + form.whole
            for name in self._present
            if name.endswith((form.values, *form.fused)) and form.dtype in (None, self._source.dtype(name))
        )

    def _tensor(self, name: str, ending: str) -> str:
        if name.endswith(self.form.fused):
            return name + ending.removeprefix(self.form.whole)
        return name.removesuffix(self.form.whole) + ending

    def _parts(self, name: str) -> list[str]:
        """The tensors of a quantised weight."""
        form = self.form
        return [self._tensor(name, ending) for ending in (form.values, form.scales, form.zeros) if ending]

    def holds(self, name: str) -> bool:
        """True if this weight is quantised."""
        return name in self._quantized

    def names(self) -> Iterable[str]:
        form, parts = self.form, {part for name in self._quantized for part in self._parts(name)}
        ignored = (*form.ignored, *([form.order] if form.order else []))
        others = (name for name in self._present - parts if not name.endswith(ignored))
        return (*(name for name in others if not _CACHE_SCALES.fullmatch(name)), *self._quantized)

    @property
    def cache_scales(self) -> list[str]:
        """Tensors for a quantised cache, which are not read."""
        return sorted(filter(_CACHE_SCALES.fullmatch, self._present))

    def spare(self, name: str) -> bool:
        """True if this is a bias of zeros beside a quantised weight; AutoGPTQ adds one to every weight."""
        weight = name.removesuffix(".bias") + self.form.whole
        return name.endswith(".bias") and self.holds(weight) and not self._source.read(name).any()

    def shape(self, name: str) -> tuple[int, ...]:
        if not self.holds(name):
            return self._source.shape(name)
        form, tensor = self.form, self._tensor(name, self.form.values)
        shape = list(self._source.shape(tensor))
        if form.blocks:
            shape[-2:] = [shape[-2] * shape[-1]]
        shape[form.values_along] *= self._packed(tensor)
        return (*shape[:-2], shape[-1], shape[-2]) if form.transposed else tuple(shape)

    def _packed(self, tensor: str) -> int:
        """Elements in a stored item."""
        return self._source.dtype(tensor).itemsize * 8 // jax.dtypes.itemsize_bits(self.form.element)

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32) if self.holds(name) else self._source.dtype(name)

    def nbytes(self, name: str) -> int:
        return sum(self._source.nbytes(part) for part in (self._parts(name) if self.holds(name) else [name]))

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        if not self.holds(name):
            return self._source.read(name, rows)
        values, scheme = self.values(name).astype(np.float32), self.form.scheme
        axis = -2 if self.form.blocks else -1

        def spread(shared: np.ndarray) -> np.ndarray:
            shared = shared.astype(np.float32)
            if scheme.group is None:
                return shared
            return np.repeat(shared, scheme.group, axis=axis).take(range(values.shape[axis]), axis=axis)

        if scheme.zeros:
            values -= spread(self.zeros(name))
        return (values * spread(self.scales(name)))[rows or slice(None)]

    def values(self, name: str, rows: slice | None = None) -> np.ndarray:
        """The stored values [..., out, in] (or the other way round), of the element type."""
        form, tensor = self.form, self._tensor(name, self.form.values)
        if rows is None or form.blocks or not form.transposed:
            raw = self._source.read(tensor, rows)
            raw = rearrange(raw, "... block byte -> ... (block byte)") if form.blocks else raw
            values = form.unpacked(raw, form.values_along)
            return values.swapaxes(-1, -2) if form.transposed else values
        first, last, _ = rows.indices(self.shape(name)[0])
        per = self._packed(tensor) if form.values_along == -1 else 1
        start, stop = first // per, -(-last // per)
        values = form.unpacked(self._source.read(tensor)[:, start:stop], form.values_along)
        return values.T[first - start * per : last - start * per]

    def scales(self, name: str, rows: slice | None = None) -> np.ndarray:
        """[..., out, in / group], or [..., out, 1] of channels; the other way round if the values are."""
        form, raw = self.form, self._source.read(self._tensor(name, self.form.scales))
        if form.blocks:
            return raw[rows or slice(None)].view(ml_dtypes.float8_e8m0fnu).swapaxes(-1, -2)
        if form.zeros and not form.scheme.zeros and self.zeros(name).astype(np.int8).any():
            raise CheckpointError(
                f"{self._tensor(name, form.zeros)} has zero points other than those of symmetric weights: set sym to "
                "false in quantization_config of config.json"
            )
        (count, *rest), raw = self.shape(name), raw.astype(np.float32)
        if len(rest) == 2:
            of_rows = raw.reshape(1, 1) if raw.size == 1 else raw.reshape(count, -1)
            of_rows = of_rows.repeat(rest[0] // of_rows.shape[1], axis=1)
            return np.broadcast_to(of_rows, (count, rest[0]))[rows or slice(None), :, None]
        if raw.size == 1:
            raw = np.broadcast_to(raw.reshape(1, 1), (count, 1))
        elif form.rows > 1:
            raw = np.repeat(raw, form.rows, axis=0)[:count]
        return (raw.T if form.transposed else raw).reshape(count, -1)[rows or slice(None)]

    def zeros(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Zero points, in the shape of `scales` and of the element type."""
        form, count = self.form, self.shape(name)[0]
        zeros = form.unpacked(self._source.read(self._tensor(name, form.zeros)), form.zeros_along, form.zeros_less)
        zeros = zeros.T if form.transposed else zeros
        zeros = np.broadcast_to(zeros, (count, 1)) if zeros.size == 1 else zeros.reshape(len(zeros), -1)
        return zeros[:count][rows or slice(None)]


def stored_readers(
    source: TensorSource, weight: WeightSpec, pieces: Sequence[Piece]
) -> tuple[Callable[[str, slice | None], np.ndarray], ...]:
    """Functions that read the values, the scales and the zero points, if there are any, of stored tensors.

    There are none for a weight that does not keep the quantisation in which its tensors are stored.
    """
    if weight.scheme is None or not isinstance(source, QuantizedSource) or not source.holds(pieces[0].tensor):
        return ()
    return (source.values, source.scales, source.zeros)[: 2 + weight.scheme.zeros]


def assemble_stored(
    scheme: Scheme,
    contracting: tuple[int, ...],
    lay_out: Callable[[Sequence[jax.Array], float], jax.Array],
    values: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    *zeros: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
    """Make the arrays of a weight from stored values, scales and, if the scheme has them, zero points. Traceable.

    lay_out: takes tensors [out, in] and the number that fills padding. values: [out, in] each; scales, zeros:
    [out, in / group]. Scales are spread over their elements and laid out like values, so that each ends where its
    elements do.
    """
    whole = lay_out(values, 0)
    shape = scheme.arrays(whole.shape, (None,) * whole.ndim, contracting)["values"][0]

    def laid_out(shared: Sequence[jax.Array], fill: float) -> jax.Array:
        full = lay_out([spread(*pair) for pair in zip(shared, values, strict=True)], fill)
        if scheme.group is not None:
            return lax.slice_in_dim(full, 0, None, shape[contracting[-1] + 1], axis=contracting[-1])
        for axis in reversed(contracting):
            full = lax.index_in_dim(full, 0, axis, keepdims=False)
        return full

    def spread(shared: jax.Array, like: jax.Array) -> jax.Array:
        if scheme.group is None:
            return jnp.broadcast_to(shared, like.shape)
        return jnp.repeat(shared, scheme.group, axis=1)[:, : like.shape[1]]

    if scheme.scales == "float8_e8m0fnu":  # as codes: there is no zero to pad with
        codes = laid_out([lax.bitcast_convert_type(x, jnp.uint8) for x in scales], 127)
        full = lax.bitcast_convert_type(codes, jnp.float8_e8m0fnu)
    else:
        full = laid_out(scales, 1)
    return (
        whole.reshape(shape),
        full,
        *(laid_out([x.astype(jnp.int8) for x in z], 0).astype(scheme.values) for z in zeros),
    )
