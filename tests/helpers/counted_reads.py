"""Counts the bytes that a loader takes from a checkpoint."""

from __future__ import annotations

import numpy as np

from inferlib.checkpoint.source import TensorSource


class CountedReads:
    """A source that records, for each tensor, the bytes of every part that is taken of it."""

    def __init__(self, source: TensorSource):
        self._source, self.taken = source, {}

    def __getattr__(self, name: str):
        return getattr(self._source, name)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        taken = self.taken.setdefault(name, [])

        class View(np.ndarray):
            def __getitem__(self, index):
                part = np.asarray(super().__getitem__(index))
                taken.append(part.nbytes)
                return part

        return self._source.read(name, rows).view(View)
