"""`/v1/chat/completions`: the next message of a conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from inferlib.outputs import CompletionOutput, RequestOutput
from inferlib.serving.deltas import Answer, Arguments, Call, Content, Delta, Parser
from inferlib.serving.exchange import Exchange
from inferlib.serving.logprobs import chat_logprobs
from inferlib.serving.parsers import AnswerFormat
from inferlib.serving.prompts import chat_tokens
from inferlib.serving.protocol import ChatRequest, read_chat
from inferlib.serving.service import Service, new_id
from inferlib.serving.streaming import ChunkWriter
from inferlib.serving.usage import usage


async def answer_chat(service: Service, body: Any, exchange: Exchange) -> dict[str, Any] | None:
    request = read_chat(body, service.defaults)
    service.check_model(request.common.model)
    tokens = await chat_tokens(service, request.messages, request.tools, request.template)
    form = AnswerFormat.of(service, request.tools, parse_reasoning=request.parse_reasoning)
    common = form.adapted(request.common, tokens)
    number = new_id("chatcmpl")
    stream = service.start(tokens, common, number)
    parser = form.parsers(tokens)
    created = int(time.time())
    name = service.name_of(common.model)
    fields = {"id": number, "object": "chat.completion", "created": created, "model": name}
    choices = [_Choice(request, form, parser()) for _ in range(common.params.n)]
    async with aclosing(service.outputs([stream])) as outputs:
        if common.delivery.stream:
            await _stream(exchange, request, choices, outputs, fields)
            return None
        latest = None
        async for _, output in outputs:
            latest = output
    assert latest is not None
    made = [choice.whole(completion) for choice, completion in zip(choices, latest.outputs, strict=True)]
    return {**fields, "choices": made, "usage": usage([latest])}


async def _stream(
    exchange: Exchange,
    request: ChatRequest,
    choices: Sequence[_Choice],
    outputs: AsyncIterator[tuple[int, RequestOutput]],
    fields: dict[str, Any],
) -> None:
    delivery = request.common.delivery
    chunks = ChunkWriter({**fields, "object": "chat.completion.chunk"}, usage=delivery.usage)
    output: RequestOutput | None = None
    async for _, output in outputs:
        counts = usage([output]) if delivery.continuous else None
        pieces = []
        for choice, completion in zip(choices, output.outputs, strict=True):
            pieces += [chunks.chunk(part, counts) for part in choice.advance(completion)]
        if pieces:
            await exchange.events.text("".join(pieces))
    if delivery.usage and output is not None:
        await exchange.events.text(chunks.chunk(None, usage([output])))
    await exchange.events.close()


class _Choice:
    """One answer to a conversation, and how much of it is sent."""

    def __init__(self, request: ChatRequest, form: AnswerFormat, parser: Parser):
        self._form, self._parser = form, parser
        self._top = request.common.params.logprobs
        self._parallel = request.tools.parallel
        self._tokens = self._characters = self._calls = 0
        self._begun = self._finished = False

    def whole(self, completion: CompletionOutput) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        answer = Answer().add(self._deltas(completion))
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.reasoning:
            message |= _thoughts(answer.reasoning)
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {"id": self._form.new_call_id(), "type": "function", "function": {"name": name, "arguments": text}}
                for name, text in answer.calls
            ]
        return {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion),
            "finish_reason": self._finish_reason(completion),
            "stop_reason": completion.stop_reason,
        }

    def advance(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """The choices of chunks with what is new in an answer."""
        if self._finished or (len(completion.token_ids) == self._tokens and completion.finish_reason is None):
            return []
        deltas = self._deltas(completion)
        parts = [_written(delta, self._form.new_call_id) for delta in deltas] or [{}]
        logprobs = self._logprobs(completion)
        if not self._begun:
            self._begun = True
            parts[0] = {"role": "assistant", "content": "", **parts[0]}
        chunks = [{"index": completion.index, "delta": part, "logprobs": None, "finish_reason": None} for part in parts]
        chunks[0]["logprobs"] = logprobs
        if completion.finish_reason is not None:
            self._finished = True
            reason = self._finish_reason(completion)
            chunks[-1] |= {"finish_reason": reason, "stop_reason": completion.stop_reason}
        elif not chunks[0]["delta"] and logprobs is None:
            chunks = []  # a token whose text is not certain yet
        self._tokens = len(completion.token_ids)
        return chunks

    def _deltas(self, completion: CompletionOutput) -> list[Delta]:
        new, self._characters = completion.text[self._characters :], len(completion.text)
        deltas = self._parser.feed(new) if new else []
        if completion.finish_reason is not None:
            deltas = deltas + self._parser.finish()
        if not self._parallel:
            deltas = [delta for delta in deltas if not isinstance(delta, Call | Arguments) or delta.index == 0]
        self._calls += sum(isinstance(delta, Call) for delta in deltas)
        return deltas

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if self._top is None or completion.logprobs is None:
            return None
        start = self._tokens
        return chat_logprobs(completion.token_ids[start:], completion.logprobs[start:], self._top)

    def _finish_reason(self, completion: CompletionOutput) -> str | None:
        called = self._calls > 0 and completion.finish_reason == "stop" and not self._form.forced
        return "tool_calls" if called else completion.finish_reason


def _written(delta: Delta, new_call_id: Callable[[], str]) -> dict[str, Any]:
    """The delta of a chunk."""
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Call):
        function = {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, "id": new_call_id(), "type": "function", "function": function}]}
    if isinstance(delta, Arguments):
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
    return _thoughts(delta.text)


def _thoughts(text: str) -> dict[str, Any]:
    """vLLM's name, and the one before it, which DeepSeek has."""
    return {"reasoning": text, "reasoning_content": text}
