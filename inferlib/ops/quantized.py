"""Weights in fewer bits: a `QuantizedTensor` stands wherever a matrix of `ops.matmul` stands.

Elements share a scale along the dimensions that a product sums over ("contracting"): either all elements of an output
channel, or groups along the last such dimension. Grouped elements are stored as [..., groups, group, ...], which the
TPU's compiler fuses into the product; a reshape of a merged array would be written to memory. Sub-byte types are XLA's
own, packed in device memory. Elements that share a scale may share a zero point: (value - zero) * scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from inferlib.ops.read_whole import ReadWhole

EIGHT_BITS = ("int8", "float8_e4m3fn")  # that matrix units multiply


@dataclass(frozen=True)
class Scheme:
    """How a weight is stored.

    values, scales: dtypes. group: number of elements that share a scale; None: a whole channel does. zeros: they share
    a zero point too, of the values' dtype, an integer. round_inputs: inputs of the product are rounded too, as matrix
    units take them: to MXFP8 in the same groups, or, if a channel shares a scale, to the values' dtype, on GPUs always
    and elsewhere where there are many rows (see `eight_bits`). rotation: inputs are rotated first, as many at a time
    (see `hadamard`), and the weight is the rotated one's; 0: they are not.

    If `group` does not divide a dimension, its groups have the greatest common divisor of the two.
    """

    values: str
    group: int | None = None
    scales: str = "float32"
    zeros: bool = False
    round_inputs: bool = False
    rotation: int = 0

    def __post_init__(self):
        if self.round_inputs and self.group is None and (self.zeros or self.values not in EIGHT_BITS):
            raise ValueError(f"inputs are rounded in groups, or to {' or '.join(EIGHT_BITS)} without zero points")

    @property
    def rounds_tokens(self) -> bool:
        """Whether inputs of products are rounded with a scale for each token."""
        return self.round_inputs and self.group is None

    def group_of(self, size: int) -> int:
        """Number of elements that share a scale in a dimension of `size`, of a scheme with groups."""
        assert self.group is not None
        return math.gcd(size, self.group)

    def arrays(
        self, shape: tuple[int, ...], names: tuple[str | None, ...], contracting: tuple[int, ...]
    ) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...], np.dtype]]:
        """Shape, axis names and dtype of a weight's values, scales and, if it has some, zero points. Scales and zero
        points have the axes of what they scale."""
        values, scales = np.dtype(self.values), np.dtype(self.scales)
        if self.group is None:
            rest = [i for i in range(len(shape)) if i not in contracting]
            stored = shape, names
            shared = tuple(shape[i] for i in rest), tuple(names[i] for i in rest)
        else:
            at = contracting[-1]
            group = self.group_of(shape[at])
            groups = (*shape[:at], shape[at] // group, *shape[at + 1 :])
            stored = (*groups[: at + 1], group, *groups[at + 1 :]), (*names[: at + 1], None, *names[at + 1 :])
            shared = groups, names
        arrays = {"values": (*stored, values), "scales": (*shared, scales)}
        return arrays | ({"zeros": (*shared, values)} if self.zeros else {})

    def tensor(self, values: jax.Array, scales: jax.Array, zeros: jax.Array | None = None) -> QuantizedTensor:
        """The tensor made of a weight's arrays, in the order of `arrays`."""
        return QuantizedTensor(values, scales, self.group is not None, zeros, self.round_inputs, self.rotation)


MX_GROUP = 32  # elements that share a scale in MX formats

