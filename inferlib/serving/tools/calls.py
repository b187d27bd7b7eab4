"""Calls of functions in messages that come back, and their ids."""

from __future__ import annotations

import json
import secrets
import string
from typing import Any

from inferlib.option_checks import brief
from inferlib.serving.errors import ApiError

_LETTERS = string.ascii_letters + string.digits


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters and digits, as Mistral's chat templates want them."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def template_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The calls of a message with their arguments as objects, which chat templates write in their own way. Raises
    ApiError."""
    if not isinstance(calls, list):
        raise ApiError(400, f"{where} must be a list, got {brief(calls)}", param=where)
    read = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(
                400,
                f'{where}[{i}] must be {{"id": ..., "type": "function", "function": {{"name": ..., "arguments": ...}}}}'
                f", got {brief(call)}",
                param=f"{where}[{i}]",
            )
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                name = f"{where}[{i}].function.arguments"
                raise ApiError(400, f"{name} is not valid JSON: {error}", param=name) from None
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read
