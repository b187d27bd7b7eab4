"""`/v1/responses`: OpenAI's newer form of a chat, for text. Nothing is stored, so a conversation comes as a whole."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from inferlib.option_checks import brief
from inferlib.outputs import RequestOutput
from inferlib.sampling.params import SamplingParams
from inferlib.serving.deltas import Content, Delta, Reasoning
from inferlib.serving.errors import ApiError
from inferlib.serving.exchange import Exchange
from inferlib.serving.fields import Fields
from inferlib.serving.parsers import AnswerFormat
from inferlib.serving.prompts import chat_tokens
from inferlib.serving.protocol import IGNORED, Common, Delivery, Message, ToolChoice, read_messages, sampling
from inferlib.serving.service import Service, new_id
from inferlib.serving.structured import constraint, read_format
from inferlib.serving.usage import usage

_CHATS = "use /v1/chat/completions"
_UNSUPPORTED = {
    "previous_response_id": "nothing is stored here; send the whole conversation as input",
    "conversation": "nothing is stored here; send the whole conversation as input",
    "prompt": "there are no stored prompts; send input",
    "tools": _CHATS,
    "max_tool_calls": _CHATS,
    "background": "wait for the answer, or stream it",
    "include": "leave it out",
    "top_logprobs": _CHATS,
}


@dataclass(frozen=True)
class ResponseRequest:
    """echo: fields that the response repeats."""

    common: Common
    messages: list[Message]
    template: Mapping[str, Any]
    echo: Mapping[str, Any]


def read_response(body: Any, defaults: SamplingParams) -> ResponseRequest:
    """Raises ApiError."""
    fields = Fields(body)
    fields.refuse(_UNSUPPORTED, (False, 0, []))
    fields.refuse({"truncation": "shorten the input"}, ("disabled",))
    fields.refuse({"store": "nothing is stored here; give store=false"}, (False,))
    fields.refuse({"tool_choice": _CHATS}, ("auto", "none"))
    fields.ignore((*IGNORED, "parallel_tool_calls", "stream_options"))
    instructions, most = fields.take("instructions", str), fields.take("max_output_tokens", int)
    messages = _messages(fields)
    if instructions is not None:
        messages = [{"role": "system", "content": instructions}, *messages]
    values: dict[str, Any] = {"max_tokens": most}
    for name in ("temperature", "top_p"):
        if (value := fields.take(name, float)) is not None:
            values[name] = value
    form = _format(fields, values)
    template: dict[str, Any] = {"chat_template_kwargs": {}}
    if (reasoning := fields.inner("reasoning")) is not None:
        if (effort := reasoning.take("effort", str)) is not None:
            template["chat_template_kwargs"]["reasoning_effort"] = effort
        reasoning.refuse({"summary": "thoughts are sent as they are", "generate_summary": "leave it out"})
        reasoning.close()
    common = Common(
        model=fields.take("model", str),
        params=sampling(defaults, values),
        fit=False,
        delivery=Delivery(fields.take("stream", bool, False)),
        priority=fields.take("priority", float, 0),
        cache_salt=fields.take("cache_salt", str),
    )
    fields.close()
    echo = {
        "instructions": instructions,
        "max_output_tokens": most,
        "temperature": common.params.temperature,
        "top_p": common.params.top_p,
        "text": {"format": form},
    }
    return ResponseRequest(common, messages, template, echo)


def _messages(fields: Fields) -> list[Message]:
    content = fields.any("input")
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    if not isinstance(content, list):
        raise fields.wrong("input", f"must be a text or a list of messages, got {brief(content)}")
    messages = []
    for item in content:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "reasoning":  # of an earlier response, which chat templates leave out
            continue
        if kind != "message":
            raise ApiError(400, f"input has an item that is no message ({brief(item)}): {_CHATS}", param="input")
        messages.append({"role": item.get("role"), "content": item.get("content")})
    return read_messages(messages)


def _format(fields: Fields, values: dict[str, Any]) -> dict[str, Any]:
    """The form of the text as the request has it; a constraint goes into the values."""
    text = fields.inner("text")
    if text is None:
        return {"type": "text"}
    form = text.inner("format")
    if form is not None and (wanted := read_format(form)):
        values["structured_outputs"] = constraint(**wanted)
    text.refuse({"verbosity": "say so in the instructions"}, ("medium",))
    text.close()
    return dict(text.any("format") or {"type": "text"})


async def answer_response(service: Service, body: Any, exchange: Exchange) -> dict[str, Any] | None:
    request = read_response(body, service.defaults)
    service.check_model(request.common.model)
    choice = ToolChoice()
    form = AnswerFormat.of(service, choice, parse_reasoning=True)
    tokens = await chat_tokens(service, request.messages, choice, request.template)
    number = new_id("resp")
    stream = service.start(tokens, form.adapted(request.common, tokens), number)
    parser, output, sent = form.parsers(tokens)(), None, 0
    events = ResponseEvents(_response(service, request, number))
    async with aclosing(service.outputs([stream])) as outputs:
        made = events.begin()
        async for _, output in outputs:
            (completion,) = output.outputs
            deltas = parser.feed(completion.text[sent:])
            sent = len(completion.text)
            if output.finished:
                deltas = deltas + parser.finish()
            made += events.add(deltas)
            made += events.end(output) if output.finished else []
            if request.common.delivery.stream:
                for event in made:
                    await exchange.events.event(event, event["type"])
                made = []
    if not request.common.delivery.stream:
        return events.response
    await exchange.events.close()
    return None


def _response(service: Service, request: ResponseRequest, number: str) -> dict[str, Any]:
    return {
        "id": number,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": service.name_of(request.common.model),
        "output": [],
        **request.echo,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
        "usage": None,
        "metadata": {},
    }


@dataclass(frozen=True)
class _Part:
    """What an item of the output holds. item, part: their types. delta: of the events that carry pieces of it."""

    item: str
    part: str
    delta: str

    def content(self, text: str) -> dict[str, Any]:
        extra = {"annotations": [], "logprobs": []} if self.part == "output_text" else {}
        return {"type": self.part, "text": text, **extra}

    def written(self, number: str, text: str | None, status: str) -> dict[str, Any]:
        """The item. text: None before it has any."""
        item: dict[str, Any] = {"id": number, "type": self.item, "status": status}
        item |= {"role": "assistant"} if self.item == "message" else {"summary": []}
        return item | {"content": [] if text is None else [self.content(text)]}


_ANSWER = _Part("message", "output_text", "response.output_text")
_THOUGHTS = _Part("reasoning", "reasoning_text", "response.reasoning_text")


class ResponseEvents:
    """The events of one response, and the response as far as it is."""

    def __init__(self, response: dict[str, Any]):
        self.response = response
        self._count = 0
        self._part: _Part | None = None  # of the item that is open
        self._id = self._text = ""

    def begin(self) -> list[dict[str, Any]]:
        return [self._event(f"response.{name}", response=dict(self.response)) for name in ("created", "in_progress")]

    def add(self, deltas: Iterable[Delta]) -> list[dict[str, Any]]:
        events = []
        for delta in deltas:
            if not isinstance(delta, Content | Reasoning):
                continue  # there are no tools that could be called
            events += self._in(_ANSWER if isinstance(delta, Content) else _THOUGHTS)
            self._text += delta.text
            extra = {"logprobs": []} if isinstance(delta, Content) else {}
            events.append(self._of_part("delta", delta=delta.text, **extra))
        return events

    def end(self, output: RequestOutput) -> list[dict[str, Any]]:
        events = self._in(_ANSWER) if self._part is None else []
        reason = output.outputs[0].finish_reason
        status = "completed" if reason == "stop" else "incomplete"
        events += self._close(status)
        counts = usage([output])
        self.response |= {
            "status": status,
            "incomplete_details": None if reason == "stop" else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
        }
        return [*events, self._event(f"response.{status}", response=self.response)]

    def _in(self, part: _Part) -> list[dict[str, Any]]:
        """Open an item of this kind, unless it is open."""
        if self._part is part:
            return []
        events = self._close("completed")
        self._part, self._text = part, ""
        self._id = new_id("msg" if part is _ANSWER else "rs")
        item = part.written(self._id, None, "in_progress")
        events.append(self._event("response.output_item.added", output_index=self._index, item=item))
        return [*events, self._of_item("response.content_part.added", part=part.content(""))]

    def _close(self, status: str) -> list[dict[str, Any]]:
        if (part := self._part) is None:
            return []
        extra = {"logprobs": []} if part is _ANSWER else {}
        item, index = part.written(self._id, self._text, status), self._index
        events = [
            self._of_part("done", text=self._text, **extra),
            self._of_item("response.content_part.done", part=part.content(self._text)),
            self._event("response.output_item.done", output_index=index, item=item),
        ]
        self.response["output"].append(item)
        self._part = None
        return events

    @property
    def _index(self) -> int:
        return len(self.response["output"])

    def _of_part(self, name: str, **fields: Any) -> dict[str, Any]:
        assert self._part is not None
        return self._of_item(f"{self._part.delta}.{name}", **fields)

    def _of_item(self, name: str, **fields: Any) -> dict[str, Any]:
        return self._event(name, item_id=self._id, output_index=self._index, content_index=0, **fields)

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        self._count += 1
        return {"type": name, "sequence_number": self._count - 1, **fields}
