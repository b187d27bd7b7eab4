"""`LLM`: generate text, stream it, score tokens."""

from __future__ import annotations

import itertools
import operator
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import jax
import numpy as np

from inferlib import distributed
from inferlib.aot.artifacts import Artifacts
from inferlib.chat import ChatTemplate, checked_kwargs
from inferlib.checkpoint.adapter import Adapter
from inferlib.config import EngineConfig, EngineOptions, EngineSettings
from inferlib.engine.adapters import AdapterLibrary, AdapterPool, LoadedAdapter, opened_adapters, with_room
from inferlib.engine.choices import Choices, engine_options, plan_programs
from inferlib.engine.engine import Engine, EngineStats, sequence_error
from inferlib.engine.grammars import Grammars
from inferlib.engine.pooling import Pooling, check_pooling, pooled
from inferlib.engine.prefiller import Prefiller, check_prefilling, prefiller_of
from inferlib.engine.request import Request, beam_sequence, request_output
from inferlib.engine.runner import Runner
from inferlib.engine.sequence import Sequence as EngineSequence
from inferlib.engine.text import OutputText
from inferlib.engine.tiers import check_tiers
from inferlib.model_files import ModelFiles
from inferlib.models.config import ModelConfig
from inferlib.models.depth import depth_of
from inferlib.ops.selected_pages import PageSelection
from inferlib.option_checks import (
    ConfigurationError,
    brief,
    check_flag,
    check_priority,
    check_seed,
    checked_path,
    is_list,
    selection_option,
)
from inferlib.outputs import BeamSearchOutput, RequestOutput
from inferlib.platforms import prepare_jax
from inferlib.programs.compilation_cache import use_compile_cache
from inferlib.programs.counter import compilations
from inferlib.programs.keys import DEVICE_MODES, Mode
from inferlib.programs.memory import explained
from inferlib.programs.program_set import ProgramSet, planned_keys
from inferlib.programs.start_functions import Compiled, adopted
from inferlib.progress import CountProgress, on_terminal
from inferlib.sampling import token_table
from inferlib.sampling.beam_search import BeamSearch, BeamSearchParams
from inferlib.sampling.generation_config import GenerationConfig
from inferlib.sampling.params import SamplingParams
from inferlib.sampling.structured import StructuredOutputs
from inferlib.sharding.mesh import Parallelism, ShardingError
from inferlib.tokenizer import Tokenizer

# A mapping has "prompt", text, or "prompt_token_ids"; and perhaps "cache_salt": only prompts of one salt share pages.
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


# Options that artifacts decide.
_OF_ARTIFACTS = ("decode_steps", "in_flight", "scan", "free_layouts", "platform", "snapshots")


class Settings(EngineSettings, total=False):
    """The keyword arguments of `LLM` that are seldom needed: options of the engine, and those of a model's files."""

    revision: str | None
    generation_config: str
    adapters: Mapping[str, str | Path] | None
    loop_steps: int | None
    early_exit: bool | Literal["kl"] | None
    prefill_devices: Sequence[Any] | None


class ChatForm(TypedDict, total=False):
    """Arguments of `LLM.chat` that say how a conversation goes on; see `ChatTemplate.render`."""

    add_generation_prompt: bool | None
    continue_final_message: bool


class _Scope(NamedTuple):
    """What the cells of a prompt depend on, or are shared by, beside its tokens."""

    salt: str | None = None
    adapter: LoadedAdapter | None = None


