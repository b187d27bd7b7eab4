"""Cells of the cache in cases of attention, as a plan for TPUs has them."""

from __future__ import annotations

from inferlib.models.layers.joint_cells import heads_of_a_cell

LANES = 128


class Cells:
    """The cells of `heads` KV heads, of `group` query heads each. size: of a head. apart: heads share no cells."""

    heads: int
    group: int
    size: int
    apart: bool = False

    @property
    def one(self) -> bool:
        """True if keys and values lie in one cell."""
        return self.size % LANES != 0

    @property
    def joint(self) -> int:
        """How many KV heads share a cell."""
        if self.apart or not self.one:
            return 1
        return heads_of_a_cell(self.heads, self.group, 2 * self.size, LANES)

    @property
    def key_size(self) -> int | None:
        """Numbers of a cell's keys; None if keys are apart from values."""
        return self.joint * self.size if self.one else None

    @property
    def layout(self) -> tuple[int, int, int]:
        """Cells of a position, query heads of a cell, and the numbers of a cell and of a query that meets it."""
        size = -(-2 * self.joint * self.size // LANES) * LANES if self.one else self.size
        return self.heads // self.joint, self.group * self.joint, size
