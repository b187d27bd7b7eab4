"""Matrix product of activations and a weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.collective_matmul import RingWeight
from inferlib.ops.packed import FEW_ROWS, PackedTensor, by_kernel, by_xla
from inferlib.ops.quantized import MX_GROUP, QuantizedTensor, to_mxfp8
from inferlib.ops.residual_norm import DeferredNorm


def precision_of(dtype) -> lax.Precision | None:
    """Float32 means float32: GPUs and TPUs would otherwise round the operands to tf32 or bf16."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Normed:
    """y [T, D], the RMS norm of x with weight + offset, for products, which make it themselves where their kernel can:
    then nothing computes y. weight [L, D]: of all layers where those of the products are stacked, else of one."""

    x: jax.Array
    y: jax.Array
    weight: jax.Array
    eps: float = field(metadata={"static": True})
    offset: float = field(metadata={"static": True})


Activation = jax.Array | Normed | DeferredNorm


def whole(x: Activation) -> jax.Array:
    """The activations themselves."""
    return x.y if isinstance(x, Normed) else x.whole() if isinstance(x, DeferredNorm) else x


def matmul(
    x: Activation,
    w: jax.Array | QuantizedTensor | PackedTensor | RingWeight,
    *,
    contract: int = 1,
    transposed: bool = False,
    activation: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    out_dtype=None,
) -> jax.Array:
    """x [T, *I], or the norm that stands for it, times w [*I, *O] -> [T, *O], accumulated in float32.

    contract: how many leading dimensions of `w` (and trailing of `x`) are summed over. transposed: w is [O, I], and not
    quantised. activation: of w's two results [T, 2, F], what makes one [T, F] of them. out_dtype: dtype of the result;
    x's by default. With a RingWeight x or the result is a device's share.
    """
    if isinstance(x, DeferredNorm) and (not isinstance(w, QuantizedTensor) or w.round_inputs):
        x = x.whole()
    if isinstance(w, PackedTensor):
        return _packed(x, w, activation, out_dtype)
    x = x.y if isinstance(x, Normed) else x
    if isinstance(w, QuantizedTensor):
        x = to_mxfp8(x, w.shape[contract]) if w.round_inputs else x
        return _quantized(x, w, contract, out_dtype or x.dtype, activation)
    if activation is not None:
        y = matmul(x, w, contract=contract, out_dtype=out_dtype)
        return activation(y[:, 0], y[:, 1])
    if isinstance(w, RingWeight):
        return w.times(x)
    if transposed:
        dimensions = (((1,), (1,)), ((), ()))
        return lax.dot_general(x, w, dimensions, precision_of(x.dtype), preferred_element_type=out_dtype or x.dtype)
    inner, outer = w.shape[:contract], w.shape[contract:]
    if x.shape[1:] != inner:
        raise ValueError(f"matmul: x {x.shape} does not end in the {contract} leading dimensions of w {w.shape}")
    if x.shape[0] > 1:  # as it is: of a reshaped weight, XLA:TPU would not fuse the slice of a stack with the product
        summed = tuple(range(1, contract + 1)), tuple(range(contract))
        return lax.dot_general(
            x, w, (summed, ((), ())), precision_of(x.dtype), preferred_element_type=out_dtype or x.dtype
        )
    forms = {name: partial(f, out_dtype=out_dtype or x.dtype) for name, f in _FORMS.items()}
    y = lax.platform_dependent(x.reshape(1, -1), w.reshape(math.prod(inner), math.prod(outer)), **forms)
    return y.reshape(1, *outer)


def _packed(x: jax.Array | Normed, w: PackedTensor, activation, out_dtype) -> jax.Array:
    normed, x = (x, x.y) if isinstance(x, Normed) else (None, x)
    out_dtype = out_dtype or x.dtype
    if w.round_inputs:
        normed, x = None, to_mxfp8(x, MX_GROUP)
    if w.readable and x.shape[0] > FEW_ROWS:
        y = by_xla(x, w, out_dtype)
        return y if activation is None else activation(y[:, 0], y[:, 1])
    from inferlib.pallas_kernels.mx_matmul_tpu import RmsNorm, unsupported

    if normed is None or unsupported(x.shape[0], x.dtype, w.stack, normed=True):
        return by_kernel(x, w, out_dtype, activation=activation)
    norm = RmsNorm(normed.weight, normed.eps, normed.offset)
    return by_kernel(normed.x, w, out_dtype, norm=norm, activation=activation)


