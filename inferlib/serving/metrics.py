"""What `/metrics` says, for Prometheus, by vLLM's names where it has one."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from inferlib.async_llm import AsyncLLM
from inferlib.outputs import RequestOutput

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts of values by upper limits. All are of one thread, so there is no lock, which would take longer."""

    def __init__(self, name: str, text: str, limits: tuple[float, ...]):
        self.name, self.text, self.limits = name, text, limits
        self.counts, self.sum = [0] * (len(limits) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.limits, value)] += times
        self.sum += value * times

    def family(self, model: str) -> Metric:
        names = [*(str(float(limit)) for limit in self.limits), "+Inf"]
        family = HistogramMetricFamily(self.name, self.text, labels=("model_name",))
        family.add_metric((model,), list(zip(names, accumulate(self.counts), strict=True)), self.sum)
        return family


class Metrics:
    """Counts of one server. Methods are called in the event loop.

    ends: requests by what ended them; "abort" if the client left. errors: answers by their status.
    """

    def __init__(self, llm: AsyncLLM, model: str):
        self._llm, self._model = llm, model
        self._registry = CollectorRegistry()
        self._registry.register(self)  # pyright: ignore[reportArgumentType]
        self.prompt_tokens = self.generated_tokens = self.cached_tokens = 0
        self.ends: Counter[str] = Counter()
        self.errors: Counter[int] = Counter()
        self.ttft = Histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self.itl = Histogram("vllm:inter_token_latency_seconds", "Between tokens of a request.", _BETWEEN)
        self.e2e = Histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _LONG)
        self.prompt_sizes = Histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_sizes = Histogram("vllm:request_generation_tokens", "Generated tokens of a request.", _TOKENS)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def follow(self) -> RequestTimes:
        return RequestTimes(self)

    def collect(self) -> Iterator[Metric]:
        """The metrics, as a registry of prometheus-client asks for them. The engine's numbers are read beside its
        thread, one by one."""
        engine = self._llm.llm.engine
        scheduler, stats, pages = engine.scheduler, engine.stats, engine.plan.pages
        used = 1 - sum(x.free for x in scheduler.pages) / max(pages, 1)
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences that have a row.", len(scheduler.running)),
            ("vllm:num_requests_waiting", "Sequences that wait for a row.", len(scheduler.waiting)),
            ("vllm:kv_cache_usage_perc", "Share of the cache's pages in use; 1 is all.", used),
            ("inferlib:open_requests", "Requests that wait, run or are read.", self._llm.open_requests),
            ("inferlib:max_batch", "Rows.", engine.config.max_batch),
            ("inferlib:cached_pages", "Pages that prompts can share.", stats.cached_pages),
        ):
            gauge = GaugeMetricFamily(name, text, labels=("model_name",))
            gauge.add_metric((self._model,), value)
            yield gauge
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens that were read.", self.prompt_tokens),
            ("vllm:generation_tokens", "Tokens that were generated.", self.generated_tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens that were looked for in the cache.", self.prompt_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens that were in the cache.", self.cached_tokens),
            ("vllm:num_preemptions", "Sequences that lost their row for a while.", scheduler.preemptions),
            ("inferlib:program_misses", "Programs that were not ready when needed.", stats.program_misses),
            ("inferlib:compilations", "XLA compilations since the start.", stats.compilations),
            ("inferlib:evicted_pages", "Cached pages that made room.", stats.evicted_pages),
        ):
            yield _counter(name, text, ("model_name",), {(self._model,): value})
        ends = {(self._model, reason): count for reason, count in self.ends.items()}
        yield _counter("vllm:request_success", "Requests that ended.", ("model_name", "finished_reason"), ends)
        errors = {(str(status),): count for status, count in self.errors.items()}
        yield _counter("inferlib:http_errors", "Answers with an error.", ("status",), errors)
        for histogram in (self.ttft, self.itl, self.e2e, self.prompt_sizes, self.output_sizes):
            yield histogram.family(self._model)


def _counter(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for names, value in values.items():
        family.add_metric(names, value)
    return family


class RequestTimes:
    """The times of one request, as its outputs come by."""

    def __init__(self, metrics: Metrics):
        self._metrics, self._start, self._last, self._tokens = metrics, time.perf_counter(), 0.0, 0
        self._finished = False

    def add(self, output: RequestOutput) -> None:
        metrics, now = self._metrics, time.perf_counter()
        if new := output.metrics.generated - self._tokens:
            if self._tokens == 0:
                self._first(output, now)
            else:  # of several outputs, each gets a part of the new tokens
                metrics.itl.observe((now - self._last) / new * len(output.outputs), new)
            self._tokens, self._last = output.metrics.generated, now
            metrics.generated_tokens += new
        if output.finished:
            self._finished = True
            metrics.e2e.observe(now - self._start)
            metrics.output_sizes.observe(self._tokens)
            metrics.ends.update(str(completion.finish_reason) for completion in output.outputs)

    def close(self) -> None:
        """The request is left; a client that did so before its end is counted."""
        if not self._finished:
            self._metrics.ends["abort"] += 1

    def _first(self, output: RequestOutput, now: float) -> None:
        metrics, size = self._metrics, len(output.prompt_token_ids)
        metrics.ttft.observe(now - self._start)
        metrics.prompt_sizes.observe(size)
        metrics.prompt_tokens += size
        metrics.cached_tokens += output.num_cached_tokens or 0
