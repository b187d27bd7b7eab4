"""`inferlib.explain`: what a model is, the memory it takes, and what each device of a mesh stores and exchanges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from math import gcd
from pathlib import Path
from typing import Any, TypedDict, Unpack

from inferlib.buckets import Buckets
from inferlib.cache.plan import BlockState, CachePlan, plan_cache
from inferlib.checkpoint.eagle3 import Eagle3Files
from inferlib.checkpoint.mtp import mtp_names
from inferlib.config import (
    DeviceKind,
    EngineOptions,
    PoolSize,
    check_compacted,
    check_draft,
    check_selecting,
    leveled_policy,
)
from inferlib.deploy import explain_text
from inferlib.deploy.source import ModelSource, model_source
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.adapters import AdapterSlots
from inferlib.models.cache_levels import layer_budgets, with_cache_levels
from inferlib.models.config import ModelConfig
from inferlib.models.eagle3 import abstract_head
from inferlib.models.families import family_of
from inferlib.models.key_bases import with_key_bases
from inferlib.models.key_turns import with_key_turns
from inferlib.models.mtp import abstract_mtp
from inferlib.models.quantization import Quantization
from inferlib.ops.cache_policy import CachePolicy
from inferlib.ops.selected_pages import PageSelection
from inferlib.option_checks import (
    CALIBRATED_CACHE,
    DTYPES,
    ConfigurationError,
    brief,
    bytes_option,
    check_kv_cache_dtype,
    policy_option,
    selection_option,
    speculation_option,
)
from inferlib.planning.explain import Explanation
from inferlib.planning.explain import explain as explain_mesh
from inferlib.programs.choices import Choices
from inferlib.programs.keys import ProgramKey
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import planned_shards
from inferlib.speculation.settings import Speculation
from inferlib.tables import Part, Tables
from inferlib.unrolling import tpu_backend

__all__ = ["Formats", "ModelExplanation", "explain"]


class Formats(TypedDict, total=False):
    """How the weights and the cache are stored, and what is beside them; see `explain`."""

    quantization: str | None
    kv_cache_dtype: str | None
    cache_memory: int | str | None
    speculation: str | None
    attention_pages: str | None
    cache_policy: str | None
    max_adapters: int | None
    max_adapter_rank: int | None
    adapter_parts: str | Sequence[str] | None


def explain(
    model: str | Path | Mapping[str, Any] | ModelSource,
    parallel: str | Parallelism | None = None,
    *,
    max_batch: int = 8,
    max_len: int | None = None,
    revision: str | None = None,
    **formats: Unpack[Formats],
) -> ModelExplanation:
    """Describe a model from its config and file headers: its layers, its parameters, the bytes of weights and cache.

    It loads no weights and needs no device.

    model: a model as for `LLM`, the name of a shape that comes with inferlib ("llama3-70b"), or a Hugging Face config
        as a mapping.
    parallel: devices to split the model over, "tp=4,dp=2": the result also says what each device stores and exchanges,
        and which implementations a TPU takes.
    max_batch: sequences decoded together on that mesh. max_len: tokens of a sequence; by default the model's context,
        at most 2048.
    quantization, kv_cache_dtype: formats of the weights and of the cache, as for `LLM`.
    cache_memory: bytes of a cache, or text such as "16GiB": the result says how many tokens its pages hold.
    speculation: "draft:NAME:3", "eagle3:DIRECTORY:3" or "mtp:3", as for `LLM`: also what drafts takes. Other drafts
        take nothing.
    attention_pages: "quest:64", as for `LLM`: the cache has the summaries of its pages.
    cache_policy: "keydiff:2048", as for `LLM`: a row's cache is bounded.
    max_adapters, max_adapter_rank, adapter_parts: as for `LLM`: also what adapters take.
    revision: branch, tag or commit of a model of the hub.

    Raises CheckpointError, ConfigError, ConfigurationError or ShardingError for input that is wrong.
    """
    if unknown := sorted(set(formats) - set(Formats.__annotations__)):
        known = ", ".join(Formats.__annotations__)
        raise TypeError(f"explain() got an unexpected keyword argument {unknown[0]!r}; formats are {known}")
    quantization, kv_cache_dtype = formats.get("quantization"), formats.get("kv_cache_dtype")
    check_kv_cache_dtype(kv_cache_dtype)
    memory, selection = bytes_option(formats.get("cache_memory")), selection_option(formats.get("attention_pages"))
    _check_size("max_batch", max_batch, 1)
    _check_size("max_len", max_len, 2)
    if not isinstance(parallel, str | Parallelism | None):
        raise ConfigurationError(f"parallel must be text such as 'tp=4,dp=2', got {brief(parallel)}")
    source = model_source(model, revision)
    recipe, stored = source.config, source.quantization(quantization)
    length, recipe = _length(recipe, max_len), _selecting(recipe, selection)
    recipe = with_key_turns(recipe) if kv_cache_dtype == CALIBRATED_CACHE else recipe
    policy = _policy(recipe, formats.get("cache_policy"), length)
    recipe = with_cache_levels(recipe, policy)
    # Stacked layers are quicker to trace and take the same bytes.
    models = {dtype: abstract_model(recipe, dtype, scan=True, quantization=stored) for dtype in DTYPES}
    draft = _draft(source, speculation_option(formats.get("speculation")), length, quantization)
    mesh, implementations = None, ()
    if parallel is not None:
        split = parallel if isinstance(parallel, Parallelism) else Parallelism.parse(parallel)
        cache: Any = dict(kv_cache_dtype=kv_cache_dtype, attention_pages=selection, cache_policy=policy)
        options = EngineOptions(max_batch=max_batch, max_len=length, **cache)
        mesh, implementations = _on_mesh(models["bfloat16"], split, options, stored)
    pool = None if memory is None else (memory, max_batch)
    of_adapters: Any = {name: formats.get(name) for name in ("max_adapters", "max_adapter_rank", "adapter_parts")}
    slots = EngineOptions(**of_adapters).adapters
    stores = stored, kv_cache_dtype, selection, policy
    return ModelExplanation(source, models, length, *stores, mesh, implementations, pool, draft, slots)


def _check_size(name: str, size: Any, least: int) -> None:
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < least):
        raise ConfigurationError(f"{name} must be a whole number of at least {least}, got {brief(size)}")


def _selecting(recipe: ModelConfig, selection: PageSelection | None) -> ModelConfig:
    """The model with what its steps select pages by. Raises ConfigurationError or ConfigError if it cannot."""
    if selection is None:
        return recipe
    check_selecting(recipe, f"attention_pages {str(selection)!r}")
    return with_key_bases(recipe) if selection.by_bases else recipe


def _policy(model: ModelConfig, value: Any, max_len: int) -> CachePolicy | None:
    """What the cache keeps, None for all. Raises ConfigurationError if a model's cache cannot be compacted."""
    if (policy := policy_option(value)) is not None:
        check_compacted(model, policy)
    if policy is not None and policy.by_layer:
        unit = gcd(PoolSize().page, policy.budget)  # as on accelerators, if the budget is one for them
        policy = leveled_policy(policy, model, unit, max_len)
    return policy


