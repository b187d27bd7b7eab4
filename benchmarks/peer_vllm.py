"""Serve requests with vLLM, for `throughput.py --peer vllm`: a program of its own, which imports nothing of inferlib.

    python peer_vllm.py FOLDER

FOLDER has job.json, with vLLM's arguments and the requests. What was measured is written to result.json there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

# The engine in this process, nothing from a network, and only what the wheel has.
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


def serve(engine, params, offers: list[dict]) -> dict:
    """One run: seconds, tokens, and of each request the time to its first token and the mean time between tokens."""
    start, wall = time.perf_counter(), time.time()
    waiting, tokens, ttft, itl = list(offers), 0, [], []
    number = 0
    while waiting or engine.has_unfinished_requests():
        now = time.perf_counter() - start
        if not engine.has_unfinished_requests() and waiting[0]["arrival"] > now:
            time.sleep(waiting[0]["arrival"] - now)
            now = time.perf_counter() - start
        while waiting and waiting[0]["arrival"] <= now:
            offer = waiting.pop(0)
            prompt, arrival = {"prompt_token_ids": offer["prompt"]}, wall + offer["arrival"]
            engine.add_request(str(number), prompt, params(offer["output_len"]), arrival_time=arrival)
            number += 1
        for output in engine.step():
            if output.finished:
                count = len(output.outputs[0].token_ids)
                tokens += count
                ttft.append(output.metrics.first_token_latency)
                if count > 1:
                    span = output.metrics.last_token_ts - output.metrics.first_token_ts
                    itl.append(span / (count - 1))
    return {"seconds": time.perf_counter() - start, "output_tokens": tokens, "ttft": ttft, "itl": itl}


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

    start = time.perf_counter()
    llm = LLM(**job["arguments"])
    ready = time.perf_counter() - start

    def params(count: int):
        final = RequestOutputKind.FINAL_ONLY
        return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count, detokenize=False, output_kind=final)

    runs = []
    for _ in range(job["runs"]):
        llm.reset_prefix_cache()
        runs.append(serve(llm.llm_engine, params, job["offers"]))
    (folder / "result.json").write_text(json.dumps(runs[-1] | {"warmup_seconds": ready}))
    sys.stdout.flush()
    os._exit(0)  # its teardown is slow


if __name__ == "__main__":
    main()
