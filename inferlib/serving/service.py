"""What the endpoints of a server share: the model, its limits, and how a request runs."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from inferlib.async_llm import AsyncLLM, AsyncStream
from inferlib.option_checks import brief
from inferlib.outputs import RequestOutput
from inferlib.programs.program_set import UnplannedProgramError
from inferlib.sampling.params import SamplingParams
from inferlib.serving.errors import ApiError
from inferlib.serving.metrics import Metrics
from inferlib.serving.protocol import Common
from inferlib.tokenizer import Tokenizer

T = TypeVar("T")
_LONG = 1 << 14  # characters of text that are worth a thread to tokenize


@dataclass(frozen=True)
class Limits:
    """body: most bytes of a request. prompt: most tokens of one; None: as many as the model takes. requests: most that
    are open at a time; None: any number."""

    body: int = 16 << 20
    prompt: int | None = None
    requests: int | None = None


@dataclass(frozen=True)
class ServerOptions:
    """names: of the model, the first of them in answers. keys: any of them opens the server; none: it is open.
    tool_parser, reasoning_parser: "auto", "none", or a name. chat_template: a Jinja template in place of the model's.
    trust_templates: requests may bring a template.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    chat_template: str | None = None
    trust_templates: bool = False

    def check_adapters(self, adapters: Iterable[str]) -> None:
        """Raise ValueError if one of these adapters has a name of the model."""
        if taken := next((name for name in adapters if name in self.names), None):
            raise ValueError(f"{taken!r} is the name of the model and of an adapter: rename one of them")


class Service:
    """A model that requests are answered by."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions):
        self.llm, self.options = llm, options
        options.check_adapters(llm.llm.adapters)
        self.metrics = Metrics(llm, options.names[0])
        self.defaults: SamplingParams = llm.llm.get_default_sampling_params()
        self.started = time.time()
        self.draining = False
        self._open = 0

    @property
    def name(self) -> str:
        return self.options.names[0]

    @property
    def tokenizer(self) -> Tokenizer:
        if (tokenizer := self.llm.llm.tokenizer) is None:
            raise ApiError(400, "this model has no tokenizer.json: give prompts as token ids to /v1/completions")
        return tokenizer

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may name: the model, and its adapters."""
        return (*self.options.names, *(name for name in self.llm.llm.adapters if name not in self.options.names))

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a request names in the model's place, if it does."""
        return None if model in self.options.names else model

    def name_of(self, model: str | None) -> str:
        """What answers a request that names this model."""
        return self.adapter_of(model) or self.name

    def check_model(self, model: str | None) -> None:
        if model is not None and model not in self.names:
            raise ApiError(
                404,
                f"The model {brief(model)} does not exist: this server has {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request while it is answered. Raises ApiError if there are too many."""
        most = self.options.limits.requests
        if most is not None and self._open >= most:
            raise ApiError(
                429, f"{most} requests are open, which is the most: try again later", code="too_many_requests"
            )
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def compute(self, size: int, function: Callable[[], T]) -> T:
        """What a function returns. size: how many characters it reads; if they are many, it runs in a thread. Its
        ValueErrors are the client's."""
        try:
            return function() if size < _LONG else await asyncio.to_thread(function)
        except ValueError as error:
            raise ApiError(400, str(error)) from None

    async def encode(self, text: str) -> list[int]:
        return await self.compute(len(text), lambda: self.tokenizer.encode(text))

    def start(self, tokens: Sequence[int], common: Common, request_id: str) -> AsyncStream:
        """A stream for one prompt. Raises ApiError."""
        params = self._params(tokens, common)
        prompt = {"prompt_token_ids": tokens}
        if common.cache_salt is not None:
            prompt["cache_salt"] = common.cache_salt  # pyright: ignore[reportArgumentType]
        try:
            adapter = self.adapter_of(common.model)
            return self.llm.generate(prompt, params, request_id, adapter=adapter, priority=common.priority)
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        except UnplannedProgramError as error:
            raise ApiError(400, str(error), code="unsupported_parameter") from None
        except RuntimeError as error:  # it sleeps or is closed
            raise ApiError(503, str(error), code="unavailable") from None

    def _params(self, tokens: Sequence[int], common: Common) -> SamplingParams:
        """The request's parameters for a prompt of these tokens. Raises ApiError if it is too long."""
        params, max_len, size = common.params, self.llm.llm.config.max_len, len(tokens)
        most, wanted = self.options.limits.prompt, params.max_tokens or 1
        if params.truncate_prompt_tokens is None:
            if most is not None and size > most:
                raise too_long(f"the prompt has {size} tokens, and this server takes {most}: shorten it")
            if size >= max_len or (size + wanted > max_len and not common.fit):
                raise too_long(
                    f"This model's maximum context length is {max_len} tokens. The request has {size} tokens and wants "
                    f"{wanted} more: shorten the prompt, lower max_tokens, or start the server with a larger --max-len"
                )
        if common.fit and params.max_tokens is not None:
            room = max(1, params.min_tokens, max_len - size)
            params = dataclasses.replace(params, max_tokens=min(params.max_tokens, room))
        return params

    async def outputs(self, streams: Sequence[AsyncStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What streams yield, as it comes, each with its stream's number. Leaving the loop ends the requests."""
        if len(streams) == 1:
            times = self.metrics.follow()
            try:
                async with aclosing(streams[0]) as stream:
                    async for output in stream:
                        times.add(output)
                        yield 0, output
            except ValueError as error:  # a grammar that cannot be compiled shows when its stream begins
                raise ApiError(400, str(error)) from None
            finally:
                times.close()
            return
        queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(2 * len(streams))
        tasks = [asyncio.create_task(self._collect(i, stream, queue)) for i, stream in enumerate(streams)]
        left = len(tasks)
        try:
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _collect(self, index: int, stream: AsyncStream, queue: asyncio.Queue) -> None:
        """Put the outputs of one stream among those of others, then None; or the error that ended it."""
        try:
            async with aclosing(self.outputs([stream])) as outputs:
                async for _, output in outputs:
                    await queue.put((index, output))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)


def too_long(message: str) -> ApiError:
    return ApiError(400, message, code="context_length_exceeded")


def new_id(kind: str) -> str:
    """An id such as chatcmpl-0a1b..., unlike any other."""
    return f"{kind}-{uuid.uuid4().hex}"