def _product(x: jax.Array, w: jax.Array, out_dtype) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())), precision_of(x.dtype), preferred_element_type=out_dtype)


def _quantized(x: jax.Array | DeferredNorm, w: QuantizedTensor, contract: int, out_dtype, activation) -> jax.Array:
    def default(x: jax.Array | DeferredNorm, w: QuantizedTensor) -> jax.Array:
        x = x.whole() if isinstance(x, DeferredNorm) else x
        y = _dequantized(x, w, contract, out_dtype)
        return y if activation is None else activation(y[:, 0], y[:, 1])

    forms = {} if w.zeros is not None else _form_on_gpu(x, w, contract, out_dtype, activation)
    return lax.platform_dependent(x, w, default=default, **forms) if forms else default(x, w)


TILED_ROWS = 128  # up to which the GPU kernel of tiles is faster than XLA, which unpacks groups to memory
TILED_GROUP = 128  # a step's inputs, which have to fit the shared memory


def rows_of_kernel(w: QuantizedTensor) -> int:
    """Up to how many rows a weight without zero points is best multiplied by the GPU kernel for few. The values of
    channels XLA unpacks in the product's own kernel, which is as fast from eight rows on."""
    from inferlib.pallas_kernels.row_matmul_gpu import ROWS

    return ROWS if w.grouped else 4


def bound_by_weight(w: jax.Array | QuantizedTensor | PackedTensor | RingWeight, tokens: int) -> bool:
    """True if GPUs multiply so few tokens by this weight with a kernel, as reading the weight bounds the product."""
    return isinstance(w, QuantizedTensor) and w.zeros is None and tokens <= rows_of_kernel(w)


def _form_on_gpu(x: jax.Array, w: QuantizedTensor, contract: int, out_dtype, activation) -> dict[str, Callable]:
    """On NVIDIA GPUs a kernel, if one takes them, for rows so few that unpacking the weight bounds XLA."""
    from inferlib.pallas_kernels import grouped_matmul_gpu, row_matmul_gpu

    values, group = _matrix(w, contract)
    rows, inner, outer = x.shape[0], values.shape[1], w.shape[contract + w.grouped :]

    def by_rows(x: jax.Array | DeferredNorm, w: QuantizedTensor) -> jax.Array:
        x, norm = (x.y, dict(squares=x.squares, eps=x.eps)) if isinstance(x, DeferredNorm) else (x, {})
        options = dict(dtype=out_dtype, activation=activation, **norm)
        y = row_matmul_gpu.row_matmul(x.reshape(rows, inner), *_arrays(w, contract), **options)
        return y.reshape(rows, *outer[activation is not None :])

    def by_tiles(x: jax.Array | DeferredNorm, w: QuantizedTensor) -> jax.Array:
        x = x.whole() if isinstance(x, DeferredNorm) else x
        sizes = jnp.full((1,), rows, jnp.int32)
        options = dict(parts=1, sizes=sizes, dtype=out_dtype)
        y = grouped_matmul_gpu.grouped_matmul(x.reshape(rows, inner), *_arrays(w, contract), **options)
        y = y.reshape(rows, *outer)
        return y if activation is None else activation(y[:, 0], y[:, 1])

    if rows <= rows_of_kernel(w) and row_matmul_gpu.unsupported(x.dtype, values, group) is None:
        return {"cuda": by_rows}
    tiled = w.grouped and group <= TILED_GROUP and rows <= TILED_ROWS and x.dtype == jnp.bfloat16
    return {"cuda": by_tiles} if tiled and grouped_matmul_gpu.unsupported(values, group, zeros=False) is None else {}


def gives_shares(w: jax.Array | QuantizedTensor | PackedTensor | RingWeight, contract: int, tokens: int, dtype) -> bool:
    """Whether `product_shares` takes rows [tokens, ...] of a dtype times a weight: where GPUs would take its kernel."""
    from inferlib.pallas_kernels.row_matmul_gpu import unsupported

    if not isinstance(w, QuantizedTensor) or w.zeros is not None or w.round_inputs or tokens > rows_of_kernel(w):
        return False
    return unsupported(dtype, *_matrix(w, contract)) is None


