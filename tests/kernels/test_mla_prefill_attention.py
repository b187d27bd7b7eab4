"""Prefill attention over latents: XLA's form and the TPU kernel against one float64 oracle. About 20 s."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from inferlib.attention_values import Expansion, LatentCache
from inferlib.ops.quantized import Scheme
from inferlib.pallas_kernels import mla_prefill_attention_tpu as tpu
from inferlib.pallas_kernels.generations_tpu import planning_for
from tests.helpers.attention_calls import mla_prefill_attention
from tests.helpers.kernels import copies_of, on_backends
from tests.helpers.mla_prefill_attention_cases import SCALE, Case
from tests.helpers.packed_experts import rounded

BACKENDS = {"xla": mla_prefill_attention, "tpu": partial(mla_prefill_attention, backend="pallas_tpu")}
CASES = {
    "starts at edges of blocks": Case((0, 1, 255, -1, 256, 257, 480)),
    "half precision, two tiles, the last one not full": Case(
        (130, 512), width=384, slots=1024, heads=2, rank=256, rotary=128, fold=1, value=256, dtype=jnp.bfloat16
    ),
    "four positions a row of keys, beyond the cache, large logits": Case(
        (0, 511, 600), slots=1024, rotary=32, fold=4, nope=64, limit=520, loudness=1e4
    ),
    "keys of 128, values of 256, large logits": Case(
        (1, 130), rotary=128, fold=1, value=256, heads=2, slots=256, loudness=1e4
    ),
    "pages, stacked layers": Case((0, 1, 240, 300, -1, 1000), slots=256, columns=5, layers=2),
    "positions dealt out": Case((0, 1, 400), stripe=4, width=64),
}

RACES = ("starts at edges of blocks", "pages, stacked layers")
FURTHER_RACES = [("pages, stacked layers", "on_wait"), ("starts at edges of blocks", "on_wait")]
# Positions of any kind, which drawn examples have too, and sizes that the case in half precision has.
FURTHER = [
    ("positions dealt out", "tpu"),
    ("starts at edges of blocks", "xla"),
    *(("keys of 128, values of 256, large logits", backend) for backend in ("xla", "tpu")),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that chunks have several tiles and products, and rows several blocks of several parts."""

    def small(width: int, heads: int, unit: int) -> tpu.Blocks:
        some = max(n for n in (1, 2, 3) if heads % n == 0)
        return tpu.Blocks(width if width <= 128 else 256, some, max(256, unit), rows=128)

    monkeypatch.setattr(tpu, "blocks", small)


@pytest.mark.slow
@on_backends(CASES, BACKENDS, RACES, further=FURTHER)
def test_equals_the_oracle(name, backend):
    CASES[name].check(BACKENDS[backend])


