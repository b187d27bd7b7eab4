"""`/v1/completions`: text behind prompts."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from inferlib.outputs import CompletionOutput, RequestOutput
from inferlib.serving.exchange import Exchange
from inferlib.serving.logprobs import completion_logprobs
from inferlib.serving.protocol import CompletionRequest, read_completion
from inferlib.serving.service import Service, new_id
from inferlib.serving.streaming import ChunkWriter
from inferlib.serving.usage import usage


async def answer_completion(service: Service, body: Any, exchange: Exchange) -> dict[str, Any] | None:
    request = read_completion(body, service.defaults)
    service.check_model(request.common.model)
    number = new_id("cmpl")
    prompts = [await service.encode(p) if isinstance(p, str) else p for p in request.prompts]
    streams = [service.start(tokens, request.common, f"{number}-{i}") for i, tokens in enumerate(prompts)]
    texts = [_Texts(service, request, i, prompt) for i, prompt in enumerate(prompts)]
    name = service.name_of(request.common.model)
    fields = {"id": number, "object": "text_completion", "created": int(time.time()), "model": name}
    latest: dict[int, RequestOutput] = {}
    delivery = request.common.delivery
    chunks = ChunkWriter(fields, usage=delivery.usage)
    async with aclosing(service.outputs(streams)) as outputs:
        async for index, output in outputs:
            latest[index] = output
            if not delivery.stream:
                continue
            counts = usage([output]) if delivery.continuous else None
            pieces = [chunks.chunk(choice, counts) for choice in texts[index].advance(output)]
            if pieces:
                await exchange.events.text("".join(pieces))
    ordered = [latest[i] for i in range(len(streams))]
    if delivery.stream:
        if delivery.usage:
            await exchange.events.text(chunks.chunk(None, usage(ordered)))
        await exchange.events.close()
        return None
    choices = [choice for text, output in zip(texts, ordered, strict=True) for choice in text.advance(output)]
    return {**fields, "choices": choices, "usage": usage(ordered)}


@dataclass
class _Sent:
    """Tokens and characters of one output that are sent."""

    tokens: int = 0
    characters: int = 0
    finished: bool = False


class _Texts:
    """The outputs of one prompt as choices, each with what is new in it."""

    def __init__(self, service: Service, request: CompletionRequest, index: int, prompt: list[int]):
        self._service, self._request, self._prompt = service, request, prompt
        n = request.common.params.n
        self._first, self._sent = index * n, [_Sent() for _ in range(n)]
        self._echoed = ""
        if request.echo:
            text = request.prompts[index]
            self._echoed = text if isinstance(text, str) else service.tokenizer.decode(prompt)

    def advance(self, output: RequestOutput) -> list[dict[str, Any]]:
        choices = []
        for completion, sent in zip(output.outputs, self._sent, strict=True):
            if len(completion.token_ids) == sent.tokens and (completion.finish_reason is None or sent.finished):
                continue
            choices.append(self._choice(output, completion, sent))
        return choices

    def _choice(self, output: RequestOutput, completion: CompletionOutput, sent: _Sent) -> dict[str, Any]:
        zero = self._request.zero_tokens
        new = "" if zero else completion.text[sent.characters :]
        text = self._echoed + new if sent.tokens == 0 else new
        choice = {
            "index": self._first + completion.index,
            "text": text,
            "logprobs": self._logprobs(output, completion, sent),
            "finish_reason": "length" if zero else completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if completion.finish_reason is not None and output.prompt_logprobs is not None and not self._request.echo:
            choice["prompt_logprobs"] = _prompt_logprobs(output)
        sent.tokens, sent.characters = len(completion.token_ids), len(completion.text)
        sent.finished = completion.finish_reason is not None
        return choice

    def _logprobs(self, output: RequestOutput, completion: CompletionOutput, sent: _Sent) -> dict[str, Any] | None:
        top = self._request.common.params.logprobs
        if top is None or completion.logprobs is None:
            return None
        tokens, entries = completion.token_ids[sent.tokens :], list(completion.logprobs[sent.tokens :])
        offset = len(self._echoed) + sent.characters
        if self._request.zero_tokens:
            tokens, entries = [], []
        if self._request.echo and sent.tokens == 0:
            tokens, entries, offset = self._prompt + tokens, [*(output.prompt_logprobs or ()), *entries], 0

        def decode(token: int) -> str:
            return self._service.tokenizer.decode([token], skip_special_tokens=False)

        return completion_logprobs(tokens, entries, top, offset, decode)


def _prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None]:
    """The log-probabilities of the prompt as vLLM has them: by token id."""
    made = []
    for entry in output.prompt_logprobs or ():
        tokens = None if entry is None else {str(token): vars(x) for token, x in entry.items()}
        made.append(tokens)
    return made
