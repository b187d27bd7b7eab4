"""A Ray cluster of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """Of 8 CPUs as Ray counts them, so that replicas find room on a small machine.

    Its dozen processes take a tenth of a core, so it ends with this folder."""
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
