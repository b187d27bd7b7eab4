"""`/v1/models`, `/health`, and `/load` for the page."""

from __future__ import annotations

import time
from typing import Any

from inferlib.serving.errors import ApiError
from inferlib.serving.service import Service


def list_models(service: Service) -> dict[str, Any]:
    return {"object": "list", "data": [_model(service, name) for name in service.names]}


def one_model(service: Service, name: str) -> dict[str, Any]:
    """Raises ApiError for a name that is neither the model's nor an adapter's."""
    service.check_model(name)
    return _model(service, name)


def _model(service: Service, name: str) -> dict[str, Any]:
    parent = {} if service.adapter_of(name) is None else {"parent": service.name}
    return {
        "id": name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "inferlib",
        "root": service.name_of(name),
        **parent,
        "max_model_len": service.llm.llm.config.max_len,
    }


def check_health(service: Service) -> dict[str, Any]:
    """Raises ApiError while the server ends, or the model sleeps."""
    if service.draining:
        raise ApiError(503, "the server ends: send requests to another", code="draining")
    if service.llm.llm.engine.asleep:
        raise ApiError(503, "the model sleeps", code="asleep")
    return {"status": "ok"}


def current_load(service: Service) -> dict[str, Any]:
    """Numbers of this moment, and totals since the start; the page makes rates of them."""
    engine, metrics = service.llm.llm.engine, service.metrics
    pages = engine.plan.pages
    return {
        "model": service.name,
        "running": len(engine.scheduler.running),
        "waiting": len(engine.scheduler.waiting),
        "rows": engine.config.max_batch,
        "pages": pages,
        "used_pages": pages - sum(x.free for x in engine.scheduler.pages),
        "cached_pages": engine.stats.cached_pages,
        "prompt_tokens": metrics.prompt_tokens,
        "cached_tokens": metrics.cached_tokens,
        "generated_tokens": metrics.generated_tokens,
        "seconds": time.time() - service.started,
        "draining": service.draining,
    }
