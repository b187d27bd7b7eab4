"""Decode attention over latents on NVIDIA GPUs: interpreted elsewhere. About 20 s."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from inferlib.models.attention_choices import choose_attention
from inferlib.models.config import MlaSpec, RopeSpec
from inferlib.ops.backend import Backend
from inferlib.ops.by_platform import traced_for
from inferlib.pallas_kernels import mla_decode_attention_gpu as gpu
from tests.helpers.attention_calls import mla_decode_attention
from tests.helpers.mla_decode_attention_cases import SCALE, Case

RUN = partial(mla_decode_attention, backend="pallas_gpu")
SMALL = partial(Case, rank=32, rotary=16, fold=1, slots=64)  # tiles of 16 positions of float32, 32 of bfloat16


def one_query(run, q, rotary, **rest):
    """By a contract of one query of a row, as one of several."""
    out, lse, *cache = run(q=q[:, 0], rotary=rotary[:, 0], **rest)
    return out[:, None], lse[:, None], *cache


def with_new(run, lengths, latents, keys, **rest):
    """The newest position of each row is not in the cache yet, and then it is, and nothing else; else lse is NaN."""
    slots, rows = latents.shape[2], jnp.arange(lengths.size)
    last, pages = jnp.maximum(lengths - 1, 0), rest.get("pages")
    page = rows if pages is None else pages[rows, last // slots]
    at = page, slice(None), jnp.where(lengths > 0, last % slots, slots)
    new, stale = [], []
    for x in (latents, keys):
        new.append(x.at[at].get(mode="fill", fill_value=7.0).astype(jnp.float32))
        stale.append(x.at[at].set(jnp.nan, mode="drop"))
    out, lse, *cache = run(lengths=lengths, latents=stale[0], keys=stale[1], new=new, **rest)
    pairs = zip(cache, (latents, keys), strict=True)
    same = jnp.stack([jnp.array_equal(result, want, equal_nan=True) for result, want in pairs])
    return out, jnp.where(jnp.all(same), lse, jnp.nan)


CASES = {
    "lengths": SMALL((0, 1, 15, 16, 17, 33, 64, 0)),
    "two tiles of heads": SMALL((0, 5, 64), heads=20, rank=16),
    "pages of a stack, large logits": SMALL((0, 17, 64), slots=16, columns=4, layers=2, loudness=1e4),
    "pages of blocks, bfloat16": SMALL((1, 128, 129, 200), slots=128, columns=2, dtype=jnp.bfloat16),
}
WRITTEN = ("two tiles of heads", "pages of blocks, bfloat16")


# What is new is written in two of them, and their results are compared there, too; drawn lengths are in
# `test_attention_properties`.
FURTHER = (*WRITTEN, "lengths")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.release] * (x in FURTHER)) for x in CASES])
def test_equals_the_oracle(name):
    CASES[name].check(partial(one_query, RUN))


@pytest.mark.slow
def test_several_queries_are_rows_of_their_own():
    """Some before the first position, and some rows inactive."""
    SMALL((0, 1, 3, 5, 18, 64), queries=4, slots=16, columns=4, layers=2).check(RUN)


@pytest.mark.parametrize("backend", ["pallas_gpu", "xla"])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_new_is_written(name, backend):
    run = partial(mla_decode_attention, backend=backend)
    CASES[name].check(partial(one_query, partial(with_new, run)))


@pytest.mark.slow
def test_one_share_and_shares_of_unlike_rows(monkeypatch):
    """Rows that fill the chip have one share, and rows longer than the average more than the others."""
    case = SMALL((64, 3, 40, 16))
    run = partial(one_query, partial(with_new, RUN))
    monkeypatch.setattr(gpu, "PROGRAMS", 4)
    assert gpu._splits(4, 64, 16) == 1
    case.check(run)
    monkeypatch.setattr(gpu, "PROGRAMS", 8)
    assert gpu._splits(4, 64, 16) == 4
    case.check(run)


def test_shares_of_usual_shapes():
    """A single row is dealt to the whole chip, and many rows are not cut into more shares than run at once."""
    assert gpu._splits(1, 2048, 32) == 64
    assert gpu._splits(1, 10**6, 32) == gpu.MOST_SHARES
    assert gpu._splits(64, 2048, 32) == 8
    assert gpu._splits(64 * 8, 2048, 32) == 1


def test_what_it_cannot_run_is_refused_with_the_reason():
    inputs = SMALL((1, 2)).inputs()
    q, rotary = inputs.pop("q")[:, 0], inputs.pop("rotary")[:, 0]
    for argument, reason in (
        (dict(q=q.astype(jnp.bfloat16)), "queries and a cache of one of"),
        (dict(rotary=rotary[:, :1]), "do not match"),
        (dict(latents=inputs["latents"][..., :24]), "latents of 24 and rotary keys of 16"),
        (dict(layer=0), "writes to none"),
        (dict(scales=(q, q)), "no scales of latents"),
    ):
        with pytest.raises(ValueError, match=reason):
            RUN(**{"q": q, "rotary": rotary, **inputs, **argument}, scale=SCALE)
    with pytest.raises(ValueError, match="pages of 40 positions"):
        SMALL((1, 2), slots=40, columns=1).check(partial(one_query, RUN))
    with pytest.raises(ValueError, match="powers of two from 16"):
        gpu.Blocks(heads=8)


@pytest.mark.parametrize(
    ("rank", "rotary", "scaled", "reason"),
    [
        (512, 64, False, ""),
        (256, 32, False, ""),
        (384, 64, False, "latents of 384 and rotary keys of 64"),
        (512, 64, True, "a cache of int8 or fp8"),
    ],
)
def test_models_that_it_decodes(rank, rotary, scaled, reason):
    spec = MlaSpec(16, None, rank, 128, 128, RopeSpec(rotary, 10000.0), 0.1)
    backend = Backend(decode_attention="pallas_gpu")
    assert choose_attention(spec, "decode_attention", backend, scaled=scaled).reason == reason


@pytest.mark.parametrize(("dtype", "columns"), [("bfloat16", 8), ("float32", None)])
def test_lowers_to_triton(dtype, columns):
    """DeepSeek-V2-Lite's shape; the cache is written where it lies."""
    cells = (40, 1, 128) if columns else (2, 1, 2048)
    shapes = {"q": (2, 16, 512), "rotary": (2, 16, 64), "latents": (*cells, 512), "keys": (*cells, 64)}
    inputs = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    if columns:
        inputs["pages"] = jax.ShapeDtypeStruct((2, columns), "int32")
    new = [jax.ShapeDtypeStruct((2, 1, size), dtype) for size in (512, 64)]
    device = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    run = jax.jit(partial(RUN, scale=SCALE), donate_argnames=("latents", "keys"))
    with traced_for("cuda"), jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = run.trace(**inputs, lengths=jax.ShapeDtypeStruct((2,), "int32"), new=new)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "xla.gpu.triton" in text
    assert text.count("output_operand_alias<") == 2
