"""The scalars of a compiled kernel that decide its path, as of a step whose rows are full.

A kernel's listing copies and computes as lengths, sizes and tables in scalar memory say. A compiled program names only
their shapes; here they get the values of a step in which all rows have the program's most positions, a chunk of a
prompt is the last one, and tokens choose experts at random. What is not named does not decide: it may be zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from inferlib.inspection.hlo import Instruction, Shape
from inferlib.programs.keys import ProgramKey

KERNELS = frozenset(
    {
        *("chunk_write", "collective_matmul", "decode_attention", "expert_mlp", "group_order", "grouped_matmul"),
        *("mla_decode_attention", "mla_prefill_attention", "mx_matmul", "prefill_attention"),
        "segment_sum",
    }
)


def scalars_of(kernel: str, call: Instruction, operands: Sequence[Shape], key: ProgramKey) -> dict[int, np.ndarray]:
    """The scalar operands of a kernel's call, by index. operands: the shapes of all operands."""
    start = max(key.limit - key.chunk, 0)
    match kernel:
        case "decode_attention":
            return {0: np.full(operands[0].dims, _positions(call, operands, key))}
        case "mla_decode_attention":
            return {0: np.full(operands[0].dims, key.limit)}
        case "prefill_attention" | "mla_prefill_attention":
            chunks, parts = operands[2].dims
            part = -(-key.chunk // parts)
            first = np.tile(start + np.arange(parts) * part, (chunks, 1))
            return {2: first, 3: np.minimum(first + part, start + key.chunk) - 1}
        case "chunk_write":
            return {1: np.full(operands[1].dims, start)}
        case "collective_matmul":
            places = np.arange(operands[1].dims[-1])
            return {1: np.stack([-places % places.size, places])}
        case "grouped_matmul":
            (experts,), (rows, *_) = operands[1].dims, operands[2].dims
            return {1: np.bincount(np.random.default_rng(0).integers(experts, size=rows), minlength=experts)}
        case "segment_sum":
            return _segments(operands, call.declared_cost)
        case "expert_mlp":
            return {1: _chosen(call, operands)}
    return {}


def _segments(operands: Sequence[Shape], declared: tuple[int, int, int] | None) -> dict[int, np.ndarray]:
    """The scalars of `segment_sum`: all pieces, with as many pairs of segments and groups at random as it declares."""
    (pairs,), (pieces, groups), (_, lines, width) = (operands[n].dims for n in (2, 5, 7))
    expected = min(declared[1] // (2 * lines // 8 * width), pairs) if declared else pairs
    chosen = np.random.default_rng(0).integers(pieces * groups, size=expected)
    sizes = np.bincount(chosen, minlength=pieces * groups).reshape(pieces, groups)
    starts = np.cumsum(sizes.T).reshape(groups, pieces).T - sizes
    first_pairs = np.append(0, np.cumsum(sizes.sum(axis=1)))
    return {0: np.array([0, pieces]), 1: first_pairs, 5: starts, 6: sizes}


def _positions(call: Instruction, operands: Sequence[Shape], key: ProgramKey) -> int:
    """The lengths that a kernel of decode attention is told: those of its rows, or, if it takes several rows together,
    how many positions of each it reads, by the FLOPs that it declares."""
    out, declared = call.shapes[0].dims, call.declared_cost
    if declared is None or out[0] == operands[0].dims[0]:
        return key.limit
    size = next(shape.dims[-1] for shape in operands if len(shape.dims) == 5)  # of a cell; results may be narrower
    return min(key.limit, declared[1] // (4 * prod(out[:-1]) * size))


def _chosen(call: Instruction, operands: Sequence[Shape]) -> np.ndarray:
    """Which experts [E] a step reads: as many as the kernel declares that it expects."""
    (experts,) = operands[1].dims
    weights = sum(s.nbytes // s.dims[0] for s in operands if len(s.dims) > 3 and s.dims[1] == experts)
    declared = call.declared_cost
    share = min(declared[0] / weights, 1.0) if declared and weights else 1.0
    chosen = np.zeros(experts, int)
    chosen[np.linspace(0, experts - 1, max(round(share * experts), 1)).astype(int)] = 1
    return chosen
