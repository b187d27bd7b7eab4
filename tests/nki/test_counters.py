"""What the kernels must reach, by the stand-in's counters and the published rates."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from benchmarks import nki as benchmark
from inferlib.attention_values import AttentionOptions, KvCache
from inferlib.nki_kernels import simulator
from inferlib.nki_kernels.flash_decode import flash_decode

SBUF_BYTES = {"trn2": 224 * 1024, "trn3": 256 * 1024}

# The counts of both generations differ by constants alone.
ONE_FIRST = [pytest.param(x, marks=[pytest.mark.release] * (n > 0)) for n, x in enumerate(benchmark.TARGETS)]


@pytest.mark.parametrize("target", benchmark.TARGETS)
def test_decode_reads_keys_and_values_once_and_hides_all_else(target):
    core, live = benchmark.decode(target, 8192, ml_dtypes.bfloat16)
    assert live <= core.hbm_read <= core.hbm_bytes <= 1.03 * live
    assert max(us for engine, us in core.busy_us.items() if engine != "dma") < core.busy_us["dma"]
    # Twice what lives at once: every tile could be loaded while its forerunner is used.
    assert 2 * core.sbuf_peak <= SBUF_BYTES[target]
    assert 2 * core.psum_peak <= 8
    assert core.short_dma < 0.005 * live


@pytest.mark.slow
@pytest.mark.parametrize("target", ONE_FIRST)
def test_decode_over_latents_reads_them_once_for_all_queries(target):
    """Beside latents, queries and results move. The Tensor engine turns latents once for four groups of queries."""
    core, live = benchmark.latents(target, 1024, 128, 4)
    queries = 512 * (512 + 64 + 512) * 2
    assert live + queries <= core.hbm_bytes <= 1.01 * (live + queries)
    assert 2 * core.sbuf_peak <= SBUF_BYTES[target]
    assert 2 * core.psum_peak <= 8
    alone, _ = benchmark.latents(target, 1024, 128)
    assert core.busy_us["tensor"] < 3.1 * alone.busy_us["tensor"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ONE_FIRST)
def test_chosen_experts_are_read_once_and_no_others(target):
    """Two tokens choose the same 2 of 3 experts. Where all places are taken, reading weights hides the rest."""
    core, chosen = benchmark.experts(target, 2, 3, 2, 3)
    assert chosen <= core.hbm_read <= core.hbm_bytes <= 1.01 * chosen
    assert 2 * core.psum_peak <= 8
    core, _ = benchmark.experts(target, 2, 3, 2, 2)
    assert max(us for engine, us in core.busy_us.items() if engine != "dma") < core.busy_us["dma"]


def test_pages_without_live_slots_are_not_read():
    """One row of 1000 positions with a table for 8192: whole runs of 16 slots are read, of keys and of values."""
    cache = np.ones((512, 1, 16, 128), ml_dtypes.bfloat16)
    q, table = np.ones((1, 1, 1, 4, 128), ml_dtypes.bfloat16), np.arange(512, dtype=np.int32)[None]
    with simulator.session("trn2") as session:
        paged = KvCache(cache, pages=table)
        out, _ = flash_decode(q, paged, np.array([1000], np.int32), AttentionOptions(0.1), lnc=1)
        np.testing.assert_allclose(np.asarray(out, np.float32), 1, rtol=0.01)
    live = 2 * 1008 * 128 * 2
    assert live < session.cores[0].hbm_read < 1.03 * live


@pytest.mark.parametrize("element", ["float8_e4m3fn", "float4_e2m1fn"])
def test_mx_products_fill_the_array_and_read_packed_weights_once(element):
    core, _, useful = benchmark.matmul("trn3", 128, 1024, 1024, element)
    assert useful >= 0.9
    assert core.matmul_useful == core.matmul_slots
    core, packed, _ = benchmark.matmul("trn3", 8, 1536, 2048, element)
    assert packed <= core.hbm_read <= core.hbm_bytes <= 1.05 * packed
    assert max(us for engine, us in core.busy_us.items() if engine != "dma") < core.busy_us["dma"]


def test_trn2_reads_packed_weights_once_too():
    core, packed, _ = benchmark.matmul("trn2", 4, 1024, 1024, "float4_e2m1fn")
    assert packed <= core.hbm_read <= core.hbm_bytes <= 1.05 * packed
