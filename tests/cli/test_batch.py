"""`inferlib generate --input --output`: lines good and bad, full disks, interruptions, resuming. About 25 s."""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from inferlib import LLM, SamplingParams
from tests.helpers.cli_model import COMMAND, Commands, error_of, make_model, sharing_programs

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SAMPLING = ("--temperature", "1", "--max-tokens", "5")


@pytest.fixture(scope="module")
def inferlib(tmp_path_factory) -> Commands:
    return Commands(make_model(tmp_path_factory.mktemp("model"), layers=1))


class Batch:
    """Runs the command over `lines`, bytes or JSON values, in a folder of its own."""

    def __init__(self, inferlib: Commands, folder: Path):
        self.inferlib, self.source, self.target = inferlib, folder / "in.jsonl", folder / "out.jsonl"
        self.files = ("--input", self.source, "--output", self.target)

    def write(self, *lines: object) -> None:
        raw = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        self.source.write_bytes(b"".join(line + b"\n" for line in raw))

    def run(self, *options: str):
        return self.inferlib.generate(*self.files, *options)

    def results(self) -> dict[int, dict]:
        """By line; every line at most once."""
        records = [json.loads(line) for line in self.target.read_bytes().splitlines()]
        by_line = {record["line"]: record for record in records}
        assert len(by_line) == len(records)
        return by_line

    def tokens(self) -> dict[int, list[int]]:
        return {line: record["outputs"][0]["token_ids"] for line, record in self.results().items()}


@pytest.fixture
def batch(inferlib, tmp_path) -> Batch:
    return Batch(inferlib, tmp_path)


# ---- lines


@pytest.mark.slow
def test_every_kind_of_line(batch):
    messages = [{"role": "user", "content": "hé"}]
    batch.write(
        {"prompt": "hé"},
        {"prompt_token_ids": [7, 8, 9], "id": "mine", "sampling_params": {"max_tokens": 3}},
        {"messages": messages, "id": 40},
        b"  ",
        {"prompt": "ab", "sampling_params": {"logit_bias": {"5": 100}, "max_tokens": None}},
    )
    result = batch.run()
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert "4 prompts" in result.stderr

    results, llm = batch.results(), batch.inferlib.llm
    assert {line: record["id"] for line, record in results.items()} == {1: 1, 2: "mine", 3: 40, 5: 5}
    text = llm.generate("hé", GREEDY)[0]
    assert results[1]["outputs"][0]["text"] == text.outputs[0].text
    assert results[1]["outputs"][0]["finish_reason"] == "length"
    assert (results[1]["prompt_tokens"], results[1]["generated_tokens"]) == (3, 8)
    short = llm.generate([7, 8, 9], SamplingParams(temperature=0.0, max_tokens=3))[0]
    assert results[2]["outputs"][0]["token_ids"] == short.outputs[0].token_ids
    assert results[3]["outputs"][0]["text"] == llm.chat(messages, GREEDY)[0].outputs[0].text
    # null: up to the model's context of 256
    assert results[5]["outputs"][0]["token_ids"] == [5] * 254


@pytest.mark.slow
def test_prompts_of_a_chat(batch):
    batch.write({"prompt": "hello"}, {"prompt_token_ids": [7, 8]})
    assert batch.run("--chat", "--system", "s").exit_code == 0
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    llm = batch.inferlib.llm
    assert batch.tokens()[1] == llm.chat(messages, GREEDY)[0].outputs[0].token_ids
    assert batch.tokens()[2] == llm.generate([7, 8], GREEDY)[0].outputs[0].token_ids


@pytest.mark.slow
def test_lines_that_begin_alike_share_what_is_cached(batch):
    """Within a salt. The summary says how much."""
    text = "shared by lines " * 5
    salts = [{}, {}, {"cache_salt": "a"}, {"cache_salt": "a"}]
    batch.write(*({"prompt": f"{text}{i}"} | salt for i, salt in enumerate(salts)))
    result = batch.run()
    assert result.exit_code == 0, result.output
    cached = [batch.results()[line]["cached_tokens"] for line in range(1, 5)]
    assert cached == [0, 64, 0, 64]
    assert "128 from the cache of" in result.stderr
    llm = batch.inferlib.llm
    for line, tokens in batch.tokens().items():
        alone = {"prompt": f"{text}{line - 1}", "cache_salt": f"alone {line}"}
        assert tokens == llm.generate(alone, GREEDY)[0].outputs[0].token_ids


