"""Cut a model's layers into segments: patterns that repeat, which a scan runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from inferlib.models.config import LayerSpec, LoopSpec


@dataclass(frozen=True)
class Segment:
    """`count` repetitions of a pattern of layers, from layer `start`; scanned if count > 1. looped: it is the core of a
    loop, which runs several times (see `LoopSpec`)."""

    start: int
    pattern: tuple[LayerSpec, ...]
    count: int = 1
    looped: bool = False

    @property
    def stop(self) -> int:
        return self.start + len(self.pattern) * self.count

    def layers(self, offset: int) -> range:
        """Indices of the layers at `offset` in the pattern."""
        return range(self.start + offset, self.stop, len(self.pattern))


def segments_of(layers: Sequence[LayerSpec], *, scan: bool, loop: LoopSpec | None = None) -> tuple[Segment, ...]:
    """Cut the layers into repeating patterns (`scan`), or into one segment per layer; a loop's core is one segment.

    Each segment takes the pattern that covers the most layers when repeated; of equals, the shortest.
    """
    if loop is not None:
        before, core, after = layers[: loop.start], layers[loop.start : loop.stop], layers[loop.stop :]
        coda = (replace(segment, start=loop.stop + segment.start) for segment in segments_of(after, scan=scan))
        return *segments_of(before, scan=scan), Segment(loop.start, tuple(core), looped=True), *coda
    if not scan:
        return tuple(Segment(i, (spec,)) for i, spec in enumerate(layers))
    segments, start = [], 0
    while start < len(layers):
        size, count = 1, 1
        for width in range(1, (len(layers) - start) // 2 + 1):
            pattern, repeats = layers[start : start + width], 1
            while layers[start + repeats * width : start + (repeats + 1) * width] == pattern:
                repeats += 1
            if repeats > 1 and repeats * width > size * count:
                size, count = width, repeats
        segments.append(Segment(start, tuple(layers[start : start + size]), count))
        start += size * count
    return tuple(segments)


def block_of(segments: Sequence[Segment], layer: int) -> tuple[int, int | None]:
    """The block of a layer, and the layer's index in it; None if the block has one layer."""
    at = 0
    for segment in segments:
        if layer < segment.stop:
            place, offset = divmod(layer - segment.start, len(segment.pattern))
            return at + offset, place if segment.count > 1 else None
        at += len(segment.pattern)
    raise IndexError(layer)
