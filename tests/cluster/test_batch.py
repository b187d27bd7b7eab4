"""Batch jobs on Ray Data. About 20 s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import ray.data

from inferlib import LLM, Buckets, SamplingParams
from inferlib.cluster.batch import BatchJob, Generator
from tests.helpers.cli_model import make_model

# Few programs, which replicas load that come after the model of one process.
BUCKETS = Buckets(prefill=(32,), batch=(2,), cache=(96,))
OPTIONS = {"max_batch": 2, "max_len": 96, "buckets": BUCKETS, "decode_steps": 1, "dtype": "float32"}
PARAMS = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_model(tmp_path_factory.mktemp("batch"), layers=1))


@pytest.mark.slow
def test_rows_and_what_is_wrong_with_them(model):
    """One replica, without a cluster."""
    chat = [{"role": "user", "content": "hello"}]
    columns = {
        "prompt": ["abc", None, None, None, "abc", 7],
        "prompt_token_ids": [None, np.array([9, 8, 7]), None, None, np.array([1]), None],
        "messages": [None, None, np.array(chat, object), None, None, None],
        "sampling_params": [None, {"max_tokens": 3, "stop": None}, None, None, None, None],
        "id": list(range(6)),
    }
    batch = {}
    for name, values in columns.items():
        batch[name] = np.empty(6, object)
        batch[name][:] = values
    answers = Generator(model, PARAMS, OPTIONS)(batch)
    llm = LLM(model, progress=False, **OPTIONS)
    expected = llm.generate(["abc", [9, 8, 7], llm.chat_prompt(chat)], PARAMS)
    expected_ids = [list(output.outputs[0].token_ids) for output in expected]
    expected_ids[1] = expected_ids[1][:3]
    assert [ids.tolist() for ids in answers["token_ids"][:3]] == expected_ids
    assert answers["text"][0] == expected[0].outputs[0].text
    assert list(answers["error"][:3]) == [None] * 3
    assert "this one has none" in answers["error"][3]
    assert "this one has prompt, prompt_token_ids" in answers["error"][4]
    assert answers["error"][5]
    assert list(answers["id"]) == list(range(6))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "replicas"), [("jsonl", 2), pytest.param("parquet", 1, marks=pytest.mark.release)])
def test_files(cluster, model, tmp_path, kind, replicas):
    rows = [{"prompt": f"prompt {i}", "n": i} for i in range(6)]
    llm = LLM(model, progress=False, **OPTIONS)
    expected = [output.outputs[0].text for output in llm.generate([row["prompt"] for row in rows], PARAMS)]
    source = tmp_path / f"prompts.{kind}"
    if kind == "jsonl":
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        ray.data.from_items(rows).repartition(1).write_parquet(str(tmp_path / "made"))
        next((tmp_path / "made").glob("*.parquet")).rename(source)
    BatchJob(model, PARAMS, replicas=replicas, rows=2, options=OPTIONS).run(str(source), str(tmp_path / "answers"))
    answers = sorted(rows_of(tmp_path / "answers"), key=lambda row: row["n"])
    assert [row["text"] for row in answers] == expected
    assert [row["n"] for row in answers] == list(range(6))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """What the files of a folder say, lines of JSON or Parquet."""
    lines = [line for file in folder.glob("*.json*") for line in file.read_text().splitlines()]
    tables = (pyarrow.parquet.read_table(file) for file in folder.glob("*.parquet"))
    return [*map(json.loads, lines), *(row for table in tables for row in table.to_pylist())]


def test_jobs_that_make_no_sense(tmp_path: Path):
    for options, message in (({"replicas": 0}, "replicas=0"), ({"params": SamplingParams(n=2)}, "n=2")):
        with pytest.raises(ValueError, match=message):
            BatchJob("m", **options)
    with pytest.raises(ValueError, match="which says how prompts are read"):
        BatchJob("m").run(str(tmp_path / "prompts.csv"), str(tmp_path / "out"))
