"""Everything that a set of programs is compiled from, as data that processes exchange and manifests store."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from jax.experimental.layout import Layout

from inferlib.buckets import Buckets
from inferlib.checkpoint.eagle3 import head_config
from inferlib.checkpoint.mtp import mtp_names
from inferlib.config import DeviceKind, EngineConfig, EngineOptions, PoolSize, leveled_model
from inferlib.models.abstract import abstract_model
from inferlib.models.config import ModelConfig
from inferlib.models.eagle3 import Eagle3Config, abstract_head
from inferlib.models.families import config_from_hf, family_of
from inferlib.models.key_bases import KEY as KEY_BASES
from inferlib.models.key_turns import KEY as KEY_TURNS
from inferlib.models.layer_preferences import KEY as LAYER_PREFERENCES
from inferlib.models.mtp import abstract_mtp
from inferlib.models.quantization import Quantization
from inferlib.option_checks import (
    CALIBRATED_CACHE,
    ConfigurationError,
    backend_option,
    check_dtype,
    check_kv_cache_dtype,
    policy_option,
    selection_option,
    sparse_option,
    speculation_option,
)
from inferlib.programs.keys import Mode, ProgramKey
from inferlib.programs.program_set import ProgramSet, check_packed, planned_keys
from inferlib.sharding.mesh import Device, Parallelism, ShardingError, make_mesh
from inferlib.sharding.rules import preset
from inferlib.sharding.shards import Shards, planned_shards
from inferlib.speculation.drafting import Drafting
from inferlib.targets import Target, parse_target


@dataclass(frozen=True)
class Deployment:
    """A model (its Hugging Face config dictionary), a target, a split and the buckets to compile for.

    quantization: how weights are stored; None: as `dtype`. kv_cache_dtype, cache_memory, page_size: see `EngineConfig`.
    speculation, attention_pages, sparse_prefill, cache_policy: as text, such as "ngram:3", "quest:64",
    "xattention:0.9" and "keydiff:2048".
    draft: the Hugging Face config of the model that drafts, or the config.json of the EAGLE-3 head; draft_quantization:
    how its weights are stored; draft_embeds: a head embeds tokens itself.
    modes: sampling modes to compile. expert_slots: number of slots of an expert placement (see `inferlib.placement`).
    backend: see `inferlib.option_checks.with_option`. Raises ConfigurationError, ShardingError or TargetError if
    they do not go together.
    """

    hf: Mapping[str, Any]
    target: str
    dtype: str
    buckets: Buckets
    parallel: Parallelism = field(default_factory=Parallelism)
    modes: tuple[Mode, ...] = ("greedy", "sample")
    quantization: Quantization | None = None
    kv_cache_dtype: str | None = None
    expert_slots: int | None = None
    backend: str = "auto"
    cache_memory: int | None = None
    page_size: int = PoolSize().page
    speculation: str | None = None
    draft: Mapping[str, Any] | None = None
    draft_quantization: Quantization | None = None
    draft_embeds: bool = False
    attention_pages: str | None = None
    sparse_prefill: str | None = None
    cache_policy: str | None = None

    def __post_init__(self):
        check_kv_cache_dtype(self.kv_cache_dtype)
        selection = selection_option(self.attention_pages)
        object.__setattr__(self, "attention_pages", None if selection is None else str(selection))
        if selection is not None and selection.by_bases:
            object.__setattr__(self, "hf", {**self.hf, KEY_BASES: True})
        if self.kv_cache_dtype == CALIBRATED_CACHE:
            object.__setattr__(self, "hf", {**self.hf, KEY_TURNS: True})
        sparse = sparse_option(self.sparse_prefill)
        object.__setattr__(self, "sparse_prefill", None if sparse is None else str(sparse))
        policy = policy_option(self.cache_policy)
        object.__setattr__(self, "cache_policy", None if policy is None else str(policy))
        if policy is None or not policy.by_preference:  # of which programs do not depend
            object.__setattr__(self, "hf", {k: v for k, v in self.hf.items() if k != LAYER_PREFERENCES})
        speculation = speculation_option(self.speculation)
        object.__setattr__(self, "speculation", None if speculation is None else str(speculation))
        if (self.draft is not None) != (speculation is not None and speculation.model is not None):
            raise ConfigurationError(
                f"draft is the config of the model that drafts, and speculation is {self.speculation}: give both, such "
                "as draft={...} with speculation='draft:NAME:3', or neither"
            )
        object.__setattr__(self, "backend", backend_option(self.backend))
        check_dtype(self.dtype)
        if self.max_len > self.model.context:
            raise ConfigurationError(
                f"cache bucket {self.max_len} exceeds the model's context of {self.model.context} tokens"
            )
        slice_ = self.slice
        if slice_.platform == "tpu" and self.parallel.devices != slice_.devices:
            raise ShardingError(
                f"parallel={self.parallel} is {self.parallel.devices} devices, and {slice_} has {slice_.devices}: "
                f"write for example --parallel tp={slice_.devices}"
            )
        if slice_.platform == "neuron" and self.parallel.devices > 1:
            raise ShardingError(
                f"parallel={self.parallel}: programs for {slice_} are of one device so far, as Neuron's compiler takes "
                "no module that is still to be partitioned; leave --parallel out, or take a TPU"
            )
        preset(self.parallel.rules)
        config = self.config(planned_shards(self.parallel))
        config.check_model(self.model, self.draft_model)
        planned_keys(config, self.modes)
        if "processed" in self.modes:
            raise ConfigurationError(
                "programs of mode 'processed' are not compiled ahead of time: leave it out, or call LLM.warmup"
            )

    @property
    def max_batch(self) -> int:
        return self.buckets.batch[-1]

    @property
    def max_len(self) -> int:
        return self.buckets.cache[-1]

    @property
    def slice(self) -> Target:
        return parse_target(self.target)

    @property
    def model(self) -> ModelConfig:
        return leveled_model(config_from_hf(dict(self.hf)), policy_option(self.cache_policy))

    @property
    def draft_model(self) -> ModelConfig | None:
        """The model that drafts."""
        return config_from_hf(dict(self.draft)) if self.draft is not None and self._method == "draft" else None

    @property
    def draft_head(self) -> Eagle3Config | None:
        """The EAGLE-3 head that drafts. Raises CheckpointError for one of another model."""
        if self.draft is None or self._method != "eagle3":
            return None
        return head_config(self.draft, self.model, embeds=self.draft_embeds)

    @property
    def _method(self) -> Any:
        """How tokens are drafted, None if they are not."""
        speculation = speculation_option(self.speculation)
        return None if speculation is None else speculation.method

    def config(self, shards: Shards) -> EngineConfig:
        target = self.slice
        options = EngineOptions(
            max_batch=self.max_batch,
            max_len=self.max_len,
            buckets=self.buckets,
            kv_cache_dtype=self.kv_cache_dtype,
            backend=self.backend,
            cache_memory=self.cache_memory,
            page_size=self.page_size,
            speculation=self.speculation,
            attention_pages=self.attention_pages,
            sparse_prefill=self.sparse_prefill,
            cache_policy=self.cache_policy,
        )
        device = DeviceKind(target.platform, target.chip.cores, target.chip.name)
        return options.resolve(device, shards, self.model, self.quantization)

    def shards(self, devices: Sequence[Device]) -> Shards:
        """The mesh; also for a single TPU, which is not a device of this process."""
        if self.parallel.devices == 1 and self.slice.platform != "tpu":
            return Shards()
        return Shards(make_mesh(self.parallel, devices), preset(self.parallel.rules))

    def program_set(self, shards: Shards, layouts: Sequence[Layout] | None = None) -> ProgramSet:
        """Its programs for a mesh: that of `shards`, or of `planned_shards` if there are no devices."""
        config = self.config(shards)
        describe = partial(abstract_model, dtype=self.dtype, backend=config.backend, scan=config.scan, shards=shards)
        model = describe(self.model, quantization=self.quantization, expert_slots=self.expert_slots)
        draft: Drafting | None = None
        check_packed(model, config, on_devices=True)
        if self.draft_model is not None:
            draft = describe(self.draft_model, quantization=self.draft_quantization)
            check_packed(draft, config, on_devices=True)
        if self.draft_head is not None:
            draft = abstract_head(self.draft_head, self.dtype, shards=shards)
        if self._method == "mtp":
            options: dict[str, Any] = dict(normed=mtp_names(family_of(dict(self.hf))).normed, shards=shards)
            draft = abstract_mtp(self.model, self.dtype, quantization=self.quantization, **options)
        return ProgramSet.make(model, config, layouts, draft)

    def planned(self) -> ProgramSet:
        """Its programs for planning, without devices."""
        return self._planned

    @cached_property
    def _planned(self) -> ProgramSet:
        return self.program_set(planned_shards(self.parallel))  # which warns

    def keys(self) -> list[ProgramKey]:
        """Its programs; the first decides the layouts of the weights."""
        programs = self.planned()
        keys = planned_keys(programs.config, self.modes)
        return sorted(keys, key=lambda key: key != programs.decisive)

    def to_json(self) -> dict[str, Any]:
        configs = {"hf": dict(self.hf), "draft": None if self.draft is None else dict(self.draft)}
        return {**asdict(self), **configs, "buckets": asdict(self.buckets)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Deployment:
        made = {
            "buckets": Buckets(**value["buckets"]),
            "parallel": Parallelism(**value["parallel"]),
            "modes": tuple(value["modes"]),
            **{name: Quantization.from_json(value[name]) for name in ("quantization", "draft_quantization")},
        }
        return Deployment(**{f.name: value[f.name] for f in fields(Deployment)} | made)

    def program_hash(self, key: ProgramKey, layouts: Sequence[Mapping] | None) -> str:
        """A hash of everything that the compiled program of a key depends on. layouts: the weights' layouts, as in a
        manifest."""
        parts = {
            **self.to_json(),
            "buckets": [self.max_batch, self.max_len, self.buckets.prefill[-1]],
            "modes": None,
            "key": asdict(key),
            "layouts": layouts,
            "versions": versions(self.slice),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=list).encode()).hexdigest()


def layout_to_json(layout: Layout) -> dict[str, Any]:
    return {
        "major_to_minor": list(layout.major_to_minor),
        "tiling": [list(tile) for tile in layout.tiling or ()],
        "element_bits": layout.sub_byte_element_size_in_bits,
    }


def layout_from_json(value: Mapping[str, Any]) -> Layout:
    return Layout(
        tuple(value["major_to_minor"]),
        tiling=tuple(map(tuple, value["tiling"])),
        sub_byte_element_size_in_bits=value["element_bits"],
    )


# ---- versions

# The code that programs are traced from.
_SOURCES = (
    *("inferlib.sharding", "inferlib.pallas_kernels", "inferlib.ops", "inferlib.models", "inferlib.sampling"),
    *("inferlib.speculation", "inferlib.unrolling", "inferlib.cache", "inferlib.config", "inferlib.buckets"),
    "inferlib.programs",
)


@cache
def code_version() -> str:
    """A hash of the code that programs are traced from."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        files = [f for f in folder.rglob("*") if f.suffix in (".py", ".json")]  # .json: blocks of kernels
        for file in sorted(files) if spec.submodule_search_locations else [Path(spec.origin)]:
            digest.update(f"{name} {file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def versions(target: Target) -> dict[str, str]:
    """The versions that a compiled program needs to run."""
    packages = ("inferlib", "jax", "jaxlib", *(("libtpu",) if target.platform == "tpu" else ()))
    return {name: _version(name) for name in packages} | {"code": code_version()}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
