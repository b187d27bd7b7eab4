"""Matrix product of activations and a weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops import eight_bits, split_dot
from inferlib.ops.by_platform import by_platform
from inferlib.ops.choice import Choice
from inferlib.ops.collective_matmul import RingWeight
from inferlib.ops.fake_quantized import FakeQuantizedWeight
from inferlib.ops.fetch_ahead import ArrivingWeight
from inferlib.ops.hadamard import rotated
from inferlib.ops.low_rank import LowRankWeight
from inferlib.ops.observed import ObservedWeight
from inferlib.ops.packed import MEMORY_BOUND_ROWS, PackedTensor, by_kernel, by_xla
from inferlib.ops.partial_sums import PartialSums
from inferlib.ops.precision import precision_of
from inferlib.ops.quantized import MX_GROUP, QuantizedTensor, to_mxfp8
from inferlib.ops.residual_norm import DeferredNorm
from inferlib.ops.separate_gate_up import SeparateGateUp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FusableNorm:
    """The RMS norm y [T, D] of x with weight + offset. A kernel that norms its inputs itself takes x instead, and then
    nothing computes y. weight [L, D]: of all layers where the products' weights are stacked, else of one."""

    x: jax.Array
    y: jax.Array
    weight: jax.Array
    eps: float = field(metadata={"static": True})
    offset: float = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.y.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.y.dtype

    def array(self) -> jax.Array:
        return self.y


Activations = jax.Array | FusableNorm | DeferredNorm
Weight = (
    jax.Array
    | QuantizedTensor
    | PackedTensor
    | SeparateGateUp
    | RingWeight
    | ObservedWeight
    | FakeQuantizedWeight
    | LowRankWeight
    | ArrivingWeight
)


def as_array(x: Activations) -> jax.Array:
    """The activations themselves."""
    return x.array() if isinstance(x, FusableNorm | DeferredNorm) else x


@dataclass(frozen=True)
class Product:
    """What `matmul` makes of activations and a weight; see there."""

    contract: int
    activation: Callable[[jax.Array, jax.Array], jax.Array] | None
    out_dtype: jax.typing.DTypeLike
    backend: str | None

    def activated(self, y: jax.Array) -> jax.Array:
        """[T, 2, F] -> [T, F], if there is an activation."""
        return y if self.activation is None else self.activation(y[:, 0], y[:, 1])


def matmul(
    x: Activations,
    w: Weight,
    *,
    contract: int = 1,
    transposed: bool = False,
    activation: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    out_dtype=None,
    backend: str | None = None,
) -> jax.Array:
    """x [T, *I] times w [*I, *O] -> [T, *O], accumulated in float32.

    contract: number of leading dimensions of `w` (and trailing ones of `x`) that are summed over. transposed: w is
    [O, I], and an array. activation: combines the two results [T, 2, F] into one [T, F]. out_dtype: dtype of the
    result; x's by default. backend: "xla" takes no GPU kernel; None takes those of the platform. TPU kernels are chosen
    by the weight: a PackedTensor, or a RingWeight, with which x or the result is this device's share of the tokens.
    """
    product = Product(contract, activation, out_dtype or x.dtype, backend)
    if isinstance(w, QuantizedTensor | PackedTensor) and w.rotation:
        x = rotated(as_array(x), w.rotation)
    if multiply := _PRODUCTS.get(type(w)):
        return multiply(x, w, product)
    w = cast(jax.Array, w)
    whole = lambda x, w: product.activated(_dense(as_array(x), w, product, transposed))  # noqa: E731
    if not isinstance(x, DeferredNorm) or transposed:
        return whole(x, w)
    if choose(w, x.shape[0], x.dtype, contract=contract, backend=backend, partials=True).name == "xla":
        return whole(x, w)
    return by_platform(x, w, cuda=partial(_by_splits, product=product), default=whole)


