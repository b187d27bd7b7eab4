"""What a checkpoint's tensors are read as."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Rows of a checkpoint tensor: `shape` is the whole tensor's; rows None means all. transposed: the checkpoint has
    rows as columns."""

    tensor: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    transposed: bool = False

    @property
    def stored(self) -> tuple[int, ...]:
        """The tensor's shape in the checkpoint."""
        return self.shape[::-1] if self.transposed else self.shape
