"""Many replicas of a model on a Ray cluster: a server on Ray Serve, and batch jobs on Ray Data.

A replica is one `LLM` on its own devices. Ray places replicas, adds and removes them, and starts lost ones again.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("ray") is None:
    raise ModuleNotFoundError("ray is not installed: pip install 'inferlib[ray]'", name="ray")
