"""Rows that share a prefix and read it once generate what they generate alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlib import Buckets, SamplingParams, configs
from inferlib.config import DeviceKind, EngineOptions
from inferlib.engine.cascade import Prefix, shared_prefixes
from inferlib.engine.engine import Engine
from inferlib.engine.sequence import Sequence
from inferlib.models.families import config_from_hf
from inferlib.option_checks import ConfigurationError
from inferlib.programs.counter import compilations
from tests.helpers.llms import build_llm

PARAMS = [  # of one mode
    SamplingParams(temperature=0.5, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=20, presence_penalty=0.5, ignore_eos=True),
]


@dataclass(eq=False)
class Row:
    pages: list[int] = field(default_factory=list)


def rows_of(ways: list[list[int]]) -> list[Row]:
    """Rows whose pages are numbered by the way that leads to them: equal ways share pages."""
    numbers: dict[tuple[int, ...], int] = {}
    return [Row([numbers.setdefault(tuple(way[: i + 1]), len(numbers)) for i in range(len(way))]) for way in ways]


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(0, 1), max_size=4), max_size=8))
def test_prefixes_that_save_most(ways):
    """Each is shared, and together they save as much as any of the pages' ways, taken alone."""
    rows = rows_of(ways)
    prefixes: list[Prefix] = shared_prefixes(rows)
    members = [row for prefix in prefixes for row in prefix.members]
    assert len(set(map(id, members))) == len(members)
    for prefix in prefixes:
        assert len(prefix.members) > 1
        assert prefix.pages > 0
        assert len({tuple(row.pages[: prefix.pages]) for row in prefix.members}) == 1
    alone = [
        (sum(row.pages[:depth] == first.pages[:depth] for row in rows) - 1) * depth
        for first in rows
        for depth in range(1, len(first.pages) + 1)
    ]
    assert sum(prefix.saved for prefix in prefixes) >= max(alone, default=0)


def traffic(seed: int, kinds: list[SamplingParams]) -> list[Sequence]:
    """Prompts behind two prefixes, with ends before, at and after pages of 16, and two behind none."""
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(3, 131, n).tolist() for n in (33, 48)]
    ends = [(i % 2, 1 + 5 * i % 17) for i in range(9)]
    prompts = [prefixes[which] + rng.integers(3, 131, n).tolist() for which, n in ends]
    prompts += [rng.integers(3, 131, n).tolist() for n in (16, 40)]
    return [Sequence(p, kinds[i % len(kinds)], 9 + i % 4, seed=i) for i, p in enumerate(prompts)]


def run(engine: Engine, sequences: list[Sequence]) -> list[list[int]]:
    for s in sequences:
        engine.add(s)
    while engine.busy:
        engine.advance()
    return [s.tokens for s in sequences]


OPTIONS = [{}, {"parallel": "dp=2,tp=2", "scan": True, "kv_cache_dtype": "int4"}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [pytest.param(options, marks=pytest.mark.release if options else [], id=str(options)) for options in OPTIONS],
)
def test_tokens_are_those_of_rows_alone(options, checkpoint):
    path = checkpoint("llama", num_hidden_layers=2 if "scan" in options else 1)
    replicas = 2 if "parallel" in options else 1
    buckets = Buckets(prefill=(32,), batch=(8 * replicas,), cache=(96,), tile=16)
    llm = build_llm(path, buckets, decode_steps=1, cascade=True, **options)
    llm.warmup(["sample"])
    engine, before, sent = llm.engine, compilations(), []
    engine.scheduler.cascade = replace(engine.scheduler.cascade, least=1)
    send = engine._send
    engine._send = lambda dispatch: (sent.append(dispatch.key), send(dispatch))
    got = run(engine, traffic(0, PARAMS))
    assert sum(key.cascade for key in sent) >= 3
    assert compilations() == before
    engine.scheduler.cascade = None
    engine.forget_prefixes()
    assert got == run(engine, traffic(0, PARAMS))
    assert not sent[-1].cascade


def test_models_that_cannot():
    for name, reason in (
        ("gemma3-1b", "windows"),
        ("nemotron-h-8b", "states"),
        ("deepseek-v2-lite", "latent attention"),
    ):
        model = config_from_hf(configs.load(name))
        assert not EngineOptions(max_batch=8, max_len=64).resolve(DeviceKind("gpu"), None, model).cascade
        with pytest.raises(ConfigurationError, match=reason):
            EngineOptions(max_batch=8, max_len=64, cascade=True).resolve(DeviceKind("cpu"), None, model)
    with pytest.raises(ConfigurationError, match="prefix_caching is False"):
        EngineOptions(max_batch=8, max_len=64, cascade=True, prefix_caching=False).resolve(DeviceKind("cpu"))
