"""Pages, and what rows have beside them, go to the host and come back as they were, on one device and on meshes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.aot.compile import environment
from inferlib.cache.plan import BlockCache, CachePlan
from inferlib.programs.page_transfer import EntryTransfer, PageTransfer, _at_once, _one_by_one
from inferlib.sharding import axes
from inferlib.sharding.mesh import Parallelism, make_mesh
from inferlib.sharding.rules import preset
from inferlib.sharding.shards import Shards, make_shards
from inferlib.targets import parse_target

BFLOAT16 = np.dtype(jnp.bfloat16)


def plan_of(pages: int) -> CachePlan:
    """Stacked keys and values, in int8 with scales; and latents, whose rotary keys are folded."""
    blocks = (
        BlockCache(((3, pages, 2, 8, 4),) * 2, False, BFLOAT16),
        BlockCache(((pages, 2, 8, 6),) * 2, False, np.dtype(np.int8), scaled=True),
        BlockCache(((pages, 1, 8, 12), (pages, 1, 4, 8)), False, BFLOAT16, latent=True),
    )
    return CachePlan(rows=2, max_len=16, page=8, pages=pages, blocks=blocks)


@pytest.mark.parametrize("parallel", [None, "dp=2,tp=2", "dp=2,cp=2,tp=2"])
def test_pages_come_back_as_they_were(parallel):
    shards = Shards() if parallel is None else make_shards(Parallelism.read(parallel))
    plan = plan_of(5 * shards.replicas)
    transfer = PageTransfer(plan, shards)
    assert transfer.nbytes == plan.nbytes // plan.pages
    assert_come_back(transfer, *(([3, 1], [0, 4]) if parallel is None else ([1, 7, 3, 9], [5, 0, 8, 4])))


@pytest.mark.parametrize("parallel", [None, "dp=2,tp=2"])
def test_one_entry_a_call(parallel):
    """The replicas that have none keep what they have."""
    shards = Shards() if parallel is None else make_shards(Parallelism.read(parallel))
    transfer = EntryTransfer(plan_of(5 * shards.replicas).arrays, shards, 5, 1)
    assert_come_back(transfer, *(([3], [0]) if parallel is None else ([2], [9])))


@pytest.mark.parametrize("parallel", [None, "dp=2,tp=2"])
def test_pages_go_to_other_devices(parallel):
    """In part to the other replica there."""
    meshes = Shards(), Shards()
    if parallel is not None:
        shape = Parallelism.read(parallel)
        both = jax.devices()[:4], jax.devices()[4:]
        meshes = tuple(Shards(make_mesh(shape, devices), preset(shape.rules)) for devices in both)
    plan = plan_of(5 * meshes[0].replicas)
    source, target = (PageTransfer(plan, shards) for shards in meshes)
    pages, others = ([3, 1], [0, 4]) if parallel is None else ([1, 7, 3], [9, 0, 8])
    host, cache = random_cache(source)
    sent = source.sent(source.read(cache, pages), pages, target)
    used = {device for page in sent for x in page for device in x.devices()}
    assert used <= (set(jax.devices()[:1]) if parallel is None else set(jax.devices()[4:]))
    before, there = random_cache(target, seed=1)
    there, _ = target.write(there, others, sent)
    for of_source, of_target, after, x in zip(host, before, there, plan.arrays, strict=True):
        expected, stack = of_target.copy(), (slice(None),) * x.axes.index(axes.PAGES)
        expected[(*stack, others)] = of_source[(*stack, pages)]
        np.testing.assert_array_equal(after, expected)


def random_cache(transfer: EntryTransfer, seed: int = 0) -> tuple[list[np.ndarray], tuple[jax.Array, ...]]:
    """Arrays on the host, and the same ones on the devices."""
    rng, sharding = np.random.default_rng(seed), transfer.shards.sharding
    host = [rng.integers(-99, 99, x.shape).astype(x.dtype) for x in transfer.arrays]
    return host, tuple(jax.device_put(x, sharding(of.axes)) for x, of in zip(host, transfer.arrays, strict=True))


def assert_come_back(transfer: EntryTransfer, source: list[int], target: list[int]) -> None:
    """Pages of random arrays that are read are those that they are written to, and no others change."""
    (host, cache), sharding = random_cache(transfer), transfer.shards.sharding
    pages = transfer.cut(transfer.read(cache, source), source)
    assert all(sum(x.nbytes for x in page) == transfer.nbytes for page in pages)
    cache, _ = transfer.write(cache, target, pages)
    for before, after, x in zip(host, cache, transfer.arrays, strict=True):
        expected, stack = before.copy(), (slice(None),) * x.axes.index(axes.PAGES)
        expected[(*stack, target)] = before[(*stack, source)]
        np.testing.assert_array_equal(after, expected)
        assert after.sharding.is_equivalent_to(sharding(x.axes) or after.sharding, after.ndim)


@pytest.mark.parametrize(("shape", "dim"), [((7, 2, 4), 0), ((3, 7, 2, 4), 1)])
def test_both_forms_write_pages(shape, dim):
    """Page 7, which does not exist, is padding."""
    array, pages = np.arange(np.prod(shape)).reshape(shape), np.array([3, 0, 7, 7])
    cells = -np.arange(4 * array[(slice(None),) * dim + (0,)].size).reshape(4, *shape[:dim], *shape[dim + 1 :])
    expected = array.copy()
    for page, new in zip(pages[:2], cells, strict=False):
        expected[(slice(None),) * dim + (page,)] = new
    for form in (_one_by_one, _at_once):
        np.testing.assert_array_equal(form(dim, *map(jnp.asarray, (array, pages, cells))), expected)


ON_TPU = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from inferlib.programs.page_transfer import EntryTransfer, PageTransfer, read_pages, write_pages
from inferlib.sharding.shards import Shards
from tests.programs.test_page_transfer import large_plan, large_rings
device = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x4").devices[0]
place = jax.sharding.SingleDeviceSharding(device)
shards, rings = Shards(), large_rings()
make = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
for transfer in (PageTransfer(large_plan(), shards), EntryTransfer(rings.arrays, shards, rings.rows, 1)):
    groups, names = transfer.groups, tuple(x.axes for x in transfer.arrays)
    cache = tuple(make(x.shape, x.dtype) for x in transfer.arrays)
    numbers = make((transfer.most, 1), jnp.int32)
    blocks = transfer.most * tuple(make(group.form.shape, group.form.dtype) for group in groups)
    for function, donated, more in ((read_pages, (), ()), (write_pages, (3,), (blocks,))):
        jitted = jax.jit(function, static_argnums=(0, 1, 2), donate_argnums=donated)
        compiled = jitted.lower(shards, names, groups, cache, numbers, *more).compile()
        print(compiled.memory_analysis().temp_size_in_bytes - transfer.call_bytes)
"""


