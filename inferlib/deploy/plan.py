"""`inferlib.plan`: how to split a model over a target, and how fast that can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from rich.markup import escape

from inferlib.aot.verify import Check, by_compiler, candidates, deployment, programs, verify
from inferlib.checkpoint.eagle3 import Eagle3Files
from inferlib.checkpoint.mtp import mtp_names
from inferlib.deploy import plan_text
from inferlib.deploy.source import ModelSource, model_source
from inferlib.inspection.outcome import Outcome
from inferlib.models.families import family_of
from inferlib.ops.cache_policy import CachePolicy
from inferlib.option_checks import (
    ConfigurationError,
    brief,
    check_kv_cache_dtype,
    checked_path,
    policy_option,
    speculation_option,
)
from inferlib.planning import planner
from inferlib.planning.drafts import Drafts
from inferlib.planning.planner import Option, PlanError, Ranking, Slo, Workload
from inferlib.programs.deployment import Deployment
from inferlib.programs.keys import ProgramKey
from inferlib.tables import Part, Tables
from inferlib.targets import Target, parse_target

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Drafts", "PlanResult", "Slo", "Workload", "plan"]


class Formats(TypedDict, total=False):
    """How the weights and the cache are stored; see `plan`."""

    quantization: str | None
    kv_cache_dtype: str | None
    cache_policy: CachePolicy | str | None


def plan(
    model: str | Path | Mapping[str, Any] | ModelSource,
    target: str,
    workload: Workload = Workload(),  # noqa: B008
    *,
    slo: str | Slo | None = None,
    revision: str | None = None,
    drafts: Drafts | None = None,
    **stored: Unpack[Formats],
) -> PlanResult:
    """Rank meshes, presets, weight formats and batch sizes for a workload, by an analytical cost model.

    It takes about a second and needs no device and no weights. Times are estimates from published figures.

    model: a model as for `LLM`, the name of a shape that comes with inferlib ("llama3-70b"), or a Hugging Face config
        as a mapping.
    target: what to run on, such as "v6e-8", "v5p:4x4x4" or "cuda:h200-4"; see `inferlib targets`.
    workload: prompt and answer lengths in tokens, and the number of requests at a time.
    slo: limits in seconds that must hold, "ttft=0.5,itl=0.02", or an `Slo`. If nothing meets them, the nearest plan
        comes first, and `PlanResult.meets_slo` is False.
    quantization: formats of the weights to rank, with commas between them ("none" is bfloat16); by default as the model
        is shipped, or "none,int8".
    kv_cache_dtype: "int8", "fp8" or "int4"; by default bfloat16.
    cache_policy: "keydiff:2048", as for `LLM`: a row's cache is bounded. Meshes that it does not work on are left out.
    revision: branch, tag or commit of a model of the hub.
    drafts: of speculative decoding, such as `Drafts(Speculation("ngram", 7), acceptance=0.7)`; each plan takes as many
        as pay.

    Raises PlanError if nothing fits, saying what would; TargetError, CheckpointError, ConfigError or
    ConfigurationError for input that is wrong.
    """
    if unknown := sorted(set(stored) - set(Formats.__annotations__)):
        known = ", ".join(Formats.__annotations__)
        raise TypeError(f"plan() got an unexpected keyword argument {unknown[0]!r}; formats are {known}")
    quantization, kv_cache_dtype = stored.get("quantization"), stored.get("kv_cache_dtype")
    if not isinstance(workload, Workload):
        raise PlanError(f"workload must be Workload(input_len, output_len, concurrency, depth), got {brief(workload)}")
    for name, value, kind in (("target", target, str), ("quantization", quantization, str | None)):
        if not isinstance(value, kind):
            raise ConfigurationError(f"{name} must be text, got {brief(value)}")
    if not isinstance(slo, str | Slo | None):
        raise PlanError(f"slo must be text such as 'ttft=0.5,itl=0.02', got {brief(slo)}")
    if not isinstance(drafts, Drafts | None):
        raise ConfigurationError(f"drafts must be Drafts(speculation, acceptance), got {brief(drafts)}")
    check_kv_cache_dtype(kv_cache_dtype)
    policy = policy_option(stored.get("cache_policy"))
    goal = slo if isinstance(slo, Slo) else Slo.parse(slo or "")
    slice_ = parse_target(target)
    source = model_source(model, revision, files=False)
    formats = planner.formats(source.shipped, quantization)
    if drafts is not None:
        drafts.check(source.config)
        if drafts.speculation.method == "mtp":
            mtp_names(family_of(dict(source.hf)))
    ranking = planner.rank(source.config, slice_, workload, goal, formats, kv_cache_dtype, drafts, policy)
    return PlanResult(source, ranking, drafts)


def drafts_option(speculation: str | None, acceptance: float | None, target: ModelSource) -> Drafts | None:
    """The drafts that two options ask for.

    speculation: text such as "ngram:3" or "draft:NAME:3". target: the model that is planned. Raises CheckpointError,
    ConfigError or ConfigurationError.
    """
    chosen, model, head = speculation_option(speculation), None, None
    if chosen is not None and chosen.model is not None:
        if chosen.method == "eagle3":
            head = Eagle3Files.open(chosen.model, target.config).config
        else:
            model = model_source(chosen.model, files=False).config
    return Drafts.of(chosen, acceptance, model, head)


@dataclass(frozen=True, repr=False)
class PlanResult(Tables):
    """The plans that fit, best first; `print` it, or show it in a notebook.

    source: the model. ranking: every option by the cost model. drafts: what was taken for granted of speculation.
    checks: what `verify` compiled.
    """

    source: ModelSource
    ranking: Ranking
    drafts: Drafts | None = None
    checks: tuple[Check, ...] = ()

    @property
    def target(self) -> Target:
        return self.ranking.target

    @property
    def best(self) -> Option:
        """The best option, by the compiler's times if there are any."""
        return (self.verified or self.ranking).best

    @property
    def options(self) -> tuple[Option, ...]:
        """Every option that fits, best first, by the cost model."""
        return self.ranking.options

    @property
    def frontier(self) -> tuple[Option, ...]:
        """The options that no other beats in both inter-token latency and throughput."""
        return self.ranking.frontier

    @property
    def meets_slo(self) -> bool:
        """True if the best option meets the SLO."""
        return (self.verified or self.ranking).meets

    @property
    def ok(self) -> bool:
        """True if the SLO is met, and every program that was compiled fits."""
        return self.meets_slo and all(check.compiled.outcome.ok for check in self.checks)

    @cached_property
    def verified(self) -> Ranking | None:
        """The plans that `verify` compiled, ranked by the compiler's times; None without any."""
        return by_compiler(self.ranking, self.checks)

    def candidates(self, meshes: int) -> list[Option]:
        """The best plan of each of the best `meshes`, which `verify` compiles. Raises CompileError if it cannot."""
        return candidates(self.ranking, meshes)

    def names(self, meshes: int) -> list[str]:
        """The names of the programs that `verify` compiles, as it passes them to `started` and `done`."""
        chosen = self.candidates(meshes)
        return [_name(option, key) for option in chosen for key in programs(deployment(self.source.hf, option))]

    def verify(
        self,
        meshes: int = 1,
        *,
        started: Callable[[str], None] = lambda name: None,
        done: Callable[[str, Outcome], None] = lambda name, outcome: None,
    ) -> PlanResult:
        """The result with the best plan of each of the best `meshes` compiled by the TPU compiler, without a TPU.

        started, done: called with a program's name before and after it compiles. Raises CompileError for a target that
        is no TPU slice, without the compiler, or for plans with drafts, a cache policy or a depth.
        """
        checks = verify(
            self.source.hf,
            self.candidates(meshes),
            started=lambda option, key: started(_name(option, key)),
            done=lambda option, outcome: done(_name(option, outcome.key), outcome),
        )
        return replace(self, checks=tuple(checks))

    def deployment(self) -> Deployment:
        """The best option, for `inferlib.compile`: its programs for greedy decoding, one bucket of each kind."""
        return deployment(self.source.hf, self.best)

    def plot(self, path: str | Path | None = None) -> Figure:
        """The frontier as a picture: tokens/s of a user against tokens/s of a chip. path: also write it to this file
        (.png, .svg, .pdf)."""
        figure = plan_text.plot(self.ranking, self.source.name)
        if path is not None:
            figure.savefig(checked_path("path", path))
        return figure

    def facts(self) -> dict[str, Any]:
        """The result as JSON values: seconds, and bytes on a device."""
        ranking, again = self.ranking, self.verified
        return {
            "model": self.source.name,
            "target": ranking.target.name,
            "workload": {name: value for name, value in vars(ranking.workload).items() if value is not None},
            "slo": vars(ranking.slo),
            "speculation": self.drafts
            and {
                "method": str(self.drafts.speculation),
                "acceptance": self.drafts.acceptance,
            },
            "meets_slo": self.meets_slo,
            "best": ranking.best.facts(),
            "frontier": [option.facts() for option in ranking.frontier],
            "options": [option.facts() for option in ranking.options],
            "verified": [check.facts() for check in self.checks],
            "best_verified": again and again.best.facts(),
        }

    def parts(self, top: int = 8) -> Sequence[Part]:
        """top: rows of the table of plans."""
        ranking, again = self.ranking, self.verified
        parts: list[Part] = [escape(plan_text.title(ranking, self.source.name) + plan_text.drafted(self.drafts))]
        parts += [plan_text.ranked(ranking, top), plan_text.frontier(ranking.frontier)]
        parts += [*plan_text.best_lines(ranking, self.drafts), plan_text.NOTE]
        parts += [plan_text.compared(self.checks)] if self.checks else []
        parts += map(escape, plan_text.remarks(self.checks))
        parts += ["With the compiler's times:", *plan_text.best_lines(again)] if again is not None else []
        return parts

    def __repr__(self) -> str:
        best = self.best
        return f"PlanResult({self.source.name} on {self.target}: {best.deployed.parallel}, batch {best.batch})"


def _name(option: Option, key: ProgramKey) -> str:
    return f"{option.deployed.parallel}, batch {option.batch}: {key}"
