"""`inferlib quantize`: write a model in fewer bits, calibrated on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inferlib.cli.arguments import Revision, TextArguments, grouped
from inferlib.cli.output import user_errors, write


@grouped
def quantize(
    model: Annotated[
        str,
        typer.Argument(help="Hugging Face directory, .gguf file, known name or name of the hub.", show_default=False),
    ],
    out: Annotated[Path, typer.Argument(help="Directory to write; must not exist.", show_default=False)],
    *,
    text: TextArguments,
    method: Annotated[
        str,
        typer.Option(
            help="nearest, clip, gptq, awq, smoothquant, hadamard, hadamard:merged or lowrank:16; several with + "
            "between, such as awq+gptq."
        ),
    ] = "awq+gptq",
    scheme: Annotated[str, typer.Option(help="Format of the matrices, as --quantization of other commands.")] = "int4",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16, of other weights.")] = "bfloat16",
    revision: Revision = None,
) -> None:
    """Quantise a model by what its matrices multiply on a text, and write it to a directory that other commands load.

    Layer by layer; an interrupted run goes on if it is started again. Prints the error of each matrix.
    """
    from inferlib.calibration.calibrate import calibrate
    from inferlib.texts import TextSample

    with user_errors():
        texts = TextSample(text.data, text.tokens, text.window)
        report = calibrate(model, out, data=texts, method=method, scheme=scheme, dtype=dtype, revision=revision)
    write(report.text(terminal=False))
