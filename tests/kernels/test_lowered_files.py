"""Lowered kernels in files beside JAX's persistent cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from inferlib.attention_values import KvCache
from inferlib.pallas_kernels import lowered_files, lowered_once
from inferlib.pallas_kernels.lowered_once import call_lowered

H200 = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
CELLS: Any = jax.ShapeDtypeStruct((2, 1, 16, 8), jnp.float32)
traced: list[float] = []


def scaled(factor: Any, x: jax.Array) -> jax.Array:
    traced.append(factor)
    return x * factor


def applied(function, x: jax.Array) -> jax.Array:
    return function(x)


@pytest.fixture
def folder(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    traced.clear()
    return tmp_path / "kernels"


def lower(function, *static) -> str:
    """The program as a new process lowers it."""
    lowered_once._exported.cache_clear()
    program = jax.jit(lambda x: call_lowered(function, static, x))
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        return program.trace(X).lower(lowering_platforms=("cuda",)).as_text()


def path(function, *static, shapes: Any = (X,)) -> Any:
    leaves, tree = jax.tree.flatten(shapes)
    return lowered_files.path_of(function, static, tree, tuple(leaves), H200)


def test_another_process_reads_what_was_lowered(folder):
    first, second = lower(scaled, 2.0), lower(scaled, 2.0)
    assert (traced, first) == ([2.0], second)
    lower(scaled, 3.0)
    assert traced == [2.0, 3.0]
    assert len([*folder.iterdir()]) == 2


@pytest.mark.parametrize("damage", [b"", b"no kernel"])
def test_a_damaged_file_is_made_again(folder, damage):
    text = lower(scaled, 2.0)
    (file,) = folder.iterdir()
    file.write_bytes(damage)
    assert [lower(scaled, 2.0) for _ in range(2)] == [text, text]
    assert traced == [2.0, 2.0]


def test_a_path_tells_apart_what_differs(folder, monkeypatch):
    cache = KvCache(CELLS, CELLS)
    others = [
        path(scaled, 2.0),
        path(scaled, 3.0),
        path(applied, partial(scaled, 2.0)),
        path(applied, partial(scaled, 3.0)),
        path(scaled, 2.0, shapes=(jax.ShapeDtypeStruct((4, 8), jnp.bfloat16),)),
        *(path(scaled, shapes=(x,)) for x in (cache, replace(cache, limit=5), replace(cache, ring=True))),
    ]
    assert len({*others}) == len(others)
    assert path(scaled, 2.0) == others[0]
    monkeypatch.setattr(lowered_files, "_versions", lambda: "another version of the code")
    assert path(scaled, 2.0) != others[0]


def test_nothing_is_kept_that_has_no_name(folder):
    assert path(applied, lambda x: x) is None
    assert path(applied, partial(scaled, object())) is None
    assert "multiply" in lower(applied, lambda x: 2 * x)
    assert not folder.exists()


def test_without_a_folder_there_are_no_files(folder):
    jax.config.update("jax_compilation_cache_dir", None)
    assert path(scaled, 2.0) is None


def test_the_oldest_files_go(folder, monkeypatch):
    monkeypatch.setattr(lowered_files, "MOST_FILES", 2)
    for factor in (1.0, 2.0, 3.0):
        lower(scaled, factor)
    assert [path(scaled, factor).exists() for factor in (1.0, 2.0, 3.0)] == [False, True, True]


def test_a_folder_that_cannot_be_written_to_stays(folder):
    folder.write_text("a file")
    lower(scaled, 2.0)
    assert folder.read_text() == "a file"
