"""Models by their names on the Hugging Face Hub: the files that are needed, through `huggingface_hub`.

Its cache, tokens, mirrors and offline mode are those that users know from it: `HF_HOME`, `HF_TOKEN` or `hf auth login`,
`HF_ENDPOINT`, `HF_HUB_OFFLINE`. See https://huggingface.co/docs/huggingface_hub/guides/download.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from inferlib.checkpoint.safetensors import listed_in
from inferlib.checkpoint.source import CheckpointError
from inferlib.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_PREFIX = "hf:"
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DESCRIPTION = ("config.json", _INDEX, *Tokenizer.FILES)

_MOST_NAMED, _MOST_CHARACTERS = 12, 200  # in errors


@dataclass(frozen=True)
class HubName:
    """A repository, "organisation/name", and a file in it, or None for all that loading needs."""

    repository: str
    file: str | None = None

    @staticmethod
    def parse(model: str | Path) -> HubName | None:
        """What "hf:org/name", "hf:org/name/FILE.gguf" or "org/name" names; None for everything else.

        Without the prefix, a file or directory of that spelling comes first. Raises CheckpointError for a prefix before
        something that is no name.
        """
        if not isinstance(model, str):
            return None
        if not model.startswith(_PREFIX):
            return HubName(model) if _NAME.fullmatch(model) and not Path(model).exists() else None
        owner, name, *rest = [*model.removeprefix(_PREFIX).split("/"), "", ""]
        repository, file = f"{owner}/{name}", "/".join(rest).strip("/")
        if not _NAME.fullmatch(repository) or (file and not file.endswith(".gguf")):
            raise CheckpointError(f"model {model!r}: after {_PREFIX} comes ORGANISATION/NAME, or that and /FILE.gguf")
        return HubName(repository, file or None)

    def __str__(self) -> str:
        return f"{self.repository}/{self.file}" if self.file else self.repository

    def download(self, revision: str | None = None, *, weights: bool = True, progress: bool = True) -> Path:
        """The model's directory, or its GGUF file, in the cache of `huggingface_hub`; what it lacks is downloaded.

        revision: a branch, tag or commit; by default the main branch. weights: False leaves out safetensors. progress:
        show `huggingface_hub`'s bars, if standard error is a terminal.

        Only what loading reads is downloaded: config.json, generation_config.json, the tokenizer, and the safetensors
        files that the index lists, or one GGUF file. Where the hub cannot be reached, what is in the cache is used.
        Raises CheckpointError if that is not enough.
        """
        with _bars(progress):
            snapshot = _Snapshot.open(self, revision)
            if self.file is None:
                snapshot.fetch([file for file in _DESCRIPTION if file in snapshot.files])
            if not weights and self.file is None and "config.json" in snapshot.files:
                return snapshot.folder
            files = snapshot.weights()
            snapshot.fetch(files)
        return snapshot.folder / files[0] if files[0].endswith(".gguf") else snapshot.folder


@dataclass
class _Snapshot:
    """One revision of a repository: its folder in the cache, and all its files, or offline those in the cache."""

    name: HubName
    revision: str | None
    files: frozenset[str]
    folder: Path
    online: bool

    @staticmethod
    def open(name: HubName, revision: str | None) -> _Snapshot:
        import huggingface_hub
        from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

        try:
            info = huggingface_hub.HfApi().model_info(name.repository, revision=revision)
        # Versions of huggingface_hub differ in the package for HTTP, whose errors come through.
        except Exception as error:
            reason = _explained(error, name, revision)
            download = partial(huggingface_hub.HfApi().snapshot_download, allow_patterns=[])
            try:
                folder = Path(download(name.repository, revision=revision, local_files_only=True))
            except (LocalEntryNotFoundError, ValueError):
                raise CheckpointError(f"model {str(name)!r}: {reason}") from error
            if not isinstance(error, OfflineModeIsEnabled):
                log.warning("%s: what is in the cache is used: %s", name, reason)
            files = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
            return _Snapshot(name, revision, frozenset(files), folder, online=False)
        files = (sibling.rfilename for sibling in info.siblings or ())
        return _Snapshot(name, revision, frozenset(files), Path(), online=True)

    def fetch(self, files: list[str]) -> None:
        """Have these files in the folder."""
        import huggingface_hub

        if self.online:
            exact = [glob.escape(file) for file in files]
            try:
                folder = huggingface_hub.HfApi().snapshot_download(
                    self.name.repository, revision=self.revision, allow_patterns=exact
                )
            except Exception as error:  # see `open`
                reason = _explained(error, self.name, self.revision)
                raise CheckpointError(f"model {str(self.name)!r}: {reason}") from error
            self.folder = Path(folder)
        if missing := [file for file in files if not (self.folder / file).is_file()]:
            raise CheckpointError(
                f"model {str(self.name)!r}: {missing[0]} is not in the cache ({len(missing)} of {len(files)} files are "
                "missing), and the hub is not reached: connect, without HF_HUB_OFFLINE, and the rest is downloaded"
            )

    def weights(self) -> list[str]:
        """The files with the tensors: what the index lists, else model.safetensors, else all safetensors or one GGUF
        file. Raises CheckpointError if there is none, or a choice of GGUF files."""
        top = sorted(file for file in self.files if "/" not in file and file.endswith(".safetensors"))
        ggufs = sorted(file for file in self.files if file.endswith(".gguf"))
        if self.name.file is None and _INDEX in self.files:
            return sorted(set(listed_in(self.folder / _INDEX).values()))
        if self.name.file is None and top:
            return [_SINGLE] if _SINGLE in top else top
        if self.name.file in ggufs or (self.name.file is None and len(ggufs) == 1):
            return [self.name.file or ggufs[0]]
        where = f"{self.name.repository} {'on the hub' if self.online else 'in the cache'}"
        if not ggufs:
            raise CheckpointError(f"{where} holds neither safetensors nor a .gguf file, which inferlib reads")
        names = ", ".join(ggufs[:_MOST_NAMED]) + (", ..." if len(ggufs) > _MOST_NAMED else "")
        raise CheckpointError(
            f"{where} holds {len(ggufs)} .gguf files: name one, as in {_PREFIX}{self.name.repository}/{ggufs[0]} "
            f"({names})"
        )


def _explained(error: Exception, name: HubName, revision: str | None) -> str:
    """Why a repository cannot be had, and what to do."""
    from huggingface_hub import constants, errors

    repository, page = name.repository, f"{constants.ENDPOINT}/{name.repository}"
    log_in = "log in with `hf auth login` or HF_TOKEN"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "it is not in the cache, and HF_HUB_OFFLINE is set: unset it once to download"
    if isinstance(error, errors.GatedRepoError):
        return f"it is gated: accept its terms at {page} and {log_in}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{page} has no revision {revision!r}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{page} does not exist, or is private: check the name ({repository} is no local path), or {log_in}"
    if isinstance(error, errors.HFValidationError):
        return f"{repository!r} is neither a local path nor a valid name of the hub"
    cause = " ".join(str(error).split())[:_MOST_CHARACTERS] or type(error).__name__
    return (
        f"it is no local path, and it could not be downloaded from {constants.ENDPOINT}: {cause}; check the network, "
        "HF_ENDPOINT and the space on the disk"
    )


@contextmanager
def _bars(show: bool) -> Iterator[None]:
    from huggingface_hub import utils

    if show or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()
