"""Commands import nothing from the folder that they run in, nor do their child processes. About half a minute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cli_model import make_model

# `inferlib` as its console script runs it: without the working folder in the import path.
COMMAND = [sys.executable, "-P", "-c", "from inferlib.cli import app; app()"]
DECOYS = ("inferlib", "models", "sharding", "json", "jax", "numpy", "typer", "configs")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder whose modules have the names of ours, of libraries and of Python's own, and end who imports them."""
    for i, name in enumerate(DECOYS):
        file = tmp_path / f"{name}.py" if i % 2 else tmp_path / name / "__init__.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"raise SystemExit('the {name} of the working folder was imported')\n")
    return tmp_path


@pytest.mark.slow
def test_compile_among_modules_of_the_same_names(folder, tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("model"), layers=1)
    buckets = ["--prefill-buckets", "8", "--batch-buckets", "1", "--cache-buckets", "32", "--modes", "embed"]
    command = [*COMMAND, "compile", str(model), "--target", "cpu", *buckets, "--out", "compiled", "--workers", "1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "compiled" / "manifest.json").exists()
