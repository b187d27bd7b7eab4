"""Ranks meshes, presets, weight dtypes and batches for a workload on a target, by the cost model alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from inferlib.config import DeviceKind, EngineOptions, PoolSize
from inferlib.models.cache_levels import layer_budgets, with_cache_levels
from inferlib.models.config import MlaSpec, ModelConfig, MoeSpec
from inferlib.models.depth import depth_of
from inferlib.models.key_turns import with_key_turns
from inferlib.models.layout import Layout
from inferlib.models.quantization import Quantization
from inferlib.ops.cache_policy import CachePolicy
from inferlib.option_checks import CALIBRATED_CACHE
from inferlib.planning.costs import Deployed, Memory, StepTime, step_time
from inferlib.planning.draft_layers import drafting_of, drafting_seconds
from inferlib.planning.drafts import Drafts
from inferlib.sharding.mesh import Parallelism, ShardingError
from inferlib.sharding.shards import planned_shards
from inferlib.targets import CHIPS, Target, TargetError, parse_target, target_names

_LONGEST_CHUNK = 1024  # tokens: enough for a prefill to be bound by compute on every chip
USUAL = (None, Quantization.named("int8"))  # the default choice for weights that are shipped unquantised
_WIDEST = 64  # most devices of a replica: with more, a step is all latency


class PlanError(ValueError):
    """A workload that cannot be planned. The message says what would work."""


@dataclass(frozen=True)
class Workload:
    """Requests of `input_len` prompt tokens and `output_len` generated ones, `concurrency` at a time. depth: of a
    looped model, how many steps of its core a pass runs on average; None: all."""

    input_len: int = 1024
    output_len: int = 256
    concurrency: int = 64
    depth: int | None = None

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"{field.name} must be at least 1, got {value!r}")

    @property
    def max_len(self) -> int:
        return self.input_len + self.output_len

    @property
    def middle(self) -> float:
        """Positions of a row in the cache half way through its answer."""
        return self.input_len + self.output_len / 2

    @property
    def chunk(self) -> int:
        """Tokens of a prefill chunk: the prompt's length rounded up to a power of two, within a limit."""
        return min(_LONGEST_CHUNK, 1 << (self.input_len - 1).bit_length())


@dataclass(frozen=True)
class Slo:
    """Service-level objective, in seconds: time to first token, and mean inter-token latency."""

    ttft: float | None = None
    itl: float | None = None

    @staticmethod
    def parse(text: str) -> Slo:
        """Read "ttft=0.5,itl=0.02"."""
        values: dict[str, float] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, value = part.partition("=")
            try:
                seconds = float(value)
            except ValueError:
                seconds = 0.0
            if name not in ("ttft", "itl") or name in values or not seconds > 0:
                raise PlanError(f"cannot read {part!r} in slo={text!r}; write seconds, for example ttft=0.5,itl=0.02")
            values[name] = seconds
        return Slo(**values)

    def missed_by(self, option: Option) -> float:
        """The factor by which the worse of the two exceeds its limit, 1.0 if both hold."""
        pairs = ((self.ttft, option.ttft), (self.itl, option.itl))
        return max([1.0, *(actual / limit for limit, actual in pairs if limit is not None)])


