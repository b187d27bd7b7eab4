"""The command line: `inferlib generate`, `chat`, `embed`, `serve`, `bench`, `compile`, `info`, `convert`, `quantize`,
`key-bases`, `layer-preferences`, `export`, `eval`, `distill`, `finetune`, `plan`, `place`, `targets`, `tune`, `doctor`.

The commands import JAX and the library when they run, so that `--help` answers at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from inferlib.cli.bench import bench
from inferlib.cli.calibrate_cache import calibrate_cache
from inferlib.cli.chat import chat
from inferlib.cli.compile import compile
from inferlib.cli.convert import convert
from inferlib.cli.distill import distill
from inferlib.cli.doctor import doctor
from inferlib.cli.embed import embed
from inferlib.cli.eval import evaluate
from inferlib.cli.export import export
from inferlib.cli.finetune import finetune
from inferlib.cli.generate import generate
from inferlib.cli.info import info
from inferlib.cli.key_bases import key_bases
from inferlib.cli.layer_preferences import layer_preferences
from inferlib.cli.place import place
from inferlib.cli.plan import plan
from inferlib.cli.quantize import quantize
from inferlib.cli.serve import serve
from inferlib.cli.targets import targets
from inferlib.cli.tune import tune


class Commands(TyperGroup):
    """The commands of `inferlib`."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command, and show where an EOFError comes from.

        Typer takes it for a closed terminal and prints "Aborted." alone. `chat` handles a closed terminal itself, so
        any other end of file is a fault.
        """
        try:
            return super().invoke(ctx)
        except EOFError as error:
            raise RuntimeError("something ended before all of it was read") from error


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        from inferlib import __version__

        typer.echo(f"inferlib {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Generate text with large language models, in JAX."""


app.command()(generate)
app.command()(chat)
app.command()(embed)
app.command()(serve)
app.command()(bench)
app.command()(info)
app.command()(convert)
app.command()(quantize)
app.command()(key_bases)
app.command()(calibrate_cache)
app.command()(layer_preferences)
app.command()(export)
app.command("eval")(evaluate)
app.command()(distill)
app.command()(finetune)
app.command()(plan)
app.command()(place)
app.command()(targets)
app.command()(compile)
app.command()(tune)
app.command()(doctor)