BAD = [
    (b'{"prompt": ', "the line is not JSON"),
    (b'{"prompt": "caf\xe9"}', "the line is not UTF-8"),
    (b"[" * 100_000, "recursion"),
    (b"[]", "must be a JSON object, it is list"),
    ({"id": 1}, "give one of prompt, prompt_token_ids, messages; there is none"),
    ({"prompt": "a", "messages": []}, "there is prompt and messages"),
    ({"prompt": "a", "max_tokens": 5}, "unknown fields: 'max_tokens'"),
    ({"prompt": "a", "id": [1]}, "id must be a string or an integer, got [1]"),
    ({"prompt": 5}, "prompt must be a string, got 5"),
    ({"prompt": "a", "cache_salt": 5}, "cache_salt is a text that is not empty, got 5"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": "\ud800"}, "lone surrogate"),
    ({"prompt": "a" * 300}, "a prompt of 300 tokens plus max_tokens 8 exceeds max_len 256"),
    ({"prompt_token_ids": [1.5]}, "prompt_token_ids must be a list of integers"),
    ({"prompt_token_ids": [260]}, "token id 260 is outside the vocabulary of 260"),
    ({"messages": "hello"}, "messages must be a list"),
    ({"messages": [{"role": "user"}]}, 'message 0 needs a "content"'),
    ({"prompt": "a", "sampling_params": []}, "sampling_params must be an object"),
    ({"prompt": "a", "sampling_params": {"top": 1}}, "unknown sampling_params: 'top'; known: n, max_tokens"),
    ({"prompt": "a", "sampling_params": {"top_p": 2}}, "top_p must be a number in (0, 1], got 2"),
    ({"prompt": "a", "sampling_params": {"temperature": "hot"}}, "temperature must be a number"),
    (b'{"prompt": "a", "sampling_params": {"min_p": NaN}}', "min_p must be a number"),
    ({"prompt": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "logit_bias must map token ids"),
    ({"prompt": "a", "sampling_params": {"stop_token_ids": [999]}}, "token 999 is not in the model's vocab"),
]


@pytest.mark.slow
def test_lines_that_follow_a_grammar(batch, tmp_path):
    """That of the options, their own, none that can be used, and one of which the rest of the line leaves nothing."""
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"type": "array", "items": {"enum": [1, 23]}, "minItems": 2, "maxItems": 2}))
    params = [
        {},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"json": {"type": "strnig"}}},
        {"structured_outputs": {"regex": "ab"}, "allowed_token_ids": [7]},
        {"structured_outputs": None, "max_tokens": 3},
    ]
    batch.write(*({"prompt": "abc", "sampling_params": p} for p in params))
    assert batch.run("--json-schema", file, "--max-tokens", "150", "--temperature", "0").exit_code == 1
    records = batch.results()
    texts = {line: record["outputs"][0]["text"] for line, record in records.items() if "error" not in record}
    assert set(json.loads(texts[1])) <= {1, 23}
    assert texts[2] in ("yes", "no")
    assert "Invalid type: strnig" in records[3]["error"]
    assert "does not follow the grammar of structured_outputs" in records[4]["error"]
    assert records[5]["generated_tokens"] == 3
    assert "none.json: No such file" in error_of(batch.run("--json-schema", tmp_path / "none.json", "--overwrite"))
    assert "there is json and regex" in error_of(batch.run("--json-schema", file, "--regex", "a", "--overwrite"))


@pytest.mark.fast_cases(1)
def test_bad_lines_report_and_the_rest_completes(batch):
    good = {"prompt": "fine"}
    batch.write(*[line for bad, _ in BAD for line in (bad, good)])
    result = batch.run()
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0].startswith(f"{len(BAD)} lines failed")
    results = batch.results()
    for number, (bad, message) in enumerate(BAD):
        record = results.pop(2 * number + 1)
        assert set(record) == {"id", "line", "error"}, bad
        assert message in record["error"], bad
    assert len(results) == len(BAD)
    assert {tuple(record["outputs"][0]["token_ids"]) for record in results.values()} == {
        tuple(batch.inferlib.llm.generate("fine", GREEDY)[0].outputs[0].token_ids)
    }


def test_an_error_has_the_id_of_its_line(batch):
    batch.write({"id": "\ud800 é", "prompt": ""})  # a lone surrogate cannot be written as UTF-8 itself
    assert batch.run().exit_code == 1
    assert batch.results()[1]["id"] == "\ud800 é"


def test_an_empty_file(batch):
    batch.write()
    assert batch.run().exit_code == 0
    assert batch.target.read_bytes() == b""


@pytest.mark.slow
def test_lines_are_read_as_they_are_needed(inferlib):
    """At most four per row of the batch are prepared ahead of the results."""
    llm, prepared, most = inferlib.llm, 0, 0

    def requests():
        nonlocal prepared
        for i in range(50):
            prepared += 1
            yield llm.prepare([7 + i], SamplingParams(temperature=0.0, max_tokens=1 + i % 5))

    for finished, _ in enumerate(llm.run(requests(), progress=False)):
        most = max(most, prepared - finished)
    assert finished == 49
    assert most == 4 * 2


