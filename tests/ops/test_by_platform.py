"""Forms of platforms: which are traced, and that traces for one platform do not serve another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from inferlib.ops.by_platform import DEFAULT, by_platform, traced_for


@pytest.mark.parametrize(
    ("platform", "result", "traced"),
    [
        pytest.param(
            None,
            2.0,
            {"cpu", "cuda", "default"},
            marks=pytest.mark.skipif(jax.default_backend() != "cpu", reason="the result is that of CPUs"),
        ),
        ("cpu", 2.0, {"cpu"}),
        ("cuda", 3.0, {"cuda"}),
        ("tpu", 4.0, {"default"}),
        (DEFAULT, 4.0, {"default"}),
    ],
)
def test_the_forms_that_are_traced(platform, result, traced):
    seen = set()

    def form(name: str, factor: float):
        def run(x: jax.Array) -> jax.Array:
            seen.add(name)
            return factor * x

        return run

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        return by_platform(x, cpu=form("cpu", 2.0), cuda=form("cuda", 3.0), default=form("default", 4.0))

    with traced_for(platform):
        assert float(f(jnp.float32(1.0))) == result
    assert seen == traced


def test_a_function_is_traced_anew_for_another_platform():
    f = jax.jit(lambda x: by_platform(x, cuda=lambda x: x + 1, default=lambda x: x - 1))
    with traced_for("cuda"):
        assert int(f(jnp.int32(0))) == 1
    with traced_for("tpu"):
        assert int(f(jnp.int32(0))) == -1
    with traced_for("cuda"):
        assert int(f(jnp.int32(0))) == 1
