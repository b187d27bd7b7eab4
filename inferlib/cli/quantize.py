"""`inferlib quantize`: write a model in fewer bits, calibrated on a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from inferlib.cli.arguments import Json, Revision, TextArguments, grouped
from inferlib.cli.output import check_output_file, json_line, user_errors, write

if TYPE_CHECKING:
    from inferlib.texts import TextSample


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    panel: ClassVar = "Report"

    test_data: Annotated[
        Path | None,
        typer.Option(
            help="JSONL file of other text. As many tokens of it tell how far the result is from the model: "
            "perplexity and KL divergence, as inferlib eval --against."
        ),
    ] = None
    plot: Annotated[Path | None, typer.Option(help="Write errors by layer as a picture (.png, .svg, .pdf).")] = None
    json: Json = False

    def sample(self, text: TextArguments) -> TextSample | None:
        """The test text, cut as the text to calibrate on."""
        from inferlib.texts import TextSample

        return None if self.test_data is None else TextSample(self.test_data, text.tokens, text.window)


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
            help="nearest, clip, gptq, awq, smoothquant, hadamard, hadamard:merged, spinquant, spinquant:100 (steps), "
            "spinquant:merged, lowrank:16 or lowrank:16:mlp; several with + between, such as awq+gptq."
        ),
    ] = "awq+gptq",
    scheme: Annotated[
        str, typer.Option(help="Format of the matrices, as --quantization of other commands has it.")
    ] = "int4",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16, of other weights.")] = "bfloat16",
    revision: Revision = None,
    report: ReportArguments,
) -> None:
    """Quantise a model by what its matrices multiply on a text, and write it to a directory that other commands load.

    Layer by layer; an interrupted run goes on if it is started again. Prints the error of each matrix.
    """
    from inferlib.calibration.calibrate import calibrate
    from inferlib.evaluation.evaluate import evaluate
    from inferlib.texts import TextSample

    check_output_file("--plot", report.plot)
    with user_errors():
        texts, test_data = TextSample(text.data, text.tokens, text.window), report.sample(text)
        original = None if test_data is None else _checked(test_data, model, revision)
        result = calibrate(model, out, data=texts, method=method, scheme=scheme, dtype=dtype, revision=revision)
        if report.plot is not None:
            result.plot().savefig(report.plot)
        evaluation = None if test_data is None else evaluate(out, test_data, against=original)
    if report.json:
        facts = {"calibration": result.to_json(), "evaluation": evaluation and evaluation.to_json()}
        write(json_line(facts).decode())
    else:
        write(result.text(terminal=False))
        if evaluation is not None:
            write(evaluation.text())


def _checked(test_data: TextSample, model: str, revision: str | None) -> Path:
    """The path of the model. Raises ConfigurationError for a test text that is too short, before long work."""
    from inferlib.model_files import ModelFiles

    files = ModelFiles.open(model, revision)
    if files.tokenizer is not None:
        test_data.windows(files.tokenizer, files.config.context)
    return files.path
