"""Weights as the TPU kernels of products read them: a `PackedTensor` stands where layers have a matrix.

What a product sums over is one dimension, K, and its results are another, N, in front of which gate and up stay apart:
[..., P, K, N]; experts come before them. It is made of a matrix or a `QuantizedTensor` when weights are loaded;
checkpoints hold those.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inferlib.ops.quantized import Scheme
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

if TYPE_CHECKING:
    from inferlib.pallas_kernels.mx_matmul_tpu import RmsNorm
    from inferlib.pallas_kernels.packed_weights_tpu import Weight

FEW_ROWS = 64  # up to which the kernel multiplies by what XLA can read itself: then it is memory that takes time


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedTensor:
    """See `packed_weights_tpu.Weight` for values, scales and tops; those of one layer, or of a stack of which `layer`
    is used. apart: whether the first dimension of a product is P; rest: its dimensions after that which N begins with;
    round_inputs: see `Scheme`.
    """

    values: jax.Array
    scales: jax.Array | None = None
    tops: jax.Array | None = None
    layer: jax.Array | None = None
    apart: bool = field(default=False, metadata={"static": True})
    rest: tuple[int, ...] = field(default=(), metadata={"static": True})
    round_inputs: bool = field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return self.values.shape

    @property
    def bits(self) -> int:
        """Of an element."""
        return 4 if self.tops is not None else jax.dtypes.itemsize_bits(self.values.dtype)

    def __getitem__(self, index) -> PackedTensor:
        """As `nnx.Param` asks for its value: `w[...]`."""
        if index is not Ellipsis:
            raise TypeError("a PackedTensor is read whole, as w[...]")
        return self

    def of_layer(self, layer: jax.Array) -> PackedTensor:
        """Of a stack, the weight of one layer; nothing is copied."""
        return replace(self, layer=layer)

    @property
    def readable(self) -> bool:
        """Whether XLA reads it at the memory's rate: its values alone, or with a scale for each channel."""
        return self.tops is None and (self.scales is None or self.scales.shape[-2] == 1)

    @property
    def stack(self) -> Weight:
        """For the kernel, [L, P, K, N]."""
        from inferlib.pallas_kernels.packed_weights_tpu import Weight

        arrays = (self.values, self.scales, self.tops)
        return Weight(*(x if x is None or x.ndim == 4 else x[None] for x in arrays))

    def of_experts(self, stacked: bool) -> Weight:
        """For the kernels of experts, [L, E, P, K, N]. stacked: whether there is a dimension of layers."""
        from inferlib.pallas_kernels.packed_weights_tpu import Weight

        arrays = (self.values, self.scales, self.tops)
        return Weight(*(x if x is None else x.reshape(_of_experts(x.shape, stacked)) for x in arrays))


def _codes(values: jax.Array) -> jax.Array:
    """Of e2m1, as uint8. By arithmetic: XLA:CPU does not always know how to take the type for integers."""
    x = values.astype(jnp.float32)
    size = jnp.abs(x)  # 0, 0.5, 1, 1.5, 2, 3, 4, 6
    code = jnp.where(size <= 2, 2 * size, jnp.where(size <= 4, size + 2, 7))
    return code.astype(jnp.uint8) | (jnp.signbit(x).astype(jnp.uint8) << 3)


def _of_experts(shape: tuple[int, ...], stacked: bool) -> tuple[int, ...]:
    """[(L,) E, (2,) 1, K, N] -> [L, E, P, K, N]"""
    lead = shape[: 1 + stacked] if stacked else (1, shape[0])
    return *lead, math.prod(shape[1 + stacked : -2]), *shape[-2:]


