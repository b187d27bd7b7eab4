"""Products with weights of many groups on NVIDIA GPUs: each weight is read as it is stored.

XLA copies the weights of chosen experts before it multiplies, and unpacks quantised ones to memory. A program of this
kernel takes a tile of rows of one group and some columns of its weight, and unpacks in registers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from inferlib.pallas_kernels.processors_gpu import PROCESSORS

PROGRAMS = 2 * PROCESSORS  # enough to fill the GPU
_PACKED = ("int4", "float4_e2m1fn")
# Rows of a group from which arithmetic bounds the kernel, not the weights' bytes. Qwen3-30B-A3B's gate and up took an
# H100 0.82 ms instead of 1.64 with 512 rows a group, and 0.37 instead of 0.49 with 128; in int8 1.09 instead of 1.34;
# gpt-oss-20b's in MXFP4, with 1,024 rows, 4.1 instead of 7.0.
_MANY = 128


@dataclass(frozen=True)
class Blocks:
    """rows: rows of a tile, at least 16 for the tensor cores. columns: columns of a program. depth: inputs of one step.
    splits: programs that share the inputs of an output. warps, stages: of Triton."""

    rows: int = 16
    columns: int = 64
    depth: int = 64
    splits: int = 1
    warps: int = 4
    stages: int = 3


def blocks(
    total: int, groups: int, parts: int, inputs: int, outputs: int, dtype, group: int | None, powers: bool = False
) -> Blocks:
    """Blocks for `total` rows of `groups` groups, each with weights [P, I, O] of a dtype and a scale for every `group`
    inputs. powers: the scales are powers of two."""
    packed, rows = jnp.dtype(dtype).name in _PACKED, min(max(16, 1 << (total // groups).bit_length()), 64)
    if groups == 1:  # of all rows; llama3-8b's gate and up in MXFP4 took 1.3 times as long with tiles of 32 as of 64
        rows = 16 if total <= 16 else 64
    columns, depth = (128, 64) if jnp.dtype(dtype).itemsize == 1 else (64, 128)
    if packed:
        columns, depth = (64, 64)
    if group is not None:
        depth = max(depth, group) if powers else group
    if groups > 1 and (wide := _wide(total // groups, jnp.dtype(dtype).name, powers)):
        return wide
    programs, splits = PROGRAMS // (min(total, groups) * parts * pl.cdiv(outputs, columns)), 1
    while splits < programs and inputs // (2 * splits) >= 512:
        splits *= 2
    return Blocks(rows, columns, depth, splits)


def _wide(rows: int, kind: str, powers: bool) -> Blocks | None:
    """Blocks for many rows of each group, of the kinds that were measured."""
    if rows < _MANY:
        return None
    if kind == "bfloat16":
        return Blocks(128, 128 if rows < 2 * _MANY else 256, 64, warps=8)
    if kind == "int8":
        return Blocks(128, 128, 64)
    return Blocks(128, 128, 64, warps=8) if kind == "float4_e2m1fn" and powers else None


@functools.cache
def converts_e4m3() -> bool:
    """True if this process's GPUs have instructions for float8_e4m3fn, or if there are no GPUs."""
    devices = jax.local_devices() if jax.default_backend() == "gpu" else ()
    return all(float(device.compute_capability) >= 8.9 for device in devices)


def unsupported(values: jax.Array | jax.ShapeDtypeStruct, group: int | None, zeros: bool) -> str | None:
    """Why the kernel cannot multiply by values [N, I, O] with a scale for every `group` inputs, and with `zeros` or
    without; None if it can. zeros: there are zero points."""
    if zeros:
        return "it knows no zero points"
    if values.size >= 2**31:
        return f"weights of {values.shape} have more elements than 32-bit offsets reach"
    if group is not None and (group < 16 or group & (group - 1)):
        return f"groups of {group} are no power of two of at least 16"
    if values.dtype.name in _PACKED and values.shape[-1] % 2:
        return f"{values.shape[-1]} outputs do not fill whole bytes of {values.dtype}"
    if values.dtype == jnp.float8_e4m3fn and not converts_e4m3():
        return "GPUs of a compute capability below 8.9 do not convert float8_e4m3fn"
    return None


@dataclass(frozen=True)
class Sorted:
    """Rows sorted by group: the first sizes[0] rows belong to group `first`, the next sizes[1] to the one after it, and
    so on. rows [M]: x is [T, I], and row m stands for x[rows[m]]."""

    sizes: jax.Array
    first: jax.Array | int = 0
    rows: jax.Array | None = None