class LLM:
    """A model on the devices of this process, or of several processes (see `follow`), ready to generate.

    model: a Hugging Face directory (config.json, safetensors, tokenizer.json), a `.gguf` file, a directory that
        `convert` wrote, a known name ("smollm2"), or a name of the Hugging Face Hub: "Qwen/Qwen3-0.6B", or with the
        prefix "hf:" even where there is a local directory "Qwen/Qwen3-0.6B"; "hf:org/name/FILE.gguf" is one file.
    config: options of the engine, such as `EngineOptions(max_batch=32, max_len=4096)`, which leave the rest to the
        platform; or a complete `EngineConfig` without a mesh.
    dtype: "float32", "bfloat16" or "float16", for weights, cache and activations; by default float32 on CPU, else
        bfloat16.
    quantization: "int8", "int4", "int4_g32", "fp8", "fp8_block", "mxfp8" or "mxfp4" quantizes the matrices of products
        (not the embedding) on the device as they are loaded; "mxfp8_a8" and "mxfp4_a8" also round the activations that
        they multiply to MXFP8, and "int8_a8" and "fp8_a8" to eight bits in products of 256 tokens or more. By default
        weights stay as they are stored.
    parallel: devices to split the model over, such as "tp=4,dp=2" or "cp=2,tp=4", or a `Parallelism`; by default one.
    artifacts: a directory that `inferlib compile` wrote. Its programs run and nothing is compiled; every other option
        must agree with it.
    seed: for requests that have no seed.
    progress: show progress bars; by default if standard error is a terminal.
    revision: branch, tag or commit of a model of the hub; by default its main branch.
    generation_config: "auto", the default, takes the sampling parameters of the model's generation_config.json for
        requests that are given none; "none" takes those of `SamplingParams()`.
    adapters: LoRA adapters by the names that requests give: directories that PEFT wrote. More can be loaded later, see
        `load_adapter`, `max_adapters` and `max_adapter_rank`.
    prefill_devices: devices that prefill prompts, so that long ones do not stall the rows that decode, such as
        `jax.devices()[4:]`, or their numbers; as many as decode. They get weights and a cache of their own.
    loop_steps: how often a looped model (Huginn, Parcae) runs its core, 1 to 256; by default as in training on average.
    early_exit: True: tokens of such a model may leave the core before its last step, once one changes their state by
        less than the `exit_threshold` of their request; "kl": once one changes what the head makes of it by less. By
        default they do not.
    options: fields of `EngineOptions` (max_batch, max_len, buckets, kv_cache_dtype, backend, expert_placement,
        expert_load, ...) as keywords; they replace those of `config`.

    Raises ArtifactError, CheckpointError, ConfigError, ConfigurationError, ShardingError or PeerError before any work
    on the devices, and OutOfMemoryError, then and later, where memory does not suffice.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineOptions | EngineConfig | None = None,
        *,
        dtype: str | None = None,
        quantization: str | None = None,
        parallel: str | Parallelism | None = None,
        artifacts: str | Path | None = None,
        seed: int = 0,
        progress: bool | None = None,
        **options: Unpack[Settings],
    ):
        self.progress = on_terminal() if progress is None else progress
        revision, generation = options.pop("revision", None), options.pop("generation_config", "auto")
        loop = options.pop("loop_steps", None), options.pop("early_exit", None)
        apart = options.pop("prefill_devices", None)
        adapters, decided = opened_adapters(options.pop("adapters", None), engine_options(config, options))
        check_seed(seed)
        check_flag("progress", progress, optional=True)
        prepare_jax()
        self._channel = distributed.channel()
        artifacts = _artifacts_path(artifacts, self._channel, decided)
        agreement = self._channel.agreement if self._channel else nullcontext
        with agreement({}):
            if artifacts is not None and decided.speculation is None:
                decided = replace(decided, speculation=Artifacts.open(artifacts).deployment.speculation)
            files = ModelFiles.open(model, revision, progress=self.progress)
            files = _with_measured(files.looped(*loop), decided, artifacts)
            self._generation = GenerationConfig.read(files.path, generation)
            choices = Choices.read(files, dtype, quantization, parallel, decided, progress=self.progress)
            if artifacts is None and (self._channel is None or decided.compile_cache is not None):
                use_compile_cache(decided.compile_cache)
        self.model_config, self.tokenizer = files.config, files.tokenizer
        self.seed = seed
        self._stored: Compiled = {}  # small functions of artifacts
        with agreement({"model": files.config, "jax": jax.__version__, **choices.shared()}):
            if artifacts is None:
                programs = plan_programs(files.config, choices)
            else:
                programs, self._stored = _load_programs(Artifacts.open(artifacts), files.config, choices)
            of_engine = {"itl": decided.itl, "prefix_caching": decided.prefix_caching, **decided.tiers}
            self.config = replace(programs.config, **of_engine)
            check_tiers(programs.plan, self.config)
            _check_processes(self._channel, self.config)
            apart = check_prefilling(apart, programs, self.config, compiled=artifacts is not None)
        self._library = AdapterLibrary(files, programs.model, adapters)
        with adopted(self._stored), explained("loading the weights", programs.demand):
            weights = _load_weights(files, programs, choices, self.progress)
        with adopted(self._stored), explained("making room for the cache", programs.demand):
            source = prefiller_of(programs, weights, apart)
            engine = Engine(
                programs.model, weights, self.config, channel=self._channel, programs=programs, source=source
            )
        if self._channel:
            self._channel.ready()
        self._library.fill(engine.adapters)
        self._ids, self._runner = itertools.count(), Runner(engine)
        self._grammars = Grammars(self.tokenizer, self._eos_ids(), programs.model.layout.vocab)
        self._time_steps(DEVICE_MODES if programs.strict else ("greedy",))

    @property
    def engine(self) -> Engine:
        return self._runner.engine

    def follow(self) -> bool:
        """Take part in what process 0 runs; for every other process, once it has a model (see `inferlib.distributed`).

        Call it in the main thread. Returns True when process 0 ends. On process 0, and where there is only one
        process, it returns False at once.
        """
        if self._channel is None or self._channel.leads:
            return False
        # Ctrl-C in a terminal, or from srun, reaches all processes. Process 0 ends the work.
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
        adapter: str | Sequence[str | None] | None = None,
        priority: float | Sequence[float] = 0,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt (text, token ids, or a mapping with either); results have the order of the prompts.

        A mapping may have a "cache_salt" too, a text: what is cached of a prompt serves only prompts of the same salt.
        sampling_params: one for all prompts, or one per prompt; by default `get_default_sampling_params()`. adapter:
        the name of a loaded adapter (see `load_adapter`), or for each prompt one or None. priority: likewise one or
        several; those of a lower number come first, and take rows and pages from others if need be. Raises ValueError,
        naming the prompt, before any work on the devices if one is invalid.
        """
        check_flag("progress", progress, optional=True)
        requests = self._prepare_all(prompts, sampling_params, priority, adapter)
        outputs = {output.request_id: output for output in self.run(requests, progress=progress)}
        return [outputs[request.id] for request in requests]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        adapter: str | None = None,
        progress: bool | None = None,
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of every prompt (text, token ids, or a mapping with either), by beam search.

        Each step of the search is a request for one token of every beam of all prompts, so prefix caching, which is on
        by default, saves most of its work. adapter: of all prompts, see `generate`. Raises ValueError, naming the
        prompt, before any work on the devices.
        """
        check_flag("progress", progress, optional=True)
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"beam_search takes BeamSearchParams(beam_width=..., max_tokens=...), got {brief(params)}")
        eos, searches = self._eos_ids(), []
        for i, prompt in enumerate(_listed(prompts)):
            try:
                _, tokens, scope = self._read(prompt, adapter)
                if error := sequence_error(tokens, params.max_tokens, *self._sizes):
                    raise ValueError(error)
            except ValueError as error:
                raise ValueError(f"prompt {i}: {error}") from error
            searches.append((tokens, scope, BeamSearch(params, eos)))
        show = self.progress if progress is None else progress
        with CountProgress("beam search", params.max_tokens, show=show) as bar:
            while running := [entry for entry in searches if entry[2].running]:
                self._extend_beams(running)
                bar.advance(1)
        return [
            BeamSearchOutput([beam_sequence(tokens, beam, search, self.tokenizer) for beam in search.finished])
            for tokens, _, search in searches
        ]

    def _extend_beams(self, searches: Sequence[tuple[list[int], _Scope, BeamSearch]]) -> None:
        """Generate a token of every beam that runs. searches: with the prompts' tokens."""
        requests = []
        for tokens, scope, search in searches:
            params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=search.candidates, ignore_eos=True)
            requests += [self._request(None, [*tokens, *b.tokens], params, scope=scope) for b in search.running]
        self._complete(requests)
        following = iter(request.sequences[0].logprobs[0] for request in requests)
        for _, _, search in searches:
            n = search.candidates
            tops = [next(following) for _ in search.running]
            search.extend([list(zip(t.top_ids[:n].tolist(), t.top_logprobs[:n].tolist(), strict=True)) for t in tops])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        tools: list[dict] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        progress: bool | None = None,
        **form: Unpack[ChatForm],
    ) -> list[RequestOutput]:
        """Answer one conversation or several: lists of {"role", "content"}, formatted by the model's chat template.

        adapter: see `generate`. The other arguments are those of `chat_prompt`. Raises ValueError.
        """
        if unknown := form.keys() - ChatForm.__annotations__.keys():
            raise TypeError(f"chat() got an unexpected keyword argument {min(unknown)!r}")
        sequence = isinstance(messages, Sequence) and not isinstance(messages, str)
        several = sequence and len(messages) > 0 and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        options: dict[str, Any] = dict(
            chat_template=chat_template, tools=tools, chat_template_kwargs=chat_template_kwargs, **form
        )
        prompts = [self.chat_prompt(conversation, **options) for conversation in conversations]
        return self.generate(prompts, sampling_params, adapter=adapter, progress=progress)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options,
    ) -> list[int]:
        """The token ids of a conversation.

        chat_template: a Jinja template in place of the model's. chat_template_kwargs: the template's own options, such
        as {"enable_thinking": False}. options: `add_generation_prompt`, `continue_final_message` and `tools` of
        `inferlib.chat.ChatTemplate.render`, and more of the template's own. Raises ValueError.
        """
        template = self._chat_template(chat_template)
        options |= checked_kwargs(chat_template_kwargs, options)
        return self._tokenizer("chat").encode(template.render(messages, **options), add_special_tokens=False)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        priority: float = 0,
    ) -> Stream:
        """Generate for one prompt, iterating over text as it appears; see `Stream` and `generate`."""
        self._tokenizer("stream")
        return Stream(self, self.prepare(prompt, sampling_params, adapter=adapter, priority=priority))

    def run(
        self,
        requests: Iterable[Request],
        *,
        progress: bool | None = None,
        failed: Callable[[Request, RuntimeError], None] | None = None,
    ) -> Iterator[RequestOutput]:
        """Run prepared requests together; yields each result as soon as it is complete.

        A lazy iterable is consumed as room appears: at most 4 * max_batch requests wait or run at a time. Several
        threads may run requests, and read streams, at a time. failed: called with a request that its grammar or its
        functions ended, and their error, which is otherwise raised and ends the others. Raises ValueError for a request
        that was run before, and RuntimeError if an error, of another call perhaps, lost results.
        """
        check_flag("progress", progress, optional=True)
        if not is_list(requests):
            raise ValueError(f"run takes requests that LLM.prepare made, got {brief(requests)}")
        return self._run(requests, "generating", self.progress if progress is None else progress, failed)

    def _run(
        self, requests: Iterable[Request], doing: str, show: bool, failed: Callable | None = None
    ) -> Iterator[RequestOutput]:
        total = len(requests) if isinstance(requests, Sized) else None
        queue, pending, limit = iter(requests), {}, 4 * self.config.max_batch
        try:
            with CountProgress(doing, total, show=show) as bar:
                while True:
                    for request in itertools.islice(queue, limit - len(pending)):
                        if not isinstance(request, Request):
                            raise ValueError(f"run takes requests that LLM.prepare made, got {brief(request)}")
                        if not request.start():
                            raise ValueError(f"request {request.id} was run before: prepare it again")
                        pending[request.id] = request
                        self._runner.submit(request)
                    if not pending:
                        return
                    for request in self._runner.wait(list(pending.values())):
                        if failed is None or request.failure is None:
                            request.check()
                        del pending[request.id]
                        bar.advance(1)
                        if request.failure is None:
                            yield request_output(request, self.tokenizer)
                        elif failed is not None:
                            failed(request, request.failure)
        finally:
            if pending:
                self._runner.abandon(pending.values())

    # ---- evaluation

    def logprobs(self, token_lists: Sequence[Sequence[int]], *, adapter: str | None = None) -> list[np.ndarray]:
        """Natural log-probability of each token given those before it: float32 [T - 1] for each list of T tokens."""
        if not is_list(token_lists):
            raise ValueError(f"logprobs takes lists of token ids, such as [[1, 2, 3]], got {brief(token_lists)}")
        requests = [self._scoring_request(tokens, "logprobs", adapter) for tokens in token_lists]
        self._complete(requests)
        scores = []
        for request in requests:
            chunks = [detail.logprob for detail in request.sequences[0].prompt_details]
            scores.append(np.concatenate(chunks)[: len(request.token_ids) - 1])
        return scores

    score = logprobs  # its name until 0.1; vLLM's score compares texts

    def logits(self, token_ids: Sequence[int], *, adapter: str | None = None) -> np.ndarray:
        """Logits at every position, float32 [T, V]."""
        request = self._scoring_request(token_ids, "logits", adapter)
        self._complete([request])
        return np.concatenate(request.sequences[0].prompt_details)[:, : self.model_config.vocab]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling = "last",
        *,
        normalize: bool = True,
        adapter: str | None = None,
        progress: bool | None = None,
    ) -> np.ndarray:
        """A vector of each prompt (text, token ids, or a mapping with either): float32 [N, D] for N prompts.

        It is made of the hidden states after the final norm, D wide: pooling "last" takes that of the last token,
        "mean" the mean over all tokens. normalize: divide it by its length. Every model here is a causal decoder and
        has them, so none is refused; how to make a vector that means something, a model's card says. `warmup()`
        compiles no programs for it unless it is given the mode "embed". Raises ValueError, naming the prompt, before
        any work on the devices.
        """
        check_pooling(pooling)
        check_flag("normalize", normalize)
        check_flag("progress", progress, optional=True)
        requests = _prepared(_listed(prompts), partial(self._embedding_request, adapter=adapter))
        rows = {request.id: row for row, request in enumerate(requests)}
        vectors = np.zeros((len(requests), self.model_config.dim), np.float32)
        for output in self._run(requests, "embedding", self.progress if progress is None else progress):
            request = requests[row := rows[output.request_id]]
            details = request.sequences[0].prompt_details
            vectors[row] = pooled(details.pop(), len(request.token_ids), pooling, normalize)
        return vectors

    # ---- preparation and metrics

    def warmup(self, modes: Sequence[Mode] = DEVICE_MODES) -> int:
        """Compile all programs of these modes now; a program that is missing later is an error.

        modes: of "greedy", "sample", "logprobs", "processed", which structured outputs and logits processors need, and
        "embed". Returns the number of programs.
        """
        with CountProgress("compiling", len(planned_keys(self.config, modes)), show=self.progress) as bar:
            count = self.engine.warmup(modes, lambda key: bar.advance(1))
            if isinstance(source := self.engine.source, Prefiller):
                count += source.warmup(lambda key: bar.advance(1))
        self._time_steps(modes)
        return count

    def sleep(self) -> None:
        """Free the memory of the devices until `wake`: the weights go to host memory, and the cache is dropped, but for
        what `host_cache` and `disk_cache` have room for.

        Programs stay compiled; on TPUs the first time compiles small ones for `wake`. Requests raise RuntimeError
        meanwhile. Raises RuntimeError, and changes nothing, if requests wait or run. A model that sleeps already stays
        as it is.
        """
        self._runner.call(lambda: self.engine.sleep())

    def wake(self) -> None:
        """Bring back what `sleep` freed, with an empty cache; nothing compiles. A model that is awake stays as it is.

        Raises OutOfMemoryError if the memory is taken; the model still sleeps then.
        """

        def wake() -> None:
            with adopted(self._stored):
                self.engine.wake()

        self._runner.call(wake)

    @property
    def compilations(self) -> int:
        """XLA compilations in this process so far."""
        return compilations()

    @property
    def stats(self) -> EngineStats:
        self.engine.count_pages()
        return self.engine.stats

    @property
    def no_prefix_caching(self) -> str | None:
        """Why prompts that begin alike share nothing in the cache; None if they do."""
        return self.engine.plan.no_prefix_caching(self.config)

    def reset_prefix_cache(self) -> None:
        """Free the pages that no request needs now, on the host and on disk too: prompts to come find nothing in them.
        As after a change of the weights, or between measurements."""
        self._runner.call(lambda: self.engine.forget_prefixes())

    def expert_load(self) -> np.ndarray:
        """How many tokens that were computed, of prompts and generated, chose each expert since the start: int64 [L, E]
        for L layers with E experts each. Raises ConfigurationError if it is not counted."""
        if not self.config.expert_load:
            raise ConfigurationError("the experts' load is not counted: build LLM(..., expert_load=True)")
        layers = self.model_config.mixtures
        counts = np.zeros((len(layers), layers[0].experts), np.int64)
        return self._runner.call(lambda: counts + self.engine.expert_load)

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests are sampled by that are given no parameters: those of the model's generation_config.json, and
        `SamplingParams()` for the rest. max_tokens is then lowered to the room that a prompt leaves."""
        return self._generation.params

    def load_adapter(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter, a directory that PEFT wrote, into host memory, for requests that give its name.

        The devices have up to `max_adapters`; others replace the least recently used once no request runs with that.
        Nothing compiles, and requests go on meanwhile. Raises ValueError for a name that is taken, CheckpointError for
        a directory that is damaged, of another model, of a higher rank than `max_adapter_rank` or of an unsupported
        kind, and ConfigurationError if the model was built without adapters.
        """
        self._pool()
        loaded = self._library.load(name, Adapter.open(checked_path("directory", directory)))
        self._runner.call(lambda: self._pool().add(loaded))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Requests that were made with it go on. Raises ValueError for an unknown name."""
        self._runner.call(lambda: self._pool().remove(name))

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that are loaded."""
        return () if self.engine.adapters is None else tuple(self.engine.adapters.named)

    def _pool(self) -> AdapterPool:
        return with_room(self.engine.adapters)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        fit: bool = False,
        adapter: str | None = None,
        priority: float = 0,
    ) -> Request:
        """Tokenize and validate a prompt, and compile its grammar. Raises ValueError naming what is wrong.

        params: None: `get_default_sampling_params()`. fit: lower max_tokens to the room that the prompt leaves, as is
        done for params None; otherwise too many are an error. adapter, priority: see `generate`.
        """
        request = self._prepare(prompt, params, fit=fit, adapter=adapter, priority=priority)
        self._constrain(request)
        return request

    # ---- inside

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        fit: bool = False,
        adapter: str | None = None,
        priority: float,
    ) -> Request:
        """A request whose grammar is not compiled, if it has one."""
        check_priority(priority)
        check_flag("fit", fit)
        if params is None:
            params, fit = self.get_default_sampling_params(), True
        if not isinstance(params, SamplingParams):
            raise ValueError(
                f"sampling_params must be SamplingParams or a list of one for each prompt, got {brief(params)}"
            )
        text, tokens, scope = self._read(prompt, adapter)
        tokens = self._truncated(tokens, params)
        if fit and params.max_tokens is not None:
            room = max(1, params.min_tokens, self.config.max_len - len(tokens))
            params = replace(params, max_tokens=min(params.max_tokens, room))
        return self._request(text, tokens, params, priority=priority, scope=scope)

    def _constrain(self, request: Request) -> None:
        """Give each sequence of a request its place in the grammar, which may have to be compiled first. Raises
        ValueError."""
        if isinstance(wanted := request.params.structured_outputs, StructuredOutputs):
            for s in request.sequences:
                s.constraint = self._grammars.constraint(wanted)

    def _read(self, prompt: Prompt, adapter: str | None) -> tuple[str | None, list[int], _Scope]:
        """A prompt's text, if it is one, its tokens, and its scope with the adapter of a name."""
        salt = None
        if isinstance(prompt, Mapping):
            prompt, salt = _unwrapped(prompt)
        scope = _Scope(salt, self._adapter(adapter))
        if isinstance(prompt, str):
            return prompt, self._tokenizer("text prompts").encode(prompt), scope
        return None, _token_ids(prompt), scope

    def _adapter(self, name: str | None) -> LoadedAdapter | None:
        return None if name is None else self._pool().find(name)

    def _chat_template(self, source: str | None) -> ChatTemplate:
        """The model's chat template, or another for the same model."""
        tokenizer = self._tokenizer("chat")
        if not isinstance(source, str | None):
            raise ValueError(f"chat_template must be the text of a Jinja template, got {brief(source)}")
        if (model := tokenizer.chat_template) is not None:
            return model if source is None else model.with_source(source)
        if source is None:
            raise ValueError("this model has no chat template: give chat_template, or a prompt of your own to generate")
        ids = (tokenizer.bos_token_id, next(iter(tokenizer.eos_token_ids), None))
        return ChatTemplate(
            source, *(i if i is None else tokenizer.decode([i], skip_special_tokens=False) for i in ids)
        )

    def _truncated(self, tokens: list[int], params: SamplingParams) -> list[int]:
        """The prompt without the first tokens that `truncate_prompt_tokens` leaves out."""
        if params.truncate_prompt_tokens is None:
            return tokens
        most = params.truncate_prompt_tokens
        if most == -1:
            most = max(1, self.config.max_len - (params.max_tokens or 1))
        return tokens[-most:]

    def _tokenizer(self, use: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{use} needs a tokenizer, and the model directory has no tokenizer.json; use token ids")
        return self.tokenizer

    def _prepare_all(self, prompts: Any, sampling_params: Any, priority: Any, adapter: Any) -> list[Request]:
        prompts = _listed(prompts)
        params_list: Any = sampling_params
        if not isinstance(sampling_params, Sequence):
            params_list = [sampling_params] * len(prompts)
        if len(params_list) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(params_list)} sampling_params")
        priorities = list(priority) if is_list(priority) else [priority] * len(prompts)
        if len(priorities) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(priorities)} priorities")
        adapters = list(adapter) if is_list(adapter) else [adapter] * len(prompts)
        if len(adapters) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(adapters)} adapters")
        options = zip(params_list, priorities, adapters, strict=True)

        def prepare(prompt: Prompt) -> Request:
            params, number, name = next(options)
            return self.prepare(prompt, params, adapter=name, priority=number)

        return _prepared(prompts, prepare)

    def _embedding_request(self, prompt: Prompt, adapter: str | None = None) -> Request:
        text, tokens, scope = self._read(prompt, adapter)
        return self._request(text, tokens, SamplingParams(temperature=0.0), "embed", scope=scope)

    def _scoring_request(
        self, token_ids: Sequence[int], detail: Literal["logprobs", "logits"], adapter: str | None
    ) -> Request:
        scope = _Scope(adapter=self._adapter(adapter))
        return self._request(None, _token_ids(token_ids), SamplingParams(temperature=0.0), detail, scope=scope)

    def _request(
        self,
        prompt: str | None,
        tokens: list[int],
        params: SamplingParams,
        scored: Literal["", "logprobs", "logits", "embed"] = "",
        priority: float = 0,
        scope: _Scope = _Scope(),  # noqa: B008
    ) -> Request:
        """scored: what to return of the prompt in place of generating."""
        vocab, max_len, _ = sizes = self._sizes
        if error := sequence_error(tokens, 0 if scored else params.max_tokens, *sizes):
            raise ValueError(error)
        encode = partial(self.tokenizer.encode, add_special_tokens=False) if self.tokenizer else None
        params = token_table.with_token_ids(params, encode)
        params.validate_for(vocab)
        depth_of(params.depth, params.exit_threshold, self.model_config)
        if params.chosen_with_host and self._channel:
            name = "logits_processors" if params.logits_processors else "structured_outputs"
            raise ValueError(f"{name} run in one process, and several processes share this model")
        if params.structured_outputs is not None:
            self._grammars.check()
        eos = self._eos_ids()
        token_table.check_choice(params, params.stop_ids(eos))
        limit = max_len - len(tokens) if params.max_tokens is None else params.max_tokens
        number = next(self._ids)
        detail = scored if params.prompt_logprobs is None else "logprobs"
        if detail and self.config.propagation is not None:
            raise ValueError(
                f"sparse_prefill {str(self.config.propagation)!r} computes no last hidden states of tokens that later "
                "layers do not see, of which scores and embeddings of prompts are made: load the model without it"
            )
        sequences = [
            EngineSequence(
                tokens,
                params,
                max_tokens=0 if scored else limit,
                seed=self._seed(params, number, i),
                eos_ids=eos,
                detail=detail if i == 0 else "",
                clock=self.engine.clock,
                priority=float(priority),
                **scope._asdict(),
            )
            for i in range(params.n)
        ]
        for s in sequences:
            self.engine.programs.require(s.mode)
        texts = [OutputText(s, self.tokenizer) for s in sequences]
        return Request(number, prompt, tokens, params, sequences, texts)

    @property
    def _sizes(self) -> tuple[int, int, int | None]:
        """The vocabulary, `max_len`, and if rows have pages elsewhere too, how many tokens those on the device hold."""
        on_device = None if self.config.resident is None else self.engine.plan.tokens
        return self.model_config.vocab, self.config.max_len, on_device

    def _eos_ids(self) -> tuple[int, ...]:
        if self.tokenizer is not None:
            return self.tokenizer.eos_token_ids
        return tuple(dict.fromkeys((*self._generation.eos_token_ids, *self.model_config.eos_token_ids)))

    def _seed(self, params: SamplingParams, number: int, index: int) -> int:
        entropy = (self.seed, number, index) if params.seed is None else (params.seed, index)
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])

    def _time_steps(self, modes: Sequence[Mode]) -> None:
        """Time steps of these modes for `config.itl`; the other processes follow."""
        if self._channel is None or self._channel.leads:
            self._runner.call(lambda: self.engine.time_steps(modes))

    def _complete(self, requests: list[Request]) -> None:
        for _ in self.run(requests, progress=False):
            pass


