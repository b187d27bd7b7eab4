"""A Ray cluster of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from tests.helpers.cli_model import sharing_programs


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """Of 8 CPUs as Ray counts them, so that replicas find room on a small machine.

    Its dozen processes take a tenth of a core, so it ends with this folder. Replicas load the programs that were
    compiled before."""
    runtime = {"env_vars": sharing_programs()}
    ray.init(runtime_env=runtime, num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