def matmul_partials(x: jax.Array, w: Weight, *, contract: int = 1) -> PartialSums:
    """x [T, *I] times w [*I, *O] -> the product [T, *O], in split-K partial sums.

    For weights for which `choose(..., partials=True)` is not "xla".
    """
    if isinstance(w, LowRankWeight):
        x, base = w.parted(x)
        return replace(matmul_partials(x, base, contract=contract), addend=w.branch(x, x.dtype))
    if isinstance(w, jax.Array):
        return PartialSums(_in_splits(x, w, contract))
    from inferlib.pallas_kernels.row_matmul_gpu import Epilogue, blocks, row_matmul

    assert isinstance(w, QuantizedTensor)
    x = rotated(x, w.rotation) if w.rotation else x
    rows, (values, _), outer = x.shape[0], _matrix(w, contract), w.shape[contract + w.grouped :]
    matrices, inputs, outputs = values.shape
    splits = blocks(matrices, inputs, outputs, values.dtype, rows=rows).splits

    def by_rows(x: jax.Array, w: QuantizedTensor) -> jax.Array:
        y = row_matmul(x.reshape(rows, -1), *_arrays(w, contract), epilogue=Epilogue(partials=True))
        return y.reshape(splits, rows, *outer)

    def default(x: jax.Array, w: QuantizedTensor) -> jax.Array:
        y = _dequantized(x, w, contract, jnp.float32).reshape(1, rows, *outer)
        return jnp.pad(y, [(0, splits - 1), *[(0, 0)] * (y.ndim - 1)])

    return PartialSums(by_platform(x, w, cuda=by_rows, default=default))


def _in_splits(x: jax.Array, w: jax.Array, contract: int, count: int | None = None) -> jax.Array:
    """x [T, *I] times w [*I, *O] -> partial sums [S, T, *O] float32. count: see `split_dot.partial_products`."""
    inner, outer = w.shape[:contract], w.shape[contract:]
    matrix = w.reshape(math.prod(inner), math.prod(outer))
    y = split_dot.partial_products(x.reshape(x.shape[0], -1), matrix, count)
    return y.reshape(*y.shape[:2], *outer)


def choose(
    w: Weight,
    tokens: int,
    dtype: jax.typing.DTypeLike,
    *,
    contract: int = 1,
    backend: str | None,
    partials: bool = False,
) -> Choice:
    """The implementation on GPUs of `matmul`, or of `matmul_partials`, for `tokens` rows of a dtype and a weight:
    "row_matmul" for decode-sized batches, "grouped_matmul" for somewhat larger ones, "eight_bits" for inputs that are
    rounded by token, whatever the backend, "split_dot" for partial sums of a weight that is not quantised, or "xla".

    XLA unpacks a quantised weight first, which takes most of the time of such products. A weight whose inputs are
    rounded by token lies in memory as matrix units read it, which the kernels do not take.
    """
    from inferlib.pallas_kernels import grouped_matmul_gpu, row_matmul_gpu

    w = w.base if isinstance(w, LowRankWeight) else w
    if isinstance(w, jax.Array) and partials and backend in (None, "pallas_gpu"):
        return Choice.of("split_dot", split_dot.unsupported(tokens, dtype, w))
    if not isinstance(w, QuantizedTensor):
        return Choice("xla")
    if w.rounds_tokens:
        return Choice("xla") if partials else Choice("eight_bits")
    if backend not in (None, "pallas_gpu"):
        return Choice("xla")
    if w.beyond_kernels or (partials and w.round_inputs and w.grouped):
        return Choice("xla", "zero points, scales of bfloat16, or inputs that are rounded")
    values, group = _matrix(w, contract)
    reason = None if tokens <= _row_limit(w) else f"{tokens} rows"
    reason = reason or row_matmul_gpu.unsupported(dtype, values, group)
    if reason is None or partials:
        return Choice.of("row_matmul", reason)
    tiled = group is not None and group <= TILED_GROUP and tokens <= TILED_ROWS and dtype == jnp.bfloat16
    if tiled and grouped_matmul_gpu.unsupported(values, group, zeros=False) is None:
        return Choice("grouped_matmul", reason)
    return Choice("xla", reason)


TILED_ROWS = 128  # rows up to which the GPU kernel of tiles is faster than XLA, which unpacks groups to memory
TILED_GROUP = 128  # inputs of a step of that kernel, which have to fit the shared memory


def decode_sized(w: Weight, tokens: int, backend: str | None) -> bool:
    """True if reading a quantised weight bounds its product with so few rows, for which GPUs have a kernel."""
    w = w.base if isinstance(w, LowRankWeight) else w
    if backend not in (None, "pallas_gpu") or not isinstance(w, QuantizedTensor):
        return False
    return not w.beyond_kernels and not w.rounds_tokens and tokens <= _row_limit(w)


