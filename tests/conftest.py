"""Settings of the suite, and tiny random models that are written and compiled once per session."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from inferlib import LLM, Buckets
from inferlib.ops.by_platform import platform_of, traced_for
from tests.helpers.fast_cases import mark_further_cases
from tests.helpers.llms import MAX_LEN, TINY, build_llm
from tests.helpers.tokenizer import write_tokenizer

# Devices for the sharding tests; all other tests run on the first.
jax.config.update("jax_num_cpu_devices", 8)
# Without most optimizations programs compile in a third of the time and run slower. XLA reads its flags once, with the
# first program; child processes inherit them. Compiling parts of a program in parallel helps only on idle cores, and
# costs more in total.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
FLAGS = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
# Where in our code an operation stands costs a tenth of what tracing and lowering do; nothing reads it.
jax.config.update("jax_traceback_in_locations_limit", 0)
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

# The same examples each time, so that only a change of the code changes the outcome. `--hypothesis-profile=fresh` draws
# others.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
hypothesis.settings.register_profile("fresh", deadline=None)
hypothesis.settings.load_profile("suite")

# Nothing becomes garbage while modules are imported, and the collector would look at millions of objects again and
# again. `pytest_collection_finish` turns it on.
gc.disable()

MOST_CACHED_BYTES = 1 << 30
CACHE_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)
MOST_MAPS = 30_000


def pytest_configure(config: pytest.Config) -> None:
    """Compile equal programs once: both workers and later runs share a cache of executables.

    To load one takes a twelfth of the time to compile it. Child processes compile for themselves: some serialize their
    executables, which those from a cache do not survive.
    """
    folder = config.rootpath / ".pytest_cache" / "programs"
    if not hasattr(config, "workerinput") and _bytes_in(folder) > MOST_CACHED_BYTES:
        shutil.rmtree(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir()) if folder.is_dir() else 0


# Files of long tests, the longest first.
LONG = ("test_notebooks", "test_bundles", "test_hosts", "test_smollm2", "test_backends", "test_compile_tpu", "test_tpu")


@pytest.hookimpl(tryfirst=True)  # before pytest chooses tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start long tests first: the last tests of a run may leave a core idle."""
    mark_further_cases(items)
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """Keep the garbage collector out of torch, transformers and JAX; and run it less often while JAX traces."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Behind a file, let go of compiled programs if there are many. Each takes some maps of memory, of which Linux
    allows a process 65,530; workers that came near died within jaxlib, which had no memory for one more program."""
    if (nextitem is None or nextitem.path != item.path) and _maps() > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


def _maps() -> int:
    """How many maps of memory this process has; 0 where the system does not say."""
    file = Path("/proc/self/maps")
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.fixture(autouse=True)
def _one_platform(request: pytest.FixtureRequest) -> Iterator[None]:
    """Trace kernels and operations in the forms of this platform alone, as an engine's programs are. Forms for others,
    which no test runs, would take as long to trace; what is lowered for another platform says so."""
    direct = request.path.parent.name in ("kernels", "ops")
    with traced_for(platform_of(jax.devices()[0])) if direct else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def _one_folder_of_programs() -> Iterator[None]:
    """After each test, programs are kept where they were before it: the folder that an LLM is given is that of the
    whole process, and the next one would take the user's."""
    before = {name: getattr(jax.config, name) for name in CACHE_SETTINGS}
    yield
    if any(getattr(jax.config, name) != value for name, value in before.items()):
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def optimized_programs() -> Iterator[None]:
    """Compile programs as for a user, where they compute so much that it pays."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """`checkpoint(family, **overrides)`: the folder of a tiny model (see `TINY`) with a tokenizer.

    Lists are passed as tuples.
    """
    from tests.helpers.oracle import make_checkpoint  # imports torch and transformers, which take seconds

    @functools.cache
    def build(family: str, **overrides: Any) -> Path:
        lists = {name: list(value) for name, value in overrides.items() if isinstance(value, tuple)}
        folder = make_checkpoint(tmp_path_factory.mktemp(family), family, **TINY[family] | overrides | lists)
        write_tokenizer(folder)
        return folder

    return build


@pytest.fixture(scope="session")
def llm_of(checkpoint) -> Callable[..., LLM]:
    """`llm_of(family, scan=False, kv_cache_dtype=None)`: a shared LLM of 4 rows with prefill buckets 8 and 16;
    with stacked layers 16 alone.

    Leave it idle, and use it for greedy tokens and logits: every other mode needs a dozen more programs.
    """

    @functools.cache
    def build(family: str, scan: bool = False, kv_cache_dtype: str | None = None) -> LLM:
        buckets = Buckets(prefill=(16,) if scan else (8, 16), batch=(4,), cache=(MAX_LEN,))
        return build_llm(checkpoint(family), buckets, scan=scan, kv_cache_dtype=kv_cache_dtype)

    return build


@pytest.fixture(scope="session")
def llama(llm_of) -> LLM:
    return llm_of("llama")


@pytest.fixture(scope="session")
def small(checkpoint) -> LLM:
    """One layer, two rows, 64 positions, two steps per dispatch: quick to compile in all modes. Leave it idle."""
    buckets = Buckets(prefill=(8,), batch=(1, 2), cache=(64,))
    return build_llm(checkpoint("llama", num_hidden_layers=1), buckets, decode_steps=2)
