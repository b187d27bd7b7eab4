"""Programs that are kept between processes. About 10 s."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.config import EngineConfig, EngineOptions
from inferlib.models.abstract import abstract_model
from inferlib.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig
from inferlib.option_checks import ConfigurationError
from inferlib.programs import compilation_cache
from inferlib.programs.compilation_cache import MOST_BYTES, default_folder, use_compile_cache
from inferlib.programs.counter import compilations
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program_set import ProgramSet, compile_order, planned_keys
from tests.helpers.cli_model import make_model


@pytest.fixture
def jax_without_cache(monkeypatch):
    """JAX as it is where nobody chose a folder."""
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(compilation_cache, "_ours", None)


def entries(folder: Path) -> list[Path]:
    return list(folder.glob("*-cache"))


def run(seed: int) -> np.ndarray:
    """The result of a function that is compiled by this call."""

    @jax.jit
    def compiled_anew(x):
        for i in range(3):
            x = jnp.sin(x @ x) + i * jnp.cumsum(x, axis=i % 2)
        return x

    before = compilations()
    result = np.asarray(compiled_anew(jax.random.normal(jax.random.key(seed), (8, 8))))
    assert compilations() > before  # also where it is taken from the folder
    return result


@pytest.mark.usefixtures("jax_without_cache")
def test_programs_are_taken_from_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation_cache, "_FASTEST", 0.0)
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    use_compile_cache(tmp_path / "new" / "folder")
    expected, files = run(0), entries(tmp_path / "new" / "folder")
    assert files
    assert jax.config.jax_compilation_cache_max_size == MOST_BYTES
    hits.clear()
    np.testing.assert_array_equal(run(0), expected)
    assert "/jax/compilation_cache/cache_hits" in hits
    for file in files:
        file.write_bytes(file.read_bytes()[:100])
    with pytest.warns(UserWarning, match="persistent compilation cache"):
        np.testing.assert_array_equal(run(0), expected)
    use_compile_cache("none")
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.usefixtures("jax_without_cache")
def test_entries_without_a_time_of_use_do_not_keep_others_out(tmp_path, monkeypatch):
    """As a process leaves them that was killed, or that does not bound the folder. JAX would only warn."""
    monkeypatch.setattr(compilation_cache, "_FASTEST", 0.0)
    (tmp_path / "jit_f-0-cache").write_bytes(b"a program")
    use_compile_cache(tmp_path)
    run(1)
    assert len(entries(tmp_path)) > 1
    assert (tmp_path / "jit_f-0-atime").stat().st_size == 8


@pytest.mark.usefixtures("jax_without_cache")
def test_whose_folder_it_is(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use_compile_cache()
    assert Path(jax.config.jax_compilation_cache_dir) == default_folder()
    assert default_folder().is_relative_to(tmp_path)
    use_compile_cache(tmp_path / "mine")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    jax.config.update("jax_compilation_cache_dir", "the application's")
    for choice in (None, "none"):
        use_compile_cache(choice)
        assert jax.config.jax_compilation_cache_dir == "the application's"
    jax.config.update("jax_compilation_cache_dir", None)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    use_compile_cache()
    assert jax.config.jax_compilation_cache_dir is None
    assert "programs are compiled in every process" in caplog.text
    with pytest.raises(ConfigurationError, match="give another folder, or 'none'"):
        use_compile_cache(tmp_path / "file" / "below")
    with pytest.raises(ConfigurationError, match="compile_cache must be the path"):
        EngineOptions(compile_cache=3)


@pytest.mark.slow
def test_an_llm_keeps_its_programs(tmp_path):
    """Of two commands, the second takes them, adds none, and says the same.

    Both keep every program: one that compiles in about `_FASTEST` seconds would be kept by some runs and not by others.
    """
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    keep_all = "from inferlib.programs import compilation_cache; compilation_cache._FASTEST = 0.0"
    command = [
        *(sys.executable, "-c", f"{keep_all}; from inferlib.cli import app; app()"),
        "generate",
        "a b",
        "--model",
        str(make_model(tmp_path / "model", layers=1)),
        *("--max-tokens", "4", "--max-batch", "1", "--max-len", "32", "--temperature", "0"),
    ]
    texts, files = [], []
    for _ in range(2):
        texts.append(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
        files.append({file.name for file in tmp_path.rglob("*-cache")})
    assert texts[0] == texts[1]
    assert files[0] == files[1] != set()


def test_the_largest_programs_and_one_of_each_shape_come_first():
    config = EngineConfig.make("gpu", 16, 512)
    keys = planned_keys(config, ("greedy", "sample"))
    order = compile_order(keys)
    assert sorted(order) == sorted(keys)
    shapes = [(key.chunks, key.chunk, key.rows) for key in order]
    count = len(set(shapes))
    assert len(set(shapes[:count])) == count
    assert shapes[0] == max(shapes, key=lambda shape: (shape[0] * shape[1], shape[2]))


def test_an_error_of_one_program_ends_the_rest():
    """The first error is raised, and what has not begun is not compiled."""
    layer = LayerSpec(AttentionSpec(heads=1, kv_heads=1, head_dim=2, scale=1.0, rope=None), MlpSpec(hidden=2))
    model = abstract_model(ModelConfig("none", vocab=64, dim=2, layers=(layer,), context=64), "float32")
    programs = ProgramSet.make(model, EngineConfig.make("cpu", 4, 64))
    asked, done = [], []

    def fail(key: ProgramKey):
        asked.append(key)
        raise RuntimeError("no")

    programs._compile = fail  # type: ignore[method-assign]
    keys = planned_keys(programs.config)
    with pytest.raises(RuntimeError, match="no"):
        programs.compile_all(keys, done.append, threads=1)
    assert len(asked) < len(keys)
    assert not done
