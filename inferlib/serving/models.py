"""`/v1/models` and `/health`."""

from __future__ import annotations

from typing import Any

from inferlib.serving.errors import ApiError
from inferlib.serving.service import Service


def list_models(service: Service) -> dict[str, Any]:
    return {"object": "list", "data": [_model(service, name) for name in service.options.names]}


def one_model(service: Service, name: str) -> dict[str, Any]:
    """Raises ApiError for a name that is not the model's."""
    service.check_model(name)
    return _model(service, name)


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "inferlib",
        "root": service.name,
        "max_model_len": service.llm.llm.config.max_len,
    }


def check_health(service: Service) -> dict[str, Any]:
    """Raises ApiError while the server ends, or the model sleeps."""
    if service.draining:
        raise ApiError(503, "the server ends: send requests to another", code="draining")
    if service.llm.llm.engine.asleep:
        raise ApiError(503, "the model sleeps", code="asleep")
    return {"status": "ok"}