def product_shares(x: jax.Array, w: QuantizedTensor, *, contract: int = 1) -> jax.Array:
    """x [T, *I] times w [*I, *O] -> [S, T, *O] float32, whose sum over S is the product."""
    from inferlib.pallas_kernels.row_matmul_gpu import blocks, row_matmul

    rows, (values, _), outer = x.shape[0], _matrix(w, contract), w.shape[contract + w.grouped :]
    splits = blocks(*values.shape, values.dtype, rows=rows).splits

    def by_rows(x: jax.Array, w: QuantizedTensor) -> jax.Array:
        y = row_matmul(x.reshape(rows, -1), *_arrays(w, contract), shares=True)
        return y.reshape(splits, rows, *outer)

    def default(x: jax.Array, w: QuantizedTensor) -> jax.Array:
        y = _dequantized(x, w, contract, jnp.float32).reshape(1, rows, *outer)
        return jnp.pad(y, [(0, splits - 1), *[(0, 0)] * (y.ndim - 1)])

    return lax.platform_dependent(x, w, cuda=by_rows, default=default)


def _matrix(w: QuantizedTensor, contract: int) -> tuple[jax.ShapeDtypeStruct, int | None]:
    """A weight's values as GPU kernels take them, [1, I, O], and how many inputs share a scale."""
    at = contract + w.grouped
    shape = 1, math.prod(w.shape[:at]), math.prod(w.shape[at:])
    return jax.ShapeDtypeStruct(shape, w.values.dtype), w.shape[contract] if w.grouped else None


def _arrays(w: QuantizedTensor, contract: int) -> tuple[jax.Array, jax.Array]:
    """Its values so, and its scales."""
    values, group = _matrix(w, contract)
    _, inner, outer = values.shape
    return w.values.reshape(values.shape), w.scales.reshape(1, *((inner // group,) if group else ()), outer)


def _dequantized(x: jax.Array, w: QuantizedTensor, contract: int, out_dtype) -> jax.Array:
    """Written so that XLA reads the packed weight: the values of channels are converted in the product's fusion and
    their zero points and scales change its result; those of groups are dequantised in the fusion, without a reshape."""
    if not w.grouped:
        y = matmul(x, w.values.astype(x.dtype), contract=contract, out_dtype=jnp.float32)
        if w.zeros is not None:
            total = jnp.sum(x.astype(jnp.float32), axis=tuple(range(1, x.ndim)))
            y = y - total.reshape(-1, *[1] * w.zeros.ndim) * w.zeros.astype(jnp.float32)
        return (y * w.scales).astype(out_dtype)
    weight = w.dequantized(range(contract), x.dtype)
    inner = weight.shape[: contract + 1]
    if math.prod(x.shape[1:]) != math.prod(inner):
        raise ValueError(f"matmul: x {x.shape} does not end in the leading dimensions of w, in groups {inner}")
    rows = x.reshape(x.shape[0], *inner)
    if x.shape[0] == 1:  # the product of one row would be a multiplication, for which TPUs unpack the whole weight
        rows = jnp.pad(rows, [(0, 7), *[(0, 0)] * len(inner)])
    dimensions = ((tuple(range(1, contract + 2)), tuple(range(contract + 1))), ((), ()))
    y = lax.dot_general(rows, weight, dimensions, precision_of(x.dtype), preferred_element_type=out_dtype)
    return y[: x.shape[0]]


_PARTS = 4


def _row_in_parts(x: jax.Array, w: jax.Array, out_dtype) -> jax.Array:
    """A batch of partial sums: XLA:CPU keeps a narrow product of one row on a single core (1.3x slower)."""
    if w.shape[0] % _PARTS:
        return _product(x, w, out_dtype)
    x, w = x.reshape(_PARTS, 1, -1), w.reshape(_PARTS, -1, w.shape[1])
    dimensions = (((2,), (1,)), ((0,), (0,)))
    parts = lax.dot_general(x, w, dimensions, precision_of(x.dtype), preferred_element_type=jnp.float32)
    return jnp.sum(parts, axis=0).astype(out_dtype)


def _row_on_gpu(x: jax.Array, w: jax.Array, out_dtype) -> jax.Array:
    """XLA:GPU makes a small product of one row a multiplication and a reduction (3x slower): the kernel's, or one of
    two rows, which takes 2 us more."""
    from inferlib.pallas_kernels import row_matmul_gpu

    if w.size > 2**23:
        return _product(x, w, out_dtype)
    if row_matmul_gpu.unsupported(x.dtype, jax.ShapeDtypeStruct((1, *w.shape), w.dtype), None) is None:
        return row_matmul_gpu.row_matmul(x, w[None], dtype=out_dtype)[:, 0]
    return _product(jnp.pad(x, ((0, 1), (0, 0))), w, out_dtype)[:1]


# How the product of one row is best written for each platform.
_FORMS = {"default": _product, "cpu": _row_in_parts, "cuda": _row_on_gpu}
