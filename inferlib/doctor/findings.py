"""What `inferlib doctor` finds out, as a table and as a report that can be sent."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from inferlib.tables import Part, Tables

Status = Literal["ok", "wrong", "note"]
_STYLES = {"ok": "green", "wrong": "bold red", "note": "yellow"}
_PATH = re.compile(r"(?:[A-Za-z]:)?(?:[/\\][\w.@+ -]+)+[/\\]([\w.@+-]+)")
_LONGEST = 300  # characters of an error


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. area: "installation", "device", "rate", "kernel" or "step". status "note": neither
    right nor wrong, such as a figure with nothing to compare it with. figures: numbers, in seconds and bytes."""

    area: str
    name: str
    status: Status
    detail: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class DoctorReport(Tables):
    """Everything that was looked at. It holds no paths, host names or user names."""

    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.status == "wrong")

    @property
    def ok(self) -> bool:
        return not self.wrong

    @property
    def verdict(self) -> str:
        if self.ok:
            return "Nothing is wrong."
        return f"{len(self.wrong)} of {len(self.findings)} are wrong."

    def facts(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}

    def parts(self) -> Sequence[Part]:
        table = Table(box=SIMPLE_HEAD)
        for title in ("", "", "", "result"):
            table.add_column(title, overflow="fold")
        area = ""
        for finding in self.findings:
            state = f"[{_STYLES[finding.status]}]{finding.status}[/]"
            table.add_row(
                "" if finding.area == area else finding.area, escape(finding.name), state, escape(finding.detail)
            )
            area = finding.area
        return [table, self.verdict]

    def write(self, path: Path) -> list[Path]:
        """Write PATH.json and PATH.txt; returns both."""
        files = [path.with_name(path.name + suffix) for suffix in (".json", ".txt")]
        files[0].write_text(json.dumps(self.facts(), indent=1), encoding="utf-8")
        files[1].write_text(self.text(), encoding="utf-8")
        return files


def public(text: str) -> str:
    """A message on one line and cut, with no folders in it."""
    line = " ".join(_PATH.sub(r"\1", text).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
