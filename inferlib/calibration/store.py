"""Where a calibration writes: a directory that becomes the result once it is whole, and from which an interrupted one
goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from inferlib.calibration.report import MatrixReport
from inferlib.checkpoint.laid_out import LaidOutWeights, layer_folder, quiet, read_layer, save_weights
from inferlib.checkpoint.source import CheckpointError, read_json
from inferlib.conversion import WRITTEN
from inferlib.locks import locked
from inferlib.model_files import CALIBRATION as RECORD  # the settings, and what was done to each matrix
from inferlib.models.abstract import WeightSpec

ROTATIONS = "rotations.npz"  # learned ones, of methods that have them
_OURS = frozenset(name + new for name in (RECORD, ROTATIONS) for new in ("", ".new"))
_OUTSIDE = "outside"


@dataclass
class Store:
    """The directory `partial` with the layers that are done. record: the content of its `RECORD`."""

    partial: Path
    record: dict[str, Any]

    @property
    def reports(self) -> tuple[MatrixReport, ...]:
        """The reports on matrices of the layers that are done, in order."""
        layers = sorted(self.record["layers"].items(), key=lambda entry: (entry[0] == _OUTSIDE, entry[0]))
        return tuple(MatrixReport(**matrix) for _, matrices in layers for matrix in matrices)

    def has(self, block: int | None) -> bool:
        """True if a layer is done."""
        return _name(block) in self.record["layers"]

    def read(self, weights: Sequence[WeightSpec]) -> dict[str, jax.Array]:
        """The arrays of a layer that is done, by their parts."""
        return read_layer(self.partial, weights)

    def write(
        self, weights: Sequence[tuple[WeightSpec, tuple[jax.Array, ...]]], reports: Sequence[MatrixReport]
    ) -> None:
        """Write a layer. Raises OSError if that fails."""
        block = weights[0][0].block
        folder = layer_folder(self.partial, block)
        for unfinished in folder.parent.glob(f"{folder.name}*"):  # what a run that was killed has left
            shutil.rmtree(unfinished)
        for _ in save_weights(self.partial, weights):
            pass
        self.record["layers"][_name(block)] = [asdict(report) for report in reports]
        _write_record(self.partial, self.record)


@contextmanager
def opened(out: Path, settings: Mapping[str, Any], nbytes: int) -> Iterator[Store]:
    """A store that becomes `out` at the end. If that is not reached, a later call with the same settings goes on.

    Raises FileExistsError if `out` exists or another process writes it, if a run with other settings was interrupted,
    and OSError if the disk has no room for `nbytes` more.
    """
    partial = out.with_name(out.name + ".partial")
    with locked(out) as alone:
        if not alone:
            raise FileExistsError(f"another process is writing {out}: wait for it, or give another directory")
        if out.exists():
            raise FileExistsError(f"{out} exists; remove it or give another directory")
        store = Store(partial, _record(partial, json.loads(json.dumps(settings))))
        missing = nbytes - sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
        if (free := shutil.disk_usage(partial.parent).free) < missing:
            raise OSError(
                f"{partial.parent} has {free / 1e9:.1f} GB free, and the weights take {missing / 1e9:.1f} GB more"
            )
        partial.mkdir(exist_ok=True)
        _write_record(partial, store.record)
        with quiet():
            yield store
        partial.rename(out)


def _record(partial: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The record of an interrupted run, or a new one."""
    new = {"settings": settings, "layers": {}}
    if not partial.exists():
        return new
    strange = [partial.name] if not partial.is_dir() else []
    strange = strange or sorted({path.name for path in partial.iterdir()} - WRITTEN - _OURS)
    if strange:
        raise FileExistsError(f"{partial} exists and holds other things than a calibration ({strange[0]}): move it")
    if not (partial / RECORD).exists():
        if any((partial / name).exists() for name in LaidOutWeights.FILES):
            raise FileExistsError(f"{partial} is of a conversion that was interrupted: remove it")
        return new
    try:
        record = read_json(partial / RECORD)
        reports = [MatrixReport(**matrix) for matrices in record["layers"].values() for matrix in matrices]
        different = [name for name, value in settings.items() if record["settings"].get(name) != value]
    except (CheckpointError, KeyError, TypeError, AttributeError):
        raise FileExistsError(f"{partial / RECORD} is damaged: remove {partial} to begin anew") from None
    if different:
        raise FileExistsError(
            f"{partial} is of a calibration with another {different[0]} ({len(reports)} matrices are done): remove "
            "it to begin anew, or go on with its settings"
        )
    return record


def _write_record(partial: Path, record: dict[str, Any]) -> None:
    new = partial / f"{RECORD}.new"
    new.write_text(json.dumps(record, indent=1), encoding="utf-8")
    new.replace(partial / RECORD)


def _name(block: int | None) -> str:
    return _OUTSIDE if block is None else f"{block:04d}"
