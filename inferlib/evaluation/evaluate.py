"""`evaluate`: perplexity of a model on a text, and how far it is from another model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.filesize import decimal
from rich.table import Table

from inferlib.buckets import Buckets
from inferlib.checkpoint.source import CheckpointError
from inferlib.evaluation.statistics import Mean, Scores
from inferlib.llm import LLM
from inferlib.model_files import ModelFiles
from inferlib.option_checks import ConfigurationError, check_dtype, check_flag, check_kv_cache_dtype
from inferlib.progress import CountProgress, on_terminal
from inferlib.tables import Part, Tables
from inferlib.texts import TextSample


@dataclass(frozen=True)
class Evaluation(Tables):
    """The result of `evaluate`: `print` shows a table.

    perplexity: its margin is of the logarithm. divergence: mean KL divergence of the next token's distribution from
    that of `against`, in nats; agreement: share of tokens whose most likely successor is the same. Both are None
    without `against`. bits: of an element of the matrices, scales included; nbytes: of all weights; token_bytes: of the
    cache of a token.
    """

    model: str
    against: str | None
    tokens: int
    surprisal: Mean
    divergence: Mean | None
    agreement: Mean | None
    bits: float
    nbytes: int
    token_bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprisal.value)

    def parts(self) -> Sequence[Part]:
        title = f"{self.model} on {self.tokens} tokens, with 95 % confidence intervals"
        table = Table(title=title, title_justify="left", show_header=False)
        for column in ("", "value"):
            table.add_column(column, justify="right" if column else "left")
        low, high = (math.exp(self.surprisal.value + sign * (self.surprisal.margin or 0)) for sign in (-1, 1))
        interval = "" if self.surprisal.margin is None else f" ({low:.2f} to {high:.2f})"
        table.add_row("perplexity", f"{self.perplexity:.2f}{interval}")
        if self.divergence is not None and self.agreement is not None:
            table.add_row(f"KL divergence from {self.against}, nats", self.divergence.text(4))
            table.add_row("same most likely token", self.agreement.text(4))
        table.add_row("bits of a matrix's element", f"{self.bits:.2f}")
        table.add_row("bytes of weights", decimal(self.nbytes))
        table.add_row("bytes of the cache of a token", decimal(self.token_bytes))
        return [table]

    def to_json(self) -> dict[str, Any]:
        """The evaluation as JSON values."""
        return asdict(self) | {"perplexity": self.perplexity}


def evaluate(
    model: str | Path,
    data: str | Path | Sequence[str] | TextSample,
    *,
    against: str | Path | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    progress: bool | None = None,
) -> Evaluation:
    """Measure a model on a text: its perplexity, and how far its distributions are from another model's.

    model, quantization, kv_cache_dtype, dtype, revision: as for `LLM`; dtype is of both models. data: see `TextSample`;
    each window is a prompt of its own. against: the other model, which is loaded beside it, as it is stored.

    Raises CheckpointError, ConfigError or ConfigurationError for wrong input, among it models that have different
    tokens.
    """
    if dtype is not None:
        check_dtype(dtype)
    check_kv_cache_dtype(kv_cache_dtype)
    check_flag("progress", progress, optional=True)
    sample = data if isinstance(data, TextSample) else TextSample(data)
    show = on_terminal() if progress is None else progress
    files = ModelFiles.open(model, revision, progress=show)
    files.quantization(quantization)
    if files.tokenizer is None:
        raise CheckpointError(
            f"{files.path} has no tokenizer, which cuts the text into tokens: put tokenizer.json there"
        )
    context = files.config.context
    if against is not None:
        other = ModelFiles.open(against)
        context = min(context, other.config.context)
        if other.config.vocab != files.config.vocab:
            raise ConfigurationError(
                f"{files.path} has {files.config.vocab} tokens and {other.path} {other.config.vocab}: their "
                "distributions cannot be compared"
            )
    windows = sample.windows(files.tokenizer, context)
    load = partial(_load, width=windows.shape[1], dtype=dtype)
    llm = load(model, quantization=quantization, kv_cache_dtype=kv_cache_dtype, revision=revision)
    base = None if against is None else load(against)
    scores = []
    with CountProgress("evaluating windows", len(windows), show=show) as bar:
        for tokens in windows:
            logits = [one.logits(tokens.tolist()) for one in (llm, base) if one is not None]
            scores.append(Scores.of(tokens, *logits))
            bar.advance(1)
    return _result(llm, None if against is None else str(against), str(model), windows, scores)


def _load(model: str | Path, *, width: int, **options: Any) -> LLM:
    buckets = Buckets(prefill=(width,), batch=(1,), cache=(width,))
    return LLM(model, max_batch=1, max_len=width, buckets=buckets, progress=False, **options)


def _result(llm: LLM, against: str | None, model: str, windows: np.ndarray, scores: list[Scores]) -> Evaluation:
    weights = llm.engine.model
    matrices = [weight for weight in weights.weights if weight.contracting]
    elements = sum(math.prod(weight.shape) for weight in matrices)
    compared = {}
    for name in ("divergence", "agreement"):
        values = [value for score in scores if (value := getattr(score, name)) is not None]
        compared[name] = Mean.of(values) if values else None
    return Evaluation(
        model,
        against,
        tokens=windows.size,
        surprisal=Mean.of([score.surprisal for score in scores]),
        bits=8 * sum(array.nbytes for weight in matrices for array in weight.arrays) / elements,
        nbytes=weights.nbytes,
        token_bytes=llm.engine.plan.nbytes // windows.shape[1],
        **compared,
    )
