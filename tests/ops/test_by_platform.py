"""Forms of platforms: which are traced, and that traces for one platform do not serve another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from inferlib.ops.by_platform import DEFAULT, by_platform, traced_for

HERE = {"cpu": 2.0, "gpu": 3.0}.get(jax.default_backend(), 4.0)  # of the form that runs if no platform is named


@pytest.mark.parametrize(
    ("platform", "result", "traced"),
    [
        (None, HERE, {"cpu", "cuda", "default"}),
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
