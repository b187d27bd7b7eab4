"""`convert`: lay a checkpoint's weights out once, so that any mesh can load them directly."""

from __future__ import annotations

import gc
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from inferlib.checkpoint.laid_out import LaidOutWeights, quiet, save_weights, stored_model, write_manifest
from inferlib.checkpoint.load import load_item, plan_load
from inferlib.checkpoint.source import CheckpointError
from inferlib.locks import locked
from inferlib.model_files import CALIBRATION, ModelFiles
from inferlib.models.families import family_of
from inferlib.option_checks import check_dtype, check_flag, checked_output, checked_path
from inferlib.platforms import prepare_jax
from inferlib.progress import ByteProgress, on_terminal
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import make_shards
from inferlib.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# What a conversion writes into its directory.
WRITTEN = frozenset({"config.json", *Tokenizer.FILES, *LaidOutWeights.FILES})
_EXPORTED = (CALIBRATION, "model")  # beginnings of names of files that an export writes beside these


def convert(
    model: str | Path,
    out: str | Path,
    *,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    parallel: str | Parallelism | None = None,
    revision: str | None = None,
    merge_adapter: str | Path | None = None,
    progress: bool | None = None,
) -> int:
    """Write a model to the directory `out`, its weights as Orbax arrays; `LLM(out)` loads it on any mesh.

    model, revision: as for `LLM`. dtype: "float32", "bfloat16" or "float16" of the stored weights. quantization: of
    the matrices, as for `LLM`. parallel: devices to split the work over; with several processes, each calls this, and
    `out` is on a file system that all share. The chunks on disk are the parts of these devices, which suits a mesh of
    the same size best. merge_adapter: a directory of a LoRA adapter that PEFT wrote, which is added to the weights in
    float32. Returns the bytes of weights.

    `out` appears once everything is written. Raises CheckpointError, ConfigError, ShardingError or ValueError before
    anything is written, and OSError if the writing fails, which leaves nothing behind.
    """
    prepare_jax()
    check_dtype(dtype)
    check_flag("progress", progress, optional=True)
    out = checked_output("out", out)
    show = on_terminal() if progress is None else progress
    files = ModelFiles.open(model, revision, progress=show)
    if merge_adapter is not None:
        files = files.merged(checked_path("merge_adapter", merge_adapter))
    if isinstance(files.source, LaidOutWeights):
        raise CheckpointError(f"{files.path} is converted already; convert the original for another dtype")
    shards = make_shards(None if parallel is None else Parallelism.read(parallel))
    scheme = files.quantization(quantization)
    stored = stored_model(files.config, dtype, scheme)
    items = plan_load(files.source, family_of(files.hf), stored)
    progress_bar = ByteProgress("converting", stored.nbytes, show=show)
    with quiet(), output_directory(out, stored.nbytes) as directory, progress_bar as bar:
        weights = (
            (
                item.weight,
                load_item(files.source, item, stored, shards, lambda _: None, [None] * len(item.weight.arrays)),
            )
            for item in items
        )
        for nbytes in save_weights(directory, weights):
            bar.advance(nbytes)
        if jax.process_index() == 0:
            files.save_description(directory)
            write_manifest(directory, files.hf, stored, scheme)
    return stored.nbytes


@contextmanager
def output_directory(out: Path, nbytes: int) -> Iterator[Path]:
    """A directory beside `out` to write to: it becomes `out` at the end, or disappears if that is not reached."""
    partial, first = out.with_name(out.name + ".partial"), jax.process_index() == 0
    with ExitStack() as stack:
        if first:
            if not stack.enter_context(locked(out)):
                raise FileExistsError(f"another process is writing {out}: wait for it, or give another directory")
            if out.exists():
                raise FileExistsError(f"{out} exists; remove it or give another directory")
            _make_room(partial, nbytes)
        multihost_utils.sync_global_devices("conversion begins")
        try:
            yield partial
            multihost_utils.sync_global_devices("conversion is written")
            if first:
                partial.rename(out)
        except BaseException:
            if first:
                _remove(partial)
            gc.collect()  # writes that failed after the first one complain when they are freed
            raise
        multihost_utils.sync_global_devices("conversion ends")


def _make_room(partial: Path, nbytes: int) -> None:
    """Make the directory to write to, in place of what a conversion that was killed has left there."""
    if partial.exists():
        strange = [] if partial.is_dir() else [partial.name]
        names = {path.name for path in partial.iterdir() if not path.name.startswith(_EXPORTED)}
        strange = strange or sorted(names - WRITTEN)
        if strange:
            raise FileExistsError(f"{partial} exists and holds other things than a conversion ({strange[0]}): move it")
        log.warning("%s is removed: a conversion that wrote it was killed", partial)
        _remove(partial)
    free = shutil.disk_usage(partial.parent).free
    if free < nbytes:
        raise OSError(f"{partial.parent} has {free / 1e9:.1f} GB free, and the weights take {nbytes / 1e9:.1f} GB")
    partial.mkdir()


def _remove(directory: Path) -> None:
    """Remove a directory to which writes may still go on that were under way when another failed."""
    for _ in range(20):
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.1)
        if not directory.exists():
            return