# ---- files


def test_files_that_cannot_be_used(batch, tmp_path):
    assert "in.jsonl does not exist" in error_of(batch.run())
    batch.write({"prompt": "a"})

    def with_files(source: Path, target: Path, *options: str) -> str:
        return error_of(batch.inferlib.generate("--input", source, "--output", target, *options))

    assert "is a directory" in with_files(tmp_path, batch.target)
    assert "is a directory" in with_files(batch.source, tmp_path)
    assert "cannot be created" in with_files(batch.source, tmp_path / "no" / "out.jsonl")
    assert "are the same file" in with_files(batch.source, batch.source, "--overwrite")
    batch.target.write_text("precious")
    assert "exists; give --resume to continue it or --overwrite" in error_of(batch.run())
    assert "not a result of this command" in error_of(batch.run("--resume"))
    assert batch.target.read_text() == "precious"


def test_overwrite(batch):
    batch.write({"prompt": "a"})
    batch.target.write_text("old")
    # Nothing is lost before the model is there to replace it.
    assert "does not exist" in error_of(batch.run("--overwrite", "--model", "/nowhere"))
    assert batch.target.read_text() == "old"
    assert batch.run("--overwrite").exit_code == 0
    assert list(batch.results()) == [1]


# ---- ending early and resuming


@pytest.mark.slow
def test_resume_does_what_is_missing(batch):
    batch.write(*({"prompt": f"line {i}"} for i in range(6)))
    assert batch.run(*SAMPLING).exit_code == 0
    whole = batch.target.read_bytes()
    tokens = batch.tokens()
    lines = whole.splitlines(keepends=True)
    for cut in (0, 3, len(lines[0]) - 1, len(lines[0]), len(lines[0]) + 100, len(whole) - 1, len(whole)):
        batch.target.write_bytes(whole[:cut])
        result = batch.run(*SAMPLING, "--resume")
        assert result.exit_code == 0, result.output
        finished = whole[:cut].count(b"\n")
        assert (f"{finished} lines are done already" in result.stderr) == (finished > 0)
        assert batch.tokens() == tokens
        assert batch.target.read_bytes().startswith(b"".join(lines[:finished]))


def test_resume_tries_errors_again(batch):
    batch.write({"prompt": "a"}, b"broken", {"prompt": "b"})
    assert batch.run().exit_code == 1
    before = batch.results()
    batch.write({"prompt": "a"}, {"prompt": "mended"}, {"prompt": "b"})
    mine = batch.target.with_name(batch.target.name + ".tmp")
    mine.write_text("notes of the user")
    assert batch.run("--resume").exit_code == 0
    after = batch.results()
    assert {1: after[1], 3: after[3]} == {1: before[1], 3: before[3]}
    assert "outputs" in after[2]
    assert list(batch.target.parent.glob("*.tmp")) == [mine]
    assert mine.read_text() == "notes of the user"


def test_resume_without_an_output_starts(batch):
    batch.write({"prompt": "a"})
    assert batch.run("--resume").exit_code == 0
    assert list(batch.results()) == [1]


@pytest.mark.parametrize("old", [b'{"a": 1}\n', b'{"id": 1, "x": 2}\n', b'{"id": 1}\n{"id"', b"\x00\n", b"[1]"])
def test_resume_leaves_other_files_alone(batch, old):
    batch.write({"prompt": "a"})
    batch.target.write_bytes(old)
    assert "line 1 of" in error_of(batch.run("--resume"))
    assert batch.target.read_bytes() == old


def test_resume_with_another_input(batch):
    batch.write({"id": "x", "prompt": "a"})
    assert batch.run().exit_code == 0
    batch.write({"id": "y", "prompt": "a"})
    assert "the input has changed" in error_of(batch.run("--resume"))


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writing beyond `size` bytes of any file fails, in part, as on a full disk.

    Python 3.11 would also keep a part of a compiled module, and every later process would read that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    wrote, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = wrote
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
def test_full_disk(batch):
    batch.write(*({"prompt": f"line {i}"} for i in range(6)))
    assert batch.run(*SAMPLING).exit_code == 0
    tokens, first = batch.tokens(), batch.target.read_bytes().index(b"\n")
    with file_size_limit(2 * first):
        message = error_of(batch.run(*SAMPLING, "--overwrite"))
    assert "File too large" in message
    assert str(batch.target) in message
    assert "the finished lines are kept" in message
    assert message.endswith("--resume")
    assert batch.target.stat().st_size == 2 * first  # a part of the last line was written
    assert batch.run(*SAMPLING, "--resume").exit_code == 0
    assert batch.tokens() == tokens


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("line", [{"prompt": "a"}, b"broken"])
def test_full_device(batch, line):
    batch.write(line)
    message = error_of(batch.inferlib.generate("--input", batch.source, "--output", "/dev/full"))
    assert "No space left on device: '/dev/full'" in message


