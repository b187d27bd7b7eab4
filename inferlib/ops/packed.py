"""Weights in the layout that the TPU kernels of products read: a `PackedTensor` takes the place of a layer's matrix.

Its arrays are [..., P, K, N]. A product sums over K and results in N; P keeps gate and up apart; the dimension of
experts comes before. Checkpoints store matrices or `QuantizedTensor`s, which are packed when they are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax

from inferlib.ops import eight_bits
from inferlib.ops.backend import Backend
from inferlib.ops.choice import Choice
from inferlib.ops.interpreted import run_kernel
from inferlib.ops.quantized import Scheme
from inferlib.ops.read_whole import ReadWhole
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

if TYPE_CHECKING:
    from inferlib.pallas_kernels.mx_matmul_tpu import RmsNorm
    from inferlib.pallas_kernels.packed_weights_tpu import Weight

# Up to this many rows, the kernel also multiplies by weights that XLA could read: reading memory takes the time.
MEMORY_BOUND_ROWS = 64
MOST_ROWS = 512  # most rows that the kernel of products takes at once


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedTensor(ReadWhole):
    """A packed weight: one layer's, or a stack of which `layer` is used.

    values, scales, tops, on_chip: see `packed_weights_tpu.Weight`. apart: the first dimension of a product is P. rest:
    N merges several dimensions; these are all but the first of them. round_inputs, rotation: see `Scheme`.
    """

    values: jax.Array
    scales: jax.Array | None = None
    tops: jax.Array | None = None
    layer: jax.Array | None = None
    apart: bool = field(default=False, metadata={"static": True})
    rest: tuple[int, ...] = field(default=(), metadata={"static": True})
    round_inputs: bool = field(default=False, metadata={"static": True})
    rotation: int = field(default=0, metadata={"static": True})
    on_chip: bool = field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.values.shape

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 4 if self.tops is not None else jax.dtypes.itemsize_bits(self.values.dtype)

    def of_layer(self, layer: jax.Array) -> PackedTensor:
        """One layer of a stacked weight; nothing is copied."""
        return replace(self, layer=layer)

    @property
    def readable(self) -> bool:
        """True if XLA reads the weight as fast as memory allows: it has no scales, or one for each channel."""
        return self.tops is None and (self.scales is None or self.scales.shape[-2] == 1)

    @property
    def rounds_tokens(self) -> bool:
        """See `Scheme.rounds_tokens`."""
        return self.round_inputs and self.readable

    @property
    def stack(self) -> Weight:
        """The stack [L, P, K, N], as the kernel of products takes it."""
        return self._reshaped(lambda x: x if x.ndim == 4 else x[None])

    def of_experts(self, stacked: bool) -> Weight:
        """The experts [L, E, P, K, N], as their kernels take them. stacked: they begin with a dimension of layers."""

        def reshape(x: jax.Array) -> jax.Array:
            lead = x.shape[:2] if stacked else (1, x.shape[0])
            return x.reshape(*lead, math.prod(x.shape[1 + stacked : -2]), *x.shape[-2:])

        return self._reshaped(reshape)

    def _reshaped(self, reshape: Callable[[jax.Array], jax.Array]) -> Weight:
        from inferlib.pallas_kernels.packed_weights_tpu import Weight

        scales, tops = (array if array is None else reshape(array) for array in (self.scales, self.tops))
        return Weight(reshape(self.values), scales, tops, self.on_chip)


def _codes(values: jax.Array) -> jax.Array:
    """The codes of e2m1 values, as uint8. They are computed, because XLA:CPU cannot always bitcast the type to
    integers."""
    x = values.astype(jnp.float32)
    size = jnp.abs(x)  # 0, 0.5, 1, 1.5, 2, 3, 4, 6
    code = jnp.where(size <= 2, 2 * size, jnp.where(size <= 4, size + 2, 7))
    return code.astype(jnp.uint8) | (jnp.signbit(x).astype(jnp.uint8) << 3)


def by_kernel(
    x: jax.Array,
    w: PackedTensor,
    out_dtype,
    *,
    norm: RmsNorm | None = None,
    activation: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """x [T, *I], or its norm, times w -> [T, *O] by the TPU kernel, which CPUs interpret. activation: combines the two
    results [T, 2, ...] into one."""
    from inferlib.pallas_kernels.mx_matmul_tpu import mx_matmul

    rows = x.reshape(x.shape[0], -1)
    layer = jnp.int32(0) if w.layer is None else w.layer

    def run(rows: jax.Array, stack: Weight, layer: jax.Array, norm: RmsNorm | None, *, interpret: bool = False):
        options: dict[str, Any] = dict(norm=norm, activation=activation, out_dtype=out_dtype, interpret=interpret)
        return mx_matmul(rows, stack, layer=layer, **options)

    y = run_kernel(run, rows, w.stack, layer, norm)
    y = y.reshape(*y.shape[:2], -1, *w.rest)
    return jnp.moveaxis(y, 0, 1) if w.apart and activation is None else y[0]


def by_xla(x: jax.Array, w: PackedTensor, out_dtype) -> jax.Array:
    """x [T, *I] times a `readable` w -> [T, *O] by XLA. Many rows are rounded if the scheme says so."""

    def of_layer(array: jax.Array) -> jax.Array:
        return array if array.ndim == 3 else lax.dynamic_index_in_dim(array, w.layer, keepdims=False)

    values, scales = of_layer(w.values), None if w.scales is None else of_layer(w.scales)
    rows = x.reshape(x.shape[0], -1)
    rows = jnp.pad(rows, ((0, 0), (0, values.shape[1] - rows.shape[1])))
    if scales is not None and eight_bits.rounds(w, rows.shape[0]):
        y = eight_bits.product(rows, values, scales[:, 0], ((1,), (1,)), out_dtype)
    else:
        y = _unrounded(rows, values, scales, out_dtype)
    y = lax.optimization_barrier(y) if w.rest else y  # otherwise XLA:TPU would reshape and copy the weight
    y = y.reshape(*y.shape[:2], -1, *w.rest)
    return y if w.apart else y[:, 0]


def _unrounded(rows: jax.Array, values: jax.Array, scales: jax.Array | None, out_dtype) -> jax.Array:
    """rows [T, K] times values [P, K, N] -> [T, P, N]."""
    accumulated = out_dtype if scales is None else jnp.float32
    dimensions = (((1,), (1,)), ((), ()))
    y = lax.dot_general(rows, values.astype(rows.dtype), dimensions, preferred_element_type=accumulated)
    return y if scales is None else (y * scales[:, 0]).astype(out_dtype)


# ---- storage

_DEPTH = 128  # inputs are padded to multiples of this, as `mx_matmul_tpu` takes them
_FLOAT4_DEPTH = 256  # the same with `Packing.float4`


@dataclass(frozen=True)
class Packing:
    """How a weight is packed.

    scheme: how it is quantised; None if it is stored as `dtype`. shape, names, contracting: its shape, logical axes and
    contracting dimensions, which are neighbours; dimensions of layers and of experts come before them. float4: MXFP4 is
    packed for TPUs that convert it in hardware.
    """

    scheme: Scheme | None
    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    contracting: tuple[int, ...]
    dtype: np.dtype | str = "bfloat16"
    float4: bool = False

    @property
    def lead(self) -> int:
        return self.contracting[0]

    @property
    def outer(self) -> int:
        """Index of the first dimension of the results."""
        return self.contracting[-1] + 1

    @property
    def apart(self) -> bool:
        return self.names[self.outer] == axes.GATE_UP

    @property
    def merged(self) -> int:
        """Index of the first dimension that N merges."""
        return self.outer + self.apart

    @property
    def sizes(self) -> tuple[int, int, int]:
        """P, K and N."""
        parts = self.shape[self.outer] if self.apart else 1
        return parts, math.prod(self.shape[self.lead : self.outer]), math.prod(self.shape[self.merged :])

    @property
    def group(self) -> int | None:
        """Elements that share a scale; None: all inputs of a channel do."""
        if self.scheme is None or self.scheme.group is None:
            return None
        return self.scheme.group_of(self.shape[self.contracting[-1]])

    @property
    def is_mxfp4(self) -> bool:
        return self.scheme is not None and self.scheme.values == "float4_e2m1fn"

    @property
    def depth(self) -> int:
        """Inputs are padded to a multiple of this."""
        return _FLOAT4_DEPTH if self.is_mxfp4 and self.float4 else _DEPTH

    def arrays(self) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...], np.dtype]]:
        """The shape, axis names and dtype of each array, like `Scheme.arrays`."""
        parts, inputs, columns = self.sizes
        padded = -(-inputs // self.depth) * self.depth
        inner, outer = self.names[self.lead], self.names[self.merged]

        def array(rows: int, dtype: np.dtype | str):
            names = (axes.GATE_UP if self.apart else None, inner if rows > 1 else None, outer)
            return (*self.shape[: self.lead], parts, rows, columns), (*self.names[: self.lead], *names), np.dtype(dtype)

        if self.is_mxfp4:
            scales = array(padded // 32, "int8") if self.float4 else array(padded // _DEPTH, "int32")
            return {"values": array(padded // 8, "int32"), "scales": scales, "tops": array(1, "float32")}
        if self.scheme is None:
            return {"values": array(padded, self.dtype)}
        scales = "uint8" if self.scheme.scales == "float8_e8m0fnu" else self.scheme.scales
        count = 1 if self.group is None else padded // self.group
        return {"values": array(padded, self.scheme.values), "scales": array(count, scales)}

    def tensor(self, *arrays: Any) -> PackedTensor:
        """The tensor that these arrays are, in the order of `arrays`; they may be shapes."""
        inputs = (self.scheme.round_inputs, self.scheme.rotation) if self.scheme is not None else (False, 0)
        options: dict[str, Any] = dict(zip(("round_inputs", "rotation"), inputs, strict=True))
        return PackedTensor(*arrays, apart=self.apart, rest=self.shape[self.merged + 1 :], **options)

    def pack(self, values: jax.Array, scales: jax.Array | None = None) -> tuple[jax.Array, ...]:
        """The packed arrays, computed from the scheme's. Traceable."""
        if self.is_mxfp4 and scales is not None:
            from inferlib.pallas_kernels.packed_weights_tpu import pack_float4, pack_mxfp4

            codes, scales = self._matrix(_codes(values)), self._matrix(lax.bitcast_convert_type(scales, jnp.uint8))
            return (pack_float4 if self.float4 else pack_mxfp4)(codes, scales)
        values = self._matrix(values)
        short = -values.shape[-2] % _DEPTH
        grow = lambda x, rows: jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, rows), (0, 0)])  # noqa: E731
        if self.scheme is None or scales is None:
            return (grow(values, short),)
        if self.scheme.scales == "float8_e8m0fnu":
            scales = lax.bitcast_convert_type(scales, jnp.uint8)
        scales = self._matrix(scales)
        return grow(values, short), scales if self.group is None else grow(scales, short // self.group)

    def _matrix(self, x: jax.Array) -> jax.Array:
        """[..., *O] -> [..., P, rows, N]"""
        parts, _, columns = self.sizes
        x = x.reshape(*self.shape[: self.lead], -1, parts * columns)
        return rearrange(x, "... k (p n) -> ... p k n", p=parts)

    def local(self, shards: Shards) -> PackedTensor:
        """A device's shard, with shapes for arrays."""
        shapes = ((shards.local_shape(names, shape), dtype) for shape, names, dtype in self.arrays().values())
        return self.tensor(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))


