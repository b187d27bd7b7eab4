"""What `/metrics` says, for Prometheus, by vLLM's names where it has one."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from inferlib.async_llm import AsyncLLM
from inferlib.outputs import RequestOutput

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counts of one server. Methods are called in the event loop."""

    def __init__(self, llm: AsyncLLM, model: str):
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(llm, model))  # pyright: ignore[reportArgumentType]
        label = {"labelnames": ("model_name",), "registry": self.registry}

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, **label).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, buckets=buckets, **label).labels(model)

        self._prompt = counter("prompt_tokens", "Prompt tokens that were read.")
        self._generated = counter("generation_tokens", "Tokens that were generated.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens that were looked for in the cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens that were in the cache.")
        self._ends = Counter(
            "vllm:request_success", "Requests that ended.", ("model_name", "finished_reason"), registry=self.registry
        )
        self._errors = Counter("inferlib:http_errors", "Answers with an error.", ("status",), registry=self.registry)
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._itl = histogram("inter_token_latency_seconds", "Between tokens of a request.", _BETWEEN)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the end.", _LONG)
        self._prompt_sizes = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output_sizes = histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        self._model = model
        self.prompt_tokens = self.generated_tokens = self.cached_tokens = 0

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def error(self, status: int) -> None:
        self._errors.labels(str(status)).inc()

    def follow(self) -> RequestTimes:
        return RequestTimes(self)


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
            else:
                metrics._itl.observe((now - self._last) / new * len(output.outputs))
            self._tokens, self._last = output.metrics.generated, now
            metrics._generated.inc(new)
            metrics.generated_tokens += new
        if output.finished:
            self._finished = True
            metrics._e2e.observe(now - self._start)
            metrics._output_sizes.observe(self._tokens)
            for completion in output.outputs:
                metrics._ends.labels(metrics._model, completion.finish_reason).inc()

    def close(self) -> None:
        """The request is left; a client that did so before its end is counted."""
        if not self._finished:
            self._metrics._ends.labels(self._metrics._model, "abort").inc()

    def _first(self, output: RequestOutput, now: float) -> None:
        metrics, size, cached = self._metrics, len(output.prompt_token_ids), output.num_cached_tokens or 0
        metrics._ttft.observe(now - self._start)
        metrics._prompt.inc(size)
        metrics._prompt_sizes.observe(size)
        metrics._queries.inc(size)
        metrics._hits.inc(cached)
        metrics.prompt_tokens += size
        metrics.cached_tokens += cached


class _EngineCollector:
    """What the engine says of itself when it is asked. Numbers are read beside its thread, one by one."""

    def __init__(self, llm: AsyncLLM, model: str):
        self._llm, self._model = llm, model

    def collect(self) -> Iterator[Metric]:
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
            ("vllm:num_preemptions", "Sequences that lost their row for a while.", scheduler.preemptions),
            ("inferlib:program_misses", "Programs that were not ready when needed.", stats.program_misses),
            ("inferlib:compilations", "XLA compilations since the start.", stats.compilations),
            ("inferlib:evicted_pages", "Cached pages that made room.", stats.evicted_pages),
        ):
            counter = CounterMetricFamily(name, text, labels=("model_name",))
            counter.add_metric((self._model,), value)
            yield counter
