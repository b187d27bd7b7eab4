"""How checkpoint tensors become one parameter: which tensors are read, and where their axes go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from einops import rearrange


@dataclass(frozen=True)
class Piece:
    """Rows of a checkpoint tensor.

    shape: the shape of the whole tensor. rows: the first row and the one after the last; None for all. transposed: the
    checkpoint stores rows as columns. values: the tensor itself, if no checkpoint stores it.
    """

    tensor: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    transposed: bool = False
    values: tuple[float, ...] | None = None

    @property
    def stored(self) -> tuple[int, ...]:
        """The tensor's shape in the checkpoint."""
        return self.shape[::-1] if self.transposed else self.shape


@dataclass(frozen=True)
class Arrange:
    """Move axes by name: `einops.rearrange`. Several tensors are stacked along a new first axis.

    pattern: such as "(k h) d -> d k h". sizes: sizes of axes that shapes do not tell.
    """

    pattern: str
    sizes: tuple[tuple[str, int], ...] = ()

    def __call__(self, *tensors: Any) -> Any:
        return rearrange(tensors[0] if len(tensors) == 1 else list(tensors), self.pattern, **dict(self.sizes))


@dataclass(frozen=True)
class HeadRows:
    """Rows `start` to `stop` of each head, as "heads rows ...", which `arrange` then lays out."""

    heads: int
    start: int
    stop: int
    arrange: Arrange

    def __call__(self, tensor: Any) -> Any:
        rows = rearrange(tensor, "(heads rows) ... -> heads rows ...", heads=self.heads)
        return self.arrange(rows[:, self.start : self.stop])


@dataclass(frozen=True)
class Assembly:
    """One parameter: its checkpoint tensors, and the traceable function that lays them out. The function is a frozen
    dataclass, so that parameters with equal layouts share a compilation."""

    pieces: tuple[Piece, ...]
    arrange: Callable[..., Any]


def assembly(pieces: Piece | tuple[Piece, ...], pattern: str, **sizes: int) -> Assembly:
    """The parameter that `pattern` makes of `pieces` (see `Arrange`)."""
    return Assembly(pieces if isinstance(pieces, tuple) else (pieces,), Arrange(pattern, tuple(sizes.items())))
