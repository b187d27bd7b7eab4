"""Coordinate descent against float64 in numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.calibration.coordinate_descent import SWEEPS, descend
from inferlib.calibration.rounding import losses, round_to, search_scales
from inferlib.models.quantization import QUANTIZATIONS
from inferlib.ops.quantized import Scheme
from tests.calibration.test_rounding import draw, round_as

GROUP = 32


def oracle(w: np.ndarray, values: np.ndarray, scales: np.ndarray, h: np.ndarray, scheme: Scheme) -> float:
    """The loss after as many sweeps. Each weight and each scale is where a parabola has its least."""
    values, scales = values.copy(), scales.copy()

    def missing() -> np.ndarray:
        return w - values * np.repeat(scales, GROUP, axis=0)

    for group in [*range(len(scales))] * SWEEPS:
        rows = np.arange(group * GROUP, (group + 1) * GROUP)
        for i in rows:
            values[i] = round_as(scheme, values[i] + h[i] @ missing() / (h[i, i] * scales[group]))
        if scheme.scales != "float8_e8m0fnu":
            v = values[rows]
            scales[group] += np.sum(v * (h[rows] @ missing()), 0) / np.sum(v * (h[np.ix_(rows, rows)] @ v), 0)
            scales[group] = scales[group].astype(scheme.scales)
    return float(np.sum(missing() * (h @ missing())))


@pytest.mark.parametrize("name", ["int4", "mxfp4"])
def test_weights_and_scales_take_their_best_in_turn(name):
    scheme, (w, h) = QUANTIZATIONS[name], draw(5)
    w32, h32 = jnp.asarray(w, jnp.float32), jnp.asarray(h, jnp.float32)
    scales = search_scales(w32, jnp.diag(h32), scheme, GROUP)
    values = round_to(w32, scales, scheme)
    better, changed = descend(w32, values, scales, h32, scheme)
    before, after = losses(w32, values, scales, h32), losses(w32, better, changed, h32)
    assert np.all(after <= before)
    assert np.sum(after) < 0.7 * np.sum(before)
    np.testing.assert_allclose(np.sum(after), oracle(w, *map(np.float64, (values, scales)), h, scheme), rtol=0.02)
    np.testing.assert_array_equal(changed.astype(scheme.scales).astype(np.float32), changed)
    assert np.array_equal(changed, scales) == (scheme.scales == "float8_e8m0fnu")


def test_a_group_of_zeros_stays():
    """Its scale says nothing, and is not divided by zero."""
    w, h = (jnp.asarray(x, jnp.float32) for x in draw(6))
    w, scheme = w.at[:GROUP].set(0.0), QUANTIZATIONS["int4"]
    h = h.at[:GROUP, GROUP:].set(0.0).at[GROUP:, :GROUP].set(0.0)
    scales = search_scales(w, jnp.diag(h), scheme, GROUP)
    values, changed = descend(w, round_to(w, scales, scheme), scales, h, scheme)
    assert not np.any(values[:GROUP])
    np.testing.assert_array_equal(changed[0], scales[0])