@pytest.mark.slow
def test_scales_of_latents_and_keys_are_folded_in():
    """Quantised, they are numbers times the scale of their position; unseen scales are NaN too."""
    case = Case((0, 60), width=16, slots=128, fold=1)
    inputs, cached = case.inputs(), {}
    for name in ("latents", "keys"):
        cached[name], inputs[name] = rounded(Scheme("int8"), inputs[name])
    wants = case.oracle(inputs)
    inputs |= {name: x.values for name, x in cached.items()}
    scales = tuple(cached[name].scales for name in ("latents", "keys"))
    out, lse = jax.jit(partial(mla_prefill_attention, scale=SCALE))(**inputs, scales=scales)
    for chunk, (want, want_lse) in wants.items():
        np.testing.assert_allclose(out[chunk], want, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(lse[chunk], want_lse, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="no scales of latents"):
        mla_prefill_attention(**inputs, scales=scales, scale=SCALE, backend="pallas_tpu")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.float16}, "bfloat16 or float32"),
        ({"slots": 384}, "384 positions are no multiple of 256"),
        ({"rank": 96}, "latents of 96 and rotary keys of 128 numbers do not fill lanes"),
        ({"rotary": 16}, "latents of 128 and rotary keys of 32 numbers do not fill lanes"),
        ({"value": 64}, "keys of 128 and values of 64 numbers are no multiples of 8 and 128"),
        ({"width": 12}, "chunks of 12 tokens do not divide into tiles of 8"),
        ({"width": 128, "rank": 4096, "value": 1024}, "on-chip memory"),
        ({"columns": 200000}, "bytes of scalar memory"),
    ],
)
def test_what_the_tpu_kernel_cannot_run_is_refused_with_the_reason(changes, reason):
    case = Case((1, 2), **changes)

    def struct(*shape: int, dtype=case.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    q = struct(2, case.width, case.heads, case.nope + case.rotary)
    k, v = struct(case.heads, case.nope, case.rank), struct(case.heads, case.rank, case.value)
    latents = struct(2, 1, case.slots, case.rank)
    keys = struct(2, 1, case.slots // case.fold, case.rotary * case.fold)
    assert reason in tpu.unsupported(q, k, v, latents, keys, pages=case.columns)
    rows, positions = struct(2, dtype=jnp.int32), struct(2, case.width, dtype=jnp.int32)
    options = {"pages": struct(2, case.columns, dtype=jnp.int32)} if case.columns else {}
    with pytest.raises(ValueError, match=reason):
        jax.eval_shape(partial(BACKENDS["tpu"], scale=1.0), q, k, v, latents, keys, rows, positions, **options)


def test_blocks_are_checked():
    with pytest.raises(ValueError, match="multiples of 128"):
        tpu.Blocks(192, 2)
    with pytest.raises(ValueError, match="not a multiple of 128"):
        tpu.Blocks(128, 2, 200)
    inputs = Case((1,), slots=512).inputs()
    arrays = [jnp.squeeze(inputs.pop(name), -3) for name in ("latents", "keys")]
    inputs |= {"expansion": Expansion(inputs.pop("k"), inputs.pop("v")), "cache": LatentCache(*arrays)}
    with pytest.raises(ValueError, match="blocks of 384 positions of 2 heads do not fit 256 of 3"):
        tpu.mla_prefill_attention(**inputs, scale=SCALE, blocks=tpu.Blocks(32, 2, 384))


def test_blocks_for_any_shape(monkeypatch):
    """They are valid and fit the chips with the least memory."""
    monkeypatch.undo()
    for width in (16, 128, 384, 512, 640, 2048, 8192):
        for heads in (1, 2, 5, 11, 16, 128):
            for rotary in (32, 64, 128):
                q = jax.ShapeDtypeStruct((2, width, heads, 128 + rotary), jnp.bfloat16)
                k = jax.ShapeDtypeStruct((heads, 128, 512), jnp.bfloat16)
                v = jax.ShapeDtypeStruct((heads, 512, 128), jnp.bfloat16)
                latents = jax.ShapeDtypeStruct((4, 8192, 512), jnp.bfloat16)
                keys = jax.ShapeDtypeStruct((4, 64 * rotary, 128), jnp.bfloat16)
                assert tpu.unsupported(q, k, v, latents, keys) is None


@pytest.mark.slow
@copies_of(RACES, early=("pages, stacked layers",), further=FURTHER_RACES)
def test_the_tpu_kernel_has_no_races(name, mode, capsys):
    """Copies happen when they are started, or not before they are waited for."""
    CASES[name].check(interpreted(pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)))
    assert "RACE" not in capsys.readouterr().out  # newer jax raises


@pytest.mark.slow
def test_two_cores_share_the_tiles(capsys):
    params = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True)
    with planning_for("v5p"):
        CASES["half precision, two tiles, the last one not full"].check(interpreted(params))
    assert "RACE" not in capsys.readouterr().out


def interpreted(params: pltpu.InterpretParams) -> Callable[..., Any]:
    """The kernel as an operation."""

    def run(k, v, latents, keys, *, weight_layer=None, **rest):
        cells = {name: rest.pop(name) for name in ("layer", "pages", "limit") if name in rest}
        cache = LatentCache(jnp.squeeze(latents, -3), jnp.squeeze(keys, -3), **cells)
        weights = Expansion(k, v, weight_layer)
        return tpu.mla_prefill_attention(expansion=weights, cache=cache, interpret=params, **rest)

    return run
