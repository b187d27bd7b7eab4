"""`LLM`: generate text, stream it, score tokens."""

from __future__ import annotations

import itertools
import operator
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from inferlib import distributed
from inferlib.aot.artifacts import Artifacts
from inferlib.config import Buckets, ConfigurationError, EngineConfig, backend_option, check_dtype, chip_of
from inferlib.engine.engine import Engine, EngineStats, sequence_error
from inferlib.engine.sequence import Sequence as EngineSequence
from inferlib.engine.sequence import Status, TokenLogprobs
from inferlib.engine.text import OutputText
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import abstract_model
from inferlib.models.config import ModelConfig
from inferlib.models.quantization import Quantization
from inferlib.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from inferlib.placement import ExpertPlacement
from inferlib.platforms import leave_out_absent_tpu
from inferlib.programs.counter import compilations
from inferlib.programs.program_set import ProgramSet, planned_keys
from inferlib.programs.start_functions import adopted
from inferlib.progress import CountProgress, on_terminal
from inferlib.sampling.params import SamplingParams
from inferlib.sharding.mesh import Parallelism, ShardingError
from inferlib.sharding.shards import make_shards
from inferlib.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(eq=False)
class Request:
    """A validated prompt with its sequences (`n` of them)."""

    id: int
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    sequences: list[EngineSequence]
    texts: list[OutputText]

    @property
    def finished(self) -> bool:
        return all(s.status is Status.FINISHED for s in self.sequences)