def test_ctrl_c(batch, monkeypatch):
    """The finished lines are there, and the command names the one that continues."""
    batch.write(*({"prompt": f"line {i}"} for i in range(9)))
    run = LLM.run

    def interrupted(self, *args, **options):
        for count, finished in enumerate(run(self, *args, **options)):
            if count == 3:
                signal.raise_signal(signal.SIGINT)
            yield finished

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore the signal
    try:
        with monkeypatch.context() as patch:
            patch.setattr(LLM, "run", interrupted)
            result = batch.run()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert result.exit_code == 128 + signal.SIGINT
    assert "interrupted; the finished lines are kept, continue with: " in result.stderr
    assert len(batch.results()) == 3
    assert batch.run("--resume").exit_code == 0
    assert len(batch.results()) == 9


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.release)])
def test_interruption(batch, number):
    """The command is stopped in the midst, then continued; the results are those of an uninterrupted run. Ctrl-C is
    above, in this process."""
    count = 20_000
    batch.write(*({"prompt": f"{i}"} for i in range(count)))
    arguments = ["generate", "--model", batch.inferlib.model, *map(str, batch.files), *SAMPLING, "--max-batch", "2"]
    # A shell's background jobs ignore SIGINT; a handler makes sure that the child does not inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    pipe, env = subprocess.PIPE, os.environ | sharing_programs()
    process = subprocess.Popen([*COMMAND, *arguments], stdout=pipe, stderr=pipe, text=True, env=env)
    signal.signal(signal.SIGINT, before)
    while process.poll() is None and (not batch.target.exists() or batch.target.read_bytes().count(b"\n") < 3):
        time.sleep(0.02)
    process.send_signal(number)
    stdout, stderr = process.communicate()
    assert process.returncode == 128 + number, stderr
    assert stdout == ""
    message, command = stderr.strip().splitlines()[-1].split(", continue with: ")
    assert message == "interrupted; the finished lines are kept"
    assert shlex.split(command) == ["inferlib", *map(str, arguments), "--resume"]

    finished = batch.target.read_bytes()
    assert 3 <= finished.count(b"\n") < count
    lines = batch.source.read_bytes().splitlines(keepends=True)
    batch.source.write_bytes(b"".join(lines[: finished.count(b"\n") + 20]))
    assert batch.run(*SAMPLING, "--resume").exit_code == 0
    assert batch.target.read_bytes().startswith(finished[: finished.rindex(b"\n") + 1])
    continued = batch.tokens()
    assert len(continued) >= finished.count(b"\n") + 20
    assert batch.run(*SAMPLING, "--overwrite").exit_code == 0
    assert batch.tokens().items() <= continued.items()


# ---- vectors


def test_vectors_of_a_file(batch):
    """Bad lines get errors; a repeated run with --resume embeds only what is missing."""
    batch.write({"prompt": "ab"}, {"prompt_token_ids": [7, 8], "id": "mine"}, {"prompt": ""}, {"text": "a"}, b"{")
    command = ("embed", batch.inferlib.model, *batch.files, "--max-batch", "2", "--pooling", "mean")
    result = batch.inferlib(*command)
    assert result.exit_code == 1, result.output
    assert "2 prompts embedded" in result.stderr
    assert "3 lines failed" in result.stderr
    results, llm = batch.results(), batch.inferlib.llm
    assert {line: record["id"] for line, record in results.items()} == {1: 1, 2: "mine", 3: 3, 4: 4, 5: 5}
    vectors = llm.embed(["ab", [7, 8]], "mean")
    assert [results[1]["embedding"], results[2]["embedding"]] == pytest.approx(vectors, abs=1e-6)
    for line, message in ((3, "the prompt is empty"), (4, "unknown fields: 'text'"), (5, "not JSON")):
        assert message in results[line]["error"]

    batch.write({"prompt": "ab"}, {"prompt_token_ids": [7, 8], "id": "mine"}, {"prompt": "a"})
    result = batch.inferlib(*command, "--resume")
    assert result.exit_code == 0, result.output
    assert "1 prompts embedded" in result.stderr
    assert sorted(batch.results()) == [1, 2, 3]
    assert "exists; give --resume" in error_of(batch.inferlib(*command))
    assert "pooling must be 'last' or 'mean', got 'max'" in error_of(batch.inferlib(*command, "--pooling", "max"))
