"""Checkpoint tensors of lanes (see `inferlib.models.lanes`): each lane's run of a matrix is a matrix of its own.

Letters: L lanes, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from einops import rearrange

from inferlib.models.config import LaneSpec, ModelConfig
from inferlib.models.pieces import Assembly, Piece, assembly


@dataclass(frozen=True)
class _Joined:
    """The matrices of the lanes as one, which `arrange` then lays out. columns: each lane has a run of inputs, not of
    outputs."""

    arrange: Callable[..., Any]
    columns: bool

    def __call__(self, *tensors: Any) -> Any:
        pattern = "lanes row column -> " + ("row (lanes column)" if self.columns else "(lanes row) column")
        return self.arrange(*(rearrange(x, pattern) for x in tensors))


def joined(lanes: int, whole: Assembly, *, columns: bool) -> Assembly:
    """The parameter that `whole` makes of matrices, of those that the lanes have of each."""

    def of_lanes(piece: Piece) -> Piece:
        rows, inputs = piece.shape
        return replace(piece, shape=(lanes, rows, inputs // lanes) if columns else (lanes, rows // lanes, inputs))

    return Assembly(tuple(map(of_lanes, whole.pieces)), _Joined(whole.arrange, columns))


def lane_assembly(spec: LaneSpec, part: str, whole: Assembly) -> Assembly:
    """How one layer's `part` is made of the tensors of lanes. whole: how Llama's is."""
    if part.endswith("norm"):
        return norm_assembly(spec, whole) if spec.lane_norms else whole
    return joined(spec.lanes, whole, columns=part in ("attn.o", "mlp.down"))


def norm_assembly(spec: LaneSpec, whole: Assembly) -> Assembly:
    """Weights of a norm that each lane has [L, D]."""
    (piece,) = whole.pieces
    tensor = piece.tensor.removesuffix(".weight") + ".scale"
    return assembly(Piece(tensor, (spec.lanes, *piece.shape)), "lane d -> lane d")


def top_lane_assembly(names: Mapping[str, str], config: ModelConfig, part: str, whole: Assembly) -> Assembly:
    """How the final norm or the head is made. whole: how Llama's is."""
    spec = config.lanes
    assert spec is not None  # only models that have lanes come here
    if part == "final_norm":
        return norm_assembly(spec, whole) if spec.lane_norms and not spec.sum_before_norm else whole
    if part == "head" and spec.head == "vocab_parallel":
        return joined(spec.lanes, whole, columns=False)
    if part == "head" and spec.head == "lane":
        return assembly(Piece(names["head"] + ".linear.weight", (config.vocab, spec.lanes * config.dim)), "v d -> d v")
    return whole
