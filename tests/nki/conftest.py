"""Importing the package puts the stand-in in the place of `nki`, which the tests here import."""

from __future__ import annotations

import numpy as np
import pytest

import inferlib.nki_kernels  # noqa: F401


@pytest.fixture
def rng():
    return np.random.default_rng(0)
