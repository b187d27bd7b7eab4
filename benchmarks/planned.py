"""What the planner says, beside what was measured on a GPU and what the TPU compiler says: two tables in Markdown.

    python benchmarks/planned.py            # prints them
    python benchmarks/planned.py --write    # and puts them in docs/benchmarks.md

Needs no device. The other figures are data in configs/measurements/. tests/planning/test_costs.py holds the planner to
them: within 10 % of measured steps, within 15 % of compiled ones.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from inferlib.checkpoint.load import described_quantization
from inferlib.configs import load, measurements
from inferlib.models.families import config_from_hf
from inferlib.planning.costs import Deployed, Work, step_time
from inferlib.planning.planner import formats
from inferlib.planning.plans import load_plan
from inferlib.sharding.mesh import Parallelism
from inferlib.targets import parse_target

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def measured() -> Iterator[str]:
    """Milliseconds of a decode step on one H200, planned / measured, by rows."""
    data = measurements("h200-decode")
    target, cache = parse_target(data["target"]), data["cache"]
    columns = sorted({rows for of in data["steps"] for rows in of["ms"]})
    yield f"| rows | {' | '.join(map(str, columns))} |"
    yield "|---" * (len(columns) + 1) + "|"
    for of in data["steps"]:
        hf = load(of["model"])
        config = config_from_hf(hf)
        (quantization,) = formats(described_quantization(hf, config), of["weights"])
        deployed = Deployed(config, target, Parallelism(), quantization)
        cells = [_pair(deployed, deployed.decode(n, cache), of["ms"][n]) if n in of["ms"] else "" for n in columns]
        yield f"| {of['model']}, {deployed.weights} | {' | '.join(cells)} |"


def compiled() -> Iterator[str]:
    """Milliseconds of a step of the plans in configs/plans, planned / compiled, both with scanned layers."""
    yield "| plan | decode, rows of a replica | decode of one row | prefill of 512 tokens |"
    yield "|---|---|---|---|"
    for name, of in measurements("tpu-compiled")["plans"].items():
        plan = load_plan(name)
        deployed, limit = plan.deployed, plan.cache[-1]
        cells = [
            f"{rows}: {_pair(deployed, replace(deployed.decode(rows, limit), fetches_ahead=False), ms, share=True)}"
            for rows, ms in sorted(of["decode"].items(), reverse=True)
        ]
        for chunk, ms in of["prefill"].items():
            cells.append(_pair(deployed, deployed.prefill(chunk, limit - chunk), ms, share=True))
        cells += [""] * (3 - len(cells))
        yield f"| {name} | {' | '.join(cells)} |"


def _pair(deployed: Deployed, work: Work, ms: float, *, share: bool = False) -> str:
    planned = 1e3 * step_time(work, deployed.network).seconds
    if share:
        return f"{planned:.1f} / {ms:.1f} ({planned / ms - 1:+.0%})"
    return f"{planned:.2f} / {ms:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/benchmarks.md")
    write = parser.parse_args().write
    text = PAGE.read_text(encoding="utf-8")
    for table in (measured, compiled):
        lines = "\n".join(table())
        print(lines, end="\n\n")
        pattern = rf"(<!-- planned.py: {table.__name__} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda match, lines=lines: f"{match[1]}\n{lines}\n\n{match[2]}", text, flags=re.DOTALL)
    if write:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
