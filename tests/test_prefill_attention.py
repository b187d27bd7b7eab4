"""Every implementation of prefill attention against one float64 oracle."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from inferlib.ops.prefill_attention import prefill_attention
from inferlib.pallas_kernels import prefill_attention_tpu
from tests.prefill_attention_cases import Case

pytestmark = pytest.mark.usefixtures("quick_compilations")

BACKENDS = {"xla": prefill_attention, "tpu": partial(prefill_attention, backend="pallas_tpu")}
CASES = {
    "starts at edges of blocks": Case((0, 1, 255, -1, 256, 257, 480)),
    "two tiles, the last one not full": Case((0, 130), width=384, slots=640, group=1, heads=1),
    "half precision, softcap, sinks": Case(
        (0, 1, 200), width=16, group=4, dtype=jnp.bfloat16, sinks=True, options={"softcap": 20.0}
    ),
    "beyond the cache": Case((500, 360), width=64, slots=384),
    "window": Case((0, 49, 50, 51, 300, 440), width=64, options={"window": 50}),
    "wide window": Case((0, 1, 270, 512), width=256, slots=768, heads=1, group=1, options={"window": 400}),
    "ring": Case((0, 100, 352, 1003), slots=384, ring=True, options={"window": 300}),
    "ring, sinks, softcap": Case((5, 1003), slots=256, ring=True, sinks=True, options={"window": 200, "softcap": 5.0}),
    "odd groups of size 256": Case((3, 130), size=256, group=3, heads=1),
    "large logits": Case((1, 200), loudness=1e4, sinks=True),
    "stacked layers": Case((5, 130), layers=2),
    "pages": Case((0, 1, 16, 17, -1, 80), slots=16, columns=7, layers=2),
    "pages of blocks": Case((0, 224, 250), slots=256, columns=2),
    "ring of pages": Case((0, 17, 100, 500), slots=16, columns=7, ring=True, options={"window": 60}),
    "positions dealt out": Case((0, 1, 400), stripe=4, width=64),
    "listed blocks": Case((0, 130, 384, -1), width=256, slots=640, listed=3, group=1),
    "listed blocks, window, sinks": Case((0, 384), width=128, listed=2, sinks=True, options={"window": 200}),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that chunks have several tiles and products, and rows several blocks of several parts."""

    def blocks(width, *_):
        return prefill_attention_tpu.Blocks(width if width <= 128 else 256, 256, rows=128, edge=128)

    monkeypatch.setattr(prefill_attention_tpu, "blocks", blocks)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name, backend):
    CASES[name].check(BACKENDS[backend])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "on_wait"])
@pytest.mark.parametrize("name", ["starts at edges of blocks", "wide window", "ring", "pages", "listed blocks"])
def test_the_tpu_kernel_has_no_races(name, mode, capsys):
    """Copies happen when they are started, or not before they are waited for."""
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)
    real = prefill_attention_tpu.prefill_attention

    def run(**inputs):
        if listed := inputs.pop("listed", None):
            inputs |= {"visits": listed.numbers, "blocks": prefill_attention_tpu.Blocks(128, 128, edge=128)}
        return real(**inputs, interpret=params)

    CASES[name].check(run)
    assert "RACE" not in capsys.readouterr().out  # newer jax raises
