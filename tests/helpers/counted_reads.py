"""What a loader really takes from a checkpoint."""

from __future__ import annotations

import numpy as np

from inferlib.checkpoint.source import TensorSource


class CountedReads:
    """A source that notes the bytes of each part that is taken from what it read, by tensor."""

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