def _row_limit(w: QuantizedTensor) -> int:
    """Rows up to which `row_matmul` is faster than XLA. XLA converts weights with a scale for each channel in the
    product's own kernel, which is as fast from eight rows on."""
    from inferlib.pallas_kernels.row_matmul_gpu import ROWS

    return ROWS if w.grouped else 4


# ---- products by kind of weight


def _with_ring(x: Activations, w: RingWeight, product: Product) -> jax.Array:
    return product.activated(w.times(as_array(x)))


def _arriving(x: Activations, w: ArrivingWeight, product: Product) -> jax.Array:
    """The product waits for its weight when x is computed, of a norm before that."""
    first, weight = w.arrived(x.x if isinstance(x, FusableNorm) else as_array(x))
    return _packed(replace(x, x=first) if isinstance(x, FusableNorm) else first, weight, product)


def _observed(x: Activations, w: ObservedWeight, product: Product) -> jax.Array:
    w.record(as_array(x))
    return product.activated(_dense(as_array(x), w.values, product, transposed=False))


def _fake_quantized(x: Activations, w: FakeQuantizedWeight, product: Product) -> jax.Array:
    return product.activated(_dense(w.inputs(as_array(x)), w.values, product, transposed=False))


def _separate(x: Activations, w: SeparateGateUp, product: Product) -> jax.Array:
    """The products with gate and with up, activated, or [T, 2, F] if there is no activation."""
    options: dict[str, Any] = dict(contract=product.contract, out_dtype=product.out_dtype, backend=product.backend)
    gate, up = (matmul(x, half, **options) for half in (w.gate, w.up))
    return jnp.stack([gate, up], axis=1) if product.activation is None else product.activation(gate, up)


def _low_rank(x: Activations, w: LowRankWeight, product: Product) -> jax.Array:
    """The sum of both branches; an activation comes after it."""
    x, base = w.parted(x)
    added = replace(w, base=base)

    def default(x: Activations, w: LowRankWeight) -> jax.Array:
        x = as_array(x)
        y = _PRODUCTS[type(w.base)](x, w.base, replace(product, activation=None))
        return product.activated(y + w.branch(x, product.out_dtype, product.backend))

    choice = choose(base, x.shape[0], x.dtype, contract=product.contract, backend=product.backend)
    if choice.name != "row_matmul":
        return default(x, added)
    x = x if isinstance(x, DeferredNorm) else as_array(x)
    return by_platform(x, added, cuda=partial(_by_rows, product=product), default=default)


def _packed(x: Activations, w: PackedTensor, product: Product) -> jax.Array:
    """The product by the TPU kernel, which norms its inputs itself if it can; by XLA where that reads the weight as
    fast."""
    y, activation = as_array(x), product.activation
    if w.round_inputs and not w.readable:
        x = y = to_mxfp8(y, MX_GROUP)
    if w.readable and y.shape[0] > MEMORY_BOUND_ROWS:
        return product.activated(by_xla(y, w, product.out_dtype))
    from inferlib.pallas_kernels.mx_matmul_tpu import RmsNorm, unsupported

    if not isinstance(x, FusableNorm) or unsupported(y.shape[0], y.dtype, w.stack, normed=True):
        return by_kernel(y, w, product.out_dtype, activation=activation)
    norm = RmsNorm(x.weight, x.eps, x.offset)
    return by_kernel(x.x, w, product.out_dtype, norm=norm, activation=activation)


def _quantized(x: Activations, w: QuantizedTensor, product: Product) -> jax.Array:
    """The product by the GPU kernel that `choose` names, on GPUs; elsewhere by XLA."""
    if w.round_inputs and w.grouped:
        x = to_mxfp8(as_array(x), w.shape[product.contract])
    if eight_bits.rounds(w, x.shape[0]):
        return _in_eight_bits(x, w, product)
    x = x if isinstance(x, DeferredNorm) else as_array(x)

    def default(x: jax.Array | DeferredNorm, w: QuantizedTensor) -> jax.Array:
        return product.activated(_dequantized(as_array(x), w, product.contract, product.out_dtype, product.backend))

    choice = choose(w, x.shape[0], x.dtype, contract=product.contract, backend=product.backend)
    if choice.name == "xla":
        return default(x, w)
    kernel = {"row_matmul": _by_rows, "grouped_matmul": _by_tiles, "eight_bits": _in_eight_bits}[choice.name]
    return by_platform(x, w, cuda=partial(kernel, product=product), default=default)


