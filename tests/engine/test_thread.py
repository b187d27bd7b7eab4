"""Threads and interrupts: every caller gets its own results, whatever strikes whom."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from inferlib import SamplingParams
from inferlib.engine.engine import Engine
from tests.helpers.llms import new_engine, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = random_prompts([9, 3, 14, 1], seed=31)


@pytest.fixture(scope="module")
def expected(small):
    return [output.outputs[0].token_ids for output in small.generate(PROMPTS, GREEDY)]


def tokens_of(llm, prompts=PROMPTS):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


def streamed(llm, prompt):
    stream = llm.stream(prompt, GREEDY)
    assert "".join(stream) == stream.output.outputs[0].text
    return stream.output.outputs[0].token_ids


def test_threads_get_their_own_results(small, expected):
    """Generate and streams, from three threads."""

    def work(number: int) -> None:
        for i in range(4):
            at = (number + i) % len(PROMPTS)
            assert streamed(small, PROMPTS[at]) == expected[at]
            assert tokens_of(small, PROMPTS[at:]) == expected[at:]

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert small.engine.scheduler.idle


def endless(llm):
    while True:
        yield llm.prepare(PROMPTS[1], GREEDY)


def test_interrupts_lose_nothing(small, expected, monkeypatch):
    """At random steps of the engine the main thread is interrupted while a stream is open."""
    rng, advance = np.random.default_rng(32), Engine.advance
    main, left = threading.main_thread().ident, 0

    def interrupting(engine, **options):
        nonlocal left
        left -= 1
        if left == 0:
            signal.pthread_kill(main, signal.SIGINT)
        return advance(engine, **options)

    monkeypatch.setattr(Engine, "advance", interrupting)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for _ in range(12):
            stream = small.stream(PROMPTS[0], GREEDY)
            pieces = iter(stream)
            text = next(pieces)
            left = int(rng.integers(1, 12))
            with pytest.raises(KeyboardInterrupt):
                list(small.run(endless(small), progress=False))
            text += "".join(pieces)
            assert text == stream.output.outputs[0].text
            assert stream.output.outputs[0].token_ids == expected[0]
    finally:
        signal.signal(signal.SIGINT, before)
    assert tokens_of(small) == expected
    assert small.engine.scheduler.idle


def test_a_failed_program_fails_those_that_ran_and_no_other(small, expected, monkeypatch):
    with new_engine(small) as engine:
        stream = small.stream(PROMPTS[0], GREEDY)
        pieces = iter(stream)
        next(pieces)
        with monkeypatch.context() as patch:
            patch.setattr("inferlib.engine.engine.jax.device_get", lambda x: (_ for _ in ()).throw(OSError("lost")))
            with pytest.raises(OSError, match="lost"):
                small.generate(PROMPTS[1], GREEDY)
        with pytest.raises(RuntimeError, match=r"an earlier error lost .*OSError\('lost'\)"):
            list(pieces)
        assert tokens_of(small) == expected
        assert engine.scheduler.idle


def test_a_request_runs_once(small, expected):
    request = small.prepare(PROMPTS[0], GREEDY)
    (output,) = small.run([request])
    assert output.outputs[0].token_ids == expected[0]
    twice = small.prepare(PROMPTS[0], GREEDY)
    for requests in ([request], [twice, twice]):
        with pytest.raises(ValueError, match="was run before: prepare it again"):
            list(small.run(requests))
    assert tokens_of(small) == expected
    assert small.engine.scheduler.idle


def test_outputs_are_bounded():
    assert dataclasses.replace(GREEDY, temperature=1.0, n=1024).n == 1024
    with pytest.raises(ValueError, match=r"n must be an integer in \[1, 1024\]"):
        SamplingParams(n=1025)


# A shell's background jobs inherit that SIGINT is ignored.
LEFT = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from inferlib.engine.thread import EngineThread
def call():
    begun.set()
    time.sleep(0.5)
    print("ended")
begun, engine = threading.Event(), EngineThread()
engine.post(call)
begun.wait()
del engine
"""


def test_the_process_ends_after_a_call_whose_engine_is_gone():
    """As an interrupt leaves it, which frees the engine: a thread inside XLA would crash the interpreter that ends."""
    run = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stdout) == (0, "ended\n"), run.stderr


def test_a_second_interrupt_ends_the_process_at_once():
    """More come, as the first may be earlier than the end of the process that it is to interrupt."""
    script = LEFT.replace("time.sleep(0.5)", "[(time.sleep(0.2), os.kill(os.getpid(), 2)) for _ in range(200)]")
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stdout) == (130, ""), run.stderr