class Stream:
    """Iterates, once, over pieces of text, which never split a character; afterwards `output` is the result.

    Leaving the loop early frees the row.
    """

    def __init__(self, llm: LLM, request: Request):
        if request.params.n != 1:
            raise ValueError("stream gives one text: use n=1")
        self._llm, self._request = llm, request
        self.output: RequestOutput | None = None

    def __iter__(self) -> Iterator[str]:
        request, finished = self._request, False
        if not request.start():
            raise RuntimeError("a stream can be read once: call LLM.stream again")
        try:
            self._llm._runner.submit(request)
            while not finished:
                delta, finished = self._llm._runner.step(request)
                if delta:
                    yield delta
            self.output = request_output(request, self._llm.tokenizer)
        finally:
            self._llm._runner.abandon([request])


def _selection(option: PageSelection | str | None, artifacts: str | Path | None) -> PageSelection | None:
    """How decode steps select pages: as is asked for, or as the programs of artifacts do."""
    if artifacts is not None and option is None:
        option = Artifacts.open(artifacts).deployment.attention_pages
    return selection_option(option)


def _with_measured(files: ModelFiles, options: EngineOptions, artifacts: str | Path | None) -> ModelFiles:
    """Files with what was measured of a model's keys, if these options or the programs of artifacts ask for it."""
    dtype = options.kv_cache_dtype
    if artifacts is not None and dtype is None:
        dtype = Artifacts.open(artifacts).deployment.kv_cache_dtype
    return files.selecting(_selection(options.attention_pages, artifacts)).with_cache(dtype)


