"""Kernels that programs share are lowered once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from inferlib.pallas_kernels import lowered_files
from inferlib.pallas_kernels.lowered_once import call_lowered

H200 = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
traced: list[tuple[int, ...]] = []


@pytest.fixture(autouse=True)
def without_files(monkeypatch):
    monkeypatch.setattr(lowered_files, "path_of", lambda *arguments: None)
    traced.clear()


def doubled(times: int, pair: dict[str, jax.Array]) -> jax.Array:
    traced.append(pair["x"].shape)
    return pair["x"] * 2**times


def program(times: int, add: float):
    """A program that has the function, and something of its own."""
    return jax.jit(lambda x: call_lowered(doubled, (times,), {"x": x}) + add)


def lowered(function, *shapes) -> str:
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        return function.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def test_programs_share_what_was_lowered():
    first, second = (lowered(program(1, add), X) for add in (1, 2))
    assert len(traced) == 1
    assert all("stablehlo.multiply" in text for text in (first, second))
    lowered(program(2, 1), X)
    lowered(program(1, 1), jax.ShapeDtypeStruct((2, 8), jnp.float32))
    assert traced == [(4, 8), (4, 8), (2, 8)]


def test_it_may_be_within_a_part_of_a_mesh():
    """It is lowered for one device, whatever mesh the program that has it runs on."""
    spec, mesh = PartitionSpec("tp"), AbstractMesh((2,), ("tp",), abstract_device=H200)
    texts = []
    for add in (1, 2):
        run = jax.shard_map(program(3, add), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        sharded = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, spec))
        texts.append(jax.jit(run).trace(sharded).lower(lowering_platforms=("cuda",)).as_text())
    assert traced == [(2, 8)]
    assert all("stablehlo.multiply" in text for text in texts)


def test_without_a_gpu_it_is_part_of_the_program():
    for _ in range(2):
        assert program(4, 1)(jnp.ones((4, 8)))[0, 0] == 17
    assert len(traced) == 2


def test_an_error_of_the_trace_reaches_the_caller():
    def wrong(x):
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        lowered(jax.jit(lambda x: call_lowered(wrong, (), x)), X)
