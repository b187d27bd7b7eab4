"""`inferlib chat`: lines on stdin are messages and commands."""

from __future__ import annotations

import importlib.metadata
import io

import pytest
from rich.console import Console

import inferlib as package
from inferlib import SamplingParams
from inferlib.cli.chat import Conversation
from tests.helpers.cli_model import Commands, error_of, make_model


@pytest.fixture(scope="module")
def inferlib(tmp_path_factory):
    return Commands(make_model(tmp_path_factory.mktemp("chat"), layers=1))


def answers_of(inferlib, lines: str, *options: str) -> list[str]:
    result = inferlib(
        "chat", inferlib.model, "--max-batch", "2", "--max-tokens", "4", "--temperature", "0", *options, stdin=lines
    )
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


@pytest.mark.slow
def test_a_conversation_remembers_until_it_is_reset(inferlib):
    first, second, again, *rest = answers_of(inferlib, "hi\nhi\n/reset\nhi\n\n/exit\nnot read\n")
    assert first == again != second
    assert rest == []
    assert answers_of(inferlib, "/system Be terse.\nhi\n") == answers_of(inferlib, "hi\n", "--system", "Be terse.")


def test_the_answers_are_those_of_python(inferlib):
    (text,) = answers_of(inferlib, "hi\n")
    params = SamplingParams(temperature=0.0, max_tokens=4)
    (output,) = inferlib.llm.chat([{"role": "user", "content": "hi"}], params)
    assert output.outputs[0].text.splitlines() == text.splitlines()


def test_a_stopped_answer_stays_and_an_impossible_message_does_not(inferlib, monkeypatch):
    talk = Conversation(inferlib.llm, SamplingParams(temperature=0.0, max_tokens=4), None)
    console = Console(file=io.StringIO())
    talk.answer("x" * 300, console)
    assert "exceeds max_len" in console.file.getvalue()
    assert talk.messages == []

    def interrupted(*_, **options):
        yield "some"
        raise KeyboardInterrupt

    monkeypatch.setattr(inferlib.llm, "stream", interrupted)
    talk.answer("hi", console)
    assert talk.messages[-1] == {"role": "assistant", "content": "some"}
    assert "stopped" in console.file.getvalue()


def test_version_and_wrong_options(inferlib):
    version = importlib.metadata.version("inferlib")
    assert package.__version__ == version
    assert inferlib("--version").stdout == f"inferlib {version}\n"
    assert "temperature" in error_of(inferlib("chat", inferlib.model, "--temperature", "-1", stdin="hi\n"))