def _artifacts_path(artifacts: Any, channel: distributed.Channel | None, options: EngineOptions) -> Path | None:
    if options.max_adapters is not None and (artifacts is not None or channel):
        what = "programs of artifacts" if artifacts is not None else "several processes that share a model"
        raise ConfigurationError(
            f"{what} take no adapters: leave them out, or merge one with inferlib convert --merge-adapter"
        )
    if artifacts is not None and channel:
        raise ConfigurationError("artifacts serve the devices of one process; several processes compile their own")
    return None if artifacts is None else checked_path("artifacts", artifacts)


def _check_processes(channel: distributed.Channel | None, config: EngineConfig) -> None:
    """Raise ShardingError if other processes would have no part of the mesh."""
    if channel and not config.shards.several_processes:
        raise ShardingError(
            f"several processes run this model: split it over their {jax.device_count()} devices with parallel"
        )


def _load_weights(files: ModelFiles, programs: ProgramSet, choices: Choices, progress: bool) -> tuple[jax.Array, ...]:
    """The weights of a model, and behind them those of one that drafts."""
    weights = files.load(
        programs.model,
        placement=choices.placement,
        shards=programs.config.shards,
        formats=programs.formats[: len(programs.model.specs)],
        progress=progress,
    )
    return weights if choices.draft is None else weights + choices.draft.load(programs, progress=progress)


