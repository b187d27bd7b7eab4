"""Batch jobs on Ray Data: a file or a folder of prompts goes through replicas of a model.

from inferlib.cluster.batch import BatchJob

BatchJob("Qwen/Qwen3-0.6B", SamplingParams(max_tokens=256), replicas=4).run("prompts/*.parquet", "answers/")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray.data

from inferlib.engine.request import Request
from inferlib.llm import LLM
from inferlib.outputs import RequestOutput
from inferlib.sampling.params import SamplingParams

_PROMPTS = ("prompt", "prompt_token_ids", "messages")


class Generator:
    """A replica for `Dataset.map_batches`: adds an answer to each row of a batch.

    A row has one of `prompt` (a text), `prompt_token_ids` and `messages` (a conversation), perhaps `sampling_params`, a
    mapping that overrides those of the job, and any other columns, which stay. Added are `text`, `token_ids`,
    `finish_reason`, and `error`: why a row has no answer, and None for all others.
    """

    def __init__(self, model: str, params: SamplingParams, options: Mapping[str, Any]):
        all_options: dict[str, Any] = {"progress": False, **options}
        self._llm, self._params = LLM(model, **all_options), params

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        count = len(next(iter(batch.values())))
        rows = [{name: column[i] for name, column in batch.items()} for i in range(count)]
        requests = [self._request(row) for row in rows]
        made: dict[Any, dict[str, Any]] = {}
        prepared = [request for request in requests if isinstance(request, Request)]
        for output in self._llm.run(prepared, failed=lambda r, error: made.update({r.id: _failed(error)})):
            made[output.request_id] = _answer(output)
        answers = [made[r.id] if isinstance(r, Request) else _failed(r) for r in requests]
        # Lists of lengths that differ: an object each, so that numpy makes no matrix of them.
        added = {name: _objects([answer[name] for answer in answers]) for name in answers[0]}
        return {**batch, **added}

    def _request(self, row: Mapping[str, Any]) -> Request | Exception:
        """A request of the `LLM`, or the error that says why there is none."""
        try:
            names = [name for name in _PROMPTS if row.get(name) is not None]
            if len(names) != 1:
                raise ValueError(f"a row has one of {', '.join(_PROMPTS)}; this one has {', '.join(names) or 'none'}")
            value = row[names[0]]
            params = self._params
            if (overrides := row.get("sampling_params")) is not None:
                fields = {name: item for name, item in dict(overrides).items() if item is not None}
                params = dataclasses.replace(params, **fields)
            prompt: Any = value
            if names[0] == "messages":
                prompt = self._llm.chat_prompt([dict(message) for message in value])
            elif names[0] == "prompt_token_ids":
                prompt = [int(token) for token in value]
            return self._llm.prepare(prompt, params)
        except (ValueError, TypeError) as error:
            return error


def _objects(values: list[Any]) -> np.ndarray:
    made = np.empty(len(values), object)
    made[:] = values
    return made


def _answer(output: RequestOutput) -> dict[str, Any]:
    first = output.outputs[0]
    return {
        "text": first.text,
        "token_ids": np.asarray(first.token_ids, np.int64),
        "finish_reason": first.finish_reason,
        "error": None,
    }


def _failed(error: Exception) -> dict[str, Any]:
    return {"text": None, "token_ids": np.zeros(0, np.int64), "finish_reason": None, "error": str(error)}


@dataclass(frozen=True)
class BatchJob:
    """A model, and replicas of it that generate for prompts.

    params: for all rows that do not override them. replicas: how many `LLM`s there are. rows: prompts that go to a
    replica at a time; many more than it decodes at once keep it busy. cpus, gpus, resources: what a replica takes of a
    node. options: those of `LLM`.
    """

    model: str
    params: SamplingParams = field(default_factory=SamplingParams)
    replicas: int = 1
    rows: int = 1024
    cpus: float = 1
    gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for name in ("replicas", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give at least 1")
        if self.params.n != 1:
            raise ValueError(f"n={self.params.n}: a row has one answer; write a prompt into several rows")

    def map(self, prompts: ray.data.Dataset) -> ray.data.Dataset:
        """The rows of the dataset with their answers, which are made when they are read (see `Generator`)."""
        return prompts.map_batches(
            Generator,
            fn_constructor_args=(self.model, self.params, dict(self.options)),
            batch_size=self.rows,
            compute=ray.data.ActorPoolStrategy(size=self.replicas),
            num_cpus=self.cpus,
            num_gpus=self.gpus,
            resources=dict(self.resources),
        )

    def run(self, source: str, target: str) -> None:
        """Read JSON lines (`.jsonl`, `.json`) or Parquet, and write the same kind into the folder `target`. Raises
        ValueError for another kind."""
        kind = source.rsplit(".", 1)[-1]
        if kind == "parquet":
            self.map(ray.data.read_parquet(source)).write_parquet(target)
        elif kind in ("jsonl", "json"):
            self.map(ray.data.read_json(source, lines=True)).write_json(target)
        else:
            raise ValueError(f"{source}: give .jsonl, .json or .parquet, which says how prompts are read")