def large_plan() -> CachePlan:
    """Of stacked arrays of 34 and 17 MB, and one layer in int8."""
    blocks = (
        BlockCache(((2, 64, 8, 128, 128),) * 2, False, BFLOAT16),
        BlockCache(((2, 64, 1, 128, 512), (2, 64, 1, 64, 128)), False, BFLOAT16, latent=True),
        BlockCache(((64, 8, 128, 128),) * 2, False, np.dtype(np.int8), scaled=True),
    )
    return CachePlan(rows=8, max_len=1024, page=128, pages=64, blocks=blocks)


def large_rings() -> CachePlan:
    """Of two stacked arrays of 403 MB."""
    blocks = (BlockCache(((2, 64, 8, 1536, 128),) * 2, True, BFLOAT16),)
    return CachePlan(rows=64, max_len=4096, page=128, pages=64, blocks=blocks)


@pytest.mark.release
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'jax[tpu]'")
def test_the_tpu_compiler_copies_no_more_than_pages_and_rows():
    environ = environment(parse_target("v6e-8")) | {"PYTHONPATH": str(Path(__file__).parents[2])}
    child = subprocess.run([sys.executable, "-c", ON_TPU], env=environ, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    assert [int(size) <= 0 for size in child.stdout.split()] == [True] * 4