def _load_programs(artifacts: Artifacts, model: ModelConfig, choices: Choices) -> tuple[ProgramSet, Any]:
    """The programs of artifacts, and the small functions that loading weights calls (see `start_functions`)."""
    if choices.engine.expert_load:
        raise ConfigurationError("programs of artifacts do not count the experts' load: leave artifacts out")
    if choices.engine.depthwise_batching:
        raise ConfigurationError("programs of artifacts run whole passes: leave artifacts or depthwise_batching out")
    if decided := [name for name in _OF_ARTIFACTS if getattr(choices.engine, name) is not None]:
        raise ConfigurationError(f"artifacts decide {decided[0]}: leave it out")
    artifacts.check(model, choices.compiled(), None if choices.draft is None else choices.draft.shape)
    return artifacts.load(), artifacts.start()


def _listed(prompts: Any) -> Any:
    """One prompt or several as a list."""
    sequence = prompts.ndim > 0 if isinstance(prompts, np.ndarray) else isinstance(prompts, Sequence)
    if isinstance(prompts, Mapping):
        return [prompts]
    if not sequence or isinstance(prompts, bytes):
        raise ValueError(f"prompts must be text, token ids or a list of these, got {brief(prompts)}")
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer)):
        return [prompts]
    return prompts


def _prepared(prompts: Sequence[Any], prepare: Callable[[Any], Request]) -> list[Request]:
    """A request of each prompt; an error names the prompt."""
    requests = []
    for i, prompt in enumerate(prompts):
        try:
            requests.append(prepare(prompt))
        except ValueError as error:
            raise ValueError(f"prompt {i}: {error}") from error
    return requests