def grouped_matmul(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array | None,
    groups: Sorted | jax.Array,
    *,
    parts: int,
    chosen: Blocks | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    interpret: bool = False,
) -> jax.Array:
    """x [M, I] times the P matrices of each row's group, of values [N * P, I, O] -> [M, P, O] of a dtype, by default
    x's, accumulated in float32.

    groups: `Sorted` rows, or ids [M] of rows in any order, where row m is x[m // n] of x [M / n, I]. Rows beyond all
    groups and rows with negative ids are not written. scales: [N * P, O] of columns, or [N * P, I / g, O] of g inputs
    each; None for values that need none. Raises ValueError with the reason of `unsupported`.
    """
    (inputs, outputs), rows = values.shape[1:], groups.rows if isinstance(groups, Sorted) else None
    total, count = _counts(x, groups)
    group = None if scales is None or scales.ndim == 2 else inputs // scales.shape[1]
    if reason := unsupported(values, group, zeros=False):
        raise ValueError(f"the GPU kernel does not run this grouped_matmul: {reason}")
    packed, kind, dtype = values.dtype.name in _PACKED, values.dtype.name, jnp.dtype(dtype or x.dtype)
    powers = scales is not None and scales.dtype == jnp.float8_e8m0fnu
    chosen = chosen or blocks(total, count, parts, inputs, outputs, values.dtype, group, powers)
    if scales is not None and group is not None and (chosen.depth % group or (not powers and chosen.depth != group)):
        raise ValueError(f"steps of {chosen.depth} inputs do not go with groups of {group}, scales of {scales.dtype}")
    group_of, begin, end = _tiles(groups, total, chosen.rows) if isinstance(groups, Sorted) else (groups, None, None)
    if packed:
        values = lax.bitcast_convert_type(values.reshape(*values.shape[:2], outputs // 2, 2), jnp.uint8)
    if scales is not None and powers:
        scales = lax.bitcast_convert_type(scales, jnp.uint8)
    programs = pl.cdiv(values.shape[2], chosen.columns // 2 if packed else chosen.columns)
    turns = 1 if isinstance(groups, Sorted) else total // x.shape[0]
    options = dict(parts=parts, turns=turns, chosen=chosen, kind=kind, group=group, interpret=interpret)
    operands = group_of, begin, end, rows, x, values, scales
    out = pl.pallas_call(
        functools.partial(_kernel, **options),
        grid=(parts * programs, group_of.size, chosen.splits),
        in_specs=[_whole(a) for a in operands],
        out_specs=pl.BlockSpec((None, total, parts, outputs), lambda n, t, s: (s, 0, 0, 0)),
        out_shape=jax.ShapeDtypeStruct(
            (chosen.splits, total, parts, outputs), dtype if chosen.splits == 1 else jnp.float32
        ),
        compiler_params=plgpu.CompilerParams(num_warps=chosen.warps, num_stages=chosen.stages),
        interpret=interpret,
        name="grouped_matmul",
    )(*operands)
    return out[0] if chosen.splits == 1 else jnp.sum(out, axis=0).astype(dtype)


def _counts(x: jax.Array, groups: Sorted | jax.Array) -> tuple[int, int]:
    """M, and the most groups that have rows. Raises ValueError for ids that are not a multiple of x's rows."""
    if isinstance(groups, Sorted):
        return x.shape[0] if groups.rows is None else groups.rows.size, groups.sizes.size
    if groups.size % x.shape[0]:
        raise ValueError(f"{groups.size} ids are not the same number for each of {x.shape[0]} rows")
    return groups.size, groups.size


def _tiles(groups: Sorted, total: int, height: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Group, first row and end of each tile of up to `height` rows; the end of surplus tiles is 0."""
    sizes = groups.sizes
    tiles = lax.div(sizes + (height - 1), jnp.int32(height))  # tiles of each group
    ends, stops = _sums(tiles), _sums(sizes)
    number = jnp.arange(min(total, sizes.size + total // height), dtype=jnp.int32)
    of = jnp.minimum(jnp.sum(ends[None] <= number[:, None], axis=1, dtype=jnp.int32), sizes.size - 1)
    first, start, stop = (
        x.at[of].get(mode="promise_in_bounds", wrap_negative_indices=False)
        for x in (ends - tiles, stops - sizes, stops)
    )
    begin = start + (number - first) * height
    end = jnp.where(number < ends[-1], jnp.minimum(begin + height, stop), 0)
    return of + groups.first, begin, end


def _sums(x: jax.Array) -> jax.Array:
    """The cumulative sums of a few numbers, in one kernel: XLA's take several, which every layer would compile."""
    number = jnp.arange(x.size)
    return jnp.sum(jnp.where(number <= number[:, None], x, 0), axis=1, dtype=x.dtype)


def _whole(array: jax.Array | None) -> pl.BlockSpec | None:
    return None if array is None else pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)


def _kernel(
    group_ref,
    begin_ref,
    end_ref,
    rows_ref,
    x_ref,
    w_ref,
    scales_ref,
    out_ref,
    *,
    parts,
    turns,
    chosen,
    kind,
    group,
    interpret,
):
    """group_ref, begin_ref, end_ref [tiles]: the group of each tile, its first row and the end of its rows; or only
    group_ref [M], the group of each row. rows_ref [M]: the rows of x, if not in order. x_ref [T, I], w_ref
    [N * P, I, O or O / 2], scales_ref [N * P, O] or [N * P, I / g, O], out_ref [M, P, O]."""
    (inputs, stored), depth, halves = w_ref.shape[1:], chosen.depth, 2 if kind in _PACKED else 1
    width = chosen.columns // halves
    # Scales that are powers of two multiply weights exactly, for several groups a step; others multiply sums.
    early = group is not None and scales_ref.dtype == jnp.uint8
    assembly = kind in _ASSEMBLY and x_ref.dtype == jnp.bfloat16 and not interpret
    part, tile = pl.program_id(0) // pl.cdiv(stored, width), pl.program_id(1)
    columns = lax.rem(pl.program_id(0), pl.cdiv(stored, width)) * width + jnp.arange(width)
    clipped = jnp.minimum(columns, stored - 1) if stored % width else columns
    group_of = plgpu.load(group_ref.at[tile])
    matrix = jnp.maximum(group_of, 0) * parts + part
    if begin_ref is None:
        row, end = tile, jnp.where(group_of < 0, 0, tile + 1)
    else:
        row, end = plgpu.load(begin_ref.at[tile]), plgpu.load(end_ref.at[tile])
    row = row + jnp.arange(chosen.rows)
    real = row < end
    source = row // turns if rows_ref is None else plgpu.load(rows_ref.at[row], mask=real, other=0)

    def load_scales(at, half):
        across = clipped if not early else clipped[None]
        loaded = plgpu.load(scales_ref.at[(matrix, *at, halves * across + half)])
        return power_of_two(loaded).astype(x_ref.dtype) if early else loaded.astype(jnp.float32)

    def step(i, sums):
        k = i * depth + jnp.arange(depth)
        within = True if inputs % depth == 0 else k < inputs
        within = within if within is True else within[None]
        xs = plgpu.load(x_ref.at[source[:, None], k[None]], mask=real[:, None] & within, other=0)
        # The weight may be anything where x is zero or no result is stored.
        k = jnp.minimum(k, inputs - 1)
        if early:
            at = matrix, k.reshape(-1, group)[:, :, None], clipped[None, None]
            deep = jnp.minimum(i * (depth // group) + jnp.arange(depth // group), inputs // group - 1)
        else:
            at = matrix, k[:, None], clipped[None]
        new = []
        for half, ws in enumerate(_unpacked(plgpu.load(w_ref.at[at]), kind, xs.dtype, assembly)):
            if early:
                ws = (ws * load_scales((deep[:, None],), half)[:, None, :]).reshape(depth, width)
            late = None if group is None or early else load_scales((i * depth // group,), half)[None]
            y = plgpu.dot(xs, ws, precision=lax.Precision.HIGHEST)
            new.append(sums[half] + (y if late is None else y * late))
        return tuple(new)

    share = pl.cdiv(pl.cdiv(inputs, depth), chosen.splits)
    start = pl.program_id(2) * share
    stop = jnp.where(end > 0, jnp.minimum(start + share, pl.cdiv(inputs, depth)), start)
    sums = lax.fori_loop(start, stop, step, (jnp.zeros((chosen.rows, width), jnp.float32),) * halves)
    for half, total in enumerate(sums):
        if scales_ref is not None and group is None:
            total = total * load_scales((), half)[None]
        at, mask = halves * columns + half, real[:, None] & (columns < stored)[None]
        plgpu.store(out_ref.at[row[:, None], part, at[None]], total.astype(out_ref.dtype), mask=mask)


def _unpacked(stored, kind: str, dtype, assembly: bool) -> tuple:
    """Stored elements as `dtype`. Packed elements give two arrays: the lower halves of the bytes, then the upper
    halves."""
    if assembly:
        return tuple(
            plgpu.elementwise_inline_asm(
                text,
                args=[stored],
                constraints="=r,=r,r",
                pack=4,
                result_shape_dtypes=[jax.ShapeDtypeStruct(stored.shape, dtype)],
            )[0]
            for text in _ASSEMBLY[kind]
        )
    if kind not in _PACKED:
        return (stored.astype(dtype),)
    bits = stored.astype(jnp.int32)
    if kind == "int4":
        return tuple((((half + 8) & 15) - 8).astype(dtype) for half in (bits & 15, bits >> 4))
    # Sign, exponent and mantissa in their places of a float16, which is then 2^-14 of the value.
    halves = ((bits & 7) << 9) | ((bits & 8) << 12), ((bits & 0x70) << 5) | ((bits & 0x80) << 8)
    return tuple(
        (lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16).astype(jnp.float32) * 2.0**14).astype(dtype)
        for half in halves
    )


def power_of_two(code):
    """e8m0 as float32; 2^-127, which is subnormal, becomes zero."""
    bits = jnp.where(code == 255, 0x7FC00000, code.astype(jnp.int32) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)


# Four bytes, or half of each, to bfloat16: the compiler's conversions take twice as long. The bits of a number are
# placed so that the result differs from it by a known factor or addend.
_E2M1 = """{
    .reg .b32 p, q, most, none;
    mov.b32 most, 0x7E807E80;
    mov.b32 none, 0x80008000;
    prmt.b32 p, $2, 0, 0x1404;
    SHIFT
    shr.b32 q, p, 6;
    and.b32 q, q, 0x01C001C0;
    lop3.b32 q, p, none, q, 0xEA;
    fma.rn.bf16x2 $0, q, most, none;
    prmt.b32 p, $2, 0, 0x3424;
    SHIFT
    shr.b32 q, p, 6;
    and.b32 q, q, 0x01C001C0;
    lop3.b32 q, p, none, q, 0xEA;
    fma.rn.bf16x2 $1, q, most, none;
}"""  # 2^-126 of the value, then the product (by fma, which older chips have too)
_INT4 = """{
    .reg .b32 p, q, one, less, mask, flip;
    mov.b32 one, 0x3F803F80;
    mov.b32 less, 0xC308C308;
    mov.b32 mask, 0x000F000F;
    mov.b32 flip, 0x43084308;
    prmt.b32 p, $2, 0, 0x4140;
    SHIFT
    lop3.b32 q, p, mask, flip, 0x6A;
    fma.rn.bf16x2 $0, q, one, less;
    prmt.b32 p, $2, 0, 0x4342;
    SHIFT
    lop3.b32 q, p, mask, flip, 0x6A;
    fma.rn.bf16x2 $1, q, one, less;
}"""  # 136 + n in the last bits of a bfloat16 of 128 to 143, less 136
_INT8 = """{
    .reg .b32 u, a, b, c, d;
    .reg .f32 x, y, z, w, less;
    mov.f32 less, 0fCB000080;
    xor.b32 u, $2, 0x80808080;
    prmt.b32 a, u, 0x4B000000, 0x7440;
    prmt.b32 b, u, 0x4B000000, 0x7441;
    prmt.b32 c, u, 0x4B000000, 0x7442;
    prmt.b32 d, u, 0x4B000000, 0x7443;
    mov.b32 x, a;
    mov.b32 y, b;
    mov.b32 z, c;
    mov.b32 w, d;
    add.f32 x, x, less;
    add.f32 y, y, less;
    add.f32 z, z, less;
    add.f32 w, w, less;
    mov.b32 a, x;
    mov.b32 b, y;
    mov.b32 c, z;
    mov.b32 d, w;
    prmt.b32 $0, a, b, 0x7632;
    prmt.b32 $1, c, d, 0x7632;
}"""  # 2^23 + 128 + n as float32, less that; its upper half is exact
_ASSEMBLY = {
    "float4_e2m1fn": (_E2M1.replace("SHIFT", "shl.b32 p, p, 4;"), _E2M1.replace("SHIFT", "")),
    "int4": (_INT4.replace("SHIFT", ""), _INT4.replace("SHIFT", "shr.b32 p, p, 4;")),
    "int8": (_INT8,),
}