# Those that kernels read, by the names that users write. MX formats are those of the OCP Microscaling Formats
# specification v1.0.
SCHEMES = {
    "int8": Scheme("int8"),
    "int4": Scheme("int4", group=128),
    "fp8": Scheme("float8_e4m3fn"),
    "fp8_block": Scheme("float8_e4m3fn", group=128),
    "mxfp8": Scheme("float8_e4m3fn", group=MX_GROUP, scales="float8_e8m0fnu"),
    "mxfp4": Scheme("float4_e2m1fn", group=MX_GROUP, scales="float8_e8m0fnu"),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedTensor(ReadWhole):
    """A weight as values, scales and zero points (None: all are 0); see `Scheme.arrays`. grouped: groups, not channels,
    share a scale. round_inputs, rotation: see `Scheme`."""

    values: jax.Array
    scales: jax.Array
    grouped: bool = field(metadata={"static": True})
    zeros: jax.Array | None = None
    round_inputs: bool = field(default=False, metadata={"static": True})
    rotation: int = field(default=0, metadata={"static": True})

    @property
    def rounds_tokens(self) -> bool:
        """See `Scheme.rounds_tokens`."""
        return self.round_inputs and not self.grouped

    @property
    def beyond_kernels(self) -> bool:
        """True if no kernel reads it, as it has zero points or scales of bfloat16."""
        return self.zeros is not None or self.scales.dtype == jnp.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.values.shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.values.size

    def dequantized(self, contracting: Sequence[int], dtype) -> jax.Array:
        """The weight as `dtype`, rounded once; grouped values keep their shape [..., groups, group, ...].

        contracting: the dimensions of the weight that products sum over.
        """
        axes = (contracting[-1] + 1,) if self.grouped else tuple(contracting)
        values, scales = self.values.astype(jnp.float32), jnp.expand_dims(self.scales.astype(jnp.float32), axes)
        if self.zeros is not None:
            values = values - jnp.expand_dims(self.zeros.astype(jnp.float32), axes)
        return (values * scales).astype(dtype)


def nbytes(shape: Sequence[int], dtype) -> int:
    """Bytes of a device array; two elements of a 4-bit type share a byte."""
    return math.prod(shape) * jax.dtypes.itemsize_bits(dtype) // 8


# ---- encoding


def quantize(w: jax.Array, contracting: tuple[int, ...], scheme: Scheme) -> QuantizedTensor:
    """Round a weight to a scheme, to nearest with ties to even; traceable.

    The largest magnitude that shares a scale becomes the type's largest value. Scales of e8m0 are powers of two, chosen
    as in section 6.3 of the OCP specification: elements that then exceed the largest value saturate. A NaN or an
    infinity spoils all elements that share its scale. Raises ValueError for a scheme with zero points: checkpoints may
    have them, but nothing is quantised to them.
    """
    if scheme.zeros:
        raise ValueError("weights are not quantised with zero points; checkpoints that have some are kept as they are")
    shape, _, dtype = scheme.arrays(w.shape, (None,) * w.ndim, contracting)["values"]
    w = w.astype(jnp.float32).reshape(shape)
    shared = contracting if scheme.group is None else (contracting[-1] + 1,)
    largest, most = jnp.max(jnp.abs(w), axis=shared, keepdims=True), largest_value(dtype)
    if scheme.scales == "float8_e8m0fnu":
        code = exponent_code(largest, dtype)
        # Multiply by the inverse, also a power of two: the smallest scale is subnormal, which devices flush to zero.
        scales, scaled = _power_of_two(code), w * _power_of_two(254 - code).astype(jnp.float32)
    else:
        scales = round_scales(largest / most, scheme.scales)
        scales = jnp.where(scales == 0, 1.0, scales)
        scaled, scales = w / scales, scales.astype(scheme.scales)
    return scheme.tensor(round_values(scaled, dtype).astype(dtype), jnp.squeeze(scales, shared))


def round_scales(scales: jax.Array, dtype) -> jax.Array:
    """float32 scales rounded to those of float32 or bfloat16, as float32.

    XLA may leave out a conversion there and back; values would be rounded by other scales than those that are stored.
    """
    info = ml_dtypes.finfo(dtype)
    return lax.reduce_precision(scales, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def round_values(x: jax.Array, dtype) -> jax.Array:
    """float32 values rounded to those of an element type, as float32: to nearest with ties to even, saturated."""
    most = largest_value(dtype)
    x = jnp.clip(x, -most, most)
    return jnp.round(x) if jnp.issubdtype(dtype, jnp.integer) else _nearest(x, dtype)


def to_mxfp8(x: jax.Array, group: int) -> jax.Array:
    """x [..., I] rounded to MXFP8 in groups along I, as x's dtype; bfloat16 represents the result exactly."""
    axis = x.ndim - 1
    rounded = quantize(x, (axis,), Scheme("float8_e4m3fn", group, "float8_e8m0fnu"))
    return rounded.dequantized((axis,), x.dtype).reshape(x.shape)


def largest_value(dtype) -> float:
    """The largest value of an element type; integers are used symmetrically."""
    info = ml_dtypes.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else ml_dtypes.finfo(dtype)
    return float(info.max)


def _nearest(x: jax.Array, dtype) -> jax.Array:
    """float32 values rounded to the values of a narrower float type, as float32; ties to even.

    A conversion is not enough: XLA converts some types to four bits by way of float16, which rounds twice.
    """
    info = ml_dtypes.finfo(dtype)
    exponent = jnp.maximum((lax.bitcast_convert_type(x, jnp.int32) >> 23 & 255) - 127, info.minexp)
    step = lax.bitcast_convert_type((exponent - info.nmant + 127) << 23, jnp.float32)
    return jnp.round(x / step) * step


def exponent_code(largest: jax.Array, dtype) -> jax.Array:
    """The e8m0 code, as uint8, of 2^(floor(log2(largest)) - emax): the smallest for zero, NaN for NaN or infinity."""
    emax = math.floor(math.log2(largest_value(dtype)))
    exponent = (lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 127  # of a subnormal: below what e8m0 has
    code = jnp.clip(exponent - emax, -127, 127) + 127
    return jnp.where(jnp.isfinite(largest), code, 255).astype(jnp.uint8)


def _power_of_two(code: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(code, jnp.float8_e8m0fnu)
