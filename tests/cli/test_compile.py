"""`inferlib compile` before and while it compiles: default buckets, and what is shown. A few seconds."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from inferlib.cli import app
from inferlib.cli.compile_progress import CompileProgress
from inferlib.inspection.outcome import Outcome
from inferlib.programs.keys import ProgramKey
from tests.helpers.cli_model import make_model


class Reached(Exception):
    """Compilation would begin."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.mark.parametrize(
    ("options", "prefill", "cache"),
    [
        ([], (32, 128, 256), (256,)),  # a context of 256
        (["--cache-buckets", "64"], (32, 64), (64,)),
        (["--cache-buckets", "20"], (20,), (20,)),
        (["--tile", "32", "--cache-buckets", "100"], (32, 128, 512), (100,)),
        (["--prefill-buckets", "8"], (8,), (256,)),
    ],
)
def test_default_buckets_suit_a_short_context(model, options, prefill, cache, monkeypatch):
    def reached(deployment, *_, **__):
        raise Reached(deployment.buckets)

    monkeypatch.setattr("inferlib.deploy.compile.compile_programs", reached)
    result = CliRunner().invoke(app, ["compile", str(model), "--modes", "greedy", *options])
    assert isinstance(result.exception, Reached), result.output
    (buckets,) = result.exception.args
    assert (buckets.prefill, buckets.batch, buckets.cache) == (prefill, (1, 8), cache)


def test_without_a_terminal_each_program_is_a_line(capsys):
    """With an estimate of the rest, from a guess at first, then from the programs that were compiled."""
    keys = [ProgramKey("greedy", rows, 64) for rows in (1, 2, 4, 8, 16)]
    names = list(map(str, keys))
    outcomes = [
        Outcome(keys[0], "compiled", {}),
        Outcome(keys[1], "reused", {}),
        Outcome(keys[2], "failed", error="no such\nthing"),
        Outcome(keys[3], "compiled", {}),
        Outcome(keys[4], "compiled", {}),
    ]
    with CompileProgress.shown(names, workers=2, guess=60.0) as progress:
        for outcome in outcomes:
            progress.started(str(outcome.key))
            progress.done(str(outcome.key), outcome)
    captured = capsys.readouterr()
    assert captured.out == ""
    title, *lines = captured.err.splitlines()
    # The first alone, then two rounds of two.
    assert title == "compiling 5 programs, 2 at a time, about 3 min"
    lines = [re.sub(r"in \d+\.\d s", "in T", line) for line in lines]
    assert lines == [
        f"[1/5] {names[0]}: compiled in T, about 0 s left",
        f"[2/5] {names[1]}: reused, about 0 s left",
        f"[3/5] {names[2]}: failed in T: no such, about 0 s left",
        f"[4/5] {names[3]}: compiled in T, about 0 s left",
        f"[5/5] {names[4]}: compiled in T",
    ]
