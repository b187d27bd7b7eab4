"""The tensor cores' `mma.m16n8k16` on weights in memory order, and other instructions of NVIDIA GPUs that JAX lacks.
Interpreted kernels emulate them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

LANES = 32  # lanes of a warp: 4 g + t of PTX's fragments. An array [8, 4] would not do: the compiler makes it 8 t + g


@dataclass(frozen=True)
class Kind:
    """How words become registers of pairs. pairs: the two outputs in the halves of each register. factor: an element
    divided by its float16."""

    pairs: tuple[tuple[int, int], ...]
    factor: float = 1.0

    @property
    def outputs(self) -> int:
        """Number of outputs in a word."""
        return 2 * len(self.pairs)


_EIGHT, _FOUR = ((0, 4), (1, 5), (2, 6), (3, 7)), ((0, 1), (2, 3))
KINDS = {
    "float4_e2m1fn": Kind(_EIGHT, 2.0**14),
    "int4": Kind(_EIGHT),
    "int8": Kind(_FOUR),
    "float8_e4m3fn": Kind(_FOUR),
    "bfloat16": Kind(((0, 1),)),
}


def asm(text: str, constraints: str, args: list, dtype=jnp.int32):
    return plgpu.elementwise_inline_asm(
        text,
        args=args,
        constraints=constraints,
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )[0]


def _unpacked(kind: str, word) -> list:
    """The registers of pairs that a word becomes, as in `Kind.pairs`, computed by their meaning."""
    if kind == "bfloat16":
        return [word]
    spec, size = KINDS[kind], 32 // KINDS[kind].outputs
    fields = [lax.shift_right_logical(word, size * n) & ((1 << size) - 1) for n in range(spec.outputs)]
    if kind == "float8_e4m3fn":
        numbers = [lax.bitcast_convert_type(y.astype(jnp.uint8), jnp.float8_e4m3fn) for y in fields]
    elif kind == "float4_e2m1fn":
        numbers = [jnp.where(y & 6, (2.0 + (y & 1)) * (1 << (y >> 1 & 3)), 2 * (y & 1)) * 2.0**-16 for y in fields]
        numbers = [jnp.where(y > 7, -number, number) for y, number in zip(fields, numbers, strict=True)]
    else:
        numbers = [y - ((y >> (size - 1)) << size) for y in fields]
    return [_words_of(*(numbers[n].astype(jnp.float16) for n in pair)) for pair in spec.pairs]


def bytes_of(word, selector, interpret: bool):
    """A word whose byte i is the byte of `word` that hexadecimal digit i of the selector names; digit 4 gives zero."""
    if not interpret:
        return asm("prmt.b32 $0, $1, 0, $2;", "=r,r,r", [word, selector])
    digits = [lax.shift_right_logical(selector, 4 * i) & 7 for i in range(4)]
    return sum(jnp.where(digit < 4, word >> (8 * (digit & 3)) & 255, 0) << (8 * i) for i, digit in enumerate(digits))


def scaled(pair, up, interpret: bool):
    """Two bfloat16 times a factor, as float16."""
    if interpret:
        return _words_of(*(y * up for y in _halves(pair, jnp.bfloat16)))
    low = "shl.b32 a, $1, 16; mov.b32 f, a; mul.f32 f, f, $2;"
    high = "and.b32 a, $1, 0xFFFF0000; mov.b32 h, a; mul.f32 h, h, $2;"
    body = f".reg .b32 a; .reg .f32 f, h; {low} {high} cvt.rn.f16x2.f32 $0, h, f;"
    return asm(f"{{ {body} }}", "=r,r,f", [pair, up])


def mma(kind: str, words: list, at: int, right: list, tile: list, interpret: bool = False) -> list:
    """tile, four numbers of each lane, plus four products in turn, with inputs 2 k and 2 k + 1 of words [8][1 or 2].
    Each product takes two of the registers that the words become, from `at` on.

    There is one statement for each number, as a statement has one result; the assembler merges their equal parts.
    """
    if interpret:
        by_warp = [jax.tree.map(lambda y: y.reshape(-1, LANES), operand) for operand in (words, right, tile)]
        results = jax.vmap(lambda words, *rest: mma_by_lanes(kind, words, at, *rest))(*by_warp)
        return [y.reshape(-1) for y in results]
    count = len(words[0])
    texts = _ASSEMBLY.get(kind, ["mov.b32 $0, $1;"])[at : at + 2 // count]
    makes = []
    for k in range(8):
        for i in range(count):
            for j, text in enumerate(texts):
                makes.append(text.replace("$1", f"${1 + count * k + i}").replace("$0", f"a{2 * k + i + j}"))
    first, dtype = 1 + 8 * count, "bf16" if kind == "bfloat16" else "f16"
    c = f"{{{', '.join(f'${first + 8 + n}' for n in range(4))}}}"
    for k in range(4):
        a = f"{{a{4 * k}, a{4 * k + 1}, a{4 * k + 2}, a{4 * k + 3}}}"
        b = f"{{${first + 2 * k}, ${first + 2 * k + 1}}}"
        makes.append(f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{d0, d1, d2, d3}}, {a}, {b}, {c};")
        c = "{d0, d1, d2, d3}"
    text = f"{{ .reg .b32 p, q, m, f, a<16>; .reg .b16 l, h; .reg .f32 d<4>; {' '.join(makes)} mov.f32 $0, d"
    constraints = ",".join(["=f", *["r"] * (first + 7), *["f"] * 4])
    args = [*chain(*words), *right, *tile]
    return [asm(f"{text}{n}; }}", constraints, args, jnp.float32) for n in range(4)]


def mma_by_lanes(kind: str, words: list, at: int, right: list, tile: list) -> list:
    """`mma` of a warp by the PTX ISA: lane (g, t) has rows g and g + 8 of a and c and column g of b; of 16 inputs 2 t,
    2 t + 1 and the two that are 8 further on; and columns 2 t and 2 t + 1 of c."""
    dtype = jnp.bfloat16 if kind == "bfloat16" else jnp.float16
    pairs = lambda y: jnp.stack(y, axis=-1).reshape(8, 8)  # noqa: E731  [g, 2 t + half]

    def rows_of(registers):
        """[8, 32], one after the other -> [8, 64]: inputs of row g."""
        numbers = jnp.stack(_halves(registers, dtype), axis=-1)
        return numbers.reshape(8, 8, 8).swapaxes(0, 1).reshape(8, 64)

    columns = (jnp.stack(of_input) for of_input in zip(*words, strict=True))  # [8, 32] each
    made = list(chain(*(_unpacked(kind, column) for column in columns)))[at : at + 2]
    a, b = jnp.concatenate([rows_of(registers) for registers in made]), rows_of(jnp.stack(right))
    total = jnp.concatenate([pairs(tile[:2]), pairs(tile[2:])])
    total = total + lax.dot(a, b.T, precision=lax.Precision.HIGHEST)
    return [total[8 * (n // 2) : 8 * (n // 2) + 8, n % 2 :: 2].reshape(LANES) for n in range(4)]


def _halves(pair, dtype) -> list:
    """The two 16-bit floats of a word, as float32."""
    bits = [(lax.shift_right_logical(pair, 16 * i) & 0xFFFF).astype(jnp.uint16) for i in range(2)]
    return [lax.bitcast_convert_type(y, dtype).astype(jnp.float32) for y in bits]


def _words_of(low, high):
    low, high = (lax.bitcast_convert_type(y.astype(jnp.float16), jnp.uint16).astype(jnp.int32) for y in (low, high))
    return low | (high << 16)


# $1, a word, becomes $0, a pair of float16; the assembler merges common steps of a word's pairs. The sign of an e2m1
# moves to the first bit of each byte (lop3: p where the mask has ones, else q), and exponent and mantissa to the place
# of their last bits in the upper byte of a float16: 2^-14 of the value. An integer's bits are put below those of 1024,
# from which 1024 and the offset that made them positive are subtracted.
_E2M1_EVEN = "shl.b32 p, $1, 4; shl.b32 q, $1, 1; lop3.b32 p, p, q, 0x80808080, 0xE4;"
_E2M1_ODD = "mov.b32 p, $1; shr.u32 q, $1, 3; lop3.b32 p, p, q, 0x80808080, 0xE4;"
_INT4_EVEN = """mov.b32 m, 0x000F000F; mov.b32 f, 0x64086408; lop3.b32 p, p, m, f, 0x6A;
    mov.b32 q, 0xE408E408; add.rn.f16x2 $0, p, q;"""  # 1024 + 8 + n
_INT4_ODD = """mov.b32 m, 0x00F000F0; mov.b32 f, 0x64806480; lop3.b32 p, p, m, f, 0x6A;
    mov.b32 q, 0x2C002C00; mov.b32 m, 0xD480D480; fma.rn.f16x2 $0, p, q, m;"""  # 1024 + 16 (8 + n), in sixteenths
_INT8 = """xor.b32 p, $1, 0x80808080; prmt.b32 p, p, 0x64646464, {};
    mov.b32 q, 0xE480E480; add.rn.f16x2 $0, p, q;"""  # 1024 + 128 + n
_ASSEMBLY = {
    "float4_e2m1fn": [
        f"{text} {shift} and.b32 $0, p, 0x8E008E00;"
        for shift in ("shl.b32 p, p, 8;", "")
        for text in (_E2M1_EVEN, _E2M1_ODD)
    ],
    "int4": [f"{move} {text}" for move in ("mov.b32 p, $1;", "shr.u32 p, $1, 8;") for text in (_INT4_EVEN, _INT4_ODD)],
    "int8": [_INT8.format(places) for places in ("0x4140", "0x4342")],
    "float8_e4m3fn": [f"mov.b32 {{l, h}}, $1; cvt.rn.f16x2.e4m3x2 $0, {half};" for half in "lh"],
}
