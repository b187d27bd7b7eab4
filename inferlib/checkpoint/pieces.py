"""What a checkpoint's tensors are read as."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Rows of a checkpoint tensor: `shape` is the whole tensor's; rows None means all. transposed: the checkpoint has
    rows as columns. values: of one that no checkpoint holds."""

    tensor: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    transposed: bool = False
    values: tuple[float, ...] | None = None

    @property
    def stored(self) -> tuple[int, ...]:
        """The tensor's shape in the checkpoint."""
        return self.shape[::-1] if self.transposed else self.shape
