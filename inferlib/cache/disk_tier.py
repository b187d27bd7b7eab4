"""Pages in files, which outlive the process that wrote them.

A folder has a file for each page, in a folder for each model: FOLDER/MODEL/KEY.page. A file is written under another
name and renamed once it is on the disk, so it is there as a whole or not at all, also after a kill. It says which model
and which page it is of and has a checksum; what does not fit is as if it were not there.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import shutil
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from inferlib.cache.host_memory import as_numpy
from inferlib.cache.host_tier import KEY_BYTES, Page
from inferlib.option_checks import ConfigurationError

log = logging.getLogger(__name__)

MODEL_BYTES = 16
_MARK = "inferlib-pages"  # a file that says what a folder is
_MAGIC = b"inferlib page 1\n"
_HEAD = struct.Struct(f"<{len(_MAGIC)}s{MODEL_BYTES}s{KEY_BYTES}sQ16s")  # with the bytes that follow, and their hash
_NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}\.page")
_STALE = 60  # seconds after which a file that is being written belongs to nobody


class Form(NamedTuple):
    """The shape and the dtype of one array of a page."""

    shape: tuple[int, ...]
    dtype: np.dtype


class DiskTier:
    """The pages of one model in a folder, which other models and other processes may use too. Any thread may call it.

    model: what tells the model, its weights and the form of its pages from others, `MODEL_BYTES` long. most: bytes of
    all files in the folder, whose least recently used leave first; None: half of what the disk has for them.
    """

    def __init__(self, folder: Path, model: bytes, most: int | None = None):
        prepare_folder(folder)
        self.folder, self.model = folder, model
        self.evictions = 0
        self._lock, self._numbers = threading.Lock(), itertools.count()
        (folder / model.hex()).mkdir(exist_ok=True)
        self._files = OrderedDict(sorted(_files(folder), key=lambda file: file[1][0]))  # (time of use, bytes) by name
        self._bytes = sum(size for _, size in self._files.values())
        self.most = most or (shutil.disk_usage(folder).free + self._bytes) // 2
        self._warned = False

    def __contains__(self, key: bytes) -> bool:
        return self._name(key) in self._files

    def __len__(self) -> int:
        """Pages of all models."""
        return len(self._files)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return self._bytes

    def read(self, key: bytes, forms: tuple[Form, ...]) -> Page | None:
        """A page of arrays of these forms, if its file is there and whole, which this counts as a use of it. Another
        file goes away."""
        name = self._name(key)
        path = self.folder / name
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            self._forget(name)
            return None
        with self._lock:
            if name in self._files:
                self._files.move_to_end(name)
        if (page := self._page(key, data, forms)) is None:
            self._forget(name)
            with suppress(OSError):
                path.unlink()
        return page

    def write(self, key: bytes, page: Page) -> None:
        """Store a page, unless the disk is full or broken, which is logged once."""
        name = self._name(key)
        arrays = [np.ascontiguousarray(as_numpy(array)).view(np.uint8).reshape(-1).data for array in page]
        size = _HEAD.size + sum(array.nbytes for array in arrays)
        head = _HEAD.pack(_MAGIC, self.model, key, size - _HEAD.size, _digest(*arrays))
        self._make_room(size)
        temporary = self.folder / f"{name}.{os.getpid()}.{next(self._numbers)}.tmp"
        try:
            with temporary.open("xb") as file:
                file.write(head)
                for array in arrays:
                    file.write(array)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.folder / name)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            if not self._warned:
                log.warning("pages are not written to %s: %s", self.folder, error.strerror)
                self._warned = True
            return
        with self._lock:
            _, before = self._files.pop(name, (0.0, 0))
            self._files[name] = (time.time(), size)
            self._bytes += size - before

    def clear(self) -> None:
        """Remove the files of this model."""
        folder = f"{self.model.hex()}/"
        for name in [name for name in list(self._files) if name.startswith(folder)]:
            self._forget(name)
            (self.folder / name).unlink(missing_ok=True)

    def _name(self, key: bytes) -> str:
        return f"{self.model.hex()}/{key.hex()}.page"

    def _forget(self, name: str) -> None:
        with self._lock:
            _, size = self._files.pop(name, (0.0, 0))
            self._bytes -= size

    def _make_room(self, size: int) -> None:
        """Remove files until there is room for one more."""
        while self._files and self._bytes + size > self.most:
            with self._lock:
                name, (_, freed) = self._files.popitem(last=False)
                self._bytes -= freed
                self.evictions += 1
            with suppress(OSError):
                (self.folder / name).unlink()

    def _page(self, key: bytes, data: bytes, forms: tuple[Form, ...]) -> Page | None:
        """The page in a file; None if it is another, or damaged."""
        if len(data) < _HEAD.size:
            return None
        magic, model, of_key, size, digest = _HEAD.unpack_from(data)
        if (magic, model, of_key) != (_MAGIC, self.model, key):
            return None
        body = memoryview(data)[_HEAD.size :]
        if len(body) != size or size != sum(map(_bytes_of, forms)) or _digest(body) != digest:
            return None
        arrays, first = [], 0
        for form in forms:
            flat = np.frombuffer(body[first : first + _bytes_of(form)], np.uint8)
            arrays.append(flat.view(form.dtype).reshape(form.shape))
            first += _bytes_of(form)
        return tuple(arrays)


def check_folder(folder: Path) -> None:
    """Raise ConfigurationError unless this is a folder of pages that may be written to, or can become one: it is empty,
    or not there yet."""
    try:
        names = sorted(os.listdir(folder)) if folder.exists() else []
    except OSError as error:
        raise ConfigurationError(f"disk_cache {folder} is no folder that can be read: {error.strerror}") from None
    if names and _MARK not in names:
        raise ConfigurationError(
            f"disk_cache {folder} has files of something else, such as {names[0]}: give a folder that is new, empty or "
            "was a disk_cache before"
        )
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigurationError(f"disk_cache {folder} cannot be written to: give another folder")


def prepare_folder(folder: Path) -> None:
    """Make a folder of pages. Raises ConfigurationError where that is not possible."""
    check_folder(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # cells are as private as the prompts
        (folder / _MARK).touch()
    except OSError as error:
        raise ConfigurationError(f"disk_cache {folder} cannot be made: {error.strerror}") from None


def _files(folder: Path) -> Iterator[tuple[str, tuple[float, int]]]:
    """The pages of all models: name, time of the last use and bytes. What a killed process left goes away."""
    for path in folder.glob("*/*"):
        try:
            stat = path.stat()
            if path.suffix == ".tmp" and stat.st_mtime < time.time() - _STALE:
                path.unlink()
        except OSError:  # another process was faster
            continue
        if _NAME.fullmatch(path.name):
            yield f"{path.parent.name}/{path.name}", (stat.st_mtime, stat.st_size)


def _bytes_of(form: Form) -> int:
    return int(np.prod(form.shape)) * form.dtype.itemsize


def _digest(*parts: memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()
