"""Requests of a looped model that take different numbers of its core's steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inferlib import LLM, Buckets, SamplingParams
from inferlib.config import EngineConfig
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.depth import Depths
from inferlib.programs.counter import compilations
from tests.helpers.llms import MAX_LEN, build_llm, new_engine, random_prompts
from tests.helpers.looped import PARCAE as PUBLISHED
from tests.helpers.looped import looped_logits, make_looped
from tests.helpers.poison import before_each_dispatch, poison, tokens_of
from tests.helpers.tokenizer import write_tokenizer

PARCAE = PUBLISHED | {"n_layers_in_prelude": 1, "n_layers_in_coda": 1, "state_norm": True}
BUCKETS = Buckets(prefill=(16,), batch=(4,), cache=(MAX_LEN,))
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = random_prompts([20, 7, 33, 12, 41, 3], seed=5)
DEPTHS = [2, 3, 1, None, 2, 1]
ALL = PARCAE["mean_recurrence"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = make_looped(tmp_path_factory.mktemp("looped") / "parcae", PARCAE)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def llm(path) -> LLM:
    return build_llm(path, BUCKETS, decode_steps=2)


def params_of(depths: list[int | None]) -> list[SamplingParams]:
    return [replace(GREEDY, depth=depth) for depth in depths]


@pytest.fixture(scope="module")
def expected(llm) -> list[list[int]]:
    """What prompts generate alone, in their order; a test below has the oracle of each number of steps."""
    with new_engine(llm, prefix_caching=False):
        pairs = zip(PROMPTS, params_of(DEPTHS), strict=True)
        return [tokens_of(llm, [prompt], params)[0] for prompt, params in pairs]


@pytest.mark.slow
def test_rows_equal_models_of_fewer_steps(path, llm, expected):
    """Rows of different depths in one batch, and alone; nothing compiles. A model that is built with fewer steps has
    the same tokens."""
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    llm.warmup(["greedy"])
    before = compilations()
    with new_engine(llm, prefix_caching=False):
        assert tokens_of(llm, PROMPTS, params_of(DEPTHS)) == expected
    assert compilations() == before
    assert tokens_of(build_llm(path, BUCKETS, loop_steps=2, decode_steps=1), PROMPTS[:1], GREEDY) == expected[:1]
    for prompt, depth, tokens in zip(PROMPTS, DEPTHS, expected, strict=True):
        hf = PARCAE | {"mean_recurrence": depth or ALL}
        logits = looped_logits(hf, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        assert (logits.max(-1) - logits[np.arange(len(tokens)), tokens]).max() < 1e-3


@pytest.mark.slow
def test_rows_that_are_preempted(llm, expected):
    """With few pages, and NaN in whatever is not valid."""
    with before_each_dispatch(llm, poison, pages=llm.engine.plan.columns * 4 // 3):
        assert tokens_of(llm, PROMPTS, params_of(DEPTHS)) == expected
        assert llm.engine.scheduler.preemptions > 0


@pytest.mark.slow
def test_prompts_share_pages_with_those_of_their_depth_alone(llm, expected):
    prompt, hits = PROMPTS[4], []
    with new_engine(llm):
        alone = {d: tokens_of(llm, prompt, replace(GREEDY, depth=d)) for d in (2, 1, None)}
        for depth in (2, 1, None, ALL):
            (output,) = llm.generate(prompt, replace(GREEDY, depth=depth))
            assert [output.outputs[0].token_ids] == alone[None if depth == ALL else depth]
            hits.append(output.num_cached_tokens)
        llm.reset_prefix_cache()
        for depth, cached in ((2, 0), (1, 0), (None, 0), (ALL, hits[-1])):
            (output,) = llm.generate(prompt, replace(GREEDY, depth=depth))
            assert output.num_cached_tokens == cached
    assert alone[2] == [expected[4]]
    assert min(hits) > 0


@pytest.mark.slow
def test_steps_that_no_row_takes_are_not_run(llm):
    """Their cells are as they were."""
    with new_engine(llm) as engine:
        llm.generate(PROMPTS, replace(GREEDY, depth=2))
        blocks = [block for block in engine.plan.view(engine.cache) if block.arrays[0].ndim == 5]
        assert len(blocks) == PARCAE["n_layers_in_recurrent_block"]
        for array in (np.asarray(array) for block in blocks for array in block.arrays):
            assert [bool(of_step.any()) for of_step in array] == [True, True, False]


def test_steps_of_a_pass(llm):
    """As many as the deepest row takes, of those that are in it."""
    config, chunks = llm.model_config, (np.array(x, np.int32) for x in ([[0] * 8], [1], [0], [8]))
    batch = StepBatch(*chunks, np.zeros((4, 1), np.int32), np.array([3, 0, 0, 5], np.int32))
    loop = llm.engine.model.merge(llm.engine.weights).loop
    for depths, steps in (([1, 2, 0, 1], 2), ([1, 1, 3, 1], 1), ([1, 0, 1, 1], 3), ([1, 1, 1, 99], 3)):
        rows = np.array(depths, np.int32)
        ctx = StepContext(batch, config, MAX_LEN, depths=Depths(rows))
        assert int(loop.steps(ctx)) == steps
        assert loop.steps(replace(ctx, depths=Depths(rows, whole=True))) == 3


@pytest.mark.parametrize(
    ("depth", "message"),
    [
        (0, r"depth must be an integer in \[1, 2147483647\], got 0"),
        (True, "depth must be an integer"),
        (4, r"depth must be 1 to 3, the model's loop_steps, got 4: give less, or build LLM\(..., loop_steps=4\)"),
    ],
)
def test_wrong_depths(depth, message, llm):
    with pytest.raises(ValueError, match=message):
        llm.generate(PROMPTS[0], SamplingParams(depth=depth))


def test_depths_are_for_looped_models(small):
    with pytest.raises(ValueError, match="depth is for models that repeat layers, and llama does not: leave depth=2"):
        small.generate("a", SamplingParams(depth=2))
    assert small.engine.state.depth is None


@pytest.mark.slow
def test_tokens_are_the_same_where_a_pass_runs_all_steps(path, expected, monkeypatch):
    """As on GPUs."""
    monkeypatch.setattr(EngineConfig, "counted", True)
    other = build_llm(path, BUCKETS, decode_steps=1)
    assert tokens_of(other, PROMPTS, params_of(DEPTHS)) == expected
    blocks = [block for block in other.engine.plan.view(other.engine.cache) if block.arrays[0].ndim == 5]
    assert all(np.asarray(block.arrays[0])[-1].any() for block in blocks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"parallel": "tp=2,dp=2"}, marks=pytest.mark.release),
        pytest.param({"speculation": "ngram:3"}, marks=pytest.mark.release),
        pytest.param({"prefill_devices": [1]}, marks=pytest.mark.release),
        {"host_cache": "1MiB"},  # the programs of `llm`
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_tokens_are_the_same(options, path, expected):
    other = build_llm(path, BUCKETS, **{"decode_steps": 2} | options)
    for _ in range(2):
        assert tokens_of(other, PROMPTS, params_of(DEPTHS)) == expected
