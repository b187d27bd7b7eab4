"""What the processes of test_hosts.py run: `python -m tests.helpers.hosts_program JSON`, the arguments of `main`."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import inferlib.model_files
from inferlib import LLM, Buckets, SamplingParams, distributed
from tests.helpers.counted_reads import CountedReads

PROMPTS = [[5, 6, 7], list(range(10, 35)), [9] * 4, list(range(40, 49)), [77, 3]]
SIZES = {"max_batch": 4, "max_len": 64, "buckets": Buckets(prefill=(16,), batch=(4,), cache=(64,)), "decode_steps": 1}


def build(model: str | Path, parallel: str | None, **sizes: Any) -> LLM:
    return LLM(model, dtype="float32", parallel=parallel, seed=7, progress=False, **SIZES | sizes)


# ---- what process 0 does, by the name of the scenario


def tokens_of(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [o.token_ids for output in llm.generate(PROMPTS, params) for o in output.outputs]


def greedy(llm: LLM, **more: Any) -> dict[str, Any]:
    """More prompts than rows, chunked prefill, and what happens on process 0 alone: a stream that is left, a request
    that is not valid. more: parameters of all requests."""
    results: dict[str, Any] = {"greedy": tokens_of(llm, SamplingParams(temperature=0, max_tokens=3, **more))}
    stream = iter(llm.stream("an eel", SamplingParams(temperature=0, max_tokens=40, **more)))
    results["stream"] = [next(stream) for _ in range(3)]
    stream.close()
    try:
        llm.generate([[1], [999999]], SamplingParams(temperature=0))
    except ValueError as error:
        results["error"] = str(error)
    lengths = [SamplingParams(temperature=0, max_tokens=n, **more) for n in (3, 5, 1, 2, 4)]
    results["lengths"] = tokens_of(llm, lengths)
    stop = SamplingParams(temperature=0, max_tokens=6, stop=results["stream"][-1] or "e", **more)
    results["stop"] = [o.outputs[0].text for o in llm.generate(["a", "tea"], stop)]
    return results


def everything(llm: LLM) -> dict[str, Any]:
    """Also sampled rows and all scores. Rows have log-probabilities, so that there are programs of one mode."""
    results = greedy(llm, logprobs=0)
    results["seeded"] = tokens_of(llm, SamplingParams(temperature=0.9, top_p=0.95, max_tokens=3, seed=5, logprobs=0))
    results["unseeded"] = tokens_of(llm, SamplingParams(temperature=1.2, top_k=30, max_tokens=3, n=2, logprobs=0))
    (output,) = llm.generate("teal", SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2))
    ranks = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    results["ranks"] = [[[token, entry.rank] for token, entry in entries.items()] for entries in ranks]
    results["logprobs"] = [entry.logprob for entries in ranks for entry in entries.values()]
    results["scores"] = [scores.tolist() for scores in llm.logprobs(PROMPTS)]
    return results


def with_logits(llm: LLM) -> dict[str, Any]:
    return greedy(llm) | {"logits": llm.logits(PROMPTS[1]).tolist()}


def warm(llm: LLM) -> dict[str, Any]:
    programs, before = llm.warmup(["greedy"]), llm.compilations
    llm.sleep()
    llm.wake()
    return greedy(llm) | {"warmed": programs > 0, "compiled": llm.compilations - before}


def endless(llm: LLM) -> None:
    """One prompt that fits a chunk, so that there are two programs, which have run when it says so."""
    llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    while True:
        print("decoding", flush=True)
        llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))


def error(llm: LLM) -> None:
    raise RuntimeError("an error of the program")


SCENARIOS: dict[str, Callable] = {f.__name__: f for f in (greedy, everything, with_logits, warm, endless, error)}


# ---- what goes wrong on one process, by the name of the fault: before there is a model, then with it


def early(llm: LLM | None) -> None:
    raise RuntimeError("an error before the model")


def failing(llm: LLM | None) -> None:
    """An error at the fifth program."""
    if llm is None:
        return
    start, calls = llm.engine._start, iter(range(4))

    def fail(call):
        if next(calls, None) is None:
            raise RuntimeError("an error of this process")
        return start(call)

    llm.engine._start = fail


def misusing(llm: LLM | None) -> None:
    """A request that enters here; another LLM. The process goes on."""
    if llm is None:
        return
    for misuse in (lambda: llm.generate([[1]]), lambda: build("", "tp=2")):
        try:
            misuse()
        except RuntimeError as refusal:
            print(refusal, file=sys.stderr)


FAULTS: dict[str, Callable] = {f.__name__: f for f in (early, failing, misusing)}


def main(
    *,
    port: int,
    processes: int,
    process: int,
    devices: int,
    model: str,
    parallel: str | None,
    scenario: str,
    then: str = "",
    fault: str = "",
    secret: str,
    sizes: dict[str, int] | None = None,
    patience: int | None = None,
    refused: Sequence[str | None] = (),
) -> None:
    """patience: seconds until a process that is stopped counts as lost. refused: what `parallel` may not be, which is
    tried first."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    jax.config.update("jax_num_cpu_devices", devices)
    if patience is not None:
        distributed._PATIENCE = patience
    assert distributed.initialize(f"localhost:{port}", processes, process, secret=secret) == process
    fail = FAULTS.get(fault, lambda llm: None)
    fail(None)
    for wrong in refused:
        try:
            build(model, wrong)
        except ValueError as refusal:
            print(refusal, file=sys.stderr)
    sources = count_reads()
    llm = build(model, parallel, **sizes or {})
    fail(llm)
    results = {"followed": True} if llm.follow() else SCENARIOS[scenario](llm)
    taken = {name: parts for source in sources for name, parts in source.taken.items()}
    devices = llm.config.shards.mesh.devices
    homes = [[device.process_index for device in row] for row in devices.reshape(len(devices), -1)]
    print("\n" + json.dumps({"found": results, "taken": taken, "homes": homes}), flush=True)
    if then and process == 0:
        SCENARIOS[then](llm)


def count_reads() -> list[CountedReads]:
    sources, make = [], inferlib.model_files.SafetensorsSource

    def counted(directory: Path) -> CountedReads:
        sources.append(CountedReads(make(directory)))
        return sources[-1]

    inferlib.model_files.SafetensorsSource = counted
    return sources


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