def by_kernel(
    x: jax.Array,
    w: PackedTensor,
    out_dtype,
    *,
    norm: RmsNorm | None = None,
    activation: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """x [T, *I], or its norm, times w -> [T, *O]; activation: of the two results [T, 2, ...] that it makes one of. The
    kernel is interpreted on CPU."""
    from inferlib.pallas_kernels.mx_matmul_tpu import mx_matmul

    rows = x.reshape(x.shape[0], -1)
    layer = jnp.int32(0) if w.layer is None else w.layer

    def run(rows: jax.Array, stack: Weight, layer: jax.Array, norm: RmsNorm | None, *, interpret: bool = False):
        options = dict(norm=norm, activation=activation, out_dtype=out_dtype, interpret=interpret)
        return mx_matmul(rows, stack, layer=layer, **options)

    y = lax.platform_dependent(rows, w.stack, layer, norm, cpu=partial(run, interpret=True), default=run)
    y = y.reshape(*y.shape[:2], -1, *w.rest)
    return jnp.moveaxis(y, 0, 1) if w.apart and activation is None else y[0]


def by_xla(x: jax.Array, w: PackedTensor, out_dtype) -> jax.Array:
    """x [T, *I] times w, `readable`, -> [T, *O]."""
    values, scales = (
        a if a is None or a.ndim == 3 else lax.dynamic_index_in_dim(a, w.layer, keepdims=False)
        for a in (w.values, w.scales)
    )
    rows = x.reshape(x.shape[0], -1)
    rows = jnp.pad(rows, ((0, 0), (0, values.shape[1] - rows.shape[1])))
    accumulated = out_dtype if scales is None else jnp.float32
    y = lax.dot_general(rows, values.astype(x.dtype), (((1,), (1,)), ((), ())), preferred_element_type=accumulated)
    y = y if scales is None else (y * scales[:, 0]).astype(out_dtype)
    y = lax.optimization_barrier(y) if w.rest else y  # or XLA:TPU would reshape the weight, and so copy it
    y = y.reshape(*y.shape[:2], -1, *w.rest)
    return y if w.apart else y[:, 0]


# ---- storage

_DEPTH = 128  # inputs are padded to multiples of it, as `mx_matmul_tpu` takes them


@dataclass(frozen=True)
class Packing:
    """How a weight of a scheme, or None and a dtype, is packed: its shape, logical axes and contracting dimensions,
    which are neighbours; before them are those of a stack and of experts."""

    scheme: Scheme | None
    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    contracting: tuple[int, ...]
    dtype: np.dtype | str = "bfloat16"

    @property
    def lead(self) -> int:
        return self.contracting[0]

    @property
    def outer(self) -> int:
        """The first dimension of the results."""
        return self.contracting[-1] + 1

    @property
    def apart(self) -> bool:
        return self.names[self.outer] == axes.GATE_UP

    @property
    def merged(self) -> int:
        """The first dimension of N."""
        return self.outer + self.apart

    @property
    def sizes(self) -> tuple[int, int, int]:
        """P, K and N."""
        parts = self.shape[self.outer] if self.apart else 1
        return parts, math.prod(self.shape[self.lead : self.outer]), math.prod(self.shape[self.merged :])

    @property
    def gains(self) -> bool:
        """Whether the kernel is for it. Fewer results than a tile has lanes would be padded in memory."""
        known = np.dtype(self.dtype) == jnp.bfloat16 if self.scheme is None else not self.scheme.zeros
        return known and (axes.EXPERTS in self.names or self.sizes[2] >= _DEPTH)

    @property
    def group(self) -> int | None:
        """Elements that share a scale, None for all."""
        group = self.scheme and self.scheme.group
        return group and self.scheme.group_of(self.shape[self.contracting[-1]])

    @property
    def is_mxfp4(self) -> bool:
        return self.scheme is not None and self.scheme.values == "float4_e2m1fn"

    def arrays(self) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...], np.dtype]]:
        """Shape, axis names and dtype of each array; as `Scheme.arrays`."""
        parts, inputs, columns = self.sizes
        padded = -(-inputs // _DEPTH) * _DEPTH
        inner, outer = self.names[self.lead], self.names[self.merged]

        def array(rows: int, dtype: str):
            names = (axes.GATE_UP if self.apart else None, inner if rows > 1 else None, outer)
            return (*self.shape[: self.lead], parts, rows, columns), (*self.names[: self.lead], *names), np.dtype(dtype)

        if self.is_mxfp4:
            words, exponents = array(padded // 8, "int32"), array(padded // _DEPTH, "int32")
            return {"values": words, "scales": exponents, "tops": array(1, "float32")}
        if self.scheme is None:
            return {"values": array(padded, self.dtype)}
        scales = "uint8" if self.scheme.scales == "float8_e8m0fnu" else self.scheme.scales
        count = 1 if self.group is None else padded // self.group
        return {"values": array(padded, self.scheme.values), "scales": array(count, scales)}

    def tensor(self, *arrays: jax.Array) -> PackedTensor:
        rounds = self.scheme is not None and self.scheme.round_inputs
        return PackedTensor(*arrays, apart=self.apart, rest=self.shape[self.merged + 1 :], round_inputs=rounds)

    def pack(self, values: jax.Array, scales: jax.Array | None = None) -> tuple[jax.Array, ...]:
        """The arrays, of those of the scheme. Traceable."""
        if self.is_mxfp4:
            from inferlib.pallas_kernels.packed_weights_tpu import pack_mxfp4

            codes, scales = self._matrix(_codes(values)), self._matrix(lax.bitcast_convert_type(scales, jnp.uint8))
            return pack_mxfp4(codes, scales)
        values = self._matrix(values)
        short = -values.shape[-2] % _DEPTH
        grow = lambda x, rows: jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, rows), (0, 0)])  # noqa: E731
        if self.scheme is None:
            return (grow(values, short),)
        if self.scheme.scales == "float8_e8m0fnu":
            scales = lax.bitcast_convert_type(scales, jnp.uint8)
        scales = self._matrix(scales)
        return grow(values, short), scales if self.group is None else grow(scales, short // self.group)

    def _matrix(self, x: jax.Array) -> jax.Array:
        """[..., *O] -> [..., P, rows, N]"""
        parts, _, columns = self.sizes
        x = x.reshape(*self.shape[: self.lead], -1, parts, columns)
        return jnp.moveaxis(x, -2, -3)

    def lacks(self, dtype, shards: Shards, rows: int) -> str | None:
        """Why the kernel cannot run a device's share of products with `rows` activations of a dtype, None if it can."""
        first = {self.lead, self.merged}
        whole = {name for i, name in enumerate(self.names) if name and i >= self.lead and i not in first}
        if split := sorted(name for name in whole if shards.size(name) > 1):
            return f"the mesh splits {' and '.join(split)}, a dimension that is one of several of its matrix"
        _, inputs, _ = self.sizes
        share = inputs // shards.size(self.names[self.lead])
        if share % _DEPTH and share < inputs:
            return f"the {share} inputs of a device do not divide into passes of {_DEPTH}"
        if self.group is not None and self.group != self.scheme.group:
            return f"groups have {self.group} inputs, not {self.scheme.group}, which do not divide theirs"
        from inferlib.pallas_kernels import grouped_matmul_tpu, mx_matmul_tpu
        from inferlib.pallas_kernels.packed_weights_tpu import Weight

        if axes.EXPERTS in self.names:
            x = jax.ShapeDtypeStruct((rows, share), dtype)
            return grouped_matmul_tpu.unsupported(x, self.local_experts(shards))
        shapes = ((shards.local_shape(names, shape), kind) for shape, names, kind in self.arrays().values())
        stack = (jax.ShapeDtypeStruct((1, *shape)[-4:], kind) for shape, kind in shapes)
        return mx_matmul_tpu.unsupported(rows, dtype, Weight(*stack))

    def local_experts(self, shards: Shards) -> Weight:
        """Shapes of a device's share of experts, for kernels (see `PackedTensor.of_experts`)."""
        from inferlib.pallas_kernels.packed_weights_tpu import Weight

        shapes = ((shards.local_shape(names, shape), kind) for shape, names, kind in self.arrays().values())
        stacked = self.names[0] == axes.LAYERS
        return Weight(*(jax.ShapeDtypeStruct(_of_experts(shape, stacked), kind) for shape, kind in shapes))