def _length(model: ModelConfig, max_len: int | None) -> int:
    """Tokens of a sequence. Raises ConfigurationError if they exceed the model's context."""
    length = max_len or min(model.context, 2048)
    if length > model.context:
        raise ConfigurationError(
            f"max_len {length} exceeds the model's context of {model.context} tokens: take at most {model.context}"
        )
    return length


def _draft(
    of: ModelSource, speculation: Speculation | None, max_len: int, quantization: str | None
) -> Mapping[str, AbstractModel]:
    """The model, head or layer that drafts, by the dtype it is loaded as; empty if none does."""
    if speculation is None or not speculation.by_model:
        return {}
    target = of.config
    if speculation.method == "mtp":
        mtp_names(family_of(dict(of.hf)))
        stored = of.quantization(quantization)
        return {dtype: abstract_mtp(target, dtype, quantization=stored).model for dtype in DTYPES}
    assert speculation.model is not None
    if speculation.method == "eagle3":
        head = Eagle3Files.open(speculation.model, target).config
        return {dtype: abstract_head(head, dtype).model for dtype in DTYPES}
    source = model_source(speculation.model)
    check_draft(source.config, target, max_len)
    stored = source.quantization(None) or source.quantization(quantization)
    return {dtype: abstract_model(source.config, dtype, scan=True, quantization=stored) for dtype in DTYPES}


