"""What a caller of `LLM` decides, and the programs that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import jax

from inferlib.config import DeviceKind, EngineConfig, EngineOptions, leveled_model
from inferlib.draft_files import DraftFiles, HeadFiles, LayerFiles, open_draft
from inferlib.engine.memory import this_memory, with_memory
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import abstract_model
from inferlib.models.config import ModelConfig
from inferlib.models.quantization import Quantization
from inferlib.option_checks import brief, check_dtype, policy_option, speculation_option
from inferlib.placement import ExpertPlacement
from inferlib.programs.program_set import ProgramSet
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import make_shards
from inferlib.speculation.drafting import model_of

# Keyword arguments of `LLM` beside the engine's options.
_OF_LLM = ("dtype", "quantization", "parallel", "artifacts", "seed", "progress", "revision", "generation_config")
_OF_LLM += ("adapters", "loop_steps", "early_exit", "prefill_devices")
# What vLLM's arguments are called here.
_OF_VLLM = {
    "tensor_parallel_size": "parallel='tp=N'",
    "data_parallel_size": "parallel='dp=N'",
    "enable_expert_parallel": "parallel='ep=N'",
    "pipeline_parallel_size": "parallel, which splits layers in other ways: 'tp=N'",
    "max_model_len": "max_len",
    "max_num_seqs": "max_batch",
    "max_num_batched_tokens": "buckets=Buckets(prefill=..., ...)",
    "gpu_memory_utilization": "cache_memory, of the cache alone: bytes, '16GiB' or a share",
    "block_size": "page_size",
    "enable_prefix_caching": "prefix_caching",
    "enforce_eager": "nothing: programs are always compiled",
    "hf_token": "HF_TOKEN, or `hf auth login`",
    "tokenizer": "nothing: the tokenizer is the model's",
    "trust_remote_code": "nothing: no code of a model is run",
    "enable_lora": "adapters or max_adapters",
    "max_loras": "max_adapters",
    "max_lora_rank": "max_adapter_rank",
}


def engine_options(config: EngineOptions | EngineConfig | None, options: Mapping[str, Any]) -> EngineOptions:
    """The engine's options of both forms. Raises TypeError naming a keyword that `LLM` does not have."""
    known = [field.name for field in fields(EngineOptions)]
    if unknown := [name for name in options if name not in known]:
        if hint := _OF_VLLM.get(unknown[0]):
            raise TypeError(f"LLM() got an unexpected keyword argument {unknown[0]!r}; here it is {hint}")
        names = (*_OF_LLM, *known)
        raise TypeError(f"LLM() got an unexpected keyword argument {unknown[0]!r}; known: {', '.join(names)}")
    if isinstance(config, EngineConfig):
        config = config.as_options()
    if not isinstance(config, EngineOptions | None):
        raise TypeError(f"config must be EngineOptions(...) or an EngineConfig, got {brief(config)}")
    return replace(config or EngineOptions(), **options)


@dataclass(frozen=True)
class Choices:
    """What a caller of `LLM` decided, read and checked; None: not decided."""

    dtype: str | None
    quantization: Quantization | None
    parallel: Parallelism | None
    placement: ExpertPlacement | None
    engine: EngineOptions
    draft: DraftFiles | HeadFiles | LayerFiles | None = None

    @staticmethod
    def read(
        files: ModelFiles,
        dtype: str | None,
        quantization: str | None,
        parallel: str | Parallelism | None,
        engine: EngineOptions,
        *,
        progress: bool = False,
    ) -> Choices:
        if dtype is not None:
            check_dtype(dtype)
        stored = files.quantization(quantization)
        placement = None
        if engine.expert_placement is not None:
            placement = ExpertPlacement.read(engine.expert_placement)
            placement.check(files.config)
        if parallel is not None:
            parallel = Parallelism.read(parallel)
        speculation = speculation_option(engine.speculation)
        draft = open_draft(speculation, files, quantization, progress=progress)
        return Choices(dtype, stored, parallel, placement, engine, draft)

    @property
    def expert_slots(self) -> int | None:
        return None if self.placement is None else self.placement.slots

    def shared(self) -> dict[str, Any]:
        """Settings that all processes must share, by name."""
        settings = {field.name: getattr(self.engine, field.name) for field in fields(EngineOptions)}
        settings |= {"dtype": self.dtype, "quantization": self.quantization, "parallel": self.parallel}
        draft = self.draft
        settings |= {"draft": draft and draft.shape}
        settings |= {"draft_quantization": draft and draft.quantization}
        return settings | {"expert_placement": self.placement}

    def compiled(self) -> dict[str, Any]:
        """Settings that artifacts are compiled for, by name."""
        names = ("dtype", "quantization", "parallel", "max_batch", "max_len", "buckets", "kv_cache_dtype", "backend")
        names += ("cache_memory", "page_size")
        made = {name: self.shared()[name] for name in names} | {"expert_slots": self.expert_slots}
        speculation = self.engine.speculation
        made |= {"speculation": None if speculation is None else str(speculation)}
        selection = self.engine.attention_pages
        made |= {"attention_pages": None if selection is None else str(selection)}
        sparse = self.engine.sparse_prefill
        made |= {"sparse_prefill": None if sparse is None else str(sparse)}
        policy = self.engine.cache_policy
        made |= {"cache_policy": None if policy is None else str(policy)}
        return made | {"draft_quantization": None if self.draft is None else self.draft.quantization}


def plan_programs(model: ModelConfig, choices: Choices) -> ProgramSet:
    """The programs to compile. Where layouts are free, they are chosen now, before weights are loaded."""
    device = DeviceKind.of(jax.devices()[0])
    dtype = choices.dtype or ("float32" if device.platform == "cpu" else "bfloat16")
    shards = make_shards(choices.parallel)

    def resolve(options: EngineOptions) -> EngineConfig:
        return options.resolve(device, shards, model, choices.quantization)

    model = leveled_model(model, policy_option(choices.engine.cache_policy))
    config, draft = resolve(choices.engine), choices.draft
    config.check_model(model, None if draft is None else draft.config)
    abstract = abstract_model(
        model,
        dtype,
        quantization=choices.quantization,
        backend=config.backend,
        scan=config.scan,
        shards=shards,
        expert_slots=choices.expert_slots,
        adapters=config.adapters,
    )
    drafting = None if draft is None else draft.describe(dtype, config)
    of_drafts = None if drafting is None else model_of(drafting)
    config = with_memory(choices.engine, resolve, abstract, this_memory, of_drafts)
    programs = ProgramSet.make(abstract, config, drafting=drafting)
    programs.choose_layouts()
    return programs
