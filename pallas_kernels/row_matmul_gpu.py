"""Products of single rows with weights on NVIDIA GPUs, each weight read once, in memory's time.

Two, four or eight outputs lie in a word of 32 bits. bfloat16 is multiplied in float32. Quantised elements become pairs
of float16, which hold every type's values exactly, and are multiplied and summed two at a time: products of up to
`_TERMS` inputs in float16, beyond that in float32. Inputs are scaled by a power of two, so that none of those sums
overflows. The error, about 4e-4 of a result's norm, is below that of rounding it to bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from inferlib.pallas_kernels.grouped_matmul_gpu import converts_e4m3, power_of_two

PROGRAMS = 27 * 132  # of one warp each: nearly what the SMs of an H100 or H200 hold at a time
_TERMS = 8


@dataclass(frozen=True)
class Blocks:
    """words: of 32 bits, side by side; units: of `depth` inputs each, of one step, both powers of two; splits: programs
    that share the inputs of an output."""

    words: int = 16
    units: int = 4
    depth: int = 16
    splits: int = 1
    warps: int = 1

    def __post_init__(self):
        if self.words & (self.words - 1) or self.units & (self.units - 1) or self.depth % _TERMS:
            raise ValueError(f"words and units are powers of two, the depth a multiple of {_TERMS}, not {self}")


@dataclass(frozen=True)
class _Kind:
    """How an element type becomes float16. outputs: in a word; top: exponent of the largest input that `_TERMS`
    products do not overflow; factor: between an element and its float16; order: which outputs the pairs are."""

    outputs: int
    top: int
    factor: float
    order: tuple[int, ...]
    fields: str  # of a word: bytes, which are "e4m3" or unsigned integers with an offset, or "bfloat16"
    offset: int = 0


_EIGHT, _FOUR = (0, 2, 4, 6, 1, 3, 5, 7), (0, 1, 2, 3)
_KINDS = {
    "float4_e2m1fn": _Kind(8, 13, 2.0**6, _EIGHT, "e4m3"),
    "int4": _Kind(8, 9, 1.0, _EIGHT, "integer", 8),
    "int8": _Kind(4, 5, 1.0, _FOUR, "integer", 128),
    "float8_e4m3fn": _Kind(4, 4, 1.0, _FOUR, "e4m3"),
    "bfloat16": _Kind(2, 0, 1.0, (0, 1), "bfloat16"),
}


def blocks(matrices: int, inputs: int, outputs: int, dtype) -> Blocks:
    """For rows that multiply so many matrices [I, O] of a dtype."""
    words, chosen = outputs // _KINDS[jnp.dtype(dtype).name].outputs, Blocks()
    # 0.92 times the time for gpt-oss's experts, whose 360 words would leave half a block empty.
    if words % chosen.words:
        chosen = Blocks(words=8, units=8)
    programs = matrices * pl.cdiv(words, chosen.words)
    steps = pl.cdiv(inputs, chosen.units * chosen.depth)
    # Each program works off a few steps, so that copies overlap products; the partial sums are read again.
    per_program = max(2, pl.cdiv(steps, max(1, min(32, pl.cdiv(PROGRAMS, programs)))))
    return replace(chosen, splits=pl.cdiv(steps, per_program))


def unsupported(x_dtype, values: jax.ShapeDtypeStruct, group: int | None, depth: int = Blocks.depth) -> str | None:
    """Why the kernel cannot multiply rows of a dtype by values [N, I, O], `group` inputs sharing a scale, `depth` at
    a time; None if it can."""
    kind, (inputs, outputs) = _KINDS.get(values.dtype.name), values.shape[1:]
    if kind is None or jnp.dtype(x_dtype) != jnp.bfloat16:
        return f"products of {jnp.dtype(x_dtype).name} with {values.dtype.name}"
    if inputs % depth or outputs % kind.outputs or (group or depth) % depth:
        return f"{inputs} inputs in groups of {group} or {outputs} outputs do not fill units of {depth} and words"
    if values.size // kind.outputs >= 2**31:
        return f"{values.shape} has more words than 32-bit offsets reach"
    if kind.fields == "e4m3" and not converts_e4m3():
        return f"{values.dtype.name} on GPUs of a compute capability below 8.9, which do not convert float8_e4m3fn"
    return None


def row_matmul(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array | None = None,
    ids: jax.Array | None = None,
    *,
    parts: int = 1,
    turns: int = 1,
    chosen: Blocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """x [M / turns, I] bfloat16 times values [N * P, I, O] -> [M, P, O] float32: x[m // turns] by the P matrices of
    group ids[m].

    Without ids all rows go to the first group. Where an id is negative the result is anything. scales: [N * P, O] of
    columns, or [N * P, I / g, O] of g inputs each; none of bfloat16. Raises ValueError where `unsupported` says why.
    """
    inputs, outputs = values.shape[1:]
    group = None if scales is None or scales.ndim == 2 else inputs // scales.shape[1]
    kind = values.dtype.name
    if reason := unsupported(x.dtype, values, group, Blocks.depth if chosen is None else chosen.depth):
        raise ValueError(f"the GPU kernel for single rows does not run {reason}")
    count = x.shape[0] if ids is None else ids.size
    chosen = chosen or blocks(count * parts, inputs, outputs, kind)
    words = _as_words(values, _KINDS[kind].outputs)
    if scales is not None and scales.dtype == jnp.float8_e8m0fnu:
        scales = _as_words(scales, 4)
    operands = ids, _as_words(x, 2), words, scales
    out = pl.pallas_call(
        partial(_kernel, kind=kind, parts=parts, turns=turns, chosen=chosen, group=group, interpret=interpret),
        grid=(parts * pl.cdiv(words.shape[2], chosen.words), count, chosen.splits),
        in_specs=[None if a is None else pl.BlockSpec(a.shape, lambda *_, rank=a.ndim: (0,) * rank) for a in operands],
        out_specs=pl.BlockSpec((None, count, parts, outputs), lambda n, m, s: (s, 0, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((chosen.splits, count, parts, outputs), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=chosen.warps, num_stages=1),
        interpret=interpret,
        name="row_matmul",
    )(*operands)
    return jnp.sum(out, axis=0)


def _as_words(x: jax.Array, count: int) -> jax.Array:
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, count), jnp.int32)


def _kernel(ids_ref, x_ref, w_ref, scales_ref, out_ref, *, kind, parts, turns, chosen, group, interpret):
    """x_ref [T, I / 2] and w_ref [N * P, I, words] are int32; scales_ref [N * P, O] or [N * P, I / g, O], or of e8m0
    [N * P, I / g, O / 4] int32; out_ref [M, P, O]."""
    spec, (inputs, stored), depth, units = _KINDS[kind], w_ref.shape[1:], chosen.depth, chosen.units
    number, tile = spec.outputs, (units, chosen.words)
    across = pl.cdiv(stored, chosen.words)
    part, m = pl.program_id(0) // across, pl.program_id(1)
    columns = lax.rem(pl.program_id(0), across) * chosen.words + jnp.arange(chosen.words)
    clipped = jnp.minimum(columns, stored - 1) if stored % chosen.words else columns
    of = jnp.int32(0) if ids_ref is None else plgpu.load(ids_ref.at[m])
    source = m // turns
    matrix = jnp.maximum(of, 0) * parts + part
    total = inputs // depth
    share = pl.cdiv(pl.cdiv(total, units), chosen.splits) * units
    start = pl.program_id(2) * share
    stop = jnp.where(of < 0, start, jnp.minimum(start + share, total))
    plain = spec.fields == "bfloat16"
    powers = not plain and scales_ref.dtype == jnp.int32

    def copies(i):
        """Words and scales of step i, asked for one step ahead."""
        asked = jnp.broadcast_to(start + i * units < stop, tile)
        unit = jnp.minimum(start + i * units + jnp.arange(units), total - 1)
        at = [(unit * depth + j)[:, None] for j in range(depth)]
        words = tuple(plgpu.load(w_ref.at[matrix, k, clipped[None]], mask=asked, other=0) for k in at)
        if group is None:
            return words, ()
        k = (unit * depth // group)[:, None]
        per_load = 4 if powers else 1
        places = [number // per_load * clipped[None] + j for j in range(number // per_load)]
        return words, tuple(plgpu.load(scales_ref.at[matrix, k, n], mask=asked, other=0) for n in places)

    first = copies(0)
    places = [number * clipped + n for n in range(number)] if group is None and not plain else []
    of_columns = [plgpu.load(scales_ref.at[matrix, n]).astype(jnp.float32) for n in places]
    up = down = 1.0
    if not plain:  # the largest input of this program decides the power of two that scales them all
        pairs = start * (depth // 2) + jnp.arange(1 << (share * depth // 2 - 1).bit_length())
        pair = plgpu.load(x_ref.at[source, pairs], mask=pairs < stop * (depth // 2), other=0)
        largest = jnp.max(jnp.maximum(pair & 0x7FFF0000, (pair << 16) & 0x7FFF0000))
        exponent = jnp.clip(largest >> 23, 16, 238)
        up, down = _float((253 + spec.top - exponent) << 23), _float((exponent - spec.top + 1) << 23)

    def step(i, carry):
        sums, (words, scales) = carry
        ahead = copies(i + 1)
        unit = start + i * units + jnp.arange(units)
        factor = jnp.broadcast_to(jnp.where(unit < stop, up, 0.0)[:, None], tile)
        unit, new = jnp.minimum(unit, total - 1), None
        for k in range(0, depth, _TERMS):
            xs = []
            for j in range(k, k + _TERMS, 2):
                pair = jnp.broadcast_to(plgpu.load(x_ref.at[source, unit * (depth // 2) + j // 2])[:, None], tile)
                if plain:
                    xs += [jnp.where(factor > 0, x, 0.0) for x in _floats(pair)]
                else:
                    xs += [_twice(pair, factor, upper, interpret) for upper in (False, True)]
            some = (_floats_dot if plain else partial(_dot, spec, interpret=interpret))(words[k : k + _TERMS], xs)
            new = some if new is None else [a + b for a, b in zip(new, some, strict=True)]
        if group is not None:
            each = (
                [power_of_two(lax.shift_right_logical(scales[n // 4], 8 * (n % 4)) & 255) for n in range(number)]
                if powers
                else [scale.astype(jnp.float32) for scale in scales]
            )
            new = [y * scale for y, scale in zip(new, each, strict=True)]
        return tuple(a + b for a, b in zip(sums, new, strict=True)), ahead

    zero = (jnp.zeros(tile, jnp.float32),) * number
    sums, _ = lax.fori_loop(0, pl.cdiv(jnp.maximum(stop - start, 0), units), step, (zero, first))
    for n, total in enumerate(sums):
        y = total.sum(axis=0) * (down * spec.factor)
        y = y * of_columns[n] if of_columns else y
        plgpu.store(out_ref.at[m, part, number * columns + n], y, mask=columns < stored)


def _floats(word) -> tuple:
    """The two bfloat16 of a word."""
    return _float(word << 16), _float(word & _bits(0xFFFF0000))


def _floats_dot(words, xs) -> list:
    """Of both outputs in a word of bfloat16, the sum over inputs, float32."""
    products = [[y * x for y in _floats(word)] for word, x in zip(words, xs, strict=True)]
    return [sum(each[1:], each[0]) for each in zip(*products, strict=True)]


def _dot(spec: _Kind, words, xs, interpret: bool) -> list:
    """Of each output in a word, the sum over inputs, float32."""
    sums = [None] * (spec.outputs // 2)
    for word, x in zip(words, xs, strict=True):
        for i, field in enumerate(_fields(spec, word)):
            for half in range(2):
                sums[2 * i + half] = _add_products(spec, field, half, x, sums[2 * i + half], interpret)
    out = [None] * spec.outputs
    for pair, total in enumerate(sums):
        for half in range(2):
            out[spec.order[2 * pair + half]] = _half(total, half, interpret)
    return out


def _fields(spec: _Kind, word) -> tuple:
    """Words of four bytes, each a number as `spec.fields` has it."""
    if spec.outputs == 4:
        return (word if spec.fields == "e4m3" else word ^ _bits(0x80808080),)
    right = partial(lax.shift_right_logical, word)
    if spec.fields == "integer":
        return tuple(x & _bits(0x0F0F0F0F) ^ _bits(0x08080808) for x in (word, right(4)))
    # Sign, exponent and mantissa of e2m1 in their places of an e4m3, which is then 2^-6 of the value.
    sign, size = _bits(0x80808080), _bits(0x1C1C1C1C)
    return ((word << 4) & sign) | ((word << 2) & size), (word & sign) | (right(2) & size)


def _bits(pattern: int) -> np.int32:
    return np.uint32(pattern).astype(np.int32)


def _float(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)


# ---- what has no name in JAX: pairs of float16 in words, by the GPU's instructions or, interpreted, by their meaning


def _asm(text: str, constraints: str, args: list, dtype=jnp.int32):
    return plgpu.elementwise_inline_asm(
        text,
        args=args,
        constraints=constraints,
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )[0]


def _twice(pair, factor, upper: bool, interpret: bool):
    """Of two bfloat16 in a word one, times a factor, as two float16."""
    if interpret:
        x = _float(pair & _bits(0xFFFF0000) if upper else pair << 16) * factor
        return _words_of(x, x)
    bits = "and.b32 a, $1, 0xFFFF0000;" if upper else "shl.b32 a, $1, 16;"
    body = f"{bits} mov.b32 f, a; mul.f32 f, f, $2; cvt.rn.f16.f32 h, f; mov.b32 $0, {{h, h}};"
    return _asm(f"{{ .reg .b32 a; .reg .f32 f; .reg .b16 h; {body} }}", "=r,r,f", [pair, factor])


def _add_products(spec: _Kind, field, half: int, x, total, interpret: bool):
    """total + two of four bytes times x, in float16; total None: nothing yet."""
    if interpret:
        bytes_ = [lax.shift_right_logical(field, 8 * (2 * half + i)) & 255 for i in range(2)]
        if spec.fields == "e4m3":
            numbers = [lax.bitcast_convert_type(b.astype(jnp.uint8), jnp.float8_e4m3fn) for b in bytes_]
        else:
            numbers = [b - spec.offset for b in bytes_]
        products = [n.astype(jnp.float32) * _half(x, i, True) for i, n in enumerate(numbers)]
        if total is not None:
            products = [_half(total, i, True) + y for i, y in enumerate(products)]
        return _words_of(*products)
    if spec.fields == "e4m3":
        made = f"mov.b32 {{l, m}}, $1; cvt.rn.f16x2.e4m3x2 h, {'lm'[half]};"
    else:  # a byte below that of 1024 as float16 adds to it; less that, and the offset
        less = {8: "0xE408E408", 128: "0xE480E480"}[spec.offset]
        made = f"mov.b32 k, {less}; prmt.b32 h, $1, 0x64646464, {('0x4140', '0x4342')[half]}; add.rn.f16x2 h, h, k;"
    body = f"{{ .reg .b32 h, k; .reg .b16 l, m; {made} "
    if total is None:
        return _asm(body + "mul.rn.f16x2 $0, h, $2; }", "=r,r,r", [field, x])
    return _asm(body + "fma.rn.f16x2 $0, h, $2, $3; }", "=r,r,r,r", [field, x, total])


def _half(pair, half: int, interpret: bool):
    """One of two float16 in a word, as float32."""
    if interpret:
        bits = (lax.shift_right_logical(pair, 16 * half) & 0xFFFF).astype(jnp.uint16)
        return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
    text = f"{{ .reg .b16 l, m; mov.b32 {{l, m}}, $1; cvt.f32.f16 $0, {'lm'[half]}; }}"
    return _asm(text, "=f,r", [pair], jnp.float32)


def _words_of(low, high):
    low, high = (lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16).astype(jnp.int32) for x in (low, high))
    return low | (high << 16)
