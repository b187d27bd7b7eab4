"""Servers of tiny models in a thread, for the tests of `inferlib.serving`."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from inferlib import LLM, AsyncLLM
from inferlib.outputs import CompletionOutput, RequestMetrics, RequestOutput
from inferlib.sampling.params import SamplingParams
from inferlib.serving.server import Address, Server
from inferlib.serving.service import Limits, ServerOptions

NAME = "tiny"


@contextlib.contextmanager
def serving(llm: LLM | AsyncLLM, *, limits: Limits | None = None, **options: Any) -> Iterator[str]:
    """The address of a server that runs in a thread until the block ends. options: of `ServerOptions`."""
    engine = llm if isinstance(llm, AsyncLLM) else AsyncLLM(llm)
    made = ServerOptions(**{"names": (NAME,), "limits": limits or Limits(), **options})
    address = Address("127.0.0.1", 0)
    server, bound = Server(engine, made, address, drain=5), address.bind()
    thread = threading.Thread(target=lambda: server.run(sockets=[bound]))
    bound.listen(256)  # so that a client which is early waits
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(300)
        assert not thread.is_alive()


class ScriptedLLM(AsyncLLM):
    """Answers are the given texts, in pieces, whatever the model would say. They end with finish_reason "stop".

    script: the pieces of each answer; answers begin again from the first after the last.
    """

    def __init__(self, llm: LLM, script: Sequence[Sequence[str]] = ()):
        super().__init__(llm)
        self.script, self.asked = script, []

    def generate(self, prompt: Any, sampling_params: SamplingParams | None = None, *rest: Any, **options: Any) -> Any:
        self.asked.append((prompt, sampling_params))
        return _Scripted(prompt, self.script[(len(self.asked) - 1) % len(self.script)], sampling_params)


class _Scripted:
    def __init__(self, prompt: Any, pieces: Sequence[str], params: SamplingParams | None):
        self._prompt, self._left, self._text, self._ids = prompt, list(pieces), "", []
        self._n = params.n if params else 1

    def __aiter__(self) -> _Scripted:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._left:
            raise StopAsyncIteration
        self._text += self._left.pop(0)
        self._ids.append(5)
        reason = None if self._left else "stop"
        made = [CompletionOutput(i, self._text, list(self._ids), reason) for i in range(self._n)]
        metrics = RequestMetrics(generated=len(self._ids) * self._n)
        ids = list(self._prompt["prompt_token_ids"])
        return RequestOutput(0, None, ids, made, metrics=metrics, finished=not self._left, num_cached_tokens=0)

    async def aclose(self) -> None:
        self._left = []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
