"""A smaller model drafts: its cache follows that of its target, and tokens are what they are without it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from inferlib import LLM, Buckets, Speculation, StructuredOutputs
from inferlib.checkpoint.source import CheckpointError
from inferlib.option_checks import ConfigurationError
from inferlib.programs.counter import compilations
from tests.helpers.engines import assert_accounted
from tests.helpers.llms import build_llm, new_engine
from tests.helpers.poison import before_each_dispatch, poison
from tests.helpers.sequences import sequence
from tests.helpers.speculation import (
    BUCKETS,
    GREEDY,
    JOBS,
    LONGER,
    SAMPLED,
    TAILS,
    TRUNK,
    Job,
    assert_nothing_compiles,
    assert_same,
    options,
    run,
    tight,
)

pytestmark = pytest.mark.usefixtures("counts")
# What all drafts of the model itself stand for: the others count drafts before them. In programs of one mode.
FREE = [(TRUNK, options(logprobs=1)), (TAILS[1], options(top_k=9, logprobs=1))]
FREE += [(TRUNK + TAILS[3], options(top_p=0.8, logprobs=1)), (TRUNK[:20], options(logprobs=1))]
LETTERS = StructuredOutputs(choice=["a b c d e f g h"])


@pytest.fixture(scope="module")
def path(checkpoint) -> Path:
    return checkpoint("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def other(checkpoint) -> Path:
    """Another model of the same vocabulary, with other sizes."""
    return checkpoint("llama", num_hidden_layers=1, num_key_value_heads=1)


@pytest.fixture(scope="module")
def states(checkpoint) -> Path:
    """Of convolutions."""
    return checkpoint("lfm2", num_hidden_layers=2, layer_types=("conv", "full_attention"))


def drafting(path: Path, model: Path, tokens: int = 3, **more) -> LLM:
    return tight(path, BUCKETS, speculation=Speculation("draft", tokens, model), **{"decode_steps": 1} | more)


@pytest.mark.release
def test_all_options_in_one_batch(path, other, without, counts):
    """Nothing compiles after the warm-up, as below; tokens are the same by other drafts in `test_equality.py`."""
    counts(0, 1, 3)
    llm = assert_nothing_compiles(lambda: drafting(path, other), without)
    assert_accounted(llm.engine)
    assert llm.engine.scheduler.preemptions
    assert llm.stats.cached_tokens
    assert 0 < llm.stats.accepted_drafts < llm.stats.drafts
    assert_nothing_is_read_of_what_drafts(llm, JOBS, without)


def assert_nothing_is_read_of_what_drafts(llm: LLM, jobs: Sequence[Job], without: LLM) -> None:
    """With weights of NaN, tokens are what they are without."""
    weights, count, drafts = llm.engine.weights, len(llm.engine.model.specs), llm.stats.drafts
    llm.engine.weights = (*weights[:count], *(jnp.full_like(x, jnp.nan) for x in weights[count:]))
    llm.reset_prefix_cache()
    assert_same(run(llm, jobs), run(without, jobs))
    assert llm.stats.drafts > drafts


@pytest.fixture(scope="module")
def linear(checkpoint) -> Path:
    """A model with states, of linear attention."""
    kinds = "linear_attention", "full_attention"
    return checkpoint("qwen3_5_text", num_hidden_layers=2, layer_types=kinds)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["other", pytest.param("linear", marks=pytest.mark.release)])
def test_batches_that_change(drafter, path, without, counts, request):
    """With cached prefixes and rows that lose their pages; the second time all is cached. Nothing compiles after the
    warm-up, whatever a dispatch drafts. In the end the weights that draft are NaN, and so is all that they compute."""
    counts(0, 1, 3)
    expected, llm = run(without, LONGER), drafting(path, request.getfixturevalue(drafter))
    llm.warmup(("greedy",))
    before = compilations()
    for _ in range(2):
        assert_same(run(llm, LONGER), expected)
    assert compilations() == before
    assert_accounted(llm.engine)
    assert llm.engine.scheduler.preemptions
    assert llm.stats.cached_tokens
    assert llm.stats.accepted_drafts < llm.stats.drafts
    assert_nothing_is_read_of_what_drafts(llm, LONGER, without)


@pytest.fixture(scope="module")
def twice(path) -> LLM:
    """A model that drafts for itself, several steps in a program."""
    return drafting(path, path, decode_steps=3)


@pytest.mark.slow
def test_the_cache_follows_the_targets(twice, without):
    """All drafts of the model itself stand, at any temperature, whatever became of the rows that they are made for; the
    last time where what is not valid holds NaN before each dispatch."""
    expected, shares, llm = run(without, FREE), [], twice
    for _ in range(2):
        assert_same(run(llm, FREE), expected)
    assert llm.engine.scheduler.preemptions
    assert llm.stats.cached_tokens
    assert llm.stats.accepted_drafts == llm.stats.drafts > 40
    with before_each_dispatch(llm, lambda engine: shares.append(poison(engine))):
        assert_same(run(llm, FREE), expected)
        assert llm.stats.accepted_drafts == llm.stats.drafts > 40
    assert max(shares) > 0


@pytest.mark.slow
def test_the_cache_is_complete_behind_a_prompt_that_comes_later(twice):
    """A step with a prompt follows one whose drafts all stood, the last of which has no cell yet."""
    first, second = (sequence(prompt, 26, FREE[0][1]) for prompt in (TAILS[1], TAILS[4]))
    with new_engine(twice, in_flight=1) as engine:
        for s in (first, second):
            engine.add(s)
            while engine.busy and (s is second or len(s.tokens) < 9):
                poison(engine)
                engine.advance()
        assert engine.stats.accepted_drafts == engine.stats.drafts > 20


@pytest.mark.slow
def test_states_follow_the_targets(states, undrafted, counts):
    """The same of a model that keeps states and drafts for itself. Dispatches without drafts lie in between, and cached
    prompts go on from snapshots."""
    counts(3, 3, 0)
    expected, llm = run(undrafted(states), LONGER), drafting(states, states)
    for _ in range(2):
        assert_same(run(llm, LONGER), expected)
        assert_accounted(llm.engine)
    assert llm.engine.scheduler.preemptions
    assert llm.stats.cached_tokens
    assert llm.stats.accepted_drafts == llm.stats.drafts > 40


# ---- what is refused


def copied(folder: Path, source: Path, **changes) -> Path:
    """A checkpoint with another configuration."""
    shutil.copytree(source, folder)
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf | changes))
    return folder


def test_models_that_cannot_draft_are_named(path, checkpoint, tmp_path):
    short = copied(tmp_path / "short", path, max_position_embeddings=32)
    small = checkpoint("llama", num_hidden_layers=1, vocab_size=96)
    cases = {
        short: "context of 32 tokens, less than max_len 64",
        small: "vocabulary of 96 tokens, and this model one of",
    }
    for model, message in cases.items():
        with pytest.raises(ConfigurationError, match=message):
            build_llm(path, BUCKETS, speculation=f"draft:{model}:3")
    with pytest.raises(CheckpointError, match="none"):
        build_llm(path, BUCKETS, speculation=f"draft:{tmp_path / 'none'}:3")
    with pytest.raises(ConfigurationError, match="draft 7, or take larger buckets"):
        build_llm(path, BUCKETS, speculation=f"draft:{path}:8")


def test_another_tokenizer_is_refused(path, tmp_path):
    folder = copied(tmp_path / "other", path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="another tokenizer: token 40 is"):
        build_llm(path, BUCKETS, speculation=f"draft:{folder}:3")


# ---- further cases of each kind


@pytest.mark.release
def test_windows(undrafted, checkpoint, counts):
    """Of a model that drafts for itself, whose layers are stacked."""
    counts(3, 0, 1)
    drafter = checkpoint("ministral", num_hidden_layers=2, layer_types=("sliding_attention",) * 2)
    llm = drafting(drafter, drafter, scan=True)
    assert_same(run(llm, LONGER), run(undrafted(drafter), LONGER))
    assert llm.stats.accepted_drafts == llm.stats.drafts > 40


@pytest.mark.release
def test_states_beside_a_grammar_and_on_a_mesh(states, undrafted, counts):
    """Forced tokens are the host's drafts, which the states get once they stand."""
    letters = dataclasses.replace(GREEDY, structured_outputs=LETTERS, ignore_eos=False)
    jobs = [(TAILS[0], letters), (TRUNK, dataclasses.replace(GREEDY, max_tokens=28)), (TAILS[4], GREEDY)]
    llm = build_llm(states, BUCKETS, parallel="tp=2", decode_steps=2, speculation=f"draft:{states}:3")
    assert_same(run(llm, jobs), run(undrafted(states), jobs))
    assert llm.stats.accepted_drafts == llm.stats.drafts > 20


