"""Decode attention over latents: XLA's form, the TPU kernel and Trainium's against one float64 oracle. 20 s."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from inferlib.attention_values import LatentCache
from inferlib.ops.quantized import Scheme
from inferlib.pallas_kernels import mla_decode_attention_tpu as tpu
from tests.helpers.attention_calls import mla_decode_attention
from tests.helpers.kernels import copies_of, on_backends
from tests.helpers.mla_decode_attention_cases import SCALE, Case
from tests.helpers.packed_experts import rounded

# Several blocks a row, several parts a block, and rows that end in each.
SMALL = tpu.Blocks(positions=512, part=256, edge=256)
BACKENDS = {
    "xla": mla_decode_attention,
    "tpu": partial(mla_decode_attention, backend="pallas_tpu"),
}
CASES = {
    "lengths": Case((0, 1, 255, 256, 257, 511, 512, 0), layers=2),
    "half precision, keys of 128, 200 queries": Case(
        (0, 2, 300, 512), dtype=jnp.bfloat16, queries=2, heads=100, rotary=128, fold=1
    ),
    "four positions a row of keys, large logits": Case(
        (0, 511, 513, 1024), slots=1024, rotary=32, fold=4, heads=3, loudness=1e4
    ),
    "pages": Case((0, 1, 256, 300, 1100), slots=256, columns=5, layers=2),
    "pages of more than a block": Case((768, 1030), slots=768, columns=2),
    "several queries": Case((0, 1, 3, 5, 256, 258, 512), queries=4),
}

RACES = ("lengths", "pages", "several queries")
# Blocks within a page, which rows without pages have too; pages, which drawn examples have.
FURTHER = [*(("pages of more than a block", backend) for backend in ("xla", "tpu")), ("pages", "xla")]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    def small(width: int, unit: int, *_) -> tpu.Blocks:
        part = max(unit, 256)
        return dataclasses.replace(SMALL, part=part, edge=part)

    monkeypatch.setattr(tpu, "blocks", small)


@on_backends(CASES, BACKENDS, RACES, further=FURTHER)
@pytest.mark.fast_cases(1)
def test_equals_the_oracle(name, backend):
    CASES[name].check(BACKENDS[backend])


@pytest.mark.slow
def test_the_trainium_kernel_on_its_stand_in():
    case = Case((0, 1, 3, 5, 256, 300), queries=4, slots=256, columns=2, fold=1, layers=2)
    case.check(partial(mla_decode_attention, backend="nki"))


def test_one_query_needs_no_axis():
    inputs = Case((3, 256)).inputs()
    run = partial(mla_decode_attention, scale=SCALE)
    whole = jax.jit(partial(run, limit=300))(**inputs)
    alone = jax.jit(run)(**inputs | {name: inputs[name][:, 0] for name in ("q", "rotary")})
    for a, b in zip(whole, alone, strict=True):
        np.testing.assert_allclose(a[:, 0], b, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_scales_of_latents_and_keys_are_folded_in():
    """Quantised, they are numbers times the scale of their position; unseen scales are NaN too."""
    case = Case((0, 3, 128), slots=128, fold=1)
    inputs, cached = case.inputs(), {}
    for name in ("latents", "keys"):
        cached[name], inputs[name] = rounded(Scheme("int8"), inputs[name])
    wants = case.oracle(inputs)
    inputs |= {name: x.values for name, x in cached.items()}
    scales = tuple(cached[name].scales for name in ("latents", "keys"))
    assert not jnp.isfinite(scales[0]).all()
    run = jax.jit(partial(mla_decode_attention, scale=SCALE))
    for result, want in zip(run(**inputs, scales=scales), wants, strict=True):
        np.testing.assert_allclose(result, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="no scales of latents"):
        mla_decode_attention(**inputs, scales=scales, scale=SCALE, backend="pallas_tpu")


@pytest.mark.slow
@copies_of(RACES, early=("pages",), further=[("pages", "on_wait"), ("lengths", "on_wait")])
def test_the_tpu_kernel_has_no_races(name, mode, capsys):
    """Copies happen when they are started, or not before they are waited for."""
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)

    def run(q, rotary, latents, keys, **rest):
        q = jnp.concatenate([q, rotary], axis=-1)
        cells = {name: rest.pop(name) for name in ("layer", "pages") if name in rest}
        cache = LatentCache(jnp.squeeze(latents, -3), jnp.squeeze(keys, -3), **cells)
        return tpu.mla_decode_attention(q, cache, interpret=params, **rest)

    CASES[name].check(run)
    assert "RACE" not in capsys.readouterr().out  # newer jax raises


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.float16}, "bfloat16 or float32"),
        ({"slots": 384}, "384 positions are no multiple of 256"),
        ({"rank": 96}, "latents of 96 and rotary keys of 128 numbers do not fill lanes"),
        ({"rotary": 16}, "latents of 128 and rotary keys of 32 numbers do not fill lanes"),
        ({"heads": 300, "queries": 4}, "4 x 300 queries of a row exceed 1024"),
        ({"heads": 1024, "rank": 2048}, "on-chip memory"),
    ],
)
def test_what_the_tpu_kernel_cannot_run_is_refused_with_the_reason(changes, reason):
    case = Case((1, 2), **changes)
    q = jax.ShapeDtypeStruct((2, case.queries, case.heads, case.rank + case.rotary), case.dtype)
    latents = jax.ShapeDtypeStruct((2, 1, case.slots, case.rank), case.dtype)
    keys = jax.ShapeDtypeStruct((2, 1, case.slots // case.fold, case.rotary * case.fold), case.dtype)
    assert reason in tpu.unsupported(q, latents, keys)
    parts = (jax.ShapeDtypeStruct((*q.shape[:3], size), q.dtype) for size in (case.rank, case.rotary))
    with pytest.raises(ValueError, match=reason):
        jax.eval_shape(partial(BACKENDS["tpu"], scale=1.0), *parts, latents, keys, jax.ShapeDtypeStruct((2,), "int32"))


def test_blocks_are_checked():
    with pytest.raises(ValueError, match="multiple of edge"):
        tpu.Blocks(positions=768, part=256, edge=512)
    case = Case((1,), slots=1024, fold=4, rotary=32)
    inputs = case.inputs()
    arrays = (jnp.squeeze(inputs[name], -3) for name in ("latents", "keys"))
    q = jnp.concatenate([inputs["q"], inputs["rotary"]], axis=-1)
    with pytest.raises(ValueError, match="a part of 256 positions is no multiple of 512"):
        tpu.mla_decode_attention(q, LatentCache(*arrays), inputs["lengths"], SCALE, blocks=SMALL)


def test_blocks_for_any_shape(monkeypatch):
    """They are valid, no longer than a row needs, and fit the chips with the least memory."""
    monkeypatch.undo()
    for width in (1, 2, 16, 70, 128, 192, 1000, 1024):
        for unit in (128, 256, 512):
            for slots in (unit, 3 * unit, 4096, 131072):
                result = tpu.blocks(width, unit, slots, 512, 2)
                assert result.part % unit == 0
                assert result.positions < 2 * max(slots, unit)
                q = jax.ShapeDtypeStruct((4, 1, width, 512 + 128 * 128 // unit), jnp.bfloat16)
                latents = jax.ShapeDtypeStruct((4, slots, 512), jnp.bfloat16)
                keys = jax.ShapeDtypeStruct((4, slots * 128 // unit, 128), jnp.bfloat16)
                assert tpu.unsupported(q, latents, keys) is None
