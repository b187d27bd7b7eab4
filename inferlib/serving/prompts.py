"""From messages to the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferlib.serving.errors import ApiError, unsupported
from inferlib.serving.protocol import Message, ToolChoice
from inferlib.serving.service import Service


async def chat_tokens(
    service: Service, messages: Sequence[Message], tools: ToolChoice, template: Mapping[str, Any]
) -> list[int]:
    """The prompt of a conversation, by the model's chat template. Raises ApiError."""
    options, source = dict(template), template_source(service)
    if options.get("chat_template") is None:
        options["chat_template"] = service.options.chat_template
    elif not service.options.trust_templates:
        raise unsupported("chat_template", "start the server with --chat-template, or --trust-request-chat-template")
    if "reasoning_effort" in options.get("chat_template_kwargs", {}) and "reasoning_effort" not in source:
        raise unsupported("reasoning_effort", "this model's chat template knows none: leave it out")
    if tools.kind != "none":
        if "tools" not in source:
            raise ApiError(400, "this model's chat template takes no tools: leave them out", param="tools")
        options["tools"] = list(tools.tools)
    if "developer" not in source:
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    size = sum(len(message["content"]) for message in messages)
    return await service.compute(size, lambda: service.llm.llm.chat_prompt(messages, **options))


def template_source(service: Service) -> str:
    """The text of the chat template in use; "" if there is none."""
    model = service.tokenizer.chat_template
    return service.options.chat_template or (model.source if model else "")
