"""The choice of experts on NVIDIA GPUs: interpreted elsewhere. About 5 s."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.ops.choice import Choice
from inferlib.ops.choose_experts import choose, choose_experts
from inferlib.pallas_kernels.choose_experts_gpu import choose_experts as kernel
from tests.helpers.kernels import kernels_in

interpreted = partial(kernel, interpret=jax.default_backend() == "cpu")


# Each score with a correction and without, and so each way to weigh them.
CHOICES = [
    *((8, 2, "softmax", True, False), (60, 6, "softmax", False, True)),
    *((60, 6, "sigmoid", True, True), (384, 8, "sigmoid", False, False)),
]


@pytest.mark.parametrize(
    ("experts", "count", "score", "renormalize", "corrected"),
    [*CHOICES, *(pytest.param(*rest, not corrected, marks=pytest.mark.release) for *rest, corrected in CHOICES)],
)
def test_equals_xla(experts, count, score, renormalize, corrected):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(5, experts)) * 3, jnp.float32)
    correction = jnp.asarray(rng.normal(size=experts), jnp.float32) if corrected else None
    options = dict(count=count, score=score, renormalize=renormalize)
    by_xla = partial(choose_experts, among=lambda ranks: ranks)
    result, expected = (jax.jit(partial(run, **options))(logits, correction) for run in (interpreted, by_xla))
    np.testing.assert_array_equal(result[0], expected[0])
    np.testing.assert_allclose(result[1], expected[1], rtol=2e-6, atol=1e-9)


def test_the_first_of_equals_and_extreme_logits():
    logits = jnp.array([[1e4, 1e4, -1e4, 1e4], [0, 0, 0, 0], [-jnp.inf, 3, -jnp.inf, -jnp.inf]], jnp.float32)
    experts, weights = interpreted(logits, None, count=3, score="softmax", renormalize=False)
    np.testing.assert_array_equal(experts, [[0, 1, 3], [0, 1, 2], [1, 0, 2]])
    np.testing.assert_allclose(weights, [[1 / 3] * 3, [0.25] * 3, [1, 0, 0]], rtol=1e-6)


def test_experts_exist_whatever_the_logits():
    experts, _ = interpreted(jnp.full((2, 6), jnp.nan), None, count=2, score="sigmoid", renormalize=True)
    assert ((experts >= 0) & (experts < 6)).all()


def test_all_tokens_take_it_on_gpus():
    def taken(tokens, backend="pallas_gpu", **options):
        options |= dict(correction=None, count=2, score="softmax", renormalize=True, backend=backend)
        return bool(kernels_in(partial(choose_experts, **options), jnp.ones((tokens, 8))))

    assert taken(1)
    assert taken(2048)
    assert not taken(1, among=lambda ranks: ranks)
    assert not taken(1, backend="xla")


def test_the_choice_says_why_it_is_xlas():
    assert choose("pallas_gpu", grouped=False) == Choice("pallas_gpu")
    assert "best groups" in choose("pallas_gpu", grouped=True).reason
    assert choose("xla", grouped=True) == Choice("xla")