class LLM:
    """A model on the devices of this process, or of several (see `follow`), ready to generate.

    model: a Hugging Face directory (config.json, safetensors, tokenizer.json), a `.gguf` file, a directory that
    `convert` wrote, or a known name ("smollm2"). dtype: "float32", "bfloat16" or "float16" of weights, cache and
    activations; None: float32 on CPU, else bfloat16. quantization: "int8", "int4", "fp8", "fp8_block", "mxfp8" or
    "mxfp4" for the matrices of products (not the embedding), made on the device as they are loaded; "mxfp8_a8" and
    "mxfp4_a8" round what is multiplied by them to MXFP8 too; None: as they are stored. kv_cache_dtype: "int8" or "fp8"
    for what the cache holds, with a scale for each position and head; None: dtype. max_batch: sequences decoded
    together, by default 8. max_len: longest prompt plus output in tokens; None: the model's context, at most 2048.
    buckets: static shapes to compile for. parallel: devices to split over, such as
    "tp=4,dp=2" or "cp=2,tp=4", or a `Parallelism`; None: one device. artifacts: a directory of `inferlib compile`: its
    programs run and none is ever compiled; what else is given must agree with it. expert_placement: a file that says
    which expert lies where, see `inferlib.placement`. expert_load: count how many tokens choose each expert, for
    `LLM.expert_load`. backend: "auto": kernels wherever they can run the model's part; "xla": no kernel;
    "decode_attention=xla,matmul=xla": no kernel for these operations of `inferlib.config.OPERATIONS`; None: "auto", or
    as the artifacts were compiled. seed: of requests that give none.

    Raises ArtifactError, CheckpointError, ConfigError, ConfigurationError, ShardingError or PeerError before device
    work.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | None = None,
        quantization: str | None = None,
        kv_cache_dtype: str | None = None,
        max_batch: int | None = None,
        max_len: int | None = None,
        buckets: Buckets | None = None,
        parallel: str | Parallelism | None = None,
        artifacts: str | Path | None = None,
        expert_placement: str | Path | None = None,
        expert_load: bool = False,
        backend: str | None = None,
        seed: int = 0,
        progress: bool | None = None,
    ):
        leave_out_absent_tpu()
        self._channel = distributed.channel()
        agreement = self._channel.agreement if self._channel else nullcontext
        with agreement({}):
            files = ModelFiles.open(model)
            kept = files.quantization(quantization)
            placement = ExpertPlacement.read(expert_placement) if expert_placement is not None else None
            if placement is not None:
                placement.check(files.config)
        self.model_config, self.tokenizer = files.config, files.tokenizer
        self.progress = on_terminal() if progress is None else progress
        self.seed = seed
        parallel = Parallelism.parse(parallel) if isinstance(parallel, str) else parallel
        backend = None if backend is None else backend_option(backend)
        sizes = dict(max_batch=max_batch, max_len=max_len, buckets=buckets)
        slots = placement and placement.slots
        settings = dict(dtype=dtype, quantization=kept, kv_cache_dtype=kv_cache_dtype, **sizes)
        settings |= dict(parallel=parallel, expert_slots=slots, backend=backend)
        if artifacts is not None and self._channel:
            raise ConfigurationError("artifacts serve the devices of one process; several processes compile their own")
        if artifacts is not None and expert_load:
            raise ConfigurationError("programs of artifacts do not count the experts' load: leave artifacts out")
        start, counts = {}, {"expert_placement": placement, "expert_load": expert_load}
        with agreement({"model": files.config, "jax": jax.__version__, **settings, **counts}):
            if artifacts is None:
                programs = _plan_programs(files.config, **settings, expert_load=expert_load)
            else:
                stored = Artifacts.open(artifacts)
                stored.check(files.config, settings)
                programs, start = stored.load(), stored.start()
            self.config = programs.config
            if self._channel and not self.config.shards.several_processes:
                raise ShardingError(
                    f"several processes run this model: split it over their {jax.device_count()} devices with parallel"
                )
        with adopted(start):
            options = dict(placement=placement, shards=self.config.shards, formats=programs.formats)
            weights = files.load(programs.model, **options, progress=self.progress)
            self.engine = Engine(programs.model, weights, self.config, channel=self._channel, programs=programs)
        if self._channel:
            self._channel.ready()
        self._ids = itertools.count()
        self._requests: dict[EngineSequence, OutputText] = {}

    def follow(self) -> bool:
        """On several processes (see `inferlib.distributed`), what all but the first do once they have a model.

        On those it does its part of what process 0 runs and returns True when process 0 ends; call it in the main
        thread. On process 0, and where there is only one process, it returns False at once.
        """
        if self._channel is None or self._channel.leads:
            return False
        # Ctrl-C in a terminal, or from srun, reaches all processes; it is process 0 that ends the work.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.engine.follow()
        finally:
            signal.signal(signal.SIGINT, before)
        return True

    # ---- generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt (text or token ids); results are in the prompts' order.

        sampling_params: one for all or one per prompt. Raises ValueError before device work if any prompt is
        invalid, naming it.
        """
        requests = self._prepare_all(prompts, sampling_params)
        done = {output.request_id: output for output in self.run(requests, progress=progress)}
        return [done[request.id] for request in requests]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: lists of {"role", "content"}, by the model's own template."""
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [self.chat_prompt(c, add_generation_prompt=add_generation_prompt, tools=tools) for c in conversations]
        return self.generate(prompts, sampling_params, progress=progress)

    def chat_prompt(self, messages: Sequence[Message], **options) -> list[int]:
        """The token ids of a conversation."""
        template = self._tokenizer("chat").chat_template
        if template is None:
            raise ValueError("this model has no chat template; use generate with a prompt of your own")
        return self._tokenizer("chat").encode(template.render(messages, **options), add_special_tokens=False)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Stream:
        """Generate for one prompt, iterating over text as it appears; see `Stream`."""
        self._tokenizer("stream")
        return Stream(self, self.prepare(prompt, SamplingParams() if sampling_params is None else sampling_params))

    def run(self, requests: Iterable[Request], *, progress: bool | None = None) -> Iterator[RequestOutput]:
        """Run prepared requests together; yields each result as soon as it is complete.

        A lazy iterable is consumed as room appears: at most 4 * max_batch requests wait or run at a time.
        """
        show = self.progress if progress is None else progress
        total = len(requests) if isinstance(requests, Sized) else None
        queue, pending, most = iter(requests), {}, 4 * self.config.max_batch
        try:
            with CountProgress("generating", total, show=show) as bar:
                while True:
                    for request in itertools.islice(queue, most - len(pending)):
                        pending[id(request)] = request
                        self._submit(request)
                    if not pending:
                        return
                    self._advance()
                    for request in [r for r in pending.values() if r.finished]:
                        del pending[id(request)]
                        bar.advance(1)
                        yield self._output(request)
        finally:
            for request in pending.values():
                self._abandon(request)

    # ---- evaluation

    def score(self, token_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Natural log-probability of each token given those before it: float32 [T - 1] for each list of T tokens."""
        params = SamplingParams(temperature=0.0)
        requests = [self._request(None, _token_ids(tokens), params, detail="logprobs") for tokens in token_lists]
        self._run_silently(requests)
        return [
            np.concatenate([detail.logprob for detail in r.sequences[0].prompt_details])[: len(r.token_ids) - 1]
            for r in requests
        ]

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits at every position, float32 [T, V]."""
        request = self._request(None, _token_ids(token_ids), SamplingParams(temperature=0.0), detail="logits")
        self._run_silently([request])
        return np.concatenate(request.sequences[0].prompt_details)[:, : self.model_config.vocab]

    # ---- preparation and metrics

    def warmup(self, modes: Sequence[str] = ("greedy", "sample", "logprobs")) -> int:
        """Compile all programs of these sampling modes now; afterwards nothing compiles, or it is an error.

        Returns the number of programs.
        """
        with CountProgress("compiling", len(planned_keys(self.config, modes)), show=self.progress) as bar:
            return self.engine.warmup(modes, lambda key: bar.advance(1))

    @property
    def compilations(self) -> int:
        """XLA compilations in this process so far."""
        return compilations()

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    def expert_load(self) -> np.ndarray:
        """How many tokens chose each expert since the start, int64 [layers that have experts, experts]: tokens of
        prompts and those generated. Raises ConfigurationError if it is not counted."""
        if not self.config.expert_load:
            raise ConfigurationError("the experts' load is not counted: build LLM(..., expert_load=True)")
        spec = self.model_config.mixtures
        return np.zeros((len(spec), spec[0].experts), np.int64) + self.engine.expert_load

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Tokenise and validate a prompt. Raises ValueError naming what is wrong."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams or a list of one for each prompt, got {params!r}")
        if isinstance(prompt, str):
            return self._request(prompt, self._tokenizer("text prompts").encode(prompt), params)
        return self._request(None, _token_ids(prompt), params)

    # ---- inside

    def _tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and the model directory has no tokenizer.json; use token ids")
        return self.tokenizer

    def _prepare_all(self, prompts, sampling_params) -> list[Request]:
        listed = prompts.ndim > 0 if isinstance(prompts, np.ndarray) else isinstance(prompts, Sequence)
        if not listed or isinstance(prompts, bytes):
            raise ValueError(f"prompts must be text, token ids or a list of these, got {prompts!r}")
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer)):
            prompts = [prompts]
        if isinstance(sampling_params, Mapping) or not isinstance(sampling_params, Sized):
            sampling_params = [SamplingParams() if sampling_params is None else sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(sampling_params)} sampling_params")
        requests = []
        for i, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True)):
            try:
                requests.append(self.prepare(prompt, params))
            except ValueError as error:
                raise ValueError(f"prompt {i}: {error}") from error
        return requests

    def _request(self, prompt: str | None, tokens: list[int], params: SamplingParams, detail: str = "") -> Request:
        vocab, max_len = self.model_config.vocab, self.config.max_len
        scoring = bool(detail)
        error = sequence_error(tokens, 0 if scoring else params.max_tokens, vocab, max_len)
        if error:
            raise ValueError(error)
        params.validate_for(vocab)
        eos = self.tokenizer.eos_token_ids if self.tokenizer else self.model_config.eos_token_ids
        params.stop_ids(eos)
        limit = max_len - len(tokens) if params.max_tokens is None else params.max_tokens
        number = next(self._ids)
        if params.prompt_logprobs is not None:
            detail = "logprobs"
        sequences = [
            EngineSequence(
                tokens,
                params,
                max_tokens=0 if scoring else limit,
                seed=self._seed(params, number, i),
                eos_ids=eos,
                detail=detail if i == 0 else "",
            )
            for i in range(params.n)
        ]
        for s in sequences:
            self.engine.programs.require(s.mode)
        texts = [OutputText(s, self.tokenizer) for s in sequences]
        return Request(number, prompt, tokens, params, sequences, texts)

    def _seed(self, params: SamplingParams, number: int, index: int) -> int:
        entropy = (self.seed, number, index) if params.seed is None else (params.seed, index)
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])

    def _submit(self, request: Request) -> None:
        for sequence, text in zip(request.sequences, request.texts, strict=True):
            self.engine.add(sequence)
            self._requests[sequence] = text

    def _advance(self, max_steps: int | None = None) -> None:
        """One round of the engine; every sequence that advanced takes in its text."""
        for sequence in self.engine.advance(max_steps=max_steps):
            running = sequence.status is not Status.FINISHED
            self._requests[sequence].update()
            if sequence.status is Status.FINISHED:
                if running:
                    self.engine.cancel(sequence)
                del self._requests[sequence]

    def _abandon(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence in self._requests:
                self.engine.cancel(sequence)
                del self._requests[sequence]

    def _run_silently(self, requests: list[Request]) -> None:
        for _ in self.run(requests, progress=False):
            pass

    def _output(self, request: Request) -> RequestOutput:
        prompt_logprobs = None
        if request.params.prompt_logprobs is not None:
            prompt_logprobs = self._prompt_logprobs(request)
        first = [s.first_token_time for s in request.sequences if s.first_token_time is not None]
        metrics = RequestMetrics(
            arrival_time=request.sequences[0].arrival,
            first_token_time=min(first, default=None),
            finished_time=max(s.finished_time for s in request.sequences),
            generated=sum(len(s.tokens) for s in request.sequences),
            itl=_mean_itl(request.sequences),
        )
        outputs = [
            self._completion(i, s, t) for i, (s, t) in enumerate(zip(request.sequences, request.texts, strict=True))
        ]
        return RequestOutput(
            request.id, request.prompt, request.token_ids, outputs, prompt_logprobs, metrics, finished=True
        )

    def _completion(self, index: int, s: EngineSequence, text: OutputText) -> CompletionOutput:
        logprobs = total = None
        if s.params.logprobs is not None:
            logprobs = [self._alternatives(entry, s.params.logprobs) for entry in s.logprobs]
            total = float(sum(entry.logprob for entry in s.logprobs))
        return CompletionOutput(
            index,
            text.text,
            list(s.tokens),
            s.finish_reason,
            s.stop_reason,
            cumulative_logprob=total,
            logprobs=logprobs,
        )

    def _prompt_logprobs(self, request: Request) -> list[dict[int, Logprob] | None]:
        details = request.sequences[0].prompt_details
        fields = [np.concatenate([np.asarray(d[i]) for d in details]) for i in range(1, 5)]
        entries: list[dict[int, Logprob] | None] = [None]
        for position, token in enumerate(request.token_ids[1:]):
            logprob, rank, ids, values = (f[position] for f in fields)
            entry = TokenLogprobs(token, float(logprob), int(rank), ids, values)
            entries.append(self._alternatives(entry, request.params.prompt_logprobs))
        return entries

    def _alternatives(self, entry: TokenLogprobs, count: int) -> dict[int, Logprob]:
        """The token itself and the `count` most likely ones."""
        chosen = {entry.token: Logprob(entry.logprob, entry.rank, self._piece(entry.token))}
        for rank in range(min(count, len(entry.top_ids))):
            token = int(entry.top_ids[rank])
            chosen.setdefault(token, Logprob(float(entry.top_logprobs[rank]), rank + 1, self._piece(token)))
        return chosen

    def _piece(self, token: int) -> str | None:
        return self.tokenizer.decode([token], skip_special_tokens=False) if self.tokenizer else None


def _plan_programs(
    model: ModelConfig,
    *,
    dtype: str | None,
    quantization: Quantization | None,
    kv_cache_dtype: str | None,
    max_batch: int | None,
    max_len: int | None,
    buckets: Buckets | None,
    parallel: Parallelism | None,
    expert_slots: int | None,
    backend: str | None,
    expert_load: bool,
) -> ProgramSet:
    """The programs of `LLM`'s arguments; where layouts are free, they are chosen now, before weights are loaded."""
    device = jax.devices()[0]
    platform = device.platform
    dtype = dtype or ("float32" if platform == "cpu" else "bfloat16")
    check_dtype(dtype)
    experts = sorted({spec.experts for spec in model.mixtures})
    if expert_load and len(experts) != 1:
        of = f"layers of {' and of '.join(map(str, experts))} experts, not of as many each" if experts else "no experts"
        raise ConfigurationError(f"expert_load counts the tokens of each expert, and the model has {of}")
    shards = make_shards(parallel)
    max_len = min(model.context, 2048) if max_len is None else max_len
    sizes = 8 if max_batch is None else max_batch, max_len, buckets
    kept = kv_cache_dtype, "auto" if backend is None else backend
    config = EngineConfig.make(platform, *sizes, shards, model, *kept, *chip_of(device))
    if max_len > model.context:
        raise ValueError(f"max_len {max_len} exceeds the model's context of {model.context} tokens")
    config = replace(config, expert_load=expert_load)
    options = dict(backend=config.backend, scan=config.scan, shards=shards, expert_slots=expert_slots)
    abstract = abstract_model(model, dtype, quantization=quantization, **options)
    programs = ProgramSet.make(abstract, config)
    programs.choose_layouts()
    return programs


def _mean_itl(sequences: list[EngineSequence]) -> float | None:
    """Mean seconds between the tokens of a sequence after its first; None if none has a second token."""
    spans = [(s.finished_time - s.first_token_time, len(s.tokens) - 1) for s in sequences if len(s.tokens) > 1]
    return sum(span for span, _ in spans) / sum(count for _, count in spans) if spans else None


class Stream:
    """Iterates, once, over text deltas, which never split a character; `output` is the result once it ended.

    Leaving the loop early frees the row.
    """

    def __init__(self, llm: LLM, request: Request):
        if request.params.n != 1:
            raise ValueError("stream gives one text: use n=1")
        self._llm, self._request = llm, request
        self.output: RequestOutput | None = None

    def __iter__(self) -> Iterator[str]:
        request, text = self._request, self._request.texts[0]
        if request.sequences[0].status is not Status.WAITING:
            raise RuntimeError("a stream can be read once: call LLM.stream again")
        self._llm._submit(request)
        try:
            while True:
                finished = request.finished
                if delta := text.delta():
                    yield delta
                if finished:
                    break
                self._llm._advance(max_steps=1)
            self.output = self._llm._output(request)
        finally:
            self._llm._abandon(request)


def _token_ids(tokens: Iterable[int]) -> list[int]:
    try:
        return [operator.index(token) for token in tokens]
    except TypeError as error:
        raise ValueError(f"a prompt is text or a sequence of integer token ids: {error}") from None
