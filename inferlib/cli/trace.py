"""How requests are served, as a table; and `inferlib plan --trace`, which simulates it."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from inferlib.progress import CountProgress, on_terminal

if TYPE_CHECKING:
    from inferlib.planning.planner import Ranking
    from inferlib.planning.trace import Offer

_KINDS = {"prefill": "prompts alone", "both": "prompts and rows", "decode": "rows alone"}


@dataclass(frozen=True, kw_only=True)
class TraceArguments:
    panel: ClassVar = "Trace: serve given requests by the engine, with the model's times in place of a device"

    trace: Annotated[
        Path | None,
        typer.Option(
            help='JSON lines of requests: {"input_len": 100, "output_len": 50, "arrival": 0.5}, or with '
            '"prompt_token_ids" and "max_tokens". They replace --input-len and --output-len.'
        ),
    ] = None
    rate: Annotated[
        float | None, typer.Option(help="Requests a second, with exponential times between them, in place of arrivals.")
    ] = None
    parallel: Annotated[str | None, typer.Option(help="The mesh, such as tp=8; by default the best plan's.")] = None
    max_batch: Annotated[int | None, typer.Option(min=1, help="Rows decoded together; by default the best plan's.")] = (
        None
    )
    itl: Annotated[
        float | None,
        typer.Option(help="Longest time between tokens that the engine aims at, in seconds; it bounds prefills."),
    ] = None
    prefill_buckets: Annotated[
        str | None, typer.Option(help="Prompt tokens of a step, ascending; by default the engine's.")
    ] = None
    batch_buckets: Annotated[
        str | None, typer.Option(help="Rows decoded together, ascending; by default the engine's.")
    ] = None

    second_slice: Annotated[
        bool,
        typer.Option(
            "--second-slice",
            help="Compare two such slices that serve requests alike with one that prefills and one that decodes.",
        ),
    ] = False

    def check(self, **others: Any) -> None:
        """Raise ValueError for options that need --trace, for others that do nothing with it, and for wrong values."""
        if self.trace is not None and (name := next((name for name, value in others.items() if value), None)):
            raise ValueError(f"--{name} is about the ranking: leave it out, or --trace")
        options = {name: value for name, value in vars(self).items() if name != "trace" and value not in (None, False)}
        if self.trace is None and options:
            raise ValueError(f"--{next(iter(options)).replace('_', '-')} is about --trace: give a file of requests")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ValueError(f"--rate is a number of requests a second above 0, got {self.rate}")

    def offers(self) -> list[Offer]:
        """The requests. Raises ValueError."""
        from inferlib.planning.trace import at_rate, read_trace

        assert self.trace is not None
        offers = read_trace(self.trace)
        return offers if self.rate is None else at_rate(offers, self.rate)


def simulated(ranking: Ranking, offers: list[Offer], arguments: TraceArguments) -> dict[str, Any]:
    """How the requests would be served by the best plan, or by what the arguments say, as JSON values. Raises
    ValueError."""
    from inferlib.planning.apart import SPLITS, simulate_splits
    from inferlib.planning.simulator import choose, simulate

    sizes = dict(prefill=_sizes(arguments.prefill_buckets), batch=_sizes(arguments.batch_buckets))
    chosen, config = choose(ranking, offers, arguments.parallel, arguments.max_batch, **sizes)
    config = replace(config, itl=arguments.itl)
    splits = []
    if arguments.second_slice:
        with CountProgress("simulating", len(SPLITS), show=on_terminal()) as bar:
            splits = simulate_splits(chosen, config, offers, lambda split: bar.advance(1))
    with CountProgress("simulating", len(offers), show=on_terminal() and len(offers) > 4096) as bar:
        done = 0

        def advanced(finished: int) -> None:
            nonlocal done
            bar.advance(finished - done)
            done = finished

        facts = simulate(chosen, config, offers, advanced).facts()
    plan: dict[str, Any] = {"parallel": str(chosen.parallel), "weights": chosen.weights, "max_batch": config.max_batch}
    if splits:
        plan["two_slices"] = {split.name: split.facts() for split in splits}
    limits = [(facts[name].get("mean", 0.0), getattr(ranking.slo, name)) for name in ("ttft", "itl")]
    meets = all(limit is None or mean <= limit for mean, limit in limits)
    return plan | {"max_len": config.max_len, "meets_slo": meets} | facts


def rendered(facts: Mapping[str, Any]) -> str:
    title = "{model} on {target}, {parallel}, {weights} weights, up to {max_batch} rows of {max_len} tokens"
    title = title.format(**facts) + ("" if facts["meets_slo"] else "\nThe mean misses the SLO")
    text, terminal = io.StringIO(), sys.stdout.isatty()
    console = Console(file=text, force_terminal=terminal, width=None if terminal else 120)
    console.print(service_table(title, {"estimate": facts} | facts.get("two_slices", {})), highlight=False)
    return text.getvalue()


def service_table(title: str, columns: Mapping[str, Mapping[str, Any]]) -> Table:
    """`Service.facts` and `StepTotals.facts` by the name of what served the requests; some may be missing."""
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    rows = [_cells(facts) for facts in columns.values()]
    for name in dict.fromkeys(name for cells in rows for name in cells):
        table.add_row(name, *(cells.get(name, "") for cells in rows))
    return table


def _cells(facts: Mapping[str, Any]) -> dict[str, str]:
    cells = {
        "requests": f"{facts['requests']:,}",
        "tokens of prompts, generated": f"{facts['input_tokens']:,}, {facts['output_tokens']:,}",
        "seconds": f"{facts['seconds']:.2f}",
        "generated tokens/s": f"{facts['output_tokens_per_second']:,.0f}",
    }
    for name, title in (("ttft", "TTFT"), ("itl", "ITL")):
        if values := facts.get(name):
            cells[f"{title}, mean / p50 / p90 / p99, ms"] = " / ".join(f"{1e3 * x:,.1f}" for x in values.values())
    if "step_seconds" in facts:
        busy = sum(facts["step_seconds"].values())
        cells["padding of prompts"] = f"{facts['padding']:.0%}"
        cells["rows that generate, of the program's"] = f"{facts['rows']:.0f} of {facts['program_rows']:.0f}"
        for kind, title in _KINDS.items():
            if kind in facts["step_seconds"]:
                seconds, count = facts["step_seconds"][kind], facts["dispatches"][kind]
                cells[f"time in steps of {title}"] = f"{seconds / busy:.0%}, {count:,} dispatches"
    if facts.get("handed_tokens"):
        cells["tokens of prompts handed over"] = f"{facts['handed_tokens']:,}"
    if "step_seconds" in facts:
        if facts.get("cached_tokens"):
            cells["tokens of prompts in the cache"] = f"{facts['cached_tokens']:,}"
        if facts["preemptions"]:
            cells["preempted"] = f"{facts['preemptions']:,}"
    if "thread_seconds" in facts:
        cells["CPU time of the engine's thread"] = f"{facts['thread_seconds']:.2f} s"
    if "warmup_seconds" in facts:
        programs = f", {facts['programs']} programs" if "programs" in facts else ""
        cells["warm-up"] = f"{facts['warmup_seconds']:.1f} s{programs}"
    return cells


def _sizes(text: str | None) -> tuple[int, ...] | None:
    """Raises ValueError."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"buckets are whole numbers with commas between them, got {text!r}") from None