@dataclass(frozen=True)
class Option:
    """One way to serve a workload, with `batch` rows over all replicas.

    decode: time of a decode step, with the cache half way through the answers. prefill: seconds for one prompt. Prompts
    are prefilled between decode steps, so every token waits for its share of them. drafts: tokens that each step
    drafts; drafter: what makes them, if that is a model or a layer; drafting: seconds that it takes for them; tokens:
    what a row gets of a step. compaction: seconds of a step in which rows are compacted.
    """

    deployed: Deployed
    workload: Workload
    batch: int
    memory: Memory
    decode: StepTime
    prefill: float
    drafts: int = 0
    drafter: Deployed | None = None
    drafting: float = 0.0
    tokens: float = 1.0
    compaction: float = 0.0

    def slower(self, decode: float = 1.0, prefill: float = 1.0) -> Option:
        """The option with these factors on its times."""
        step = replace(self.decode, seconds=decode * self.decode.seconds)
        return replace(self, decode=step, prefill=prefill * self.prefill)

    @property
    def active(self) -> int:
        """The number of rows that the workload fills."""
        return min(self.batch, self.workload.concurrency)

    @property
    def core(self) -> str | None:
        """The memory from which decode steps on TPUs read the core of a looped model; None for other models.

        "on chip": they read it once and keep it there. "in memory": they read it as often as they run it.
        """
        if self.deployed.config.loop is None or self.deployed.target.platform != "tpu":
            return None
        tokens = -(-self.active // self.deployed.replicas) * (1 + self.drafts)
        return "on chip" if self.deployed.reads_core_once(tokens) else "in memory"

    @property
    def step(self) -> float:
        """Seconds of a decode step, of its drafts and of compactions."""
        return self.decode.seconds + self.drafting + self.compaction

    @property
    def _cycle(self) -> float:
        """Seconds to answer a full batch."""
        rows = -(-self.active // self.deployed.replicas)
        return self.workload.output_len / self.tokens * self.step + rows * self.prefill

    @property
    def itl(self) -> float:
        return self._cycle / self.workload.output_len

    @property
    def ttft(self) -> float:
        """Time to first token: the wait for a row, the decode step that is running, and the prompt itself."""
        wait = (self.workload.concurrency / self.active - 1) * self._cycle
        return wait + self.step + self.prefill

    @property
    def throughput(self) -> float:
        """Generated tokens per second of the whole slice."""
        return self.active * self.workload.output_len / self._cycle

    @property
    def per_chip(self) -> float:
        return self.throughput / self.deployed.target.chips

    @property
    def over(self) -> int:
        """Bytes by which a device's memory is exceeded; negative if there is room."""
        return self.memory.total - self.deployed.target.hbm_bytes

    @property
    def pool_tokens(self) -> int:
        """How many tokens the cache of the whole slice holds if it takes all memory that the rest leaves. Its pages and
        snapshots have what drafts, too."""
        workload, deployed, memory = self.workload, self.deployed, self.memory.cache - self.over
        of_drafts = None if self.drafter is None else self.drafter.model
        plan = deployed.plan(self.batch, workload.max_len, workload.chunk, of_drafts)
        plan = plan.with_snapshots(PoolSize(memory=memory, snapshots=None), deployed.shards)
        return plan.tokens_in(memory, deployed.shards)

    def facts(self) -> dict[str, Any]:
        """The option as JSON values: seconds, and bytes on a device."""
        return {
            "parallel": str(self.deployed.parallel),
            "weights": self.deployed.weights,
            "kv_cache_dtype": self.deployed.kv_cache_dtype or "bfloat16",
            "cache_policy": self.deployed.cache_policy and str(self.deployed.cache_policy),
            "layer_budgets": layer_budgets(self.deployed.config, self.deployed.cache_policy),
            "core": self.core,
            "batch": self.batch,
            "pool_tokens": self.pool_tokens,
            "ttft": self.ttft,
            "itl": self.itl,
            "tokens_per_second": self.throughput,
            "tokens_per_second_per_chip": self.per_chip,
            "drafts": self.drafts,
            "tokens_per_step": self.tokens,
            "drafting": self.drafting,
            "compaction": self.compaction,
            "decode": vars(self.decode) | {"bound": self.decode.bound},
            "bytes": vars(self.memory) | {"total": self.memory.total, "over": self.over},
        }


@dataclass(frozen=True)
class Ranking:
    """The options that fit, best first: by how far they miss the SLO, then by throughput, then by latency."""

    workload: Workload
    slo: Slo
    target: Target
    options: tuple[Option, ...]

    @property
    def best(self) -> Option:
        return self.options[0]

    def of(self, options: Iterable[Option]) -> Ranking:
        """The ranking of other options for the same workload."""
        slo = self.slo
        order = sorted(options, key=lambda o: (_digits(slo.missed_by(o)), -_digits(o.throughput), _digits(o.itl)))
        return replace(self, options=tuple(order))

    @property
    def meets(self) -> bool:
        """True if the best option meets the SLO."""
        return self.slo.missed_by(self.best) == 1.0

    @cached_property
    def frontier(self) -> tuple[Option, ...]:
        """The options that no other beats in both inter-token latency and throughput, lowest latency first."""
        frontier: list[Option] = []
        for option in sorted(self.options, key=lambda o: (_digits(o.itl), -_digits(o.throughput))):
            if not frontier or _digits(option.throughput) > _digits(frontier[-1].throughput):
                frontier.append(option)
        return tuple(frontier)


def _digits(value: float) -> float:
    """The value to three digits: smaller differences count as equal, so that the simpler mesh comes first."""
    return float(f"{value:.3g}")


def formats(shipped: Quantization | None, names: str | None) -> tuple[Quantization | None, ...]:
    """The formats of weights to rank: those named, with commas between them and "none" for bfloat16; by default the one
    that a model is shipped in, or `USUAL`. Raises ConfigError for an unknown name."""
    if not names:
        return USUAL if shipped is None else (shipped,)
    by_name = {"": None, "none": None} | ({} if shipped is None else {shipped.name: shipped})
    return tuple(by_name[name] if name in by_name else Quantization.named(name) for name in names.split(","))


def rank(
    config: ModelConfig,
    target: Target,
    workload: Workload,
    slo: Slo = Slo(),
    quantizations: Sequence[Quantization | None] = USUAL,
    kv_cache_dtype: str | None = None,
    drafts: Drafts | None = None,
    cache_policy: CachePolicy | None = None,
) -> Ranking:
    """Rank every mesh, preset, weight dtype and batch. kv_cache_dtype, cache_policy: see `EngineConfig`. drafts: of
    speculative decoding, of which each option takes as many as give most tokens for their time.

    Raises PlanError if nothing fits (the message says what is missing and what would work) or if the workload exceeds
    the model's context; TargetError for a target without published figures; ConfigurationError for a cache policy that
    does not work with the rest.
    """
    if not target.hbm_bytes:
        raise TargetError(
            f"{target} is whatever this machine has, without published figures; plan for a chip, such as cuda:h200"
        )
    if workload.max_len > config.context:
        raise PlanError(f"{workload.max_len} tokens exceed the model's context of {config.context}")
    if workload.depth is not None:
        check_depth(workload.depth, config, target)
    config = with_key_turns(config) if kv_cache_dtype == CALIBRATED_CACHE else config
    if cache_policy is not None:
        taken: dict[str, Any] = dict(kv_cache_dtype=kv_cache_dtype, speculation=drafts and drafts.speculation)
        options = EngineOptions(max_len=workload.max_len, cache_policy=cache_policy, **taken)
        resolved = options.resolve(DeviceKind(target.platform)).leveled(config)
        resolved.check_model(config)
        config, cache_policy = with_cache_levels(config, cache_policy), resolved.cache_policy
    settings: dict[str, Any] = dict(kv_cache_dtype=kv_cache_dtype, cache_policy=cache_policy, depth=workload.depth)
    every = [
        option
        for parallel in meshes(config, target, workload.chunk)
        for quantization in quantizations
        if _keeps_groups(deployed := Deployed(config, target, parallel, quantization, **settings)) and deployed.compacts
        for option in _options(deployed, workload, drafts)
    ]
    if not every and cache_policy is not None:
        raise PlanError(
            f"no mesh of {target} has whole groups of heads and all positions of a row on each device, which "
            f"cache_policy {str(cache_policy)!r} needs: take a smaller slice, or a policy by keys"
        )
    options = [o for o in every if o.over <= 0]
    if not options:
        raise PlanError(_advice(min(every, key=lambda o: o.over), quantizations))
    return Ranking(workload, slo, target, ()).of(options)


def check_depth(depth: int, config: ModelConfig, target: Target) -> None:
    """Raise PlanError if no pass of a model on a target runs `depth` steps of its core."""
    try:
        depth_of(depth, None, config)
    except ValueError as error:
        raise PlanError(str(error)) from None
    if target.platform == "gpu" and config.loop is not None and not config.loop.early_exit:
        raise PlanError("on GPUs a pass runs all steps of the core, but with early_exit: leave depth out")


def meshes(config: ModelConfig, target: Target, chunk: int) -> list[Parallelism]:
    """All meshes of all devices that the model and its prefill chunks divide over, with every preset that makes a
    difference, simplest first. Replicas have their own experts, or share one set."""
    widths = _widths(target)
    kv_heads = max(1 if isinstance(x.attention, MlaSpec) else x.attention.kv_heads for x in config.layers)
    candidates = _tensor_meshes(config, target)
    # "tp" would copy the cache.
    candidates += [
        Parallelism(tensor=n, **{axis: target.devices // n}, rules="dp_attention")
        for n in widths
        for axis in _replica_axes(config, target.devices // n)
        if n > kv_heads
    ]
    for width in widths:
        for sequence in (n for n in widths if n > 1 and width % n == 0):
            tensor = width // sequence
            rules = ["cp"] if chunk % sequence == 0 else []
            # For more devices than KV heads, with as many as possible on the tensor axis.
            rules += ["helix"] if tensor == max(n for n in widths if n <= kv_heads and width % n == 0) else []
            rules += ["tp2d"] if tensor > 1 else []
            candidates += [
                Parallelism(tensor=tensor, sequence=sequence, **{axis: target.devices // width}, rules=name)
                for axis in _replica_axes(config, target.devices // width)
                for name in rules
            ]
    return [parallel for parallel in candidates if _divides(config, parallel)]


def _tensor_meshes(config: ModelConfig, target: Target) -> list[Parallelism]:
    return [
        Parallelism(tensor=n, **{axis: target.devices // n}, rules=rules)
        for n in _widths(target)
        for axis in _replica_axes(config, target.devices // n)
        for rules in ("tp", "tp_sp")[: 1 + (n > 1)]
    ]


def _widths(target: Target) -> list[int]:
    """Possible numbers of devices of a replica."""
    return [n for n in range(1, min(target.devices, _WIDEST) + 1) if target.devices % n == 0]


def _replica_axes(config: ModelConfig, replicas: int) -> list[str]:
    fewest = min((layer.mlp.experts for layer in config.layers if isinstance(layer.mlp, MoeSpec)), default=1)
    return ["data", "expert"] if 1 < replicas <= fewest else ["data"]


def _divides(config: ModelConfig, parallel: Parallelism) -> bool:
    try:
        Layout(config, planned_shards(parallel))
    except ShardingError:
        return False
    return True


def _keeps_groups(deployed: Deployed) -> bool:
    """True if the mesh does not cut groups of quantised elements that share a scale."""
    try:
        _ = deployed.model
    except ShardingError:
        return False
    return True


def _batches(concurrency: int, replicas: int) -> list[int]:
    """Batch sizes over all replicas: a power of two on each, and last as many as there are requests at a time."""
    most = -(-concurrency // replicas)
    rows = [1 << k for k in range(most.bit_length()) if 1 << k < most]
    return [n * replicas for n in (*rows, most)]


def _options(deployed: Deployed, workload: Workload, drafts: Drafts | None) -> Iterator[Option]:
    """The options of a deployment, one for each batch size."""
    chunk = workload.chunk
    prefill = _prefill(deployed, workload)
    for batch in _batches(workload.concurrency, deployed.replicas):
        rows = -(-min(batch, workload.concurrency) // deployed.replicas)
        decode = step_time(deployed.decode(rows, deployed.cells(workload.middle)), deployed.network)
        memory = deployed.memory(batch, workload.max_len, chunk)
        compaction = deployed.compaction(rows, workload.max_len, chunk)
        option = Option(deployed, workload, batch, memory, decode, prefill, compaction=compaction)
        if drafts is not None:
            drafted = [o for o in _drafted(option, rows, drafts) if o.over <= max(option.over, 0)]
            option = max(drafted, key=lambda o: o.throughput)
        yield option


def _prefill(deployed: Deployed, workload: Workload) -> float:
    """Seconds for one prompt."""
    chunks, policy = -(-workload.input_len // workload.chunk), deployed.cache_policy
    starts = [i * workload.chunk if policy is None else min(i * workload.chunk, policy.budget) for i in range(chunks)]
    middle = deployed.prefill(workload.chunk, sum(starts) / chunks)
    return chunks * step_time(middle, deployed.network).seconds


def _drafted(option: Option, rows: int, drafts: Drafts) -> Iterator[Option]:
    """The option with each number of drafts that a step may have, and without a draft model if none are best."""
    yield option
    deployed, workload = option.deployed, option.workload
    if (drafting := drafting_of(drafts, deployed)) is not None:
        if not (_divides(drafting.config, deployed.parallel) and _keeps_groups(drafting)):
            return
        memory = option.memory.plus(drafting.memory(option.batch, workload.max_len, workload.chunk))
        prefill = option.prefill + _prefill(drafting, workload)
        option = replace(option, memory=memory, prefill=prefill, drafter=drafting)
    for count in drafts.speculation.counts:
        step = step_time(deployed.decode(rows, workload.middle, drafts=count), deployed.network)
        spent = 0.0 if drafting is None else drafting_seconds(drafting, rows, workload.middle, count)
        yield replace(option, decode=step, drafts=count, drafting=spent, tokens=drafts.tokens(count))


def _advice(nearest: Option, quantizations: Sequence[Quantization | None]) -> str:
    """A message about what is missing, and the smallest slice of each kind that would work."""
    deployed, target = nearest.deployed, nearest.deployed.target
    gib = 1024**3
    text = (
        f"the model does not fit {target}: the nearest ({deployed.parallel}, {deployed.weights} "
        f"weights, batch {nearest.batch}) needs {nearest.memory.total / gib:.1f} GiB on each device, "
        f"{nearest.over / gib:.1f} GiB more than its {target.hbm_bytes / gib:.1f}"
    )
    chips = [chip for chip in CHIPS.values() if chip.platform == target.platform and chip.hbm_bytes]
    chips.sort(key=lambda chip: chip != target.chip)
    able = []
    # Weights that are shipped quantised stay so.
    for quantization in USUAL if None in quantizations else quantizations:
        names = [target.name] if quantization not in quantizations else []
        for offered in (names, *(target_names(chip.name) for chip in chips)):
            fit = (n for n in offered if _fits(replace(deployed, quantization=quantization), n, nearest.workload))
            if name := next(fit, None):
                able.append(f"{name} with {quantization or 'bfloat16'} weights")
    return f"{text}; what would do: {', '.join(able) or 'fewer tokens'}"


def _fits(deployed: Deployed, name: str, workload: Workload) -> bool:
    """True if one row of each replica fits a target with the widest tensor axis."""
    target = parse_target(name)
    deployed = replace(deployed, target=target, parallel=_tensor_meshes(deployed.config, target)[-1])
    if not deployed.compacts:
        return False
    return deployed.memory(deployed.replicas, workload.max_len, workload.chunk).total <= target.hbm_bytes
