"""Products with weights on TPUs: a weight is one stream of blocks from memory, unpacked in registers if it is packed.

Part of a product may be what comes before and behind it: an RMS norm of the rows, the activation that makes one of gate
and up. The MXU takes bfloat16 rows against weights of 8-bit floats too, so that is what packed elements become. Those
of 4 bits with a power of two for each 32 (MXFP4) become e5m2 with their scale in the exponent, four at a time in a
32-bit word, relative to the largest scale of their column: what is 2^-26 of that or less vanishes, as it does in a
float32 sum. Scales of other formats multiply partial sums; where groups are shorter than a pass of the MXU, rows are
repeated, each with the elements of one group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.tuned_tpu import tuned

LANES, ROWS = 128, 16  # of a tile of bfloat16
DEPTH = 128  # inputs that are unpacked together
BLOCK = 32  # elements that share a scale of MXFP8 and MXFP4
VMEM_BYTES = 48 << 20  # of 64 MiB on v5p and v7x, 128 MiB on v5e and v6e
X_ELEMENTS = 1 << 22  # of x at a time
TALL = 64  # rows from which on the MXU is what takes longest
REPEATED = 32  # rows that are repeated for their groups: more, and weights are scaled before the product
STEP, TALL_STEP = 2048, 512  # inputs of one iteration: of many rows few, as the compiler takes longer for them
_TOP = 27  # exponent of the largest scale of a column, of 5 bits, so that 6.0 is finite


@dataclass(frozen=True)
class Blocks:
    """What a step computes: rows of x by columns of the weight, over all inputs."""

    rows: int
    columns: int

    def __post_init__(self):
        if min(self.rows, self.columns) < 1 or self.rows % ROWS or self.columns % LANES:
            raise ValueError(f"blocks are multiples of {ROWS} rows and {LANES} columns, not {self}")


@tuned("mx_matmul", Blocks)
def blocks(rows: int, parts: int, inputs: int, columns: int, bits: int, group: int) -> Blocks:
    """The default blocks of x [rows, inputs] times a weight [parts, inputs, columns] of `bits`, `group` to a scale.

    About 2 MiB of a weight come at a time, at least eight times, so that little is waited for at the start.
    """
    most = max((2 << 23) // (inputs * bits) // LANES, 2)
    most = min(most, 8, max(columns // 8 // LANES, 2))
    steps = pl.cdiv(columns, most * LANES)
    tall = max(min(X_ELEMENTS // inputs, 512) // ROWS * ROWS, ROWS)
    even = lambda size, count, tile: pl.cdiv(size, count * tile) * tile  # noqa: E731
    return Blocks(even(rows, pl.cdiv(rows, tall), ROWS), even(columns, steps, LANES))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weight:
    """A stack of weights [L, P, K, N] as the kernel reads them, K a multiple of 128.

    values: bfloat16 without scales; int8, int4 or e4m3 [L, P, K, N], scales float32 [L, P, K / g, N], or e8m0 codes as
    uint8 for g = 32; or of MXFP4 what `pack_mxfp4` returns, tops included.
    """

    values: jax.Array
    scales: jax.Array | None = None
    tops: jax.Array | None = None

    @property
    def packed(self) -> bool:
        return self.tops is not None

    @property
    def inputs(self) -> int:
        """K"""
        return self.values.shape[2] * (8 if self.packed else 1)

    @property
    def group(self) -> int:
        """Inputs that share a scale, if there are some."""
        return BLOCK if self.packed else self.inputs // (1 if self.scales is None else self.scales.shape[2])

    @property
    def bits(self) -> int:
        """Of an element."""
        return 4 if self.packed else jax.dtypes.itemsize_bits(self.values.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RmsNorm:
    """Of the rows of x [T, K], before a product: over the root of their mean square, times weight + offset. weight
    [L, K]: of the product's layers."""

    weight: jax.Array
    eps: float = field(metadata={"static": True})
    offset: float = field(default=0.0, metadata={"static": True})


# ---- storage


