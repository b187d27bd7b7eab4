"""How a model is run: sizes, buckets and other choices of the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, TypeVar

from inferlib.buckets import Buckets, rounded_up
from inferlib.models.adapters import MOST_RANK, MOST_SLOTS, AdapterSlots
from inferlib.models.attention_choices import choose_attention
from inferlib.models.cache_levels import cache_owners, layer_shares, level_budgets, with_cache_levels
from inferlib.models.config import AttentionSpec, MlaSpec, ModelConfig
from inferlib.models.quantization import Quantization
from inferlib.models.recurrent import keeps_state
from inferlib.ops.backend import Backend
from inferlib.ops.cache_policy import CachePolicy
from inferlib.ops.prefill_attention import takes_lists
from inferlib.ops.selected_pages import PageSelection
from inferlib.ops.sparse_prefill import BLOCK, TILE, SparsePrefill
from inferlib.ops.token_propagation import SEGMENT, TokenPropagation
from inferlib.option_checks import (
    CALIBRATED_CACHE,
    PACKED_CACHES,
    PLATFORMS,
    ConfigurationError,
    backend_option,
    brief,
    check_backend,
    check_depthwise,
    check_flag,
    check_itl,
    check_kv_cache_dtype,
    check_page_size,
    check_snapshots,
    checked_path,
    memory_option,
    parts_option,
    policy_option,
    selection_option,
    size_option,
    sparse_option,
    speculation_option,
    whole_number,
    with_option,
)
from inferlib.pallas_kernels.generations_tpu import GENERATIONS
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards
from inferlib.speculation.settings import Speculation
from inferlib.unrolling import tpu_backend, unrolls

T = TypeVar("T")

# Rows, and most positions of a sequence, by default. On a CPU, where each row takes its time, they are modest.
# Elsewhere as many rows as the cache has room for are worth their programs. Where attention reads whole cache buckets,
# each is a set of programs: then there are fewer rows; see `EngineOptions.resolve`.
_ROWS, _ROWS_OF_BUCKETS = {"cpu": 8, "gpu": 512, "tpu": 64, "neuron": 8}, 64
_POSITIONS = {"cpu": 2048, "gpu": 2048, "tpu": 8192, "neuron": 2048}
# By platform: tokens of a tile, and most prompt tokens of a step.
_TILES = {"cpu": (32, 512), "gpu": (32, 8192)}
_NARROWEST = 128  # tokens of the smallest chunk beside those of a whole segment
_DETAIL_TOKENS = 512  # most tokens of a step whose logits or log-probabilities are returned
_RING_TOKENS = 512  # most tokens of a row in a step where layers keep rings, which are longer by as many
STREAMED_ROWS = 16  # of a replica, whose streams get each token by itself; see `EngineConfig.one_step_buckets`
# Bounds of what would only waste memory, or overflow a compiled program's counters.
_MOST_STEPS, _MOST_IN_FLIGHT = 1024, 64


class PoolSize(NamedTuple):
    """The pages of a cache.

    page: positions of a page on a device, a power of two; a platform may need more, see `plan_cache`. memory: bytes of
    the whole cache on a device; None: as many as all rows of `max_len` tokens take. snapshots: how many of rings and
    states each replica has room for; None: `plan_cache` decides. selection: which blocks of its pages decode steps
    read, by summaries of the blocks; None: all. bounds: most cells of a row whose cache is compacted, in layers of each
    level (see `inferlib.models.cache_levels`); (): one for each token. massed: the cache has the attention that each
    cell got. queries: how many of a row's newest queries the cache has.
    """

    page: int = 128
    memory: int | None = None
    snapshots: int | None = 0
    selection: PageSelection | None = None
    bounds: tuple[int, ...] = ()
    massed: bool = False
    queries: int = 0

    def compacted(self, policy: CachePolicy | None, bounds: tuple[int, ...]) -> PoolSize:
        """This pool with rows that a policy bounds to so many cells; (): rows are not compacted."""
        if policy is None or not bounds:
            return self
        return self._replace(bounds=bounds, massed=policy.counts_mass, queries=policy.queries)


class DeviceKind(NamedTuple):
    """What the defaults of a platform depend on.

    platform: "cpu", "gpu", "tpu" or "neuron". cores: cores of one device; v4 and v5p have two. generation: of a TPU,
    such as "v7x".
    """

    platform: str
    cores: int = 1
    generation: str | None = None

    @staticmethod
    def of(device: Any) -> DeviceKind:
        """device: a `jax.Device`."""
        return DeviceKind(device.platform, getattr(device, "num_cores", None) or 1, GENERATIONS.get(device.device_kind))


@dataclass(frozen=True)
class EngineConfig:
    """How a model is run, with nothing left to decide; see `EngineOptions` for what users give.

    max_batch: sequences decoded together. max_len: longest prompt plus output, in tokens.
    platform: "cpu", "gpu", "tpu" or "neuron".
    decode_steps: tokens that a decode program generates per row and dispatch.
    in_flight: dispatches that the host sends ahead of the results it has seen.
    scan: repeating layers are stacked and scanned instead of unrolled.
    free_layouts: the compiler chooses how weights lie in memory.
    kv_cache_dtype: "int8" or "fp8" with one scale per position and head, or "int4" values of 4 bits and
    keys of 6, or "int4_calibrated" keys of 4 too; None for the model's dtype.
    shards: the mesh; each of its replicas has an equal part of the rows.
    expert_load: programs count how many tokens choose each expert.
    cascade: decode steps of eight rows and more may read a shared prefix once, with programs of their own.
    row_limit: most prompt tokens of one row in a step, a multiple of the tile; None: as many as a step has.
    page_size: positions of a page of the cache, a power of two. cache_memory: bytes of the cache on each device; None:
    as many as `max_batch` sequences of `max_len` tokens take. prefix_caching: a prompt that begins like an earlier one
    reuses its pages (see `CachePlan.no_prefix_caching`). snapshots: how many of rings and states each replica has, from
    which such prompts go on; None: as many as rows, or as memory allows.
    host_cache: bytes of host memory for pages and snapshots that are evicted; disk_cache: a folder for them, with files
    of at most `disk_cache_size` bytes. None: no such tier, or a size that the disk decides.
    itl: most seconds of a step in which rows decode, which bounds its prompt tokens; None: no bound. See `ItlBound`.
    speculation: what drafts tokens that decode steps verify; None: nothing does.
    attention_pages: which pages of a row decode steps read; None: all.
    sparse_prefill: how prompts list the blocks that they attend to, or which of their tokens later layers see; None:
    they attend to all.
    cache_policy: which positions of a row its cache keeps; None: all.
    adapters: how many adapters may be on the devices; None: programs take none.
    depthwise_batching: decode programs have rows at different steps of a loop's core; a number: how many wait before
    the rest of the model runs for them, see `inferlib.programs.depthwise`.
    """

    max_batch: int
    max_len: int
    buckets: Buckets
    platform: str = "cpu"
    decode_steps: int = 8
    in_flight: int = 2
    scan: bool = False
    free_layouts: bool = False
    kv_cache_dtype: str | None = None
    backend: Backend = field(default_factory=Backend)
    shards: Shards = field(default_factory=Shards)
    expert_load: bool = False
    cascade: bool = False
    row_limit: int | None = None
    page_size: int = PoolSize().page
    cache_memory: int | None = None
    prefix_caching: bool = True
    host_cache: int | None = None
    disk_cache: Path | None = None
    disk_cache_size: int | None = None
    snapshots: int | None = None
    itl: float | None = None
    speculation: Speculation | None = None
    attention_pages: PageSelection | None = None
    sparse_prefill: SparsePrefill | TokenPropagation | None = None
    cache_policy: CachePolicy | None = None
    adapters: AdapterSlots | None = None
    depthwise_batching: bool | int = False

    def __post_init__(self):
        check_itl(self.itl)
        check_snapshots(self.snapshots)
        self._check_speculation()
        self._check_selection()
        self._check_sparse()
        self._check_propagation()
        self._check_policy()
        self._check_depthwise()
        check_page_size(self.page_size)
        check_kv_cache_dtype(self.kv_cache_dtype)
        check_backend(self.backend, self.platform)
        if self.max_batch < 1:
            raise ConfigurationError(f"max_batch must be at least 1, got {self.max_batch}")
        for name, most in (("decode_steps", _MOST_STEPS), ("in_flight", _MOST_IN_FLIGHT)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigurationError(f"{name} must be 1 to {most}, got {getattr(self, name)}")
        if self.max_batch % (replicas := self.shards.replicas):
            multiple = rounded_up(self.max_batch, replicas)
            raise ConfigurationError(
                f"max_batch {self.max_batch} does not divide over {replicas} replicas: take a multiple, such as "
                f"{multiple}"
            )
        if self.row_limit is not None and (self.row_limit < 1 or self.row_limit % (self.buckets.tile or 1)):
            raise ConfigurationError(
                f"row_limit must be a multiple of the tile, {self.buckets.tile}, got {self.row_limit}"
            )
        if self.max_len < 2:
            raise ConfigurationError(f"max_len must hold a prompt token and a new one, got {self.max_len}")
        if self.buckets.batch[-1] != self.max_batch:
            raise ConfigurationError(
                f"the largest batch bucket ({self.buckets.batch[-1]}) must equal max_batch ({self.max_batch})"
            )
        if self.buckets.cache[-1] != self.max_len:
            raise ConfigurationError(
                f"the largest cache bucket ({self.buckets.cache[-1]}) must equal max_len ({self.max_len})"
            )
        devices = self.shards.size(axes.TOKENS)  # that the tokens of a chunk are split over
        if odd := [size for size in self.buckets.prefill if size % devices]:
            raise ConfigurationError(
                f"prefill buckets are dealt out to {devices} devices, which {odd} do not allow: take multiples, such "
                f"as {sorted({rounded_up(size, devices) for size in odd})}"
            )
        if self.buckets.tile is None and self.buckets.prefill[-1] > rounded_up(self.max_len, devices):
            raise ConfigurationError(
                f"the largest prefill bucket ({self.buckets.prefill[-1]}) exceeds max_len ({self.max_len})"
            )

    def _check_speculation(self) -> None:
        if self.speculation is None:
            return
        if self.speculation.tokens >= self.row_tokens:
            raise ConfigurationError(
                f"speculation of {self.speculation.tokens} tokens takes prefill buckets of more, and the largest has "
                f"{self.row_tokens}: draft {self.row_tokens - 1}, or take larger buckets"
            )

    def _check_selection(self) -> None:
        if (selection := self.attention_pages) is None:
            return
        striped = self.shards.size(axes.POSITIONS) > 1
        quantised = self.platform == "tpu" and self.kv_cache_dtype is not None
        reasons = {
            "needs all positions of a row on each device: leave cp out of parallel": striped,
            "does not run on Trainium: leave it out": self.platform == "neuron",
            "reads a cache of the model's dtype on TPUs: leave kv_cache_dtype out": quantised,
            "reads other pages of each row, not a prefix that rows share: leave cascade out": self.cascade,
            "has bases of keys as they are, and kv_cache_dtype int4 rotates them: take int8 or fp8, or quest": (
                selection.by_bases and self.kv_cache_dtype in PACKED_CACHES
            ),
            **self._reasons_against_resident(selection),
        }
        if why := next((why for why, holds in reasons.items() if holds), None):
            raise ConfigurationError(f"attention_pages {str(selection)!r} {why}")

    def _reasons_against_resident(self, selection: PageSelection) -> dict[str, bool]:
        """What speaks against pages of rows that decode in the host's memory, if there may be some."""
        if selection.resident is None:
            return {}
        # The first page, those that dispatches in flight write or get ahead, and those that one query selects.
        ahead = (self.in_flight + 1) * self.decode_steps + self.page_size // 2
        selected = -(-selection.count * (selection.size or self.page_size) // self.page_size)
        least = max(2 + -(-ahead // self.page_size), selected)
        return {
            "moves the pages of one device: leave parallel out": self.shards.mesh is not None,
            "asks for pages by one query of a row: leave speculation out": self.speculation is not None,
            "has the host's memory for pages of rows, not of the prefix cache: leave host_cache and disk_cache out": (
                self.has_tiers
            ),
            f"selects pages, and writes some ahead, of which the device has to keep {least}: take resident={least} or "
            "more": selection.resident < least,
        }

    def _check_sparse(self) -> None:
        if (sparse := self.block_lists) is None:
            return
        split = self.shards.size(axes.POSITIONS) > 1 or self.shards.size(axes.TOKENS) > 1
        other = self.platform == "gpu" and not takes_lists(self.backend.prefill_attention)
        reasons = {
            "needs all positions of a row on each device: leave cp out of parallel": split,
            "does not run on Trainium: leave it out": self.platform == "neuron",
            "makes lists of blocks, which of the kernels for GPUs only that for Hopper takes: leave it out, or take "
            "the slower form of XLA with backend='prefill_attention=xla'": other,
        }
        if why := next((why for why, holds in reasons.items() if holds), None):
            raise ConfigurationError(f"sparse_prefill {str(sparse)!r} {why}")

    def _check_propagation(self) -> None:
        if not isinstance(how := self.sparse_prefill, TokenPropagation):
            return
        names = ("speculation", "attention_pages", "cascade", "depthwise_batching", "itl")
        reasons = {
            "has steps of whole rows, split over heads or replicas: give parallel with tp, ep and dp alone": (
                self.shards.preset not in ("", "tp")
            ),
            "does not run on Trainium: leave it out": self.platform == "neuron",
            "has layers that see other tokens, which are not stacked: leave scan out, or give scan=False": self.scan,
            "packs cells of later layers by row, which no tier could give to another: leave host_cache and disk_cache "
            "out": self.has_tiers,
            **{f"does not work with {name} yet: leave one of them out": getattr(self, name) for name in names},
            f"has segments that are chunks of a prompt, and by these buckets a chunk has up to {self.segment} tokens: "
            "make them their tile, or leave the segment out": how.segment not in (None, self.segment)
            and self.segment < self.max_len,
        }
        if why := next((why for why, holds in reasons.items() if holds), None):
            raise ConfigurationError(f"sparse_prefill {str(how)!r} {why}")

    def _check_policy(self) -> None:
        if (policy := self.cache_policy) is None:
            return
        split = self.shards.size(axes.POSITIONS) > 1 or self.shards.size(axes.TOKENS) > 1
        off = {name: self.compacted is not None and getattr(self, name) for name in ("attention_pages", "cascade")}
        off |= {name: getattr(self, name) for name in ("speculation", "sparse_prefill", "kv_cache_dtype")}
        reasons = {
            "needs all positions of a row on each device: leave cp out of parallel": split,
            "does not run on Trainium: leave it out": self.platform == "neuron",
            "moves cells that tiers would keep by their tokens: leave host_cache and disk_cache out": self.has_tiers,
            **{f"does not work with {name} yet: leave one of them out": value for name, value in off.items()},
            f"keeps a multiple of {self.prefill_unit} positions, so that prompts go on behind whole runs of cells: "
            f"take {rounded_up(policy.budget, self.prefill_unit)}": policy.budget % self.prefill_unit,
        }
        if why := next((why for why, holds in reasons.items() if holds), None):
            raise ConfigurationError(f"cache_policy {str(policy)!r} {why}")

    def _check_depthwise(self) -> None:
        if not self.depthwise_batching:
            return
        rules = self.shards.rules
        split = self.shards.replicas > 1 or (rules is not None and rules.name != "tp")
        reasons = {
            "splits layers over devices alone, with tp: leave dp, cp, ep and rules out of parallel": split,
            "does not run on Trainium, which has no loops: leave it out": self.platform == "neuron",
            "has rows at other steps, which share no prefix: leave cascade out": self.cascade,
            "verifies no drafts: leave speculation out": self.speculation is not None,
            "needs decode_steps of 2 or more, as single steps are passes": self.decode_steps == 1,
            f"is a number of rows, and max_batch is {self.max_batch}: give at most as many": (
                self.depthwise_batching > self.max_batch
            ),
        }
        if why := next((why for why, holds in reasons.items() if holds), None):
            raise ConfigurationError(f"depthwise_batching {self.depthwise_batching!r} {why}")

    @property
    def block_lists(self) -> SparsePrefill | None:
        """How prompts list the blocks that they attend to; None: they attend to all."""
        return self.sparse_prefill if isinstance(self.sparse_prefill, SparsePrefill) else None

    @property
    def propagation(self) -> TokenPropagation | None:
        """Which tokens of prompts later layers see; None: all."""
        how = self.sparse_prefill
        return replace(how, segment=self.segment) if isinstance(how, TokenPropagation) else None

    @property
    def segment(self) -> int:
        """Tokens of a segment of a prompt, of which later layers see some: those of the widest chunk. Narrower chunks
        have what is left of a prompt."""
        return max(width for _, width in self.prefill_shapes())

    @property
    def resident(self) -> int | None:
        """The most pages that a row which decodes keeps on the device; None: all."""
        return None if self.attention_pages is None else self.attention_pages.resident

    @property
    def compacted(self) -> CachePolicy | None:
        """What rows' caches keep when they are compacted; None if none ever is."""
        return self.cache_policy if self.bounds else None

    @property
    def bounds(self) -> tuple[int, ...]:
        """Most cells of a row in layers of each level, the fewest first, if caches are compacted."""
        policy = self.cache_policy
        return () if policy is None else policy.bounds(self.max_len, self.row_tokens)

    def leveled(self, model: ModelConfig | None) -> EngineConfig:
        """This configuration with the budgets of a model's layers, if that is known and the cache policy has some by
        layer. Raises ConfigurationError for a model or a budget that cannot be shared out so."""
        policy = self.cache_policy
        if model is None or policy is None or not policy.by_layer or policy.levels:
            return self
        check_compacted(model, policy)
        return replace(self, cache_policy=leveled_policy(policy, model, self.prefill_unit, self.max_len))

    def limit_of(self, limit: int, level: int) -> int:
        """What no cell of a step reaches in layers of a level, if `limit` is that of level 0."""
        if (policy := self.compacted) is None or not level:
            return limit
        return min(limit + policy.budgets[level] - policy.budgets[0], self.bounds[level])

    @cached_property
    def limits(self) -> tuple[int, ...]:
        """The cache buckets that steps need, the largest one for the most cells of a row."""
        most = self.bounds[0] if self.bounds else self.max_len
        return (*(size for size in self.buckets.cache if size < most), most)

    @property
    def counted(self) -> bool:
        """True if decode programs always run all their steps: on GPUs a loop with a condition waits for the host."""
        return self.platform == "gpu"

    @cached_property
    def rows(self) -> int:
        """Number of rows on each replica."""
        return self.max_batch // self.shards.replicas

    @cached_property
    def row_buckets(self) -> tuple[int, ...]:
        """Batch buckets in rows of one replica."""
        return tuple(sorted({-(-size // self.shards.replicas) for size in self.buckets.batch}))

    @cached_property
    def one_step_buckets(self) -> tuple[int, ...]:
        """Batch buckets in rows of one replica that have programs of one step as well, for streams. On GPUs, whose
        dispatches are short, those of more rows than `STREAMED_ROWS` have none: streams get the tokens of a dispatch
        together then."""
        small = tuple(rows for rows in self.row_buckets if rows <= STREAMED_ROWS)
        return (small or self.row_buckets[:1]) if self.counted else self.row_buckets

    def most_chunks(self, width: int) -> int:
        """Number of chunks of `width` tokens that one step prefills on a replica: as many as fill the longest chunk."""
        return max(1, min(self.rows, self.buckets.prefill[-1] // width))

    def prefill_shapes(self) -> tuple[tuple[int, int], ...]:
        """All (P, C) of a replica, those of fewer tokens first: the tiles of each bucket; without tiles, one chunk of
        each bucket C, or as many of it as `most_chunks` allows."""
        buckets = self.buckets
        if buckets.tile is not None:
            return buckets.tiles
        shapes = {(p, c) for c in buckets.prefill for p in (1, self.most_chunks(c))}
        return tuple(sorted(shapes, key=lambda s: (s[0] * s[1], s[1])))

    def detail_shapes(self) -> tuple[tuple[int, int], ...]:
        """The shapes (P, C) of steps for one prompt whose log-probabilities or logits are asked for.

        With tiles these steps have at most 512 tokens, or one tile, or the fewest that there are: logits of every
        position take far more memory than the rest of a step.
        """
        if self.buckets.tile is None:
            return tuple((1, c) for c in self.buckets.prefill)
        shapes = self.buckets.tiles
        return tuple((p, c) for p, c in shapes if p == 1 or p * c <= _DETAIL_TOKENS) or shapes[:1]

    @property
    def has_tiers(self) -> bool:
        """True if pages that are evicted go to the host's memory or to disk."""
        return self.host_cache is not None or self.disk_cache is not None

    @property
    def pool(self) -> PoolSize:
        snapshots = self.snapshots if self.prefix_caching else 0
        pool = PoolSize(self.page_size, self.cache_memory, snapshots, self.attention_pages)
        return pool.compacted(self.compacted, self.bounds)

    @property
    def prefill_unit(self) -> int:
        """Steps that end within a prompt end at a multiple of this number of tokens. So no run of chunk tokens that
        divides it spans two pages."""
        return math.gcd(self.page_size, self.buckets.tile or self.row_tokens)

    @property
    def row_tokens(self) -> int:
        """Most prompt tokens of one row in a step. A ring has as many slots beyond its window."""
        return self.row_limit or self.buckets.prefill[-1]

    def check_model(self, model: ModelConfig, draft: ModelConfig | None = None) -> None:
        """Raise ValueError if max_len exceeds the model's context, ConfigurationError if no load can be counted, if no
        layer selects pages or blocks, if the cache of a layer cannot be compacted, if tokens leave out steps that the
        cache follows, or if `draft`, the model that drafts, cannot do so for this one."""
        if self.attention_pages is not None:
            check_selecting(model, f"attention_pages {str(self.attention_pages)!r}")
            check_bases(model, self.attention_pages, drafts=draft is not None)
        if self.kv_cache_dtype == CALIBRATED_CACHE:
            check_turns(model, drafts=draft is not None)
        if self.block_lists is not None:
            check_selecting(model, f"sparse_prefill {str(self.block_lists)!r}")
        if self.propagation is not None:
            check_propagation(model, self.propagation)
        if self.cache_policy is not None:
            check_compacted(model, self.cache_policy)
            if self.cache_policy.by_layer and not self.cache_policy.levels:
                raise ConfigurationError(
                    f"cache_policy {str(self.cache_policy)!r} has a budget for each layer: give `resolve` the model"
                )
        if model.loop is not None and model.loop.early_exit and (self.attention_pages or self.cache_policy):
            name = "attention_pages" if self.attention_pages else "cache_policy"
            raise ConfigurationError(
                f"{name} follows every step of a loop, and with early_exit tokens leave some out: give one of them"
            )
        if self.depthwise_batching:
            check_stages(model)
        if self.max_len > model.context:
            raise ValueError(f"max_len {self.max_len} exceeds the model's context of {model.context} tokens")
        if draft is not None:
            check_draft(draft, model, self.max_len)
        counts = sorted({spec.experts for spec in model.mixtures})
        if self.expert_load and len(counts) != 1:
            several = f"layers of {' and of '.join(map(str, counts))} experts, not of as many each"
            raise ConfigurationError(
                f"expert_load counts the tokens of each expert, and the model has {several if counts else 'no experts'}"
            )

    def as_options(self) -> EngineOptions:
        """The options by which a user asks for this configuration.

        Raises ConfigurationError if there is a mesh, which the option `parallel` makes.
        """
        if self.shards.mesh is not None:
            raise ConfigurationError("LLM makes the mesh: leave shards out of EngineConfig and give parallel='tp=...'")
        names = {field.name for field in fields(EngineOptions)} & {field.name for field in fields(self)}
        options = EngineOptions(**{name: getattr(self, name) for name in names})
        if (slots := self.adapters) is None:
            return options
        return replace(
            options, max_adapters=slots.count, max_adapter_rank=slots.rank, adapter_parts=slots.parts or None
        )

    @staticmethod
    def make(
        device: str | DeviceKind,
        max_batch: int,
        max_len: int,
        buckets: Buckets | None = None,
        shards: Shards | None = None,
        model: ModelConfig | None = None,
        kv_cache_dtype: str | None = None,
        backend: str = "auto",
    ) -> EngineConfig:
        """The defaults of a device, or of a platform named by a string; see `EngineOptions`."""
        options = EngineOptions(
            max_batch=max_batch, max_len=max_len, buckets=buckets, kv_cache_dtype=kv_cache_dtype, backend=backend
        )
        return options.resolve(DeviceKind(device) if isinstance(device, str) else device, shards, model)


class EngineSettings(TypedDict, total=False):
    """The fields of `EngineOptions` as keyword arguments."""

    max_batch: int | None
    max_len: int | None
    buckets: Buckets | None
    kv_cache_dtype: str | None
    backend: str | Backend | None
    expert_load: bool
    expert_placement: str | Path | None
    decode_steps: int | None
    in_flight: int | None
    scan: bool | None
    free_layouts: bool | None
    platform: str | None
    cascade: bool | None
    page_size: int | None
    cache_memory: int | float | str | None
    prefix_caching: bool
    host_cache: int | str | None
    disk_cache: str | Path | None
    disk_cache_size: int | str | None
    snapshots: int | None
    compile_cache: str | Path | None
    itl: float | None
    speculation: Speculation | str | None
    attention_pages: PageSelection | str | None
    sparse_prefill: SparsePrefill | TokenPropagation | str | None
    cache_policy: CachePolicy | str | None
    max_adapters: int | None
    max_adapter_rank: int | None
    adapter_parts: str | Sequence[str] | None
    depthwise_batching: bool | int


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a user decides about the engine. None leaves a decision to `resolve`.

    max_batch: sequences decoded together. By default 512 on GPUs (64 where the kernels read more than what a row has),
        64 on TPUs, 8 elsewhere. On GPUs and TPUs it is less if rings and recurrent states would take more than half of
        the memory that is left.
    max_len: longest prompt plus output, in tokens. It reserves nothing. By default the model's context, but at most
        8192 on TPUs and 2048 elsewhere. GPUs whose kernels read only what a row has take any context.
    buckets: static shapes to compile for; by default powers of four.
    kv_cache_dtype: "int8" or "fp8" stores keys and values with one scale per position and head, "int4" rotated values
        of 4 bits and keys of 6, "int4_calibrated" keys of 4 bits that a model has turned by what
        `inferlib.calibration.key_turns.calibrate_cache` wrote beside it; by default they have the model's dtype.
    backend: "auto" runs the platform's kernels wherever they support the model; "xla" runs none of them;
        "decode_attention=xla,matmul=xla" leaves these operations (of `OPERATIONS`) to XLA; a `Backend` is taken as it
        is. By default "auto".
    expert_load: programs count how many tokens choose each expert.
    expert_placement: a file that says which device stores which expert (see `inferlib.placement`).
    decode_steps, in_flight, scan, free_layouts: see `EngineConfig`; by default what suits the platform.
    platform: whose defaults to take; by default the platform of the devices.
    cascade: rows that share a prefix read it once, at eight rows and more (see `inferlib.ops.cascade_attention`); by
        default on GPUs, for models that can. It takes programs of its own.
    page_size: positions of a page of the cache, a power of two; by default 128, and 256 if tiles of 256 tokens list
        blocks (see `sparse_prefill`).
    cache_memory: of the cache on each device: bytes, a text such as "16GiB", or a share of the device's memory up to 1.
        By default all that weights and steps leave free; on CPUs what `max_batch` sequences of `max_len` tokens take.
    host_cache: memory of the host for pages and snapshots that the devices have no room for: bytes, or a text such as
        "16GiB". They come back when that is faster than to compute their tokens again.
    disk_cache: a folder for such pages and snapshots. Later processes with the same model find them there. The folder
        is new, empty, or one that was used in this way before. disk_cache_size: most bytes of its files; by default
        half of what is free on the disk.
    prefix_caching: a prompt that begins like an earlier one reuses its pages, and computes only the rest.
    snapshots: how many snapshots of windows and recurrent states each replica has. Prompts of models with such layers
        go on from a snapshot; with 0 they share nothing. By default one for each row: at most 64, in at most a quarter
        of the memory that rows and one sequence leave, or at most 8 if `cache_memory` is neither given nor known.
    compile_cache: a folder for compiled programs, from which later processes take them; by default one in the user's
        cache folder, "none" for none. See `inferlib.programs.compilation_cache`. Several processes that share a model
        use one only if it is given.
    itl: most seconds between two tokens of a row while prompts are prefilled, on average over rows and prompts that
        fill the cache. Steps then read no more prompt tokens than that leaves time for. Steps are timed at the start,
        those of other sampling modes by `LLM.warmup`. By default prompts are prefilled as fast as possible.
    speculation: something drafts tokens, and a decode step checks them together; no result changes. "ngram:3" drafts up
        to 3 tokens that followed the same tokens earlier in the row, "draft:NAME:3" asks a smaller model of the same
        vocabulary, "eagle3:DIRECTORY:3" an EAGLE-3 head, "mtp:3" the model's own layer for further tokens; or a
        `Speculation`. The engine measures where that pays. It needs programs of its own. By default off.
    attention_pages: decode steps read only the pages of a row whose keys may matter most to the query, which changes
        results: "quest:64" reads 64 pages of each row and KV head, the first and the newest among them, "quest:64:16"
        as many blocks of 16 positions; "loki:64" likewise, by bases of keys from beside the model, see
        `measure_key_bases`. All cells stay. Prompts, and layers with a window, latents or a state, are
        computed in full. With ":resident=96" behind either, a row that decodes keeps 96 pages on the device and the
        others in the host's memory, see `inferlib.engine.host_pages`. By default all pages are read.
    sparse_prefill: prompts attend only to the blocks of 128 positions that an estimate lists, which changes results:
        "xattention:0.9" lists blocks of each tile (128 tokens, on TPUs 256) and KV head until they have 90 % of the
        estimated attention, at most a quarter of the blocks of `max_len`; "xattention:0.9:0.5" at most half of them;
        "sample:0.9" estimates by samples of the queries, "mean:0.9" by means. Layers with a window, latents or a
        state, and decode steps, are computed in full. Or "fastkv:20:0.3": layers from number 20 on see 30 % of the
        tokens of each segment of 2048; "fastkv:20:0.3:512" of each 512. By default prompts attend to all, in all
        layers.
    cache_policy: a row's cache keeps a budget of positions for each layer and KV head, which bounds its memory and what
        decode steps read, and changes results: "keydiff:2048" keeps 2048 by scores of their keys ("knorm" too; "h2o",
        "snapkv", "morphkv", "sagekv" and "tova" by attention, "streaming" by age), the first 4 and the newest 32 among
        them, and lets 32 more come before it scores again; "keydiff:2048:64" lets 64 more come. "pyramidkv:2048" keeps
        more in lower layers than in upper ones, 2048 on average. It needs layers that keep keys and values of all
        positions. Prompts share no pages. By default all positions are kept.
    max_adapters: how many adapters are on the devices at a time, beside the weights. More may be loaded, and take
        turns. By default as many as `LLM` is given, or none. max_adapter_rank: the highest rank of an adapter; by
        default the highest of those that `LLM` is given, or 16. adapter_parts: the weights of a layer that they change,
        or how their names begin: "attn.qkv", or several with commas between; fewer take less memory and time. By
        default all that adapters can.
    depthwise_batching: of a model with `early_exit`: a decode step runs the core's next step for each row, wherever it
        is, and the rest of the model once enough rows have left, so that the deepest one does not hold the others up
        (continuous depth-wise batching); a number: once that many wait. It changes no result, and pays where the core
        takes most of the time and depths differ, see `benchmarks/depthwise.py`. By default passes run until all tokens
        have left.
    """

    max_batch: int | None = None
    max_len: int | None = None
    buckets: Buckets | None = None
    kv_cache_dtype: str | None = None
    backend: str | Backend | None = None
    expert_load: bool = False
    expert_placement: str | Path | None = None
    decode_steps: int | None = None
    in_flight: int | None = None
    scan: bool | None = None
    free_layouts: bool | None = None
    platform: str | None = None
    cascade: bool | None = None
    page_size: int | None = None
    cache_memory: int | float | str | None = None
    prefix_caching: bool = True
    host_cache: int | str | None = None
    disk_cache: str | Path | None = None
    disk_cache_size: int | str | None = None
    snapshots: int | None = None
    compile_cache: str | Path | None = None
    itl: float | None = None
    speculation: Speculation | str | None = None
    attention_pages: PageSelection | str | None = None
    sparse_prefill: SparsePrefill | TokenPropagation | str | None = None
    cache_policy: CachePolicy | str | None = None
    max_adapters: int | None = None
    max_adapter_rank: int | None = None
    adapter_parts: str | Sequence[str] | None = None
    depthwise_batching: bool | int = False

    def __post_init__(self):
        check_itl(self.itl)
        check_snapshots(self.snapshots)
        self._check_adapters()
        check_depthwise(self.depthwise_batching)
        object.__setattr__(self, "speculation", speculation_option(self.speculation))
        object.__setattr__(self, "attention_pages", selection_option(self.attention_pages))
        object.__setattr__(self, "sparse_prefill", sparse_option(self.sparse_prefill))
        object.__setattr__(self, "cache_policy", policy_option(self.cache_policy))
        if self.page_size is not None:
            check_page_size(self.page_size)
        if self.cache_memory is not None:
            object.__setattr__(self, "cache_memory", memory_option(self.cache_memory))
        self._check_tiers()
        for name in ("max_batch", "max_len", "decode_steps", "in_flight"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        for name in ("expert_load", "prefix_caching", "scan", "free_layouts", "cascade"):
            check_flag(name, getattr(self, name), optional=name in ("scan", "free_layouts", "cascade"))
        if not isinstance(self.buckets, Buckets | None):
            raise ConfigurationError(
                f"buckets must be Buckets(prefill=..., batch=..., cache=...), got {brief(self.buckets)}"
            )
        check_kv_cache_dtype(self.kv_cache_dtype)
        if isinstance(self.backend, str):
            object.__setattr__(self, "backend", backend_option(self.backend))
        elif not isinstance(self.backend, Backend | None):
            raise ConfigurationError(f"backend must be text such as 'auto', or a Backend, got {brief(self.backend)}")
        if self.expert_placement is not None:
            checked_path("expert_placement", self.expert_placement)
        if self.compile_cache is not None:
            checked_path("compile_cache", self.compile_cache)
        if self.platform is not None and not (isinstance(self.platform, str) and self.platform in PLATFORMS):
            raise ConfigurationError(f"platform must be one of {', '.join(PLATFORMS)}, got {brief(self.platform)}")

    def _check_adapters(self) -> None:
        for name, most in (("max_adapters", MOST_SLOTS), ("max_adapter_rank", MOST_RANK)):
            if getattr(self, name) is None:
                continue
            object.__setattr__(self, name, size := whole_number(name, getattr(self, name)))
            if not 1 <= size <= most:
                raise ConfigurationError(f"{name} must be 1 to {most}, got {size}")
        object.__setattr__(self, "adapter_parts", parts_option("adapter_parts", self.adapter_parts))

    @property
    def adapters(self) -> AdapterSlots | None:
        """Raises ConfigurationError for a rank or parts of no adapters."""
        if self.max_adapters is not None:
            return AdapterSlots(self.max_adapters, self.max_adapter_rank or 16, tuple(self.adapter_parts or ()))
        for name in ("max_adapter_rank", "adapter_parts"):
            if getattr(self, name) is not None:
                raise ConfigurationError(f"{name} is of adapters: give adapters or max_adapters too")
        return None

    def _check_tiers(self) -> None:
        for name in ("host_cache", "disk_cache_size"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, size_option(name, getattr(self, name)))
        if self.disk_cache is not None:
            object.__setattr__(self, "disk_cache", checked_path("disk_cache", self.disk_cache))
        elif self.disk_cache_size is not None:
            raise ConfigurationError("disk_cache_size is of the files in disk_cache: give that folder too")

    def resolve(
        self,
        device: DeviceKind,
        shards: Shards | None = None,
        model: ModelConfig | None = None,
        quantization: Quantization | None = None,
    ) -> EngineConfig:
        """The complete configuration for a device, a mesh and a model (which may be left out if max_len is given) whose
        weights are quantised.

        TPUs scan stacked layers, or unroll them (see `inferlib.unrolling`), and let the compiler choose the layouts of
        weights. GPUs run fewer steps per dispatch: they always run all of them, so a row that ends keeps its place
        until the last. Trainium runs one, as it has no loops. Raises ConfigurationError.
        """
        if self.platform is not None:
            device = device._replace(platform=self.platform)
        platform, shards = device.platform, shards or Shards()
        scan, backend = self._layers(device, shards, model, quantization)
        live = _reads_live_positions(backend, model, self.kv_cache_dtype)
        max_len = self._max_len(model, None if live else _POSITIONS[platform])
        rows = _ROWS[platform] if live else min(_ROWS[platform], _ROWS_OF_BUCKETS)
        max_batch = _default(self.max_batch, rounded_up(rows, shards.replicas))
        buckets = self.buckets
        if buckets is None:
            buckets = self._buckets((max_batch, max_len), platform, shards, model, live=live)
        return EngineConfig(
            max_batch,
            max_len,
            buckets,
            platform=platform,
            decode_steps=_default(self.decode_steps, self._usual_steps(platform)),
            in_flight=_default(self.in_flight, 2),
            scan=scan,
            free_layouts=_default(self.free_layouts, platform == "tpu"),
            cascade=self._cascade(platform, shards, model),
            kv_cache_dtype=self.kv_cache_dtype,
            backend=backend,
            shards=shards,
            expert_load=self.expert_load,
            row_limit=_row_limit(buckets, model, compacted=self.cache_policy is not None),
            page_size=_default(self.page_size, self._usual_page(buckets)),
            cache_memory=self.cache_memory if isinstance(self.cache_memory, int) else None,
            prefix_caching=self.prefix_caching,
            **self.tiers,
            snapshots=self.snapshots,
            itl=self.itl,
            speculation=speculation_option(self.speculation),
            **self.approximations,
            adapters=self.adapters,
            depthwise_batching=self.depthwise_batching,
        ).leveled(model)

    @property
    def _selects_tokens(self) -> bool:
        """True if later layers see fewer tokens of prompts."""
        return isinstance(self.sparse_prefill, TokenPropagation)

    def _usual_page(self, buckets: Buckets) -> int:
        """The positions of a page by default: all tiles of a prompt that list blocks begin with a page, also behind a
        prefix that is reused."""
        lists = isinstance(self.sparse_prefill, SparsePrefill)
        return TILE if lists and (buckets.tile or buckets.prefill[-1]) >= TILE else PoolSize().page

    def _buckets(
        self, sizes: tuple[int, int], platform: str, shards: Shards, model: ModelConfig | None, *, live: bool
    ) -> Buckets:
        """The buckets by default. sizes: `max_batch` and `max_len`. live: see `_reads_live_positions`."""
        (max_batch, max_len), sparse = sizes, self.sparse_prefill
        tile, most = _tile(platform, shards, model, 1 if sparse is None else BLOCK)
        narrowest = None
        if isinstance(sparse, TokenPropagation):  # a tile is a whole segment
            tile, most = sparse.segment or SEGMENT, _TILES.get(platform, (None, None))[1]
            narrowest = _NARROWEST
        return Buckets.default(
            max_batch,
            max_len,
            ragged=live,
            fine=platform == "gpu",
            multiple=shards.size(axes.TOKENS),
            tile=tile,
            most=most and min(most, max_len * (max_batch if platform == "gpu" else 1)),
            narrowest=narrowest,
        )

    def _usual_steps(self, platform: str) -> int:
        """How many decode steps a dispatch has by default. Rows at different depths do not wait for each other."""
        return 8 if self.depthwise_batching else {"gpu": 4, "neuron": 1}.get(platform, 8)

    def _layers(
        self, device: DeviceKind, shards: Shards, model: ModelConfig | None, quantization: Quantization | None
    ) -> tuple[bool, Backend]:
        """Whether layers are scanned, and the backend for that: of unrolled layers XLA multiplies. A model that drafts
        is stored as the other one, by a quantisation of its own, so that layers beside one are scanned."""
        backend, on_tpu, speculation = self.backend, device.platform == "tpu", speculation_option(self.speculation)
        fixed = isinstance(backend, Backend)
        if not isinstance(backend, Backend):
            chosen = Backend.for_platform(device.platform, shards, device.cores, device.generation)
            backend = with_option(chosen, "auto" if backend is None else backend)
        drafted = speculation is not None and speculation.by_model
        if self._selects_tokens and self.scan is None:
            return False, backend
        if not on_tpu or self.scan is not None or model is None or drafted or (fixed and backend.matmul != "xla"):
            return _default(self.scan, on_tpu), backend
        unrolled = unrolls(model, quantization, shards, backend, device.generation)
        return not unrolled, tpu_backend(backend, model, quantization, shards, device.generation)

    @property
    def tiers(self) -> dict[str, Any]:
        """The options of the tiers by name."""
        return {name: getattr(self, name) for name in ("host_cache", "disk_cache", "disk_cache_size")}

    @property
    def approximations(self) -> dict[str, Any]:
        """The options of long contexts that change results, by name."""
        return {
            "attention_pages": selection_option(self.attention_pages),
            "sparse_prefill": sparse_option(self.sparse_prefill),
            "cache_policy": policy_option(self.cache_policy),
        }

    def _cascade(self, platform: str, shards: Shards, model: ModelConfig | None) -> bool:
        mixers = [] if model is None else [layer.attention for layer in model.layers]
        pages = not any(keeps_state(x) or x.reach for x in mixers)
        reasons = {
            "prefix_caching is False, so rows share nothing": not self.prefix_caching,
            "attention_pages reads other pages of each row": self.attention_pages is not None,
            "cache_policy keeps other cells of each row": self.cache_policy is not None,
            "sparse_prefill fastkv packs cells by row": self._selects_tokens,
            "positions are split over devices": shards.size(axes.POSITIONS) > 1,
            "depthwise_batching has rows at different steps": bool(self.depthwise_batching),
            "rows of this model share nothing: it has windows, chunks or states": not pages,
            "this model has latent attention alone": bool(mixers) and all(isinstance(x, MlaSpec) for x in mixers),
        }
        why = next((reason for reason, holds in reasons.items() if holds), None)
        if self.cascade and why:
            raise ConfigurationError(f"cascade=True reads a prefix that rows share once, and {why}: leave cascade out")
        return why is None and _default(self.cascade, platform == "gpu")

    def _max_len(self, model: ModelConfig | None, most: int | None) -> int:
        if self.max_len is not None:
            return self.max_len
        if model is None:
            raise ConfigurationError("max_len has no default without a model")
        return model.context if most is None else min(model.context, most)


def check_selecting(model: ModelConfig, option: str) -> None:
    """Raise ConfigurationError if no layer of a model can select what it reads, as an option asks."""
    mixers = [layer.attention for layer in model.layers]
    if not any(isinstance(mixer, AttentionSpec) and mixer.reach is None for mixer in mixers):
        raise ConfigurationError(
            f"{option} is of layers that keep keys and values of all positions, and this model has none, only windows, "
            "latents or states: leave it out"
        )


def check_propagation(model: ModelConfig, how: TokenPropagation) -> None:
    """Raise ConfigurationError if layers of a model cannot see fewer tokens of prompts than others."""
    mixers, count = [layer.attention for layer in model.layers], len(model.layers)
    every = all(isinstance(x, AttentionSpec) and x.reach is None and x.cache_of is None for x in mixers)
    reasons = {
        "is for models whose layers all keep keys and values of all positions of their own, and this one has windows, "
        "latents, states or layers that read the cache of another: leave it out": not every,
        "weighs keys again without the learned sinks that this model has: leave it out": any(
            isinstance(x, AttentionSpec) and x.sinks for x in mixers
        ),
        "is for models whose layers run once: leave it out": model.loop is not None,
        "is for models with one residual: leave it out": model.lanes is not None or model.streams > 1,
        "is for models that embed tokens before the first layer alone: leave it out": model.per_layer is not None,
        "is for models of two layers or more, and this one has one: leave it out": count == 1,
        f"names a layer from 1 to {count - 1} of this model of {count}": how.layer >= count,
    }
    if why := next((why for why, holds in reasons.items() if holds), None):
        raise ConfigurationError(f"sparse_prefill {str(how)!r} {why}")


def check_bases(model: ModelConfig, selection: PageSelection, *, drafts: bool = False) -> None:
    """Raise ConfigurationError if pages are selected by bases of keys that a model lacks, or one that drafts."""
    if not selection.by_bases:
        return
    if not any(isinstance(layer.attention, AttentionSpec) and layer.attention.key_basis for layer in model.layers):
        raise ConfigurationError(
            f"attention_pages {str(selection)!r} needs bases of keys, which `LLM` reads from beside a model: take "
            "quest here"
        )
    if drafts:
        raise ConfigurationError(
            f"attention_pages {str(selection)!r} needs bases of keys, and a model that drafts has none: take quest, or "
            "drafts by ngram"
        )


def check_turns(model: ModelConfig, *, drafts: bool = False) -> None:
    """Raise ConfigurationError for a calibrated cache of a model that lacks the turns of its keys, or with one that
    drafts."""
    if drafts or not all(
        mixer.key_turns for layer in model.layers if isinstance(mixer := layer.attention, AttentionSpec)
    ):
        why = (
            "a model that drafts has none: take int4, or drafts by ngram" if drafts else "this has none: take int4 here"
        )
        raise ConfigurationError(
            f"kv_cache_dtype {CALIBRATED_CACHE} needs a calibration, which `LLM` reads from beside a model, and {why}"
        )


def check_compacted(model: ModelConfig, policy: CachePolicy) -> None:
    """Raise ConfigurationError if the cache of a layer cannot be compacted."""
    for number, mixer in enumerate(layer.attention for layer in model.layers):
        what = {MlaSpec: "latents", AttentionSpec: "a window" if mixer.reach else ""}.get(type(mixer), "a state")
        if what:
            raise ConfigurationError(
                f"cache_policy {str(policy)!r} is for models whose layers all keep keys and values of all positions, "
                f"and layer {number} of this one has {what}: leave it out"
            )
        if policy.queries and isinstance(mixer, AttentionSpec) and mixer.sinks:
            raise ConfigurationError(
                f"cache_policy {str(policy)!r} weighs keys again without the learned sinks that layer {number} of this "
                "model has: take h2o or a policy by keys"
            )
    if policy.by_layer:
        count = len(cache_owners(model))
        reasons = {
            "repeats layers, each time with other cells": model.loop is not None,
            "has lanes": model.lanes is not None,
            "has only one layer with a cache": count < 2,
        }
        if why := next((why for why, holds in reasons.items() if holds), None):
            raise ConfigurationError(
                f"cache_policy {str(policy)!r} has a budget for each layer, and this model {why}: "
                f"take 'snapkv:{policy.budget}'"
            )


def leveled_model(model: ModelConfig, policy: CachePolicy | None) -> ModelConfig:
    """The model with its layers in a policy's levels, see `with_cache_levels`. Raises ConfigurationError if the policy
    is not for the model, and ConfigError if it is but takes preferences of layers that were not measured."""
    if policy is not None:
        check_compacted(model, policy)
    return with_cache_levels(model, policy)


def leveled_policy(policy: CachePolicy, model: ModelConfig, unit: int, max_len: int) -> CachePolicy:
    """A policy by layer with the budgets of a model's levels; see `level_budgets`. Raises ConfigurationError."""
    try:
        shares, layers = layer_shares(model, policy), len(cache_owners(model))
        return replace(policy, levels=level_budgets(policy, layers, unit, max_len, shares))
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def check_stages(model: ModelConfig) -> None:
    """Raise ConfigurationError if rows of a model cannot be at different steps of a loop's core."""
    if not model.exits_early:
        why = "repeats no layers: leave it out" if model.loop is None else "does not let them: give early_exit too"
        raise ConfigurationError(
            f"depthwise_batching is for models whose tokens leave a loop's core early, and this one of {model.family} "
            f"{why}"
        )
    for number, mixer in enumerate(layer.attention for layer in model.layers):
        if not isinstance(mixer, AttentionSpec) or mixer.reach or mixer.cache_of is not None:
            raise ConfigurationError(
                "depthwise_batching is for models whose layers all keep keys and values of all positions, and layer "
                f"{number} of this one does not: leave it out"
            )


def check_draft(draft: ModelConfig, target: ModelConfig, max_len: int = 0) -> None:
    """Raise ConfigurationError if a model cannot draft for another one, whose sequences have up to `max_len` tokens."""
    if draft.vocab != target.vocab:
        raise ConfigurationError(
            f"the model that drafts has a vocabulary of {draft.vocab} tokens, and this model one of {target.vocab}: "
            "take a draft model of the same vocabulary"
        )
    if draft.context < max_len:
        raise ConfigurationError(
            f"the model that drafts has a context of {draft.context} tokens, less than max_len {max_len}: lower "
            "max_len, or take another draft model"
        )


def _tile(platform: str, shards: Shards, model: ModelConfig | None, multiple: int = 1) -> tuple[int | None, int | None]:
    """Tokens of a tile, a multiple of `multiple`, and most prompt tokens of a step; None, None if prompts are not
    packed by default.

    The kernels of TPUs and Trainium read a prompt's cache once a chunk, so long chunks suit them. So they do latent
    attention, which expands the cache once a chunk, and recurrent layers, which take the tiles of a step one after the
    other. Tokens that are dealt out to devices make short tiles shorter.
    """
    layers = () if model is None else model.layers
    if shards.size(axes.TOKENS) > 1 or any(
        isinstance(x.attention, MlaSpec) or keeps_state(x.attention) for x in layers
    ):
        return None, None
    if platform not in _TILES:
        return None, None
    tile, most = _TILES[platform]
    mixers = [layer.attention for layer in layers]
    if platform == "gpu" and any(isinstance(x, AttentionSpec) and x.heads == x.kv_heads for x in mixers):
        tile *= 2  # with one query for each key, 32 tokens would not fill a program of the kernel
    return rounded_up(tile, multiple), most


def _row_limit(buckets: Buckets, model: ModelConfig | None, *, compacted: bool) -> int | None:
    """See `EngineConfig.row_limit`. compacted: prompts are compacted after that many tokens."""
    most = buckets.prefill[-1]
    rings = model is not None and any(layer.attention.reach is not None for layer in model.layers)
    if buckets.tile is None or not (rings or compacted):
        return None
    return min(most, rounded_up(_RING_TOKENS, buckets.tile))


def _reads_live_positions(backend: Backend, model: ModelConfig | None, kv_cache_dtype: str | None) -> bool:
    """True if decode attention reads only the positions that a row has, so that one cache bucket serves all lengths."""
    if backend.decode_attention != "pallas_gpu":
        return False
    if model is None:
        return True
    # Prefill expands the latents of the whole bucket.
    if any(isinstance(layer.attention, MlaSpec) for layer in model.layers):
        return False
    packed = kv_cache_dtype in PACKED_CACHES
    scaled = kv_cache_dtype is not None and not packed
    # A layer with a window or chunks stores a ring and reads all of it, whatever the bucket.
    mixers = [layer.attention for layer in model.layers]
    return all(
        mixer.reach or not choose_attention(mixer, "decode_attention", backend, scaled=scaled, packed=packed).reason
        for mixer in mixers
    )


def _default(value: T | None, default: T) -> T:
    return default if value is None else value
