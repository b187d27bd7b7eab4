"""Results that are printed as text and shown as HTML: rich tables, with lines of text between them."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.markup import render
from rich.table import Table
from rich.text import Text

Part = Table | str

_WIDTH = 160  # characters of a line where there is no terminal


class Tables:
    """A result as tables and lines: `str` and `print` give text, a notebook shows HTML tables."""

    def parts(self) -> Sequence[Part]:
        """Tables, and lines in rich's markup."""
        raise NotImplementedError

    def text(self, *, terminal: bool = False, **options: Any) -> str:
        """The result as text; for a terminal in its width and with colours. options: of `parts`."""
        out = io.StringIO()
        width = None if terminal else _WIDTH
        console = Console(file=out, width=width, force_terminal=terminal, force_jupyter=False)
        for part in self.parts(**options):
            console.print(part, highlight=False, soft_wrap=isinstance(part, str))
        return out.getvalue()

    def __str__(self) -> str:
        return self.text()

    def __rich__(self) -> Group:
        return Group(*self.parts())

    def _repr_html_(self) -> str:
        return "\n".join(_table(part) if isinstance(part, Table) else f"<p>{_html(part)}</p>" for part in self.parts())


def _table(table: Table) -> str:
    rows = list(zip(*(list(column.cells) for column in table.columns), strict=True))
    sides = [column.justify if column.justify in ("left", "right", "center") else "left" for column in table.columns]
    head = _row([column.header for column in table.columns], sides, "th") if table.show_header else ""
    caption = f"<caption style='text-align: left'>{_html(table.title)}</caption>" if table.title else ""
    foot = ""
    if table.show_footer:
        foot = f"<tfoot>{_row([column.footer for column in table.columns], sides, 'th')}</tfoot>"
    body = "".join(_row(row, sides, "td") for row in rows)
    return f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody>{foot}</table>"


def _row(cells: Iterable, sides: Sequence[str], tag: str) -> str:
    pairs = zip(cells, sides, strict=True)
    return (
        "<tr>" + "".join(f"<{tag} style='text-align: {side}'>{_html(cell)}</{tag}>" for cell, side in pairs) + "</tr>"
    )


def _html(cell) -> str:
    """A cell or a line as HTML, without its markup."""
    if isinstance(cell, str):
        cell = render(cell)
    return html.escape(cell.plain if isinstance(cell, Text) else str(cell))