def choose(packing: Packing, dtype, shards: Shards, *, rows: int = MOST_ROWS) -> Choice:
    """Whether a weight is packed for the kernel: "pallas_tpu" if the kernel multiplies it by `rows` activations of a
    dtype.

    "xla" comes without a reason where the kernel would not be faster: for experts quantised by channel, which
    `grouped_matmul` reads as they are, and for fewer results than a tile has lanes, which would be padded in memory.
    """
    scheme, experts = packing.scheme, axes.EXPERTS in packing.names
    if scheme is not None and scheme.scales == "bfloat16":
        return Choice("xla", "scales of bfloat16")
    known = np.dtype(packing.dtype) == jnp.bfloat16 if scheme is None else not scheme.zeros
    by_group = scheme is not None and scheme.group is not None
    if not known or not (by_group if experts else packing.sizes[2] >= _DEPTH):
        return Choice("xla")
    return Choice.of("pallas_tpu", _unsupported(packing, jnp.dtype(dtype), shards, rows))


def choose_packings(packings: Sequence[Packing], dtype, backend: Backend, shards: Shards) -> list[tuple[Packing, bool]]:
    """How the weights of a model are stored: for each its packing, and whether it is packed."""
    from inferlib.pallas_kernels.generations_tpu import FLOAT4, planning_for

    if "pallas_tpu" not in (backend.matmul, backend.grouped_matmul):
        return [(packing, False) for packing in packings]
    with planning_for(backend.generation):
        if backend.generation in FLOAT4:  # this form needs more inputs on each device than the other
            forms = [replace(packing, float4=True) for packing in packings]
            pairs = zip(packings, forms, strict=True)
            packings = [form if choose(form, dtype, shards).name != "xla" else packing for packing, form in pairs]
        pairs = [(packing, choose(packing, dtype, shards)) for packing in packings]
    refused = any(choice.reason for packing, choice in pairs if axes.EXPERTS in packing.names)

    def is_packed(packing: Packing, choice: Choice) -> bool:
        experts = axes.EXPERTS in packing.names
        reads = backend.grouped_matmul == "pallas_tpu" and not refused if experts else backend.matmul == "pallas_tpu"
        # Kernels that fuse products with collectives, where tokens are split, read unquantised weights as they are.
        return reads and choice.name != "xla" and not (shards.splits_tokens and packing.scheme is None)

    return [(packing, is_packed(packing, choice)) for packing, choice in pairs]


