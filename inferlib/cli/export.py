"""`inferlib export`: write a quantised model as files that other libraries load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal

from inferlib.cli.output import user_errors


def export(
    model: Annotated[
        str, typer.Argument(help="Directory that quantize, or convert --quantization, wrote.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="Directory to write; must not exist.", show_default=False)],
) -> None:
    """Write a quantised model as compressed-tensors files, which transformers and vLLM load.

    Runs on the CPU, whatever devices there are.
    """
    import jax

    from inferlib.exporting import export

    with user_errors():
        jax.config.update("jax_platforms", "cpu")
        nbytes = export(model, out)
    Console(stderr=True).print(f"{out}: {decimal(nbytes)} of weights", highlight=False, soft_wrap=True)
