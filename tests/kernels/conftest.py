"""Tests of kernels trace the forms of this platform alone."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_platform(one_platform: None) -> None:
    """See `one_platform`."""
