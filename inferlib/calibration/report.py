"""What a calibration did to each matrix, as a table and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal
from rich.table import Table

from inferlib.tables import Part, Tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class MatrixReport:
    """How a matrix was rounded.

    layer: None outside the layers. loss, nearest: the mean square of the products' error over that of the products, as
    rounded and if rounded to nearest. tokens: whose inputs were recorded; of experts, the fewest of one. idle: experts
    that no token chose, whose weights alone decided.
    """

    layer: int | None
    part: str
    loss: float
    nearest: float
    tokens: int
    idle: int = 0


@dataclass(frozen=True)
class CalibrationReport(Tables):
    """The result of `calibrate`: `print` shows a table of losses by layer and part, `plot` a picture.

    bits: bits of an element of a quantised matrix, scales included. nbytes: bytes of all weights. tokens: how many were
    used. seconds: time of this run. matrices: an entry for each quantised matrix. learned: what learned rotations make
    of the KL divergence of weights that are rounded to nearest, in nats, before and after; None: they were not learned.
    """

    out: Path
    method: str
    quantization: str
    bits: float
    nbytes: int
    tokens: int
    seconds: float
    matrices: tuple[MatrixReport, ...]
    learned: tuple[float, float] | None = None

    def parts(self) -> Sequence[Part]:
        return [self._table(), *self._lines()]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self) | {"out": str(self.out)}

    def plot(self) -> Figure:
        """The error of each part's products over the layers; dashed lines are of rounding to nearest."""
        from matplotlib.figure import Figure  # takes a second

        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.subplots()
        for name in dict.fromkeys(matrix.part for matrix in self.matrices if matrix.layer is not None):
            points = [(m.layer, m.loss, m.nearest) for m in self.matrices if m.part == name and m.layer is not None]
            layers, losses, nearest = zip(*points, strict=True)
            (line,) = axes.plot(layers, losses, marker=".", label=name)
            axes.plot(layers, nearest, linestyle="--", linewidth=1, color=line.get_color())
        axes.set(xlabel="layer", ylabel="error, share of the products' square", yscale="log")
        axes.set_title(f"{self.method} to {self.quantization}, {self.bits:.2f} bits; dashed: nearest", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, ncols=2)
        return figure

    def _table(self) -> Table:
        names = list(dict.fromkeys(matrix.part for matrix in self.matrices))
        table = Table(
            title="Error of each matrix's products, as a share of their square (of rounding to nearest)",
            title_justify="left",
            show_footer=True,
        )
        table.add_column("layer", footer="mean")
        for name in names:
            matrices = [matrix for matrix in self.matrices if matrix.part == name]
            mean = _losses(
                sum(matrix.loss for matrix in matrices) / len(matrices),
                sum(matrix.nearest for matrix in matrices) / len(matrices),
            )
            table.add_column(name, justify="right", footer=mean)
        for layer in dict.fromkeys(matrix.layer for matrix in self.matrices):
            of_layer = {matrix.part: matrix for matrix in self.matrices if matrix.layer == layer}
            cells = [_losses(of_layer[name].loss, of_layer[name].nearest) if name in of_layer else "" for name in names]
            table.add_row("" if layer is None else str(layer), *cells)
        return table

    def _lines(self) -> Iterator[str]:
        yield (
            f"{self.out}: {self.method} to {self.quantization}, {self.bits:.2f} bits, {decimal(self.nbytes)} of "
            f"weights, from {self.tokens} tokens in {self.seconds:.0f} s"
        )
        if self.learned is not None:
            before, after = self.learned
            yield (
                "learned rotations: KL divergence of weights that are rounded to nearest "
                f"{before:.4f} -> {after:.4f} nats"
            )
        if idle := sum(matrix.idle for matrix in self.matrices):
            fewest = min(matrix.tokens for matrix in self.matrices)
            yield (
                f"{idle} matrices of experts saw no token, and were rounded by their weights alone; the fewest tokens "
                f"of an expert were {fewest}: give more text"
            )


def _losses(loss: float, nearest: float) -> str:
    return f"{loss:.5f} ({nearest:.5f})"