def _unsupported(packing: Packing, dtype, shards: Shards, rows: int) -> str | None:
    """Why the kernel cannot multiply `rows` activations by a device's shard of the weight; None if it can."""
    from inferlib.pallas_kernels import grouped_matmul_tpu, mx_matmul_tpu

    first = {packing.lead, packing.merged}
    whole = {name for i, name in enumerate(packing.names) if name and i >= packing.lead and i not in first}
    if split := sorted(name for name in whole if shards.size(name) > 1):
        return f"the mesh splits {' and '.join(split)}, a dimension that is one of several of its matrix"
    _, inputs, _ = packing.sizes
    local_inputs = inputs // shards.size(packing.names[packing.lead])
    if local_inputs % packing.depth and local_inputs < inputs:
        return f"the {local_inputs} inputs of a device do not divide into passes of {packing.depth}"
    group = packing.scheme and packing.scheme.group
    if packing.group != group:
        return f"groups have {packing.group} inputs, not {group}, which do not divide theirs"
    local = packing.local(shards)
    if axes.EXPERTS in packing.names:
        x = jax.ShapeDtypeStruct((rows, local_inputs), dtype)
        experts = jax.eval_shape(lambda w: w.of_experts(packing.names[0] == axes.LAYERS), local)
        return grouped_matmul_tpu.unsupported(x, experts)
    return mx_matmul_tpu.unsupported(rows, dtype, jax.eval_shape(lambda w: w.stack, local))