@pytest.mark.release
def test_changing_counts_and_batches(path, without, counts):
    """Dispatches that draft nothing keep the cache complete, and rows move to smaller batches."""
    counts(3, 0, 1, 0, 0)
    buckets = Buckets(prefill=(8,), batch=(1, 4), cache=(24, 64))
    llm = build_llm(path, buckets, decode_steps=2, speculation=f"draft:{path}:3", page_size=8)
    assert_same(run(llm, LONGER), run(without, LONGER))
    assert llm.stats.accepted_drafts == llm.stats.drafts > 10


@pytest.mark.release
def test_other_devices_prefill(states, undrafted, counts):
    """The cells and states of the draft model, too: all drafts stand of a model that drafts for itself."""
    counts(3, 3, 0)
    llm = drafting(states, states, prefill_devices=[1], page_size=8)
    for engine in (llm.engine, llm.engine.source.engine):
        poison(engine)
    for _ in range(2):
        assert_same(run(llm, LONGER), run(undrafted(states), LONGER))
        assert_accounted(llm.engine)
        assert_accounted(llm.engine.source.engine)
    assert llm.stats.handed_tokens > 40
    assert llm.stats.accepted_drafts == llm.stats.drafts > 20


@pytest.mark.release
def test_stacked_layers_and_caches_of_eight_bits_in_tiers(path, other, undrafted):
    kinds, jobs = {"scan": True, "kv_cache_dtype": "int8"}, JOBS[1:4]
    expected = run(undrafted(path, **kinds), jobs)
    llm = drafting(path, other, host_cache="1MiB", **kinds)
    for _ in range(3):
        assert_same(run(llm, jobs), expected)
        run(llm, [(TAILS[4] + TRUNK, dataclasses.replace(GREEDY, max_tokens=9))])  # its pages push others out
    assert llm.stats.accepted_drafts
    assert llm.stats.host_tokens


@pytest.mark.release
def test_replicas_heads_and_positions_on_several_devices(checkpoint):
    buckets, path = Buckets(prefill=(8,), batch=(8,), cache=(64,)), checkpoint("llama")
    expected = run(build_llm(path, buckets), SAMPLED)
    llm = build_llm(path, buckets, parallel="dp=2,cp=2,tp=2", decode_steps=2, speculation=f"draft:{path}:3")
    assert_same(run(llm, SAMPLED), expected)
    assert llm.stats.accepted_drafts > 0.6 * llm.stats.drafts


@pytest.mark.release
def test_sleep_and_functions_that_change_logits(twice, without):
    """Dispatches with such rows draft nothing, and the cache follows. All are scored: programs are of one mode."""
    unchanged = dataclasses.replace(GREEDY, logits_processors=[lambda tokens, logits: logits], max_tokens=8, logprobs=1)
    jobs = [(TAILS[0], unchanged), FREE[0]]
    expected, llm = run(without, jobs), twice
    for _ in range(2):
        before = llm.stats.drafts
        assert_same(run(llm, jobs), expected)
        assert llm.stats.accepted_drafts == llm.stats.drafts > before
        llm.sleep()
        llm.wake()
    jax.block_until_ready(llm.engine.weights)
