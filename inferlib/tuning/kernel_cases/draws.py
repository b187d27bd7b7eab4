"""Deterministic data that the cases of several kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def shuffled_pages(lengths: Sequence[int], page: int) -> np.ndarray:
    """A page table [rows, columns] int32 in random order wide enough for the longest row. page: positions of a page."""
    columns = -(-max(lengths) // page)
    return np.random.default_rng(1).permutation(len(lengths) * columns).reshape(-1, columns).astype(np.int32)


def unequal(most: int, rows: int) -> tuple[int, ...]:
    """Lengths of rows in even steps up to the largest."""
    return tuple(most * (row + 1) // rows for row in range(rows))


def tokens_of_experts(tokens: int, experts: int, chosen: int) -> np.ndarray:
    """The number of tokens [experts] of each expert, if each of `tokens` tokens takes `chosen` different ones."""
    rng = np.random.default_rng(0)
    picks = np.concatenate([rng.permutation(experts)[:chosen] for _ in range(tokens)])
    return np.bincount(picks, minlength=experts)


def stored(scheme: str, *shape: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of a stack of experts' matrices [..., K, N] as kernels read them: without scales if quantised
    by channel, as the arrays of a `Weight` if by group."""
    from inferlib.pallas_kernels.generations_tpu import FLOAT4, generation

    *lead, inputs, columns = shape
    rows = -(-inputs // 128)
    if scheme == "mxfp4" and generation() in FLOAT4:
        rows += rows % 2
        parts = {"values": (rows * 16, "int32"), "scales": (rows * 4, "int8"), "tops": (1, "float32")}
    elif scheme == "mxfp4":
        parts = {"values": (rows * 16, "int32"), "scales": (rows, "int32"), "tops": (1, "float32")}
    else:
        dtype = {"fp8": "float8_e4m3fn", "fp8_block": "float8_e4m3fn", "mxfp8": "float8_e4m3fn"}.get(scheme, scheme)
        parts = {"values": (inputs, dtype)}
        if scheme in ("int4", "fp8_block"):
            parts["scales"] = rows, "float32"
        elif scheme == "mxfp8":
            parts["scales"] = rows * 4, "uint8"
    return {name: ((*lead, depth, columns), dtype) for name, (depth, dtype) in parts.items()}


def bits(scheme: str) -> float:
    """Bits of an element, with its part of a group's scale."""
    return {"bfloat16": 16, "mxfp4": 4.25, "mxfp8": 8.25, "int4": 4.25, "fp8_block": 8.25}.get(scheme, 8)


def scheme_of(weight: list[Any] | dict[str, Any]) -> tuple[str, list[int]]:
    """The scheme and the shape [E, P, K, N] of experts' weights, from their entry in `tuned_tpu`."""
    if isinstance(weight, list):
        return "fp8" if weight[0] == "float8_e4m3fn" else weight[0], weight[1:]
    (dtype, *shape), (scales, *_) = weight["values"], weight["scales"]
    if "tops" in weight:
        return "mxfp4", [*shape[:2], 8 * shape[2], shape[3]]
    return ("mxfp8" if scales == "uint8" else "fp8_block" if dtype == "float8_e4m3fn" else dtype), shape