def _in_eight_bits(x: Activations, w: QuantizedTensor, product: Product) -> jax.Array:
    summed = tuple(range(1, product.contract + 1)), tuple(range(product.contract))
    return product.activated(eight_bits.product(as_array(x), w.values, w.scales, summed, product.out_dtype))


def _by_rows(
    x: jax.Array | DeferredNorm, w: QuantizedTensor | LowRankWeight, product: Product, interpret: bool = False
) -> jax.Array:
    from inferlib.pallas_kernels.row_matmul_gpu import Epilogue, row_matmul

    y, squares, eps = (x.y, x.squares, x.eps) if isinstance(x, DeferredNorm) else (x, None, 0.0)
    rows, addend = x.shape[0], None
    if isinstance(w, LowRankWeight):
        addend, w = w.branch(y, y.dtype).reshape(rows, -1), cast(QuantizedTensor, w.base)
    outer = w.shape[product.contract + w.grouped :]
    epilogue = Epilogue(product.activation, squares, eps, addend=addend, dtype=product.out_dtype)
    y = row_matmul(y.reshape(rows, -1), *_arrays(w, product.contract), epilogue=epilogue, interpret=interpret)
    return y.reshape(rows, *outer[product.activation is not None :])


def _by_tiles(x: jax.Array | DeferredNorm, w: QuantizedTensor, product: Product, interpret: bool = False) -> jax.Array:
    from inferlib.pallas_kernels.grouped_matmul_gpu import Sorted, grouped_matmul

    rows, outer = x.shape[0], w.shape[product.contract + w.grouped :]
    values, scales = _arrays(w, product.contract)
    groups, x = Sorted(jnp.full((1,), rows, jnp.int32)), as_array(x).reshape(rows, -1)
    y = grouped_matmul(x, values, scales, groups, parts=1, dtype=product.out_dtype, interpret=interpret)
    return product.activated(y.reshape(rows, *outer))


_PRODUCTS: dict[type, Callable[[Activations, Any, Product], jax.Array]] = {
    QuantizedTensor: _quantized,
    PackedTensor: _packed,
    ArrivingWeight: _arriving,
    SeparateGateUp: _separate,
    RingWeight: _with_ring,
    ObservedWeight: _observed,
    FakeQuantizedWeight: _fake_quantized,
    LowRankWeight: _low_rank,
}


def _by_splits(x: DeferredNorm, w: jax.Array, product: Product, interpret: bool = False) -> jax.Array:
    """The product by XLA; the kernel that adds up its partial sums multiplies them by the norm's factor."""
    from inferlib.pallas_kernels.row_matmul_gpu import Epilogue, finished

    y, outer = _in_splits(x.y, w, product.contract), w.shape[product.contract :]
    y = y.reshape(*y.shape[:2], 1, -1)
    epilogue = Epilogue(product.activation, x.squares, x.eps, dtype=product.out_dtype)
    y = finished(y, epilogue, x.shape[1], interpret=interpret)
    return y.reshape(x.shape[0], *outer[product.activation is not None :])


