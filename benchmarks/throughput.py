"""Serve requests: tokens/s, time to first token, time between tokens, and where the steps' time goes.

    python benchmarks/throughput.py --config llama3-8b --max-batch 256 --peer vllm --peer-path SITE
    python benchmarks/throughput.py --model smollm2 --count 64 --rate 2
    python benchmarks/throughput.py --config llama3-8b --requests requests.jsonl --simulate cuda:h200

--config takes a shape from configs/ with random weights, --model a checkpoint. --requests is a file as `inferlib plan
--trace` reads it; by default requests are made, of lognormal lengths. They are offered at their arrivals, which are 0
if the file has none, or --rate a second on average with exponential times between them. Every request generates all its
tokens, greedily, by the engine without text. Of several --runs the last one counts; each begins with no prompt in the
cache. Programs are compiled anew unless --compile-cache names a folder: "warm-up" is their time.

--peer vllm serves the same requests with vLLM, in a process of its own, with dummy weights or the checkpoint's;
--peer-path is put on that process's PYTHONPATH. vLLM's time of start is everything from its construction on.
--simulate TARGET adds what `inferlib plan --trace` says of a target for the same buckets.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from inferlib import configs
from inferlib.buckets import Buckets
from inferlib.cli.trace import service_table
from inferlib.config import DeviceKind, EngineConfig, EngineOptions
from inferlib.engine.engine import Engine
from inferlib.engine.memory import device_memory, with_memory
from inferlib.engine.sequence import Sequence as EngineSequence
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import abstract_model
from inferlib.models.config import ModelConfig
from inferlib.models.families import config_from_hf
from inferlib.models.quantization import QUANTIZATIONS, Quantization
from inferlib.planning.costs import Deployed
from inferlib.planning.simulator import engine_config, kind_of_step, serve, simulate
from inferlib.planning.trace import Offer, Service, StepTotals, at_rate, percentiles, read_trace, usual_trace
from inferlib.platforms import prepare_jax
from inferlib.programs.compilation_cache import use_compile_cache
from inferlib.programs.program_set import ProgramSet
from inferlib.progress import CountProgress, on_terminal
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import Shards, make_shards
from inferlib.targets import parse_target


class Watched(Engine):
    """An engine that adds up its steps: a dispatch's time is from the result before it, or from when it was sent."""

    totals = StepTotals.none()
    _idle_until = 0.0

    def _send(self, dispatch) -> None:
        if not self._in_flight:
            self._idle_until = time.perf_counter()
        super()._send(dispatch)

    def _receive(self) -> list[EngineSequence]:
        dispatch, before = self._in_flight[0][0], self.stats.generated_tokens
        advanced = super()._receive()
        now, key = time.perf_counter(), dispatch.key
        firsts = sum(chunk.last for chunk in dispatch.chunks)
        rows = (self.stats.generated_tokens - before - firsts) / key.steps
        tokens = sum(chunk.length for chunk in dispatch.chunks)
        replicas = self.config.shards.replicas
        room = replicas * key.chunks * key.chunk
        self.totals.add(kind_of_step(key), now - self._idle_until, (tokens, room), (rows, replicas * key.rows))
        self._idle_until = now
        return advanced


class Stopwatch:
    def __init__(self) -> None:
        self._start = time.perf_counter()

    def time(self) -> float:
        return time.perf_counter() - self._start

    def wait_until(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds - self.time()))


