"""The command line: `inferlib generate`, `compile`, `info`, `convert`, `plan`, `place`, `targets`, `tune`.

The commands import JAX and the library when they run, so that `--help` answers at once.
"""

from __future__ import annotations

import typer

from inferlib.cli.compile import compile
from inferlib.cli.convert import convert
from inferlib.cli.generate import generate
from inferlib.cli.info import info
from inferlib.cli.place import place
from inferlib.cli.plan import plan
from inferlib.cli.targets import targets
from inferlib.cli.tune import tune

app = typer.Typer(
    help="Generate text with large language models, in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(info)
app.command()(convert)
app.command()(plan)
app.command()(place)
app.command()(targets)
app.command()(compile)
app.command()(tune)
