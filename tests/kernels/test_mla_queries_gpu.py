"""Queries and new cells of latent attention in one kernel for NVIDIA GPUs: interpreted elsewhere. About 5 s."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from inferlib.models.config import MlaSpec, RopeSpec
from inferlib.models.layers.mla import LatentStep, Mla
from inferlib.ops.by_platform import traced_for
from inferlib.ops.choice import Choice
from inferlib.ops.mla_queries import choose, mla_queries
from inferlib.pallas_kernels.mla_queries_gpu import ROWS
from tests.helpers.decode_attention_cases import TOLERANCE

EPS = 1e-3


def draw(
    rows: int, heads: int = 3, nope: int = 128, rank: int = 512, rotary: int = 64, before: int = 0, dtype="float32"
):
    rng = np.random.default_rng(0)
    shapes = (rows, heads, nope + rotary), (rows, before + rank + rotary), (rank,), (heads, nope, rank)
    drawn = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    angles = rng.uniform(0, 6, size=(rows, rotary // 2))
    return *drawn, jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


@jax.jit
def expected(q, down, weight, k, cos, sin):
    """What the layer computes without the kernel, in float32."""
    q, down, weight, k = (x.astype(jnp.float32) for x in (q, down, weight, k))
    (heads, n, rank), rope = k.shape, RopeSpec(2 * cos.shape[1], 1e4)
    before = down.shape[1] - rank - rope.dim
    spec = MlaSpec(heads, before or None, rank, n, n, rope, scale=1.0, eps=EPS)
    layer = SimpleNamespace(spec=spec, kv_norm={...: weight}, k={...: k})
    q, latent, key = Mla.rotated(layer, q, down, SimpleNamespace(rope={rope: (cos, sin)}))
    return *LatentStep.absorb(layer, q), latent[:, None], key[:, None]


@pytest.mark.slow
@pytest.mark.parametrize(
    "inputs",
    [
        dict(rows=1, dtype="bfloat16"),
        dict(rows=ROWS, nope=40, rank=32, rotary=16, before=24),
        dict(rows=3, nope=16, rank=128, rotary=32, before=10),
    ],
    ids=["V2-Lite's", "a latent of queries before them", "rows that fill no tile"],
)
def test_equals_what_layers_compute(inputs):
    operands = draw(**inputs)
    result = jax.jit(lambda *xs: mla_queries(*xs, EPS))(*operands)
    scale = operands[3].shape[1] ** 0.5  # of what is summed
    for got, want in zip(result, expected(*operands), strict=True):
        assert (got.dtype, got.shape) == (operands[0].dtype, want.shape)
        tolerance = TOLERANCE[got.dtype.name]
        np.testing.assert_allclose(np.asarray(got).astype(np.float32), want, rtol=tolerance, atol=tolerance * scale / 8)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (dict(rows=17), "at most 16 rows, not 17"),
        (dict(rows=1, dtype="int8"), "one of bfloat16, float16, float32, not int8 and int8"),
        (dict(rows=1, rank=48), "latents of 48 and rotary keys of 16"),
        (dict(rows=1, rotary=8), "latents of 32 and rotary keys of 8"),
    ],
)
def test_what_it_cannot_run_is_refused(inputs, reason):
    operands = draw(**dict(rank=32, rotary=16) | inputs)
    q, _, _, k, cos, _ = operands
    assert reason in choose(q, k, cos, "pallas_gpu").reason
    with pytest.raises(ValueError, match=reason):
        mla_queries(*operands, EPS)


def test_queries_and_their_weight_are_of_one_dtype():
    q, _, _, k, cos, _ = draw(1, rank=32, rotary=16, dtype="bfloat16")
    assert choose(q, k, cos, "pallas_gpu") == Choice("pallas_gpu")
    assert choose(q, k.astype("float32"), cos, "pallas_gpu").reason.endswith("not bfloat16 and float32")


def test_lowers_to_triton():
    device = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    with traced_for("cuda"), jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(lambda *xs: mla_queries(*xs, EPS)).trace(*draw(1, nope=192, dtype="bfloat16"))
        assert "xla.gpu.triton" in traced.lower(lowering_platforms=("cuda",)).as_text()