def _dense(x: jax.Array, w: jax.Array, product: Product, transposed: bool) -> jax.Array:
    out_dtype, contract = product.out_dtype, product.contract
    if transposed:
        dimensions = (((1,), (1,)), ((), ()))
        return lax.dot_general(x, w, dimensions, precision_of(x.dtype), preferred_element_type=out_dtype)
    inner, outer = w.shape[:contract], w.shape[contract:]
    if x.shape[1:] != inner:
        raise ValueError(f"matmul: x {x.shape} does not end in the {contract} leading dimensions of w {w.shape}")
    if x.shape[0] > 1:  # as it is: of a reshaped weight, XLA:TPU would not fuse the slice of a stack with the product
        summed = tuple(range(1, contract + 1)), tuple(range(contract))

        def whole(x: jax.Array, w: jax.Array) -> jax.Array:
            return lax.dot_general(x, w, (summed, ((), ())), precision_of(x.dtype), preferred_element_type=out_dtype)

        sizes = x.shape[0], math.prod(inner), math.prod(outer)
        if product.backend in (None, "pallas_gpu") and x.dtype == w.dtype == jnp.bfloat16 and split_dot.halved(*sizes):
            return by_platform(x, w, cuda=partial(_in_halves, contract=contract, out_dtype=out_dtype), default=whole)
        return whole(x, w)
    forms = _ROW_FORMS if product.backend in (None, "pallas_gpu") else _XLA_ROW_FORMS

    def of_matrix(x: jax.Array, w: jax.Array, *, form: Callable[..., jax.Array]) -> jax.Array:
        w = w.reshape(math.prod(inner), math.prod(outer))
        return form(x.reshape(1, -1), w, out_dtype=out_dtype).reshape(1, *outer)

    chosen = {name: partial(of_matrix, form=form) for name, form in forms.items()}
    return by_platform(x, w, tpu=partial(_row_on_tpu, contract=contract, out_dtype=out_dtype), **chosen)


def _in_halves(x: jax.Array, w: jax.Array, contract: int, out_dtype) -> jax.Array:
    """The product as the sum of two, of half the inputs each, which XLA adds in the kernel that takes the result."""
    return PartialSums(_in_splits(x, w, contract, count=2)).total(out_dtype)


def _row_on_tpu(x: jax.Array, w: jax.Array, contract: int, out_dtype) -> jax.Array:
    """The product of a tile of rows: XLA:TPU makes one of a single row a multiplication, and lays the weight out anew
    where it is reshaped."""
    summed = tuple(range(1, contract + 1)), tuple(range(contract))
    x = jnp.pad(x, [(0, 7), *[(0, 0)] * contract])
    y = lax.dot_general(x, w, (summed, ((), ())), precision_of(x.dtype), preferred_element_type=out_dtype)
    return y[:1]


def _product(x: jax.Array, w: jax.Array, out_dtype) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())), precision_of(x.dtype), preferred_element_type=out_dtype)


def _matrix(w: QuantizedTensor, contract: int) -> tuple[jax.ShapeDtypeStruct, int | None]:
    """The shape of a weight's values as GPU kernels take them, [1, I, O], and how many inputs share a scale."""
    at = contract + w.grouped
    shape = 1, math.prod(w.shape[:at]), math.prod(w.shape[at:])
    return jax.ShapeDtypeStruct(shape, w.values.dtype), w.shape[contract] if w.grouped else None


def _arrays(w: QuantizedTensor, contract: int) -> tuple[jax.Array, jax.Array]:
    """A weight's values and scales as GPU kernels take them."""
    values, group = _matrix(w, contract)
    _, inner, outer = values.shape
    return w.values.reshape(values.shape), w.scales.reshape(1, *((inner // group,) if group else ()), outer)


def _dequantized(x: jax.Array, w: QuantizedTensor, contract: int, out_dtype, backend: str | None = None) -> jax.Array:
    """The product by XLA, written so that it reads the packed weight. Values with a scale for each channel are
    converted in the product's fusion, and zero points and scales change its result; values in groups are dequantised in
    the fusion, without a reshape."""
    if not w.grouped:
        y = matmul(x, w.values.astype(x.dtype), contract=contract, out_dtype=jnp.float32, backend=backend)
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
    """The product by the kernel, or of two rows, which takes 2 us more: XLA:GPU makes a small product of one row a
    multiplication and a reduction (3x slower)."""
    from inferlib.pallas_kernels import row_matmul_gpu

    if w.size > 2**23:
        return _product(x, w, out_dtype)
    if row_matmul_gpu.unsupported(x.dtype, jax.ShapeDtypeStruct((1, *w.shape), w.dtype), None) is None:
        return row_matmul_gpu.row_matmul(x, w[None], epilogue=row_matmul_gpu.Epilogue(dtype=out_dtype))[:, 0]
    return _product(jnp.pad(x, ((0, 1), (0, 0))), w, out_dtype)[:1]


# How the product of one row is best written for each platform.
_XLA_ROW_FORMS = {"default": _product, "cpu": _row_in_parts}
_ROW_FORMS = _XLA_ROW_FORMS | {"cuda": _row_on_gpu}
