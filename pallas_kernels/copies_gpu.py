"""Copies from memory to shared memory that run ahead of a program of one warp on NVIDIA GPUs, by PTX statements. Pallas
has no such copies, and the assembler moves each load to registers close to its use.

The compiler regards statements as functions without effects and orders them only by their operands and results, so each
statement takes a word (a token) that the one before it returns. A compiler must not duplicate a statement, either; none
of jax 0.10 to 0.12 does. Lane i has element i of [32].
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from inferlib.pallas_kernels.mma_gpu import LANES, asm

SLOTS = 4  # a power of two that divides a step's units; a unit's number in its step chooses the slot


@dataclass(frozen=True)
class Ring:
    """Slots in shared memory, each with 32 rows of eight times `words` 32-bit words. Lane 4 g + t reads rows 8 t to
    8 t + 7 of the g-th words. Row 8 t + k lies at 4 k + t, and some groups of four words are in another order, so that
    the lanes of one load read different banks (also if two loads become one of four words). One of the SLOTS is read
    while the others are filled."""

    words: int

    def __post_init__(self):
        if self.words not in (1, 2, 4):
            raise ValueError(f"a ring holds 1, 2 or 4 words of a lane, not {self.words}")

    @property
    def size(self) -> int:
        """Bytes of a slot."""
        return 1024 * self.words

    def begin(self) -> jax.Array:
        """The address of the ring in shared memory."""
        text = f"{{ .shared .align 16 .b8 ring[{SLOTS * self.size}]; mov.u32 $0, ring; }}"
        return asm(text, "=r,r", [jnp.zeros(LANES, jnp.int32)])

    def copy(self, ring, slot, ref, at, stride: int, real, token) -> jax.Array:
        """Start to copy rows that are `stride` bytes apart, from 16 * at bytes after the start of ref's array; unless
        `real`, fill the slot with zeros and read no memory. (A predicate would become branches, and the assembler waits
        for earlier loads before a branch.)"""
        chunks = 2 * self.words  # chunks of 16 bytes in a row
        lane = jnp.arange(LANES)
        place, chunk = lane // chunks, lane % chunks
        source = at + (8 * (place % 4) + place // 4) * (stride // 16) + chunk
        chunk = chunk ^ 2 * (place % 4) if self.words == 4 else chunk
        target = ring + slot * self.size + 16 * (place * chunks + chunk)
        text = "{ .reg .b64 a; .reg .b32 n; shl.b32 n, $4, 4; mad.wide.u32 a, $2, 16, $1;"
        for n in range(chunks):
            text += f" cp.async.cg.shared.global [$3+{512 * n}], [a+{n * (4 // self.words) * stride}], 16, n;"
        text += " cp.async.commit_group; mov.b32 $0, 0; }"
        return asm(text, "=r,l,r,r,r,r", [ref, source, target, real, token])

    def wait(self, token, read: list) -> jax.Array:
        """Wait until `read` is read and all copies have arrived, except for the newest ones, which fill all slots but
        two."""
        text = f"cp.async.wait_group {SLOTS - 2}; bar.warp.sync 0xffffffff; mov.b32 $0, 0;"
        return asm(text, ",".join(["=r", "r", *["r"] * len(read)]), [token, *read])

    def read(self, ring, slot, token) -> list:
        """[8][words] for each lane: the words of its eight rows."""
        lane = jnp.arange(LANES)
        g, t = lane >> 2, lane & 3
        g = g ^ 2 * t if self.words == 4 else g
        at = ring + slot * self.size + 4 * self.words * (8 * t + g) + token
        words = []
        for row in range(8):
            place, of_row = 128 * self.words * row, []
            if self.words == 1:
                of_row = [asm(f"ld.shared.b32 $0, [$1+{place}];", "=r,r", [at])]
            for w in range(0, self.words - 1, 2):
                both = asm(f"ld.shared.b64 $0, [$1+{place + 4 * w}];", "=l,r", [at], jnp.int64)
                halves = "{ .reg .b32 d; mov.b64 {$0, d}, $1; }", "{ .reg .b32 d; mov.b64 {d, $0}, $1; }"
                of_row += [asm(half, "=r,l", [both]) for half in halves]
            words.append(of_row)
        return words