@dataclass(frozen=True, repr=False)
class ModelExplanation(Tables):
    """What a model is and takes; `print` it, or show it in a notebook.

    source: the model. models: the abstract model by the dtype it is loaded as. max_len: tokens of a sequence.
    quantization, kv_cache_dtype: formats of the weights and of the cache, None for that dtype. attention_pages: what
    decode steps read of a row, cache_policy: what its cache keeps, None for all. mesh: the arrays and collectives of a
    mesh, None without one. implementations: those that a TPU takes, see `Choices.facts`. pool: bytes
    of a cache on one device and its rows, None if not asked. draft: the model that drafts, by the dtype it is loaded
    as; empty if none does. adapters: how many may be on the devices, None for none.
    """

    source: ModelSource
    models: Mapping[str, AbstractModel]
    max_len: int
    quantization: Quantization | None = None
    kv_cache_dtype: str | None = None
    attention_pages: PageSelection | None = None
    cache_policy: CachePolicy | None = None
    mesh: Explanation | None = None
    implementations: tuple[Mapping[str, str], ...] = ()
    pool: tuple[int, int] | None = None
    draft: Mapping[str, AbstractModel] = field(default_factory=dict)
    adapters: AdapterSlots | None = None

    @property
    def parameters(self) -> int:
        return self._model.parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied by: of the experts, those it chooses."""
        return self._model.active_parameters

    @property
    def context(self) -> int:
        """Most tokens of a sequence."""
        return self._model.config.context

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the tensors in the files, None without files."""
        return None if self.source.files is None else self.source.files.nbytes

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of all weights, by the dtype they are loaded as."""
        return {dtype: model.nbytes for dtype, model in self.models.items()}

    @property
    def adapter_bytes(self) -> dict[str, int]:
        """Bytes of the factors of all adapters, by dtype; 0 without any."""
        config, slots = self._model.config, self.adapters
        models = {dtype: abstract_model(config, dtype, scan=True, adapters=slots) for dtype in self.models}
        return {dtype: model.nbytes - sum(x.nbytes for x in model.base_specs) for dtype, model in models.items()}

    @cached_property
    def cache_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes of the cache, by dtype.

        "per_token": what all layers store of one token; "beyond_windows": what layers without a window store of it;
        "states": of a row in recurrent layers, whatever its length; "snapshot": of its states, and its rings in layers
        with a window; "per_sequence": of a row for `max_len` tokens, rings and states included.
        """
        return self._cache_bytes(self.models)

    def _cache_bytes(self, models: Mapping[str, AbstractModel]) -> dict[str, dict[str, int]]:
        pool = self._pool if models is self.models else PoolSize()
        plans = {
            dtype: (model, _plan(model, 1, self.kv_cache_dtype or dtype, self.max_len, pool=pool))
            for dtype, model in models.items()
        }
        return {dtype: _cache_bytes(*pair) for dtype, pair in plans.items()}

    @cached_property
    def pool_tokens(self) -> dict[str, int] | None:
        """How many tokens the pages of a cache of `pool` bytes hold, by dtype; None if not asked."""
        if self.pool is None:
            return None
        (memory, rows), tokens = self.pool, {}
        for dtype, model in self.models.items():
            draft = self.draft.get(dtype)
            plan = _plan(model, rows, self.kv_cache_dtype or dtype, self.max_len, draft, pool=self._pool)
            tokens[dtype] = plan.with_snapshots(PoolSize(memory=memory, snapshots=None)).tokens_in(memory)
        return tokens

    @property
    def _pool(self) -> PoolSize:
        """What the cache keeps of a row, and beside it."""
        policy = self.cache_policy
        bounds = () if policy is None else policy.bounds(self.max_len, _chunk(self.max_len))
        return PoolSize(selection=self.attention_pages).compacted(policy, bounds)

    @property
    def _model(self) -> AbstractModel:
        return self.models["float32"]

    def facts(self) -> dict[str, Any]:
        """The explanation as JSON values; sizes in bytes, lengths in tokens."""
        config = self._model.config
        facts = {
            "model": self.source.name,
            "family": config.family,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "layer_count": len(config.layers),
            "layers": [
                {"repeat": segment.count, "pattern": [asdict(layer) for layer in segment.pattern]}
                for segment in self._model.segments
            ],
            "loop": config.loop and asdict(config.loop),
            "lanes": config.lanes and asdict(config.lanes),
            "width": config.dim,
            "norm": asdict(config.norm),
            "vocab": config.vocab,
            "tied": config.tied,
            "context": config.context,
            "stored_bytes": self.stored_bytes,
            "weight_bytes": self.weight_bytes,
            "max_len": self.max_len,
            "kv_cache_dtype": self.kv_cache_dtype,
            "attention_pages": None if self.attention_pages is None else str(self.attention_pages),
            "cache_policy": None if self.cache_policy is None else str(self.cache_policy),
            "layer_budgets": layer_budgets(config, self.cache_policy),
            "cache_bytes": self.cache_bytes,
            "pool_tokens": self.pool_tokens,
            "quantization": self.quantization and self.quantization.name,
            "rotation": self.quantization.rotation if self.quantization else 0,
            "rank": self.quantization.rank if self.quantization else 0,
            "branches": list(self.quantization.branches) if self.quantization else [],
        }
        if self.draft:
            weights = {dtype: model.nbytes for dtype, model in self.draft.items()}
            facts["draft"] = {"weight_bytes": weights, "cache_bytes": self._cache_bytes(self.draft)}
        if self.adapters is not None:
            facts["adapters"] = {**asdict(self.adapters), "bytes": self.adapter_bytes}
        if self.mesh is not None:
            facts |= {"implementations": list(self.implementations), "parallel": self.mesh.facts()}
        return facts

    def parts(self) -> Sequence[Part]:
        facts, model = self.facts(), self._model
        parts: list[Part] = [explain_text.recipe(facts, model.config, model.segments)]
        parts.append(explain_text.memory(facts, model.config))
        if self.mesh is not None:
            parts += [*self.mesh.parts(), explain_text.implementations(self.implementations)]
        return parts

    def __repr__(self) -> str:
        return f"ModelExplanation({self.source.name}: {self.parameters / 1e6:,.1f} million parameters)"


