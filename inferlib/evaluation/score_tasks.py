"""`evaluate_tasks`: how many questions of small tasks a model answers, alone and beside another one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from inferlib.buckets import Buckets
from inferlib.checkpoint.source import CheckpointError
from inferlib.evaluation.statistics import Mean
from inferlib.evaluation.tasks import TASKS, Question, questions
from inferlib.llm import LLM
from inferlib.model_files import ModelFiles
from inferlib.option_checks import ConfigurationError
from inferlib.progress import CountProgress, on_terminal
from inferlib.sampling.params import SamplingParams
from inferlib.tables import Part, Tables

_ROWS = 4
_ANSWER = 16  # most tokens of an answer
_CHUNK = 512  # prompt tokens of a step

Asked = dict[str, list[Question]]
Right = dict[str, np.ndarray]


@dataclass(frozen=True)
class TaskScore:
    """How a model did in a task. right: the share of questions; against: of the other model, or None."""

    task: str
    questions: int
    right: Mean
    against: Mean | None = None


@dataclass(frozen=True)
class TaskScores(Tables):
    """The result of `evaluate_tasks`: `print` shows a table."""

    model: str
    against: str | None
    context: int
    scores: tuple[TaskScore, ...]

    def parts(self) -> Sequence[Part]:
        title = (
            f"{self.model}, contexts of {self.context} tokens: share of right answers, with 95 % confidence intervals"
        )
        table = Table(title=title, title_justify="left")
        for column in ("task", "questions", "right", *([] if self.against is None else [f"{self.against}"])):
            table.add_column(column, justify="left" if column == "task" else "right")
        for score in self.scores:
            means = [mean.text(2) for mean in (score.right, score.against) if mean is not None]
            table.add_row(score.task, str(score.questions), *means)
        return [table]

    def to_json(self) -> dict[str, Any]:
        """The scores as JSON values."""
        return asdict(self)


def evaluate_tasks(
    model: str | Path,
    tasks: Sequence[str] = tuple(TASKS),
    *,
    against: str | Path | None = None,
    count: int = 24,
    context: int = 512,
    progress: bool | None = None,
    **options: Any,
) -> TaskScores:
    """Ask a model questions that it is simple to check (see `inferlib.evaluation.tasks`), always the same ones.

    tasks: names of `TASKS`. against: another model, such as the original, which answers the same questions as it is
    stored. count: questions of a task. context: tokens of the long prompts. options: of `LLM`, such as quantization,
    kv_cache_dtype, attention_pages and cache_policy; dtype is of both models.

    Raises CheckpointError, ConfigError or ConfigurationError for wrong input, among it a context beyond a model's.
    """
    if unknown := [name for name in tasks if name not in TASKS]:
        raise ConfigurationError(f"no task {unknown[0]!r:.100}; there are {', '.join(TASKS)}")
    for name, number, least in (("count", count, 2), ("context", context, 128)):
        if type(number) is not int or number < least:
            raise ConfigurationError(f"{name} must be a whole number of at least {least}, got {number!r:.100}")
    show = on_terminal() if progress is None else progress
    files, other = _opened(model, options.get("revision")), None if against is None else _opened(against)
    asked = _asked(files, other, tasks, count, context)
    right = _answered(files, model, asked, show, options)
    base = None
    if other is not None and against is not None:
        base = _answered(other, against, asked, show, {"dtype": options.get("dtype")})
    scores = [TaskScore(name, count, _mean(right[name]), None if base is None else _mean(base[name])) for name in tasks]
    return TaskScores(str(model), None if against is None else str(against), context, tuple(scores))


def _opened(model: str | Path, revision: str | None = None) -> ModelFiles:
    """Raises CheckpointError for a model without a tokenizer."""
    files = ModelFiles.open(model, revision)
    if files.tokenizer is None:
        raise CheckpointError(
            f"{files.path} has no tokenizer, which makes tokens of questions: put tokenizer.json there"
        )
    return files


def _asked(files: ModelFiles, other: ModelFiles | None, tasks: Sequence[str], count: int, context: int) -> Asked:
    """The questions, made with the model's own tokenizer. Raises ConfigurationError where one is too long."""
    assert files.tokenizer is not None
    asked = {name: questions(name, files.tokenizer, count=count, context=context) for name in tasks}
    for one in (files, *([] if other is None else [other])):
        if (longest := _longest(one, asked)) > one.config.context:
            raise ConfigurationError(
                f"the longest question and its answer take {longest} tokens, beyond the {one.config.context} of "
                f"{one.path}: take a context below {context}"
            )
    return asked


def _longest(files: ModelFiles, asked: Asked) -> int:
    """Tokens of the longest question and its answer."""
    assert files.tokenizer is not None
    texts = (q.prompt + text for each in asked.values() for q in each for text in ("", *q.choices))
    return max(len(files.tokenizer.encode(text)) for text in texts) + _ANSWER


def _answered(files: ModelFiles, model: str | Path, asked: Asked, show: bool, options: dict[str, Any]) -> Right:
    """Whether each question of each task was answered."""
    length = min(-(-_longest(files, asked) // 128) * 128, files.config.context)
    sizes: dict[str, Any] = dict(buckets=Buckets((min(_CHUNK, length),), (_ROWS,), (length,)))
    llm = LLM(model, max_batch=_ROWS, max_len=length, progress=False, **sizes, **options)
    right = {}
    with CountProgress("asking questions", sum(map(len, asked.values())), show=show) as bar:
        for name, each in asked.items():
            right[name] = np.array(_chosen(llm, each) if each[0].choices else _generated(llm, each), np.float64)
            bar.advance(len(each))
    return right


def _generated(llm: LLM, asked: Sequence[Question]) -> list[bool]:
    """Whether the model goes on with each answer, greedily."""
    params = SamplingParams(temperature=0, max_tokens=_ANSWER)
    outputs = llm.generate([q.prompt for q in asked], params, progress=False)
    texts = [output.outputs[0].text.strip() for output in outputs]
    return [re.match(rf"{re.escape(q.answer)}(?!\w)", text) is not None for text, q in zip(texts, asked, strict=True)]


def _chosen(llm: LLM, asked: Sequence[Question]) -> list[bool]:
    """Whether the answer is the likeliest of each question's choices."""
    assert llm.tokenizer is not None
    prompts = [llm.tokenizer.encode(q.prompt + choice) for q in asked for choice in q.choices]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = iter(llm.generate(prompts, params, progress=False))
    right = []
    for q in asked:
        behind, likelihoods = len(llm.tokenizer.encode(q.prompt)), []
        for _ in q.choices:
            output = next(outputs)
            assert output.prompt_logprobs is not None
            pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[behind:]
            likelihoods.append(sum(entry[token].logprob for token, entry in pairs if entry is not None))
        right.append(q.choices[int(np.argmax(likelihoods))] == q.answer)
    return right


def _mean(right: np.ndarray) -> Mean:
    return Mean.of([right[i : i + 1] for i in range(len(right))])