def _unwrapped(prompt: Mapping[str, Any]) -> tuple[str | Sequence[int], str | None]:
    """The text or token ids of a prompt that is a mapping, as in vLLM, and its salt. Raises ValueError for any other
    mapping."""
    names, salt = prompt.keys() - {"cache_salt"}, prompt.get("cache_salt")
    if len(names) != 1 or not names <= {"prompt", "prompt_token_ids"}:
        raise ValueError(
            "a prompt that is a mapping has either 'prompt' or 'prompt_token_ids', and perhaps 'cache_salt', got "
            f"{brief(prompt)}"
        )
    if "cache_salt" in prompt and not (isinstance(salt, str) and salt):
        raise ValueError(f"cache_salt is a text that is not empty, got {brief(salt)}")
    value = prompt.get("prompt", prompt.get("prompt_token_ids"))
    if isinstance(value, str) != ("prompt" in prompt):
        raise ValueError(f"'prompt' is text and 'prompt_token_ids' are token ids, got {brief(prompt)}")
    return value, salt


def _token_ids(tokens: Iterable[int]) -> list[int]:
    if isinstance(tokens, bytes | bytearray | memoryview):
        raise ValueError(f"a prompt is text or a sequence of integer token ids, got {tokens!r}: decode bytes to text")
    try:
        return [operator.index(token) for token in tokens]
    except TypeError as error:
        raise ValueError(f"a prompt is text or a sequence of integer token ids: {error}") from None