def measure(engine: Watched, offers: Sequence[Offer], runs: int) -> dict[str, Any]:
    """The last run's facts. Raises RuntimeError if a program was compiled in it, or tokens are missing."""
    start = time.perf_counter()
    programs = engine.warmup(("greedy",))
    warmup, facts = time.perf_counter() - start, {}
    for run in range(runs):
        engine.forget_prefixes()
        engine.totals, compiled = StepTotals.none(), engine.stats.compilations
        preempted, cached = engine.scheduler.preemptions, engine.stats.cached_tokens
        with CountProgress(f"run {run + 1} of {runs}", len(offers), show=on_terminal()) as bar:
            done = [0]

            def advanced(finished: int, bar=bar, done=done) -> None:
                bar.advance(finished - done[0])
                done[0] = finished

            thread = time.thread_time()
            service = Service.of(offers, serve(engine, offers, Stopwatch(), advanced))
            thread = time.thread_time() - thread
        if service.output_tokens != sum(offer.output_len for offer in offers):
            raise RuntimeError(f"{service.output_tokens} tokens were generated, not those asked for")
        if run and engine.stats.compilations != compiled:
            raise RuntimeError("programs were compiled after warm-up")
        engine.totals.preemptions = engine.scheduler.preemptions - preempted
        engine.totals.cached = engine.stats.cached_tokens - cached
        facts = service.facts() | engine.totals.facts() | {"thread_seconds": thread}
    return facts | {"warmup_seconds": warmup, "programs": programs}


def peer_vllm(args: argparse.Namespace, hf: dict[str, Any], offers: Sequence[Offer]) -> dict[str, Any]:
    """vLLM's facts of the last run, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(args.model) if args.model else Path(folder) / "model"
        if not args.model:
            model.mkdir()
            (model / "config.json").write_text(json.dumps(hf))
        arguments = dict(model=str(model), skip_tokenizer_init=True, dtype=args.dtype, max_model_len=args.max_len)
        arguments |= dict(max_num_seqs=args.max_batch, enable_prefix_caching=args.prefix_caching)
        arguments |= dict(disable_log_stats=False)
        arguments |= dict(tensor_parallel_size=args.parallel.devices, load_format="auto" if args.model else "dummy")
        prompts = [list(offer.prompt or range(offer.input_len)) for offer in offers]
        asked = [
            {"prompt": [token % hf["vocab_size"] for token in prompt], "arrival": o.arrival, "output_len": o.output_len}
            for prompt, o in zip(prompts, offers, strict=True)
        ]
        job = {"arguments": arguments | json.loads(args.peer_args), "offers": asked, "runs": args.runs}
        (Path(folder) / "job.json").write_text(json.dumps(job))
        environment = os.environ | ({"PYTHONPATH": args.peer_path} if args.peer_path else {})
        command = [args.peer_python, str(Path(__file__).with_name("peer_vllm.py")), folder]
        result = subprocess.run(command, env=environment, stdout=2, check=False)
        if result.returncode:
            raise SystemExit(f"vLLM ended with {result.returncode}: see its messages above")
        facts = json.loads((Path(folder) / "result.json").read_text())
    service = {"requests": len(offers), "input_tokens": sum(offer.input_len for offer in offers)}
    service["output_tokens_per_second"] = facts["output_tokens"] / facts["seconds"]
    facts |= {name: percentiles(facts[name]) for name in ("ttft", "itl")}
    return service | facts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--config", choices=configs.names(), help="a shape from configs/, random weights")
    shape.add_argument("--model", help="a checkpoint")
    parser.add_argument("--requests", type=Path, help="a file of requests; by default they are made")
    parser.add_argument("--count", type=int, default=512, help="number of requests to make")
    parser.add_argument("--rate", type=float, help="requests a second")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--max-batch", type=int, default=64, help="rows decoded together")
    parser.add_argument("--max-len", type=int, help="by default as long as the longest request")
    parser.add_argument("--prefill", help="prefill buckets, with commas between them")
    parser.add_argument("--batch", help="batch buckets; the last is --max-batch")
    parser.add_argument("--tile", type=int, help="tokens of a tile")
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="within a run")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on CPU, else bfloat16")
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument("--parallel", default="tp=1", help="such as tp=4")
    parser.add_argument("--compile-cache", default="none", help="a folder of compiled programs")
    parser.add_argument("--peer", choices=("vllm",), help="also serve with this peer")
    parser.add_argument("--peer-path", help="PYTHONPATH of the peer's process")
    parser.add_argument("--peer-python", default=sys.executable, help="the peer's Python")
    parser.add_argument("--peer-args", default="{}", help="JSON of further arguments of the peer's LLM")
    parser.add_argument("--simulate", metavar="TARGET", help="also what the cost model says of a target")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    try:
        args.offers = read_trace(args.requests) if args.requests else usual_trace(args.count)
        args.offers = at_rate(args.offers, args.rate) if args.rate else args.offers
        args.max_len = args.max_len or max(offer.input_len + offer.output_len for offer in args.offers)
        args.files = ModelFiles.open(args.model) if args.model else None
        args.scheme = args.quantization and Quantization.named(args.quantization)
        if args.files:
            args.scheme = args.files.quantization(args.quantization)
        args.parallel = Parallelism.parse(args.parallel)
        args.target = args.simulate and parse_target(args.simulate)
        use_compile_cache(args.compile_cache)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def run_options(args: argparse.Namespace, model: ModelConfig, shards: Shards) -> EngineOptions:
    """The engine's defaults on the devices of this machine, with the buckets that were given."""

    def sizes(text: str | None, usual: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(int, text.split(","))) if text else usual

    device = DeviceKind.of(jax.devices()[0])
    usual = EngineConfig.make(device, args.max_batch, args.max_len, None, shards, model)
    chosen = Buckets(
        sizes(args.prefill, usual.buckets.prefill),
        sizes(args.batch, usual.buckets.batch),
        usual.buckets.cache,
        args.tile or usual.buckets.tile,
    )
    asked = dict(max_batch=args.max_batch, max_len=args.max_len, prefix_caching=args.prefix_caching)
    return EngineOptions(buckets=chosen, **asked)


