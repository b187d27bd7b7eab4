"""Files of pages: whole or not there, and of one model."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from inferlib.cache.disk_tier import DiskTier, Form
from inferlib.option_checks import ConfigurationError

FORMS = (Form((2, 300), np.dtype(ml_dtypes.bfloat16)), Form((2, 30), np.dtype(np.float32)))
MODEL, OTHER = b"m" * 16, b"o" * 16


def key_of(number: int) -> bytes:
    return number.to_bytes(20, "big")


def page_of(number: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(number)
    return tuple(rng.standard_normal(form.shape).astype(form.dtype) for form in FORMS)


def assert_is(page: tuple[np.ndarray, ...] | None, number: int) -> None:
    assert page is not None
    for array, expected, form in zip(page, page_of(number), FORMS, strict=True):
        assert array.dtype == form.dtype
        np.testing.assert_array_equal(array, expected)


def test_pages_outlive_the_tier(tmp_path):
    folder = tmp_path / "a" / "b"
    tier = DiskTier(folder, MODEL)
    for number in range(3):
        tier.write(key_of(number), page_of(number))
    again = DiskTier(folder, MODEL)
    assert (len(again), again.nbytes) == (3, tier.nbytes)
    assert folder.stat().st_mode & 0o777 == 0o700
    for number in range(3):
        assert key_of(number) in again
        assert_is(again.read(key_of(number), FORMS), number)
    assert again.read(key_of(9), FORMS) is None
    again.clear()
    assert (len(DiskTier(folder, MODEL)), again.nbytes) == (0, 0)


def damage(path: Path, other: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(data[:-1])
    elif how == "longer":
        path.write_bytes(data + b"\0")
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "of another page":
        path.write_bytes(other.read_bytes())
    else:
        data[{"first byte": 0, "size": 60, "head": 70, "cells": 300, "last byte": -1}[how]] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize(
    "how", ["cut", "longer", "empty", "of another page", "first byte", "size", "head", "cells", "last byte"]
)
def test_a_damaged_file_is_a_miss(how, tmp_path):
    tier = DiskTier(tmp_path, MODEL)
    for number in range(2):
        tier.write(key_of(number), page_of(number))
    path, other = (tmp_path / MODEL.hex() / f"{key_of(number).hex()}.page" for number in range(2))
    damage(path, other, how)
    assert tier.read(key_of(0), FORMS) is None
    assert key_of(0) not in tier
    assert not path.exists()
    assert_is(tier.read(key_of(1), FORMS), 1)
    assert tier.nbytes == other.stat().st_size
    tier.write(key_of(0), page_of(0))
    assert_is(tier.read(key_of(0), FORMS), 0)


def test_models_share_a_folder_and_no_page(tmp_path):
    """Also if a file is moved from one to the other."""
    tiers = [DiskTier(tmp_path, model) for model in (MODEL, OTHER)]
    tiers[0].write(key_of(0), page_of(0))
    assert tiers[1].read(key_of(0), FORMS) is None
    name = f"{key_of(0).hex()}.page"
    (tmp_path / OTHER.hex() / name).write_bytes((tmp_path / MODEL.hex() / name).read_bytes())
    moved = DiskTier(tmp_path, OTHER)
    assert key_of(0) in moved
    assert moved.read(key_of(0), FORMS) is None
    assert_is(tiers[0].read(key_of(0), FORMS), 0)
    other_form = DiskTier(tmp_path, MODEL)
    assert other_form.read(key_of(0), FORMS[::-1][:1]) is None


def test_the_least_recently_used_files_make_room(tmp_path):
    """Across restarts, and across models."""
    size = DiskTier(tmp_path / "one", MODEL)
    size.write(key_of(0), page_of(0))
    most = 3 * size.nbytes
    folder = tmp_path / "several"
    DiskTier(folder, OTHER, most).write(key_of(7), page_of(7))
    tier = DiskTier(folder, MODEL, most)
    for number in range(2):
        tier.write(key_of(number), page_of(number))
    past = time.time() - 1000
    for number in (7, 0, 1):
        (path,) = folder.rglob(f"{key_of(number).hex()}.page")
        os.utime(path, (past + number, past + number))
    tier = DiskTier(folder, MODEL, most)
    assert_is(tier.read(key_of(0), FORMS), 0)
    for number in (2, 3):
        tier.write(key_of(number), page_of(number))
    assert [number for number in range(4) if key_of(number) in tier] == [0, 2, 3]
    assert (tier.evictions, tier.nbytes) == (2, most)
    assert len(list(folder.rglob("*.page"))) == 3


def test_a_file_that_vanished_is_a_miss(tmp_path):
    tier = DiskTier(tmp_path, MODEL)
    tier.write(key_of(0), page_of(0))
    DiskTier(tmp_path, MODEL).clear()
    assert tier.read(key_of(0), FORMS) is None
    assert (len(tier), tier.nbytes) == (0, 0)


def test_a_full_disk_is_told_once(tmp_path, monkeypatch, caplog):
    tier = DiskTier(tmp_path, MODEL)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for number in range(3):
        tier.write(key_of(number), page_of(number))
        assert key_of(number) not in tier
    assert [record.getMessage() for record in caplog.records] == [
        f"pages are not written to {tmp_path}: No space left on device"
    ]
    assert not list(tmp_path.glob("*/*"))


WRITER = """
import itertools, sys
from pathlib import Path
from inferlib.cache.disk_tier import DiskTier
from tests.engine.test_disk_tier import MODEL, key_of, page_of
tier = DiskTier(Path(sys.argv[1]), MODEL)
print("ready", flush=True)
for number in itertools.count():
    tier.write(key_of(number % 200), page_of(number % 200))
"""


@pytest.mark.slow
def test_kill_while_writing(tmp_path):
    """Whenever a writer is killed, every file that is there is whole."""
    root, environ = Path(__file__).parents[2], os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", WRITER, tmp_path]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, env=environ)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    while len(list(tmp_path.rglob("*.page"))) < 20:
        assert child.poll() is None
        time.sleep(0.01)
    time.sleep(random.random() / 10)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    tier = DiskTier(tmp_path, MODEL)
    numbers = [number for number in range(200) if key_of(number) in tier]
    assert len(numbers) == len(tier) >= 20
    for number in numbers:
        assert_is(tier.read(key_of(number), FORMS), number)
    # What it left half written belongs to nobody after a while.
    (tmp_path / MODEL.hex() / "half.1.0.tmp").write_bytes(b"page")
    for path in tmp_path.glob("*/*.tmp"):
        os.utime(path, (0, 0))
    DiskTier(tmp_path, MODEL)
    assert not list(tmp_path.glob("*/*.tmp"))


def test_wrong_folders(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("")
    for path, message in (
        (tmp_path / "model", "has files of something else, such as config.json: give a folder that is new"),
        (tmp_path / "file", "is no folder that can be read: Not a directory"),
        (tmp_path / "file" / "pages", "cannot be written to: give another folder"),
        (Path("/proc/pages"), "cannot be (made|written to)"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            DiskTier(path, MODEL)