def pack_mxfp4(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """e2m1 codes uint8 [..., K, N] and e8m0 codes uint8 [..., K / 32, N] as the kernel reads them; traceable.

    K, a multiple of 32, is padded to one of 128. Returns words int32 [..., K / 8, N], exponents int32
    [..., K / 128, N] and tops float32 [..., 1, N].

    Of each 128 inputs, byte b of word r holds inputs 32 b + r and 32 b + 16 + r: so it is of block b, as is byte b of
    the exponents. Three bits of an input are its exponent (0.5 is 0) and its mantissa inverted, less 1; all ones are
    zero, for which the addition of that 1 carries into what then takes the rest away. They are bits 1 to 3 of the
    first, whose sign is bit 7, and 4 to 6 of the second, whose sign is bit 0.
    """
    inputs, columns = codes.shape[-2:]
    pad = [(0, 0)] * (codes.ndim - 2)
    codes = jnp.pad(codes, [*pad, (0, -inputs % DEPTH), (0, 0)])
    scales = jnp.pad(scales, [*pad, (0, codes.shape[-2] // BLOCK - scales.shape[-2]), (0, 0)])
    float_ = jnp.maximum(codes & 7, 1) - (codes & 7 == 1)  # of 0.5, 1, 1.5, ... exponent and mantissa
    is_zero = codes & 7 == 0
    magnitudes, signs = jnp.where(is_zero, 7, (float_ ^ 1) - 1), jnp.where(is_zero, 0, codes >> 3)
    pairs = (x.astype(jnp.uint32).reshape(*codes.shape[:-2], -1, 4, 2, 16, columns) for x in (magnitudes, signs))
    magnitudes, signs = (jnp.moveaxis(x, -3, 0) for x in pairs)
    held = magnitudes[0] << 1 | signs[0] << 7 | magnitudes[1] << 4 | signs[1]
    words = jnp.sum(held << jnp.arange(0, 32, 8, dtype=jnp.uint32)[:, None, None], axis=-3, dtype=jnp.uint32)
    words = lax.bitcast_convert_type(words, jnp.int32).reshape(*codes.shape[:-2], -1, columns)
    top = jnp.max(scales, axis=-2, keepdims=True).astype(jnp.int32)
    exponents = jnp.maximum(_TOP + scales.astype(jnp.int32) - top, 0).astype(jnp.uint32)
    exponents = exponents.reshape(*scales.shape[:-2], -1, 4, columns)
    exponents = jnp.sum(exponents << jnp.arange(0, 32, 8, dtype=jnp.uint32)[:, None], axis=-2, dtype=jnp.uint32)
    return words, lax.bitcast_convert_type(exponents, jnp.int32), _power_of_two(top)


def _power_of_two(code: jax.Array) -> jax.Array:
    """float32 of an e8m0 code, int32; 2^-127 as zero, which devices take it for."""
    bits = lax.bitcast_convert_type(code << 23, jnp.float32)
    return jnp.where(code == 255, jnp.nan, bits)


# ---- the product


def unsupported(rows: int, dtype, weight: Weight, chosen: Blocks | None = None, *, normed: bool = False) -> str | None:
    """Why the kernel cannot multiply x [rows, K], or its norm, by a weight (of arrays or their shapes), or None if it
    can."""
    if dtype != jnp.bfloat16:
        return f"it takes activations of bfloat16, not {jnp.dtype(dtype)}"
    if weight.inputs % DEPTH:
        return f"{weight.inputs} inputs do not divide into passes of {DEPTH}"
    if weight.group not in (BLOCK, DEPTH, weight.inputs):
        return f"groups are of {BLOCK} or {DEPTH} inputs or of all, not {weight.group}"
    chosen = chosen or blocks(
        rows, weight.values.shape[1], weight.inputs, weight.values.shape[3], weight.bits, weight.group
    )
    need = _vmem_bytes(weight, chosen, normed)
    if need > VMEM_BYTES:
        return f"{weight.inputs} inputs need {need} bytes of on-chip memory, and there are {VMEM_BYTES}"
    return None


def _repeats(weight: Weight, rows: int) -> int:
    return DEPTH // BLOCK if weight.group == BLOCK and not weight.packed and rows <= REPEATED else 1


def _vmem_bytes(weight: Weight, chosen: Blocks, normed: bool) -> int:
    parts, rows = weight.values.shape[1], chosen.rows
    repeats = _repeats(weight, rows)
    x = rows * weight.inputs * 2 * (2 + repeats * (normed or weight.packed or repeats > 1))
    held = parts * weight.inputs * chosen.columns * weight.bits // 8 * 2
    scales = 4 * parts * pl.cdiv(weight.inputs, weight.group) * chosen.columns * 2
    out = rows * chosen.columns * (4 * parts + 4 * parts + 4 * repeats)
    return x + held + scales + out + STEP * chosen.columns * 2 + (2 << 20)


def mx_matmul(
    x: jax.Array,
    weight: Weight,
    *,
    layer: jax.Array | int = 0,
    norm: RmsNorm | None = None,
    activation: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    out_dtype=None,
    blocks_: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """x [T, K] times layer `layer` of a weight [L, P, K, N] -> [P, T, N], accumulated in float32.

    x may have fewer than K columns where K is padded. norm: of x, rounded to its dtype. activation: of the products,
    float32, with the two parts of a weight, P = 2, of which it makes one [1, T, N]. out_dtype: x's by default. Raises
    ValueError where `unsupported` says why.
    """
    if reason := unsupported(x.shape[0], x.dtype, weight, blocks_, normed=norm is not None):
        raise ValueError(f"the TPU kernel does not run this product: {reason}")
    inputs, (_, parts, _, columns) = weight.inputs, weight.values.shape
    (given, width), out_dtype = x.shape, out_dtype or x.dtype
    pad = ((0, -given % ROWS), (0, inputs - width))
    operands = {"x": jnp.pad(x, pad)}
    if norm is not None:
        operands["norm"] = jnp.pad(norm.weight, ((0, 0), pad[1]))
    rows = given + pad[0][1]
    chosen = blocks_ or blocks(rows, parts, inputs, columns, weight.bits, weight.group)
    tall, wide = min(chosen.rows, rows), chosen.columns
    repeats, results = _repeats(weight, tall), parts if activation is None else 1

    def of_weight(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, parts, array.shape[2], wide), lambda t, n, layer: (layer[0], 0, 0, n))

    specs = [pl.BlockSpec((tall, inputs), lambda t, n, *_: (t, 0))]
    if norm is not None:
        few = min(norm.weight.shape[0], ROWS)
        specs.append(pl.BlockSpec((few, inputs), lambda t, n, layer: (lax.div(layer[0], few), 0)))
    arrays = {"values": weight.values, "scales": weight.scales, "tops": weight.tops}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    nbytes = sum(a.size // a.shape[0] * jax.dtypes.itemsize_bits(a.dtype) // 8 for a in arrays.values())
    if not interpret:  # or XLA would bring a small weight to VMEM whole
        arrays = {name: pltpu.with_memory_space_constraint(array, pltpu.HBM) for name, array in arrays.items()}
    scratch = {}
    if norm is not None or weight.packed or repeats > 1:
        scratch["xs"] = pltpu.VMEM((repeats * tall, inputs), x.dtype)
    if weight.packed:
        scratch["keep"] = scratch["add"] = pltpu.VMEM((parts, inputs // DEPTH, wide), jnp.int32)
    elif weight.scales is not None and weight.group == BLOCK:
        scratch["wide"] = pltpu.VMEM((parts, inputs // BLOCK, wide), jnp.float32)
    y = pl.pallas_call(
        functools.partial(
            _kernel,
            names=(*operands, *arrays, "out", *scratch),
            width=width,
            eps=norm and norm.eps,
            offset=norm and norm.offset,
            activation=activation,
            group=weight.group,
            repeats=repeats,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(rows, tall), pl.cdiv(columns, wide)),
            in_specs=[*specs, *map(of_weight, arrays.values())],
            out_specs=pl.BlockSpec((results, tall, wide), lambda t, n, *_: (0, t, n)),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=jax.ShapeDtypeStruct((results, rows, columns), out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=max(_vmem_bytes(weight, chosen, norm is not None), 14 << 20),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * inputs * parts * columns,
            bytes_accessed=pl.cdiv(rows, tall) * nbytes
            + rows * inputs * x.dtype.itemsize
            + (0 if norm is None else few * inputs * norm.weight.dtype.itemsize)
            + results * rows * columns * jnp.dtype(out_dtype).itemsize,
            transcendentals=0 if activation is None else rows * columns,
        ),
        interpret=interpret,
        name="mx_matmul",
    )(jnp.asarray(layer, jnp.int32).reshape(1), *operands.values(), *arrays.values())
    return y[:, :given] if given < rows else y


def _kernel(layer_ref, *refs, names, width, eps, offset, activation, group, repeats):
    """Some columns of the weight times some rows of x [T, K], of which `width` columns are x's.

    norm [16, K] has the layer's weight among others; values [P, K, N], scales [P, K / g, N], tops [P, 1, N] and out
    [P, T, N] hold those columns. Scratch: xs, what is multiplied, if not x itself: normed, with its inputs in the order
    of the words' bytes, or repeated [4 T, K], each time with one block of each 128; of MXFP4, what to keep of an
    exponent and what to add [P, K / 128, N]; of MXFP8 scales as float32, wide [P, K / 32, N].
    """
    refs = dict(zip(names, refs, strict=True))
    x_ref, values_ref, out_ref = refs["x"], refs["values"], refs["out"]
    xs_ref, scales_ref, packed = refs.get("xs", x_ref), refs.get("scales"), "keep" in refs
    (parts, _, columns), rows = values_ref.shape, x_ref.shape[0]
    inputs = x_ref.shape[1]

    @pl.when(pl.program_id(1) == 0)
    def _():
        source = x_ref
        if "norm" in refs:
            source = xs_ref.at[:rows]
            layer = lax.rem(layer_ref[0], refs["norm"].shape[0])
            _normalize(x_ref, refs["norm"], layer, source, width, eps, offset)
        if packed:
            _permute(source, xs_ref)
        elif repeats > 1:
            _repeat(source, xs_ref, repeats)

    if packed:
        scaled = scales_ref[...] << 2
        refs["keep"][...] = scaled & _bytes(0x70) | _bytes(0x8E)
        refs["add"][...] = scaled & _bytes(0x0C)
    elif "wide" in refs:
        refs["wide"][...] = _power_of_two(scales_ref[...].astype(jnp.int32))
        scales_ref = refs["wide"]

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    def words(part: int, at: jax.Array, depth: int) -> jax.Array:
        found = []
        for n in range(depth // DEPTH):
            row = lax.div(at, DEPTH) + n
            word = values_ref[part, pl.ds(pl.multiple_of(row * 16, 16), 16), :]
            kept = (refs[name][part, pl.ds(row, 1), :] for name in ("keep", "add"))
            keep, add = (jnp.broadcast_to(x, word.shape) for x in kept)
            found += [_floats(word, half, keep, add) for half in range(2)]
        return pltpu.bitcast(jnp.concatenate(found), jnp.float8_e5m2)

    def part_of(part: int, at: jax.Array, depth: int) -> jax.Array:
        """The product over `depth` inputs."""
        x = xs_ref[:, pl.ds(pl.multiple_of(at, DEPTH), depth)]
        if packed:
            return product(x, words(part, at, depth))
        w = values_ref[part, pl.ds(pl.multiple_of(at, DEPTH), depth), :]
        if group == inputs:
            return product(x, w)
        scales = [scales_ref[part, pl.ds(lax.div(at, group) + n, 1), :] for n in range(depth // group)]
        if repeats < len(scales):
            wide = jnp.concatenate([jnp.broadcast_to(scale, (group, columns)) for scale in scales])
            return product(x, (w.astype(jnp.float32) * wide).astype(x.dtype))
        y = product(x, w)
        return sum(y[n * rows : (n + 1) * rows] * scale for n, scale in enumerate(scales))

    deep = DEPTH if not packed and group < inputs else 2 * DEPTH if inputs % (2 * DEPTH) == 0 else DEPTH
    most = STEP if rows <= TALL else TALL_STEP
    step = next(size for size in range(most, 0, -deep) if inputs % size == 0)

    def total_of(part: int) -> jax.Array:
        def body(i, total):
            for at in range(0, step, deep):
                total = total + part_of(part, jnp.int32(i * step + at), deep)
            return total

        zero = jnp.zeros((rows, columns), jnp.float32)
        total = body(0, zero) if step == inputs else lax.fori_loop(0, inputs // step, body, zero)
        if packed:
            return total * refs["tops"][part]
        return total * scales_ref[part] if scales_ref is not None and group == inputs else total

    if activation is not None:
        out_ref[0] = activation(total_of(0), total_of(1)).astype(out_ref.dtype)
        return
    for part in range(parts):
        out_ref[part] = total_of(part).astype(out_ref.dtype)


def _normalize(x_ref, weights_ref, layer: jax.Array, out_ref, width: int, eps: float, offset: float) -> None:
    own = lax.broadcasted_iota(jnp.int32, weights_ref.shape, 0) == layer
    weight = jnp.sum(jnp.where(own, weights_ref[...].astype(jnp.float32), 0), axis=0, keepdims=True) + offset

    @pl.loop(0, x_ref.shape[0], step=ROWS)
    def _(at):
        few = pl.ds(pl.multiple_of(at, ROWS), ROWS)
        x = x_ref[few, :].astype(jnp.float32)
        mean = jnp.sum(x * x, axis=1, keepdims=True) / width
        out_ref[few, :] = (x * lax.rsqrt(mean + eps) * weight).astype(out_ref.dtype)


def _permute(x_ref, xs_ref) -> None:
    """Input 32 b + r of each 128 goes to 4 r + b, by a product with what also takes `_TOP` away: multiplied by that, a
    small scale of a column would be no normal number."""
    source, target = (lax.broadcasted_iota(jnp.int32, (DEPTH, DEPTH), axis) for axis in range(2))
    goes = source == BLOCK * (target & 3) + (target >> 2)
    moves = jnp.where(goes, 2.0 ** (14 - _TOP), 0.0).astype(x_ref.dtype)
    for at in range(0, x_ref.shape[1], DEPTH):
        moved = jnp.dot(x_ref[:, at : at + DEPTH], moves, preferred_element_type=jnp.float32)
        xs_ref[:, at : at + DEPTH] = moved.astype(xs_ref.dtype)


def _repeat(x_ref, xs_ref, repeats: int) -> None:
    x = x_ref[...]
    block = lax.rem(lax.div(lax.broadcasted_iota(jnp.int32, x.shape, 1), BLOCK), repeats)
    xs_ref[...] = jnp.concatenate([jnp.where(block == n, x, 0) for n in range(repeats)])


def _bytes(value: int) -> jax.Array:
    """A word of four equal bytes."""
    word = value * 0x01010101
    return jnp.int32(word - (1 << 32) if word >> 31 else word)


def _floats(word: jax.Array, half: int, keep: jax.Array, add: jax.Array) -> jax.Array:
    """The first or the second inputs of each byte as e5m2; see `pack_mxfp4`."""
    if half:
        magnitude = lax.shift_right_logical(word, jnp.int32(3)) & _bytes(0x0E)
        word = magnitude | (word << 7) & _bytes(0x80)
    else:
        word = word & _bytes(0x8E)
    # An exponent of 28 or more, of which the scale keeps a part; of zero, a byte of nothing but the highest bit.
    return (((word + _bytes(0x72)) & keep) ^ _bytes(0x02)) + add
