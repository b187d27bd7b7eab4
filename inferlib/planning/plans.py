"""Deployment plans as data: a model shape, a target, a mesh, and the buckets to compile for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from inferlib import configs
from inferlib.buckets import Buckets
from inferlib.config import DeviceKind, EngineConfig
from inferlib.models.config import ModelConfig
from inferlib.models.families import config_from_hf
from inferlib.models.quantization import Quantization
from inferlib.option_checks import ConfigurationError
from inferlib.planning.costs import Deployed, Memory
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import planned_shards
from inferlib.targets import Target, parse_target


@dataclass(frozen=True)
class Plan:
    """What to compile a model for; the contents of `configs/plans/*.yaml`. Raises ValueError if it cannot work.

    model: name of a shape. target, parallel: in the command line's spelling. dtype: type of weights and activations.
    quantization: of the weights, kv_cache_dtype: of the cache; None for `dtype`. max_len: most tokens of a sequence.
    prefill, batch, cache: see `Buckets`.
    """

    model: str
    target: str
    parallel: str
    max_len: int
    prefill: tuple[int, ...]
    batch: tuple[int, ...]
    cache: tuple[int, ...]
    dtype: str = "bfloat16"
    quantization: str | None = None
    kv_cache_dtype: str | None = None

    def __post_init__(self):
        if self.model not in configs.names():
            raise ConfigurationError(f"no model shape is called {self.model!r}; known: {', '.join(configs.names())}")
        if self.dtype != "bfloat16":
            raise ConfigurationError(f"plans are for bfloat16, got dtype {self.dtype!r}")
        for name in ("prefill", "batch", "cache"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.engine.max_len > self.shape.context:
            raise ConfigurationError(f"max_len {self.max_len} exceeds {self.model}'s context of {self.shape.context}")
        _ = (
            self.deployed.network,
            self.deployed.model,
        )  # raise if the mesh is not the slice, or the weights do not divide over it

    @staticmethod
    def parse(values: Mapping[str, Any]) -> Plan:
        """Read a plan from a mapping, as YAML yields it."""
        known = [f.name for f in fields(Plan)]
        if not isinstance(values, Mapping) or set(values) - set(known):
            strange = sorted(set(values) - set(known)) if isinstance(values, Mapping) else values
            raise ConfigurationError(f"a plan has the fields {', '.join(known)}; got {strange}")
        missing = [f.name for f in fields(Plan) if f.default is MISSING and f.name not in values]
        if missing:
            raise ConfigurationError(f"the plan lacks {', '.join(missing)}")
        return Plan(**values)

    @cached_property
    def shape(self) -> ModelConfig:
        return config_from_hf(configs.load(self.model))

    @cached_property
    def engine(self) -> EngineConfig:
        """The engine's configuration, on an abstract mesh."""
        shards = planned_shards(Parallelism.parse(self.parallel))
        buckets = Buckets(self.prefill, self.batch, self.cache)
        sizes = buckets.batch[-1], self.max_len, buckets
        device = DeviceKind(self.slice.platform, self.slice.chip.cores)
        return EngineConfig.make(device, *sizes, shards, kv_cache_dtype=self.kv_cache_dtype)

    @cached_property
    def slice(self) -> Target:
        return parse_target(self.target)

    @cached_property
    def deployed(self) -> Deployed:
        """The deployment as the cost model takes it."""
        return Deployed(self.shape, self.slice, Parallelism.parse(self.parallel), self.stored, self.kv_cache_dtype)

    @cached_property
    def stored(self) -> Quantization | None:
        return Quantization.named(self.quantization) if self.quantization else None

    @property
    def memory(self) -> Memory:
        """Memory on a device, by the cost model."""
        return self.deployed.memory(self.batch[-1], self.max_len, self.prefill[-1])


def load_plan(plan: str | Path) -> Plan:
    """Read a plan by name, such as "llama3-8b-v5e-8", or from a YAML file; ConfigurationError if it cannot work."""
    path = Path(plan).expanduser()
    if str(plan) in configs.plan_names():
        text = configs.plan_text(str(plan))
    elif path.suffix in (".yaml", ".yml") and path.is_file():
        text = path.read_text(encoding="utf-8")
    else:
        raise ConfigurationError(
            f"no plan is called {str(plan)!r}; known: {', '.join(configs.plan_names())}, or a .yaml file"
        )
    try:
        return Plan.parse(yaml.safe_load(text))
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ConfigurationError(f"plan {str(plan)!r}: {error}") from error
