"""Cells of turned keys against numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.ops.calibrated_cells import CalibratedCells
from inferlib.ops.int4_cells import CALIBRATED_KEYS, KEYS, cells_of_keys
from tests.helpers.llms import calibrated_cells

GENERATOR = np.random.default_rng(0)
CELLS = CalibratedCells()


@pytest.mark.parametrize("size", [8, 64, 96])
def test_numbers_are_those_of_numpy(size):
    """But for those next to a border of rounding, and quarters where two shares are as good."""
    x = GENERATOR.standard_normal((50, 3, size)) * np.repeat([4, 2, 1, 0.5], size // 4)
    x[0, 0] = 0
    x[0, 1, :-1] = 0  # the last quarter has the largest number
    x = x.astype(np.float32)
    stored = jax.jit(CELLS.encode)(x)
    assert (stored.shape, stored.dtype) == ((50, 3, size // 2 + 5), jnp.uint8)
    assert (CELLS.nbytes(size), CELLS.size(stored.shape[-1])) == (size // 2 + 5, size)
    numbers, expected = np.asarray(CELLS.decode(stored, jnp.float32)), calibrated_cells(x)
    assert np.mean(np.abs(numbers - expected) > 1e-5 * np.abs(expected)) < 2e-3
    np.testing.assert_array_equal(numbers[0, 0], 0)
    errors, squares = (np.sum(y.reshape(50, 3, 4, -1)[1:] ** 2, axis=(0, 1, 3)) for y in (numbers - x, x))
    assert np.all(errors < np.array([0.03, 0.1, 0.25, 0.25]) ** 2 * squares)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_cell_alone(bad):
    x = GENERATOR.standard_normal((4, 16)).astype(np.float32)
    through = jax.jit(lambda x: CELLS.decode(CELLS.encode(x), jnp.float32))
    good = np.asarray(through(x))
    x[2, 5] = bad
    numbers = np.asarray(through(x))
    assert not np.isfinite(numbers[2]).any()
    np.testing.assert_array_equal(np.delete(numbers, 2, 0), np.delete(good, 2, 0))


def test_the_bytes_of_a_cell_tell_its_form():
    for size in range(8, 520, 8):
        assert cells_of_keys(CALIBRATED_KEYS.nbytes(size)) is CALIBRATED_KEYS
        assert cells_of_keys(KEYS.nbytes(size)) is KEYS