def main() -> None:
    args = arguments()
    hf = dict(args.files.hf) if args.files else configs.load(args.config)
    if args.peer and not args.dtype:
        args.dtype = "bfloat16"
    columns: dict[str, dict[str, Any]] = {}
    # The peer first: this process reserves most of a GPU's memory as soon as JAX starts.
    peer = peer_vllm(args, hf, args.offers) if args.peer else None
    prepare_jax()
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    config, scheme = config_from_hf(hf), args.scheme
    shards = make_shards(args.parallel if args.parallel.devices > 1 else None)
    options, device = run_options(args, config, shards), jax.devices()[0]

    def resolve(options: EngineOptions) -> EngineConfig:
        return options.resolve(DeviceKind.of(device), shards, config)

    usual = resolve(options)
    model = abstract_model(config, dtype, quantization=scheme, backend=usual.backend, scan=usual.scan, shards=shards)
    run = with_memory(options, resolve, model, lambda config: device_memory(device, alone=False))
    programs = ProgramSet.make(model, run)
    if args.files:
        formats = programs.formats
        weights = args.files.load(model, placement=None, shards=shards, formats=formats, progress=on_terminal())
    else:
        weights = programs.random_weights()
    columns["inferlib"] = measure(Watched(model, weights, run, programs=programs), args.offers, args.runs)
    if peer:
        columns["vLLM"] = peer
    if args.target:
        it = Deployed(config, args.target, args.parallel, scheme)
        planned = engine_config(it, run.max_batch, run.max_len, run.buckets)
        columns[f"estimate for {args.target}"] = simulate(it, planned, args.offers).facts()
    if args.json:
        facts = {"model": args.config or args.model, "dtype": dtype, "device": device.device_kind}
        print(json.dumps(facts | columns))
        return
    rows = f"up to {run.max_batch} rows of {run.max_len} tokens"
    title = f"{args.config or args.model}, {scheme or dtype}, {device.device_kind}, {rows}"
    Console(width=None if Console().is_terminal else 140).print(service_table(title, columns), highlight=False)


if __name__ == "__main__":
    main()
