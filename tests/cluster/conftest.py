"""A Ray cluster of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from tests.helpers.cli_model import sharing_programs

QUIET: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """The cluster has 4 CPUs as Ray counts them, so that replicas find room on a small machine.

    Its dozen processes take a tenth of a core, so it ends with this folder. Replicas load the programs that were
    compiled before, by variables that all processes inherit. None starts before there is something to do: as many would
    as there are CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sharing_programs().items():
            patch.setenv(name, value)
        config = dict.fromkeys(("enable_worker_prestart", "prestart_worker_first_driver"), False)
        ray.init(num_cpus=4, _system_config=config, **QUIET)
        yield
        ray.shutdown()
