"""`response_format`, and vLLM's `structured_outputs` and `guided_*`, as a field of `SamplingParams`."""

from __future__ import annotations

import importlib.util
from typing import Any

from inferlib.programs.keys import DEVICE_MODES, Mode
from inferlib.sampling.structured import StructuredOutputs
from inferlib.serving.errors import ApiError
from inferlib.serving.fields import Fields

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_SPACE = "whitespace_pattern"
_ANY_OBJECT = {"type": "object"}


def read_constraint(fields: Fields) -> StructuredOutputs | None:
    """What the answer has to match, as `SamplingParams` takes it; None if it is free. Raises ApiError."""
    wanted: dict[str, Any] = {}
    if (form := fields.inner("response_format")) is not None:
        wanted |= read_format(form)
    if (inner := fields.inner("structured_outputs")) is not None:
        wanted |= {name: value for name in (*_KINDS, _SPACE) if (value := inner.any(name)) is not None}
        inner.close()
    for name in (*_KINDS[:-1], _SPACE):
        if (value := fields.any(f"guided_{name}")) is not None:
            wanted[name] = value
    if wanted.pop("json_object", False):
        wanted.setdefault("json", _ANY_OBJECT)
    if len(kinds := [name for name in wanted if name != _SPACE]) > 1:
        raise ApiError(400, f"an answer matches one of {' and '.join(kinds)}: give one", param="response_format")
    return constraint(**wanted) if wanted else None


def read_format(form: Fields) -> dict[str, Any]:
    """What `response_format`, or `text.format` of a response, asks for: {} or {"json": schema}. Raises ApiError."""
    kind = form.take("type", str)
    if kind == "text":
        form.close()
        return {}
    if kind == "json_object":
        form.close()
        return {"json": _ANY_OBJECT}
    if kind != "json_schema":
        raise form.wrong("type", f"must be text, json_object or json_schema, got {kind!r}")
    inner = form.inner("json_schema") or form  # a response has its fields beside the type
    schema = inner.take("schema", dict)
    if schema is None:
        raise inner.wrong("schema", "is missing: give the JSON schema of the answer")
    inner.ignore(("name", "description", "strict"))
    inner.close()
    form.close()
    return {"json": schema}


def warmup_modes() -> tuple[Mode, ...]:
    """All that requests can need; "processed" only for constraints, since no request brings a function."""
    constraints: tuple[Mode, ...] = ("processed",) if importlib.util.find_spec("llguidance") else ()
    return (*DEVICE_MODES, *constraints, "embed")


def constraint(**wanted: Any) -> StructuredOutputs:
    """`StructuredOutputs` of these fields. Raises ApiError if they are wrong."""
    try:
        return StructuredOutputs(**wanted)
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error), param="response_format") from None
