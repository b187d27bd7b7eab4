"""Tokens that grammars force go through as drafts: they are what they are without speculation, in fewer steps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from random import Random

import pytest

from inferlib import LLM, Speculation, StructuredOutputs
from inferlib.outputs import RequestOutput
from inferlib.programs.counter import compilations
from tests.helpers.engines import assert_accounted
from tests.helpers.json_schemas import random_schema
from tests.helpers.llms import build_llm, new_engine, random_prompts
from tests.helpers.poison import before_each_dispatch, poison
from tests.helpers.speculation import BUCKETS, GREEDY, TAILS, TRUNK, assert_same, options, run, tight

pytestmark = pytest.mark.usefixtures("pays")
PLACES = StructuredOutputs(choice=["London is large", "Lima, they say, is larger"])
PLACE = {"type": "object", "properties": {"place": {"enum": ["a", "bc"]}, "seat": {"type": "boolean"}}}
PLACE |= {"required": ["place", "seat"], "additionalProperties": False}
OBJECT = StructuredOutputs(json=PLACE, whitespace_pattern="")
JOBS = [
    (TAILS[0], dataclasses.replace(GREEDY, structured_outputs=OBJECT, ignore_eos=False, max_tokens=50)),
    (TRUNK[:20], options(structured_outputs=OBJECT, ignore_eos=False, max_tokens=44)),
    (TAILS[2], options(structured_outputs=PLACES, max_tokens=40)),
    # The grammar ends where no end may be chosen, its tokens where drafts are left, and a stop token amid drafts.
    (TRUNK, options(structured_outputs=PLACES, min_tokens=28, max_tokens=30)),
    (TAILS[3], options(structured_outputs=PLACES, max_tokens=12)),
    (TAILS[4], options(structured_outputs=PLACES, stop_token_ids=[3], max_tokens=40)),
    (TAILS[5], options(structured_outputs=StructuredOutputs(choice=["no"], after="e"), max_tokens=50)),
    (TAILS[6], dataclasses.replace(GREEDY, max_tokens=60)),
]
JOBS = [(prompt, dataclasses.replace(params, temperature=0.9, seed=5)) for prompt, params in JOBS]  # all sampled
GREEDILY = [(prompt, dataclasses.replace(params, temperature=0.0)) for prompt, params in JOBS]


@pytest.fixture
def pays(counts, monkeypatch) -> None:
    """Dispatches verify as many drafts as they may."""
    monkeypatch.setattr("inferlib.engine.profit.Profit.choose_certain", lambda self, *_: self.counts[-1])


@pytest.fixture(scope="module")
def path(checkpoint) -> Path:
    return checkpoint("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def states(checkpoint) -> Path:
    kinds = "linear_attention", "full_attention"
    return checkpoint("qwen3_5_text", num_hidden_layers=2, layer_types=kinds)


@pytest.fixture(scope="module")
def llm(path) -> LLM:
    """Rows lose their pages."""
    return tight(path, BUCKETS, decode_steps=1, speculation="ngram:3")


@pytest.fixture(scope="module")
def expected(without) -> list[RequestOutput]:
    return run(without, GREEDILY)


@pytest.mark.slow
def test_tokens_are_those_without(llm, expected):
    """With rows that lose their pages; the second time from the cache, where what is not valid holds NaN."""
    assert_same(run(llm, GREEDILY), expected)
    with before_each_dispatch(llm, poison):
        assert_same(run(llm, GREEDILY), expected)
    assert_accounted(llm.engine)
    assert llm.engine.scheduler.preemptions
    assert llm.stats.accepted_drafts
    assert json.loads(expected[0].outputs[0].text)["place"] in ("a", "bc")


@pytest.mark.slow
def test_forced_tokens_take_fewer_steps(llm, without):
    """Alone, all drafts of a grammar stand: the first of forced tokens comes by itself, the others four at a time."""
    letters = StructuredOutputs(choice=["a b c d e f g h"])
    job = (TAILS[0], dataclasses.replace(GREEDY, structured_outputs=letters, ignore_eos=False))
    (wanted,) = run(without, [job])
    with new_engine(llm) as engine:
        assert_same(run(llm, [job]), [wanted])
    stats, count = engine.stats, len(wanted.outputs[0].token_ids)
    assert stats.drafts == stats.accepted_drafts
    assert count - stats.accepted_drafts <= 2 + count // 4
    assert stats.dispatches <= 3 + count // 4


# ---- further cases


@pytest.mark.release
def test_states_take_the_forced_tokens_that_stand(states, undrafted):
    """With rows that lose their pages; the second time where states and cells that are not valid hold NaN."""
    expected = run(undrafted(states), GREEDILY)
    llm = tight(states, BUCKETS, decode_steps=2, speculation="ngram:3")
    assert_same(run(llm, GREEDILY), expected)
    with before_each_dispatch(llm, poison):
        assert_same(run(llm, GREEDILY), expected)
    assert_accounted(llm.engine)
    assert llm.engine.scheduler.preemptions
    assert llm.stats.accepted_drafts > 40


@pytest.mark.release
def test_beside_a_model_that_drafts_and_on_a_mesh(path, expected):
    """What a model has of its cache follows: drafts of the model itself all stand, behind the forced ones of others."""
    speculation = Speculation("draft", 3, path)
    llm = build_llm(path, BUCKETS, decode_steps=3, speculation=speculation, parallel="dp=2,tp=2")
    assert_same(run(llm, GREEDILY), expected)
    assert_accounted(llm.engine)
    assert llm.stats.accepted_drafts
    before = dataclasses.replace(llm.stats)
    run(llm, [GREEDILY[0], (TAILS[6], dataclasses.replace(GREEDY, max_tokens=40))])
    stats = llm.stats
    assert stats.drafts - before.drafts == stats.accepted_drafts - before.accepted_drafts > 20


@pytest.mark.slow
def test_answers_to_random_schemas(llm, without):
    """Sampled."""
    random, before = Random(1), llm.stats.accepted_drafts
    jobs = [
        (prompt, options(seed=i, structured_outputs=StructuredOutputs(json=random_schema(random)), max_tokens=50))
        for i, prompt in enumerate(random_prompts([6] * 56))
    ]
    assert_same(run(llm, jobs), run(without, jobs))
    assert llm.stats.accepted_drafts > before + 50


@pytest.mark.release
def test_nothing_compiles_after_the_warm_up(path, without):
    expected = run(without, JOBS)
    llm = tight(path, BUCKETS, decode_steps=2, speculation="ngram:3")
    llm.warmup(("sample", "processed"))
    before = compilations()
    assert_same(run(llm, JOBS), expected)
    assert llm.stats.accepted_drafts
    assert compilations() == before
