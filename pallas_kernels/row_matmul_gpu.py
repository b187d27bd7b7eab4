"""Products of one to sixteen rows with weights on the tensor cores of NVIDIA GPUs; each weight is read once.

Weights are the left operand of `mma.m16n8k16`: a register of it holds a pair of outputs of one input, as a word of
memory does, so nothing is transposed. The right operand has two columns, one for each output of the pair: x stands in
the lower or the upper half of a register, beside a zero. Its eight columns thus serve four rows, or four groups of
inputs of a single row, whose sums get their scales and are added at the end. Quantised elements become float16, which
holds every type's values exactly. It also holds inputs exactly, scaled by a power of two, unless they are 2^-29 of the
largest. Products are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from inferlib.pallas_kernels.copies_gpu import SLOTS, Ring
from inferlib.pallas_kernels.grouped_matmul_gpu import converts_e4m3
from inferlib.pallas_kernels.mma_gpu import KINDS, LANES, Kind, bytes_of, mma, scaled
from inferlib.pallas_kernels.partial_sums_gpu import summed
from inferlib.pallas_kernels.processors_gpu import PROCESSORS

ROWS = 16  # most rows that share one read of the weights
# Numbers of programs, of one warp each.
PROGRAMS = 20 * PROCESSORS  # programs that load their weights: as many as the GPU holds at a time
AHEAD = 8 * PROCESSORS  # programs whose weights are copied three units ahead
FEWER = 4 * PROCESSORS  # the same, for one row with matrices that have up to SMALL bytes together and are not bfloat16
SMALL = 26 * 2**20
SHARED = 12 * PROCESSORS  # the same, for 2 to SHARED_ROWS rows with weights of four bits, whose unpacking needs warps
SHARED_ROWS = 12  # with more rows, there are too few registers for SHARED programs
UNIT = 32  # inputs, of which a lane reads 8
_UNITS = 4  # units of a step
_WIDEST = 8 * 4  # most words of an input that a program reads
_TOP = 14  # exponent of the largest input in float16


@dataclass(frozen=True)
class Blocks:
    """words: words of 32 bits that a lane reads side by side. splits: programs that share the inputs of an output;
    another kernel adds their results. copied: weights are copied to a ring ahead of their use, otherwise loaded."""

    words: int = 2
    splits: int = 1
    copied: bool = False

    def __post_init__(self):
        if self.words not in (1, 2, 4) or self.splits < 1:
            raise ValueError(f"a lane reads 1, 2 or 4 words, in 1 or more splits, not {self}")


def blocks(matrices: int, inputs: int, outputs: int, dtype, *, rows: int = 1) -> Blocks:
    """Blocks for `matrices` matrices [I, O] of a dtype, each multiplied by a row of its own, or all by the same rows.

    Programs of one warp, whose results are added by another kernel, were faster than programs of several warps, which
    add on chip: by 1.2 to 1.7 times for llama3-8b's gate and up, whose larger programs do not fill the SMs evenly. The
    bytes under way have an optimum, and the next kernel reads a partial sum for each split: this gives the numbers of
    programs above.
    """
    number = KINDS[jnp.dtype(dtype).name].outputs
    stored, steps = outputs // number, pl.cdiv(inputs, _UNITS * UNIT)
    copied = stored % _WIDEST == 0
    tiles = lambda words: matrices * pl.cdiv(stored, 8 * words)  # noqa: E731
    # Wide reads pay while at least `enough` programs of one step are left; copies make do with fewer programs.
    most, enough = (2, 1000) if number == 8 else (4, 1000 if copied else 1500)
    fits = [words for words in (4, 2, 1) if 4 // number <= words <= most and stored % words == 0]
    words = next((words for words in fits if tiles(words) * steps >= enough), fits[-1])
    programs = AHEAD if copied else PROGRAMS
    if copied and rows == 1 and number > 2 and 4 * matrices * inputs * stored <= SMALL:
        programs = FEWER
    elif copied and 1 < rows <= SHARED_ROWS and number == 8:
        programs = SHARED
    each = next((n for n in range(1, steps) if tiles(words) * pl.cdiv(steps, n) <= programs), steps)
    return Blocks(words, pl.cdiv(steps, each), copied)


def unsupported(x_dtype, values: jax.Array | jax.ShapeDtypeStruct, group: int | None) -> str | None:
    """Why the kernel cannot multiply rows of a dtype by values [N, I, O] with a scale for every `group` inputs; None if
    it can."""
    kind, (inputs, outputs) = KINDS.get(values.dtype.name), values.shape[1:]
    if kind is None or jnp.dtype(x_dtype) != jnp.bfloat16:
        return f"products of {jnp.dtype(x_dtype).name} with {values.dtype.name}"
    least = max(kind.outputs, 4)  # two registers of pairs
    if inputs % UNIT or outputs % least or (group or UNIT) % UNIT:
        return f"{inputs} inputs in groups of {group} or {outputs} outputs do not fill units of {UNIT} and of {least}"
    if values.size // kind.outputs >= 2**31:
        return f"{values.shape} has more words than 32-bit offsets reach"
    if values.dtype.name == "float8_e4m3fn" and not converts_e4m3():
        return f"{values.dtype.name} on GPUs of a compute capability below 8.9, which do not convert it"
    return None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["squares", "addend"],
    meta_fields=["activation", "eps", "partials", "dtype"],
)
@dataclass(frozen=True)
class Epilogue:
    """What follows a product of M rows.

    addend [M, P O]: added to the sums. squares, eps: results are then multiplied by the factor of the RMS norm of x,
    see `partial_sums_gpu`. activation: makes one [M, O] of two results, of two parts or side by side in one, each
    rounded to dtype before. partials: return the split-K partial sums [S, M, P O] float32 instead, and nothing else.
    """

    activation: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    squares: jax.Array | None = None
    eps: float = 0.0
    partials: bool = False
    addend: jax.Array | None = None
    dtype: jax.typing.DTypeLike = jnp.float32


_FLOAT32 = Epilogue()


@partial(jax.jit, static_argnames=("parts", "chosen", "interpret"))
def row_matmul(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array | None = None,
    ids: jax.Array | None = None,
    *,
    parts: int = 1,
    epilogue: Epilogue = _FLOAT32,
    chosen: Blocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """x [M / n, I] bfloat16 times values [N * P, I, O] -> [M, P, O] of the epilogue's dtype: x[m // n] times the P
    matrices of group ids[m].

    Without ids n is 1, and up to `ROWS` rows are multiplied by the first group, which is read once. The results of
    negative ids may be anything. scales: [N * P, O] of columns, or [N * P, I / g, O] of g inputs each; None for
    bfloat16 values. A value that is not finite spoils the output that it shares a register with, too. Raises ValueError
    with the reason of `unsupported`.
    """
    group = None if scales is None or scales.ndim == 2 else values.shape[1] // scales.shape[1]
    kind, outputs = values.dtype.name, values.shape[2]
    _check(x, values, group, ids, epilogue)
    count, shared = (x.shape[0], x.shape[0]) if ids is None else (ids.size, 1)
    chosen = chosen or blocks(count // shared * parts, values.shape[1], outputs, kind, rows=shared)
    words = _as_words(values, KINDS[kind].outputs)
    _check_blocks(chosen, words, kind)
    if scales is not None and scales.dtype == jnp.float8_e8m0fnu:
        scales = _as_words(scales, 4)
    operands = ids, _as_words(x, 2), words, scales
    # The start of the weights: a statement takes a reference as a pointer, and it must have the shape of the other
    # arguments.
    base = words.reshape(-1) if chosen.copied and not interpret else None
    options = dict(parts=parts, turns=count // x.shape[0], chosen=chosen, group=group, interpret=interpret)
    out = pl.pallas_call(
        partial(_kernel, kind=kind, **options),
        grid=(parts * pl.cdiv(words.shape[2], 8 * chosen.words), count // shared, chosen.splits),
        in_specs=[
            *(None if a is None else pl.BlockSpec(a.shape, lambda *_, rank=a.ndim: (0,) * rank) for a in operands),
            None if base is None else pl.BlockSpec((LANES,), lambda *_: (0,)),
        ],
        out_specs=pl.BlockSpec((None, count, parts, outputs), lambda n, m, s: (s, 0, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((chosen.splits, count, parts, outputs), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="row_matmul",
    )(*operands, base)
    return finished(out, epilogue, x.shape[1], interpret=interpret)


def _check(x: jax.Array, values: jax.Array, group: int | None, ids: jax.Array | None, epilogue: Epilogue) -> None:
    """Raise ValueError for a product that the kernel cannot compute."""
    if reason := unsupported(x.dtype, values, group):
        raise ValueError(f"the GPU kernel for few rows does not run {reason}")
    if epilogue.squares is not None and ids is not None:
        raise ValueError("the GPU kernel for few rows takes a norm's squares for rows without ids")
    if epilogue.partials and any(x is not None for x in (epilogue.activation, epilogue.squares, epilogue.addend)):
        raise ValueError("partial sums are of the product alone: leave out the activation, squares and the addend")
    if ids is None and x.shape[0] > ROWS:
        raise ValueError(f"the GPU kernel takes up to {ROWS} rows without ids, not {x.shape}")
    if ids is not None and ids.size % x.shape[0]:
        raise ValueError(f"{ids.size} ids are not the same number for each of {x.shape[0]} rows")


def _check_blocks(chosen: Blocks, words: jax.Array, kind: str) -> None:
    if words.shape[2] % max(chosen.words, 4 // KINDS[kind].outputs):
        raise ValueError(f"{words.shape[2]} words of {kind} are no multiple of those of {chosen}")
    if chosen.copied and words.shape[2] % (8 * chosen.words):
        raise ValueError(f"{words.shape[2]} words of {kind} do not fill the programs of {chosen}, which copy them")


def finished(out: jax.Array, epilogue: Epilogue, inputs: int, *, interpret: bool = False) -> jax.Array:
    """What `row_matmul` returns, from partial sums [S, M, P, O] of products with `inputs` inputs."""
    splits, count, parts, outputs = out.shape
    if epilogue.partials:
        return out.reshape(splits, count, -1)
    activation, squares, addend = epilogue.activation, epilogue.squares, epilogue.addend
    runs = activation is not None and _runs(activation)
    if squares is not None or runs:
        y = summed(
            out.reshape(splits, count, -1),
            squares,
            addend,
            inputs=inputs,
            eps=epilogue.eps,
            activation=activation if runs else None,
            dtype=epilogue.dtype,
            interpret=interpret,
        )
        if runs:
            return y
    else:
        y = jnp.sum(out, axis=0)
        y = (y if addend is None else y + addend.reshape(y.shape)).astype(epilogue.dtype)
    if activation is None:
        return y.reshape(count, parts, outputs)
    return activation(*jnp.split(y.reshape(count, -1), 2, axis=1))


@cache
def _runs(activation) -> bool:
    """True if a kernel can compute the activation: Pallas has no erf on GPUs."""
    return "erf" not in str(jax.make_jaxpr(activation)(0.0, 0.0))


def _as_words(x: jax.Array, count: int) -> jax.Array:
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, count), jnp.int32)


def _kernel(ids_ref, x_ref, w_ref, scales_ref, base_ref, out_ref, *, kind, parts, turns, chosen, group, interpret):
    """x_ref [T, I / 2] and w_ref [N * P, I, words] are int32; scales_ref [N * P, O] or [N * P, I / g, O], or for e8m0
    [N * P, I / g, O / 4] int32; base_ref [32], the first words of w_ref, if weights are copied; out_ref [M, P, O].

    A unit is 32 inputs of a group; lane (g, t) reads 8 of them, from 8 t on. A step is one unit of each of four groups,
    or any four units where columns share a scale. Columns 2 c and 2 c + 1 of the products are the sums of unit c of a
    single row, or of row c of several. So lane (g, t) ends with the sums of c = t, for the words that g's lanes read.
    """
    spec, (inputs, stored), width = KINDS[kind], w_ref.shape[1:], chosen.words
    number, rows = spec.outputs, out_ref.shape[0] if ids_ref is None else 1
    unquantized, single, fours = kind == "bfloat16", rows == 1, pl.cdiv(rows, 4)
    of_columns, powers = not unquantized and group is None, group is not None and scales_ref.dtype == jnp.int32
    per_group = (group or UNIT) // UNIT  # units
    groups = inputs // UNIT // per_group
    g, t = jnp.arange(LANES) >> 2, jnp.arange(LANES) & 3

    across = pl.cdiv(stored, 8 * chosen.words)
    part, m = pl.program_id(0) // across, pl.program_id(1)
    # Lanes beyond the last word repeat it, and store what another stores.
    block = lax.rem(pl.program_id(0), across) * (8 * chosen.words)
    first = jnp.minimum(block + chosen.words * g, stored - chosen.words)
    of = jnp.int32(0) if ids_ref is None else plgpu.load(ids_ref.at[m])
    matrix = jnp.maximum(of, 0) * parts + part
    steps = pl.cdiv(groups, _UNITS) * per_group
    share = pl.cdiv(steps, chosen.splits)
    start = jnp.broadcast_to(pl.program_id(2) * share, (LANES,))
    count = jnp.where(of < 0, 0, jnp.clip(steps - pl.program_id(2) * share, 0, share))
    last = jnp.minimum(start + share, steps) - 1

    def over(step):
        """For each lane the step's group of groups, and its place in it."""
        if per_group == 1:
            return step, 0
        return lax.div(step, jnp.full_like(step, per_group)), lax.rem(step, jnp.full_like(step, per_group))

    def group_of(step, c):
        return _UNITS * over(step)[0] + c

    def begin(step, c):
        """The first input of a step's unit c, or of another unit if that one does not exist."""
        return (jnp.minimum(group_of(step, c), groups - 1) * per_group + over(step)[1]) * UNIT

    def later(step, c):
        """The step and the number of the unit that is c units after the first unit of a step."""
        return step + (c >> 2), c & 3

    def row_of(four):
        """For each lane the row that its columns of the right operand hold."""
        return m // turns if single else jnp.minimum(4 * four + (g >> 1), rows - 1)

    def weights(step, c):
        """[8][width] words for each lane: the weights of each of its inputs of unit c."""
        at = begin(jnp.minimum(step, last), c) + 8 * t
        return [_side_by_side(w_ref, (matrix, at + k), first, width) for k in range(8)]

    def inputs_of(step, c):
        """[rows / 4][4] words for each lane: its pairs of inputs of unit c, or for a single row those of any unit."""
        c = g >> 1 if single else c
        words = [_side_by_side(x_ref, (row_of(four),), (begin(step, c) >> 1) + 4 * t, 4) for four in range(fours)]
        return [[jnp.where(group_of(step, c) < groups, y, 0) for y in each] for each in words]

    def scales_of(step, c):
        """The words or numbers that hold each lane's scales."""
        at, less = jnp.minimum(group_of(step, c), groups - 1), 4 if powers else 1
        return _side_by_side(scales_ref, (matrix, at), first * number // less, width * number // less)

    def numbers_of(scales):
        """[width * number] float32 from the words or numbers of `scales_of`."""
        return [_power(y, n) for y in scales for n in range(4)] if powers else [y.astype(jnp.float32) for y in scales]

    ring = None
    if base_ref is not None:
        ring = Ring(width)
        memory = ring.begin()

        def copy(step, c, slot, token):
            real = jnp.where(count > 0, (step <= last).astype(jnp.int32), 0)
            at = (matrix * inputs + begin(jnp.minimum(step, last), c)) * (stored // 4) + block // 4
            return ring.copy(memory, slot, base_ref, at, 4 * stored, real, token)

        token = jnp.zeros(LANES, jnp.int32)
        for c in range(SLOTS - 1):
            token = copy(*later(start, c), c, token)
        first_words = token, [[token] * width] * 8
    else:
        first_words = weights(start, 0)
    first_inputs = inputs_of(start, 0)
    ups = downs = [None] * fours
    if not unquantized:
        some = (per_group * _UNITS * UNIT // 2) * (pl.cdiv(share, per_group) + (per_group > 1))
        at = over(start)[0] * (per_group * _UNITS * UNIT // 2)
        largest = [_largest(x_ref, row_of(four), at, min(some, inputs // 2), single) for four in range(fours)]
        ups, downs = zip(*[_factors(each, single) for each in largest], strict=True)
    zeros = [[jnp.zeros(LANES, jnp.float32)] * 4 for _ in range(width * number // 4)]

    def prepared(xs):
        if unquantized:
            return xs
        return [[scaled(pair, up, interpret) for pair in each] for each, up in zip(xs, ups, strict=True)]

    def step(i, carry):
        sums, words, xs, scales = carry
        i = start + i
        new = sums if group is None else [zeros] * fours
        if single:
            pairs, xs = prepared(xs), inputs_of(i + 1, 0)
            scales = scales_of(i, t) if group is not None else []

        def unit(c, carry):
            sums, new, words, xs, scales = carry
            if ring:
                token, before = words
                token = ring.wait(token, [*chain(*before)])
                token = copy(*later(i, c + SLOTS - 1), (c - 1) & (SLOTS - 1), token)
                words = ring.read(memory, c & (SLOTS - 1), token)
                next_words = token, words
            else:
                next_words = weights(*later(i, c + 1))
            next_scales = scales
            if single:
                of_unit, next_xs = pairs, xs
            else:
                of_unit, next_xs = prepared(xs), inputs_of(*later(i, c + 1))
                next_scales = scales_of(*later(i, c + 1)) if group is not None else []
            # The bytes of a pair of inputs that a lane of the right operand takes: its column's half if it is active.
            places = [jnp.where((g & 1) > 0, high, low) for low, high in ((0x4410, 0x1044), (0x4432, 0x3244))]
            places = [jnp.where((g >> 1) == c, place, 0x4444) for place in places] if single else places
            right = [[bytes_of(pair, place, interpret) for pair in each for place in places] for each in of_unit]
            new = [_products(kind, words, b, tiles, interpret) for b, tiles in zip(right, new, strict=True)]
            if group is not None and not single:
                numbers = numbers_of(scales)
                sums = [_add_scaled(spec, a, b, numbers, powers) for a, b in zip(sums, new, strict=True)]
                new = [zeros] * fours
            return sums, new, next_words, next_xs, next_scales

        carry = sums, new, words, xs, scales
        if interpret or not single or ring:  # smaller code; slower for single rows whose weights are loaded
            carry = lax.fori_loop(0, _UNITS, unit, carry)
        else:
            for c in range(_UNITS):
                carry = unit(c, carry)
        sums, new, words, xs, scales = carry
        if group is None:
            sums = new
        elif single:
            sums = [_add_scaled(spec, sums[0], new[0], numbers_of(scales), powers)]
        return sums, words, xs, [] if single else scales

    first_scales = [] if single or group is None else scales_of(start, 0)
    sums, *_ = lax.fori_loop(0, count, step, ([zeros] * fours, first_words, first_inputs, first_scales))
    first, outputs = number * first, width * number
    # With a single row, a lane stores every fourth output of its words.
    if of_columns and single:
        scales = [plgpu.load(scales_ref.at[matrix, first + n + t]) for n in range(0, outputs, 4)]
    elif of_columns:
        scales = _side_by_side(scales_ref, (matrix,), first, outputs)
    for four, down in enumerate(downs):
        results = _in_order(spec, sums[four])
        if single:
            results = [_over(jnp.sum, y, 4) for y in results]
            quads = [results[n : n + 4] for n in range(0, len(results), 4)]
            results = [jnp.where(t < 2, jnp.where(t < 1, a, b), jnp.where(t < 3, c, d)) for a, b, c, d in quads]
        results = results if down is None else [y * (down * spec.factor) for y in results]
        if of_columns:
            results = [y * scale.astype(jnp.float32) for y, scale in zip(results, scales, strict=True)]
        if single:
            for n, y in enumerate(results):
                plgpu.store(out_ref.at[m, part, first + 4 * n + t], y)
            continue
        row = jnp.broadcast_to((4 * four + t)[:, None], (LANES, 4))
        for n in range(0, outputs, 4):
            at = first[:, None] + (n + jnp.arange(4))[None]
            plgpu.store(out_ref.at[row, part, at], _quads(*results[n : n + 4]), mask=row < rows)


def _quads(a, b, c, d):
    """Stack four arrays [...] to [..., 4]."""
    pair = lambda x, y: jnp.concatenate([x[..., None], y[..., None]], axis=-1)  # noqa: E731
    return pair(pair(a, c), pair(b, d)).reshape(*a.shape, 4)


def _side_by_side(ref, at: tuple, base, count: int) -> list:
    """Load `count` neighbours for each lane, from base on; four words of 32 bits are one load."""
    lift = lambda y: y[:, None] if jnp.ndim(y) else y  # noqa: E731
    neighbours = []
    for i in range(0, count, 4):
        size = min(count - i, 4)
        place = jnp.broadcast_to((base + i)[:, None] + jnp.arange(size)[None], (base.size, size))
        loaded = plgpu.load(ref.at[(*map(lift, at), place)])
        neighbours += lax.split(loaded, [1] * size, 1) if size > 1 else [loaded]
    return [y.reshape(base.shape) for y in neighbours]


def _largest(x_ref, row, at, count: int, single: bool):
    """For each lane the bits of the largest number in `count` words of a row from `at` on, and perhaps in others."""
    lanes, each = (LANES, 8) if single else (8, 16)
    lane = jnp.arange(at.size) & (lanes - 1)
    each = min(each, 1 << (pl.cdiv(count, lanes) - 1).bit_length())

    def larger(i, largest):
        base = jnp.minimum(at + (i * lanes + lane) * each, x_ref.shape[1] - each)
        for pair in _side_by_side(x_ref, (row,), base, each):
            largest = jnp.maximum(largest, jnp.maximum(pair & 0x7FFF0000, (pair << 16) & 0x7FFF0000))
        return largest

    largest = lax.fori_loop(0, pl.cdiv(count, lanes * each), larger, jnp.zeros(at.shape, jnp.int32))
    return _over(jnp.max, largest, lanes)


def _over(reduce, y, lanes: int):
    """Reduce each `lanes` neighbours to one number, and give it to all of them."""
    groups = y.reshape(-1, lanes)
    return jnp.broadcast_to(reduce(groups, axis=1, keepdims=True), groups.shape).reshape(y.shape)


def _factors(largest, single: bool) -> tuple:
    """Two powers of two: one multiplies a lane's inputs, the other its sums at the end, which belong to row t."""
    exponent = jnp.clip(largest >> 23, _TOP + 2, 254)
    up = _float((254 + _TOP - exponent) << 23)
    if not single:
        shape = largest.size // LANES, 8, 4
        g, t = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 2))
        exponent = jnp.sum(jnp.where(g == 2 * t, exponent.reshape(shape), 0), axis=1, keepdims=True)
        exponent = jnp.broadcast_to(exponent, shape).reshape(largest.shape)
    return up, _float((exponent - _TOP) << 23)


def _products(kind: str, words: list, right: list, tiles: list, interpret: bool) -> list:
    """tiles + words x right for one unit: words [8][width] of a lane's inputs, right [8]."""
    out = []
    for n, tile in enumerate(tiles):  # tile n has registers 2 n and 2 n + 1
        indices = sorted({e // len(KINDS[kind].pairs) for e in (2 * n, 2 * n + 1)})
        of_tile = [[of_input[w] for w in indices] for of_input in words]
        at = 2 * n % len(KINDS[kind].pairs)
        out.append(mma(kind, of_tile, at, right, tile, interpret))
    return out


def _places(spec: Kind, tiles: int) -> list[int]:
    """The output of its lane that each number of the tiles belongs to, in the order of the numbers."""
    pairs = len(spec.pairs)
    return [spec.outputs * (e // pairs) + spec.pairs[e % pairs][half] for e in range(2 * tiles) for half in range(2)]


def _in_order(spec: Kind, tiles: list) -> list:
    """A lane's outputs in the order of memory."""
    numbers = [number for tile in tiles for number in tile]
    return [numbers[i] for i in np.argsort(_places(spec, len(tiles)))]


def _add_scaled(spec: Kind, sums: list, new: list, scales: list, powers: bool) -> list:
    each, out = [scales[place] for place in _places(spec, len(sums))], []
    for total, y, scale in zip(chain(*sums), chain(*new), each, strict=True):
        # A scale that is NaN arrives as an infinity.
        out.append(total + y * scale + scale * 0.0 if powers else total + y * scale)
    return [out[i : i + 4] for i in range(0, len(out), 4)]


def _power(word, i: int):
    """Byte i, an e8m0, as float32; NaN becomes infinity, and 2^-127, which is subnormal, zero."""
    return _float((word << (23 - 8 * i) if i < 3 else word >> 1) & 0x7F800000)


def _float(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)
