"""`inferlib convert`: write a model with its weights laid out, for any mesh to load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal

from inferlib.cli.arguments import Quantization, Revision
from inferlib.cli.output import user_errors


def convert(
    model: Annotated[
        str,
        typer.Argument(help="Hugging Face directory, .gguf file, known name or name of the hub.", show_default=False),
    ],
    out: Annotated[Path, typer.Argument(help="Directory to write; must not exist.", show_default=False)],
    *,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    quantization: Quantization = None,
    revision: Revision = None,
    merge_adapter: Annotated[
        Path | None, typer.Option(help="Directory of a LoRA adapter, as PEFT writes it, to add to the weights.")
    ] = None,
    fuse_ffn: Annotated[
        Path | None,
        typer.Option(
            metavar="TEXT.JSONL",
            help="Compute feed-forwards that follow one another side by side, as one; the text (4,096 tokens of it) "
            "tells how far results are from the original's.",
        ),
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(help="Mesh to split the files for, such as tp=8; other meshes can load them too."),
    ] = None,
) -> None:
    """Write a model to a directory whose weights load without being laid out again, on any number of devices.

    Runs on the CPU, whatever devices there are.
    """
    import jax

    from inferlib.calibration.fuse import fuse_feed_forwards
    from inferlib.conversion import convert
    from inferlib.option_checks import ConfigurationError
    from inferlib.sharding.mesh import Parallelism
    from inferlib.texts import TextSample

    with user_errors():
        mesh = Parallelism.parse(parallel or "")
        jax.config.update("jax_platforms", "cpu")
        if fuse_ffn is not None:
            if parallel or merge_adapter:
                raise ConfigurationError("--fuse-ffn takes neither --parallel nor --merge-adapter: leave them out")
            stored: dict[str, Any] = dict(dtype=dtype, quantization=quantization, revision=revision)
            Console().print(fuse_feed_forwards(model, out, data=TextSample(fuse_ffn, tokens=4096), **stored))
            return
        if mesh.devices > 1:
            jax.config.update("jax_num_cpu_devices", mesh.devices)
        options: dict[str, Any] = dict(revision=revision, merge_adapter=merge_adapter)
        nbytes = convert(model, out, dtype=dtype, quantization=quantization, parallel=mesh, **options)
    formats = f"{dtype} and {quantization}" if quantization else dtype
    Console(stderr=True).print(f"{out}: {decimal(nbytes)} of {formats} weights", highlight=False, soft_wrap=True)
