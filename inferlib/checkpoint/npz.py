"""Files of numpy arrays that are written whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def write_npz(file: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays by their names to an .npz file. Raises OSError."""
    new = file.with_name(f"{file.name}.new")
    with new.open("wb") as stream:
        np.savez(stream, **arrays)
    new.replace(file)