def _plan(
    model: AbstractModel,
    rows: int,
    dtype: str,
    max_len: int,
    draft: AbstractModel | None = None,
    *,
    pool: PoolSize,
) -> CachePlan:
    sizes: dict[str, Any] = dict(rows=rows, max_len=max_len, chunk=_chunk(max_len))
    return plan_cache(model, **sizes, dtype=dtype, pool=pool, drafting=draft)


def _chunk(max_len: int) -> int:
    """Most prompt tokens of a row in a step."""
    return Buckets.default(1, max_len).prefill[-1]


def _cache_bytes(model: AbstractModel, plan: CachePlan) -> dict[str, int]:
    tokens = beyond = states = 0
    for block, layers in zip(plan.blocks, model.blocks(), strict=True):
        size = len(layers) * model.config.runs(layers[0]) * sum(array.position_bytes() for array in block.owned)
        tokens += size
        states += len(layers) * block.row_bytes() if isinstance(block, BlockState) else 0
        beyond += size if model.config.layers[layers[0]].attention.reach is None else 0
    pairs = zip(plan.arrays, plan.of_rows, strict=True)
    snapshot = 0 if plan.bounds or plan.pages_leave else sum(array.nbytes() for array, of_row in pairs if of_row)
    sizes = {"per_token": tokens, "beyond_windows": beyond, "states": states, "snapshot": snapshot}
    return sizes | {"per_sequence": plan.nbytes}


def _on_mesh(
    alone: AbstractModel,
    parallel: Parallelism,
    options: EngineOptions,
    quantization: Quantization | None,
) -> tuple[Explanation, tuple[dict[str, str], ...]]:
    """The arrays on each device, a greedy decode step of all rows and the longest prefill chunk, in bfloat16 or as
    quantized; and the implementations that TPUs take, see `Choices.facts`. options: sizes, and what is in the cache."""
    shards = planned_shards(parallel)
    config = options.resolve(DeviceKind("tpu"), shards)
    config = replace(config, backend=tpu_backend(config.backend, alone.config, quantization, shards, None))
    describe = partial(abstract_model, alone.config, "bfloat16", quantization=quantization, scan=True, shards=shards)
    model = describe()
    sizes: dict[str, Any] = dict(rows=config.max_batch, max_len=config.max_len, chunk=config.row_tokens)
    dtype, pool = config.kv_cache_dtype or "bfloat16", config.pool._replace(memory=None, snapshots=0)
    plan = plan_cache(model, **sizes, dtype=dtype, platform=config.platform, pool=pool)
    keys = [
        ProgramKey("greedy", config.rows, config.limits[-1], steps=config.decode_steps),
        ProgramKey("greedy", 0, config.limits[-1], chunks=1, chunk=config.row_tokens),
    ]
    packed = describe(backend=config.backend)  # weights as TPUs store them
    choices = Choices.of(config, packed, plan).facts(packed)
    return explain_mesh(model, plan, config, keys), tuple(choices)
