"""Drafts, their verification, and the choice of how many there are: without a model."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlib.buckets import Buckets
from inferlib.config import EngineConfig, EngineOptions
from inferlib.engine.profit import Profit
from inferlib.engine.sequence import Sequence
from inferlib.option_checks import ConfigurationError
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program_set import planned_keys
from inferlib.programs.row_state import RowState
from inferlib.programs.verification import accepted, gathered, hidden_of_tokens, verification_batch
from inferlib.sampling.params import SamplingParams
from inferlib.sampling.sampler import Sampled
from inferlib.speculation.ngram import NgramDrafter
from inferlib.speculation.settings import Speculation


def continuation(tokens: list[int], count: int, longest: int) -> list[int]:
    """What `NgramDrafter` drafts, in plain words."""
    best, place = 0, -1
    for end in range(1, len(tokens)):
        size = 0
        while size < min(longest, end) and tokens[end - 1 - size] == tokens[-1 - size]:
            size += 1
        if size and size >= best:
            best, place = size, end
    drafts = list(tokens)
    for _ in range(count if best else 0):
        drafts.append(drafts[place + len(drafts) - len(tokens)])
    return drafts[len(tokens) :] or [-1] * count


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=24), st.sampled_from([1, 3]), st.sampled_from([2, 4]))
def test_ngrams_continue_as_the_latest_of_the_longest_matches(tokens, count, longest):
    history = np.full((2, 24), 7)
    history[1, : len(tokens)] = tokens
    drafts = NgramDrafter(longest).propose(jnp.array(history), jnp.array([1, len(tokens)]), count)
    assert drafts.tolist() == [[-1] * count, continuation(tokens, count, longest)]


def rows_of(token, length, active, budget) -> RowState:
    state = RowState.zeros(len(token), 4, 1)
    arrays = map(jnp.array, (token, length, active, budget))
    return state._replace(**dict(zip(("token", "length", "active", "budget"), arrays, strict=True)))


@pytest.mark.slow
def test_rows_take_as_many_drafts_as_their_budget():
    """Behind padding, with positions that end where a row may."""
    rows = rows_of([5, 6, 7], [3, 9, 2], [True, False, True], [9, 9, 2])
    batch, counts = verification_batch(rows, jnp.array([[1, -1, 99], [1, 1, 1], [0, 1, -5]]), vocab=10)
    assert batch.decode_positions.tolist() == [[3, 4, 5, 6], [-1] * 4, [-1, -1, 2, 3]]
    assert batch.decode_lengths.tolist() == [7, 0, 4]
    tokens = batch.decode_tokens
    assert [tokens[0].tolist(), tokens[2, 2:].tolist()] == [[5, 1, 0, 9], [7, 0]]
    first = hidden_of_tokens(tokens.reshape(-1, 1), counts)[:, :, 0]
    assert [first[0].tolist(), first[2, :2].tolist()] == [[5, 1, 0, 9], [7, 0]]


@pytest.mark.slow
def test_drafts_stand_up_to_the_first_that_was_not_sampled():
    """A row whose drafts stand, one whose first does not, one that ends at its second token, and one that is idle."""

    def advance(rows, i):
        token = jnp.full(4, i + 1)
        live = rows.active.astype(int)
        left = rows.budget - live
        new = rows._replace(budget=left, generated=rows.generated + live, active=rows.active & (left > 0))
        return new, Sampled(jnp.where(rows.active, token, -1))

    rows = rows_of([0] * 4, [1] * 4, [True, True, True, False], [9, 9, 2, 9])
    rows, sampled, tally = accepted(advance, rows, jnp.array([[1, 2], [-1, 2], [1, 2], [1, 2]]), 3)
    assert sampled.token.T.tolist() == [[1, 2, 3], [1, -1, -1], [1, 2, -1], [-1, -1, -1]]
    assert rows.generated.tolist() == [3, 1, 2, 0]
    assert rows.active.tolist() == [True, True, False, False]
    assert tally.tried.tolist() == [2, 1, 1, 0]
    assert tally.stood.tolist() == [2, 0, 1, 0]


def test_tokens_of_steps_are_put_together():
    outs = Sampled(jnp.full((6, 2), -1))
    outs = gathered(outs, jnp.array([0, 0]), Sampled(jnp.array([[1, 5], [2, -1], [-1, -1]])))
    outs = gathered(outs, jnp.array([2, 1]), Sampled(jnp.array([[3, -1], [-1, -1], [-1, -1]])))
    assert outs.token.T.tolist() == [[1, 2, 3, -1, -1, -1], [5, -1, -1, -1, -1, -1]]


# ---- how many


def sequences(count: int) -> list[Sequence]:
    return [Sequence([1], SamplingParams(), 9, seed=0) for _ in range(count)]


def test_drafts_that_stand_are_made_and_others_are_not():
    profit = Profit(Speculation(tokens=7), "cpu")
    good, bad = sequences(2)
    for _ in range(4):
        profit.learn(good, 8, 8)
        profit.learn(bad, 8, 0)
    assert profit.choose([good], "greedy", 1) == 7
    assert profit.choose([bad], "greedy", 1) == 0
    assert profit.acceptance(bad) < 0.2 < 0.8 < profit.acceptance(good)


def test_measured_times_decide():
    """Steps that take in proportion to their tokens are worth no draft; those that take the same are."""
    profit, (s,) = Profit(Speculation(tokens=3), "gpu"), sequences(1)
    profit.learn(s, 100, 70)
    for drafts in (0, 1, 3):
        profit.learn_time(ProgramKey("greedy", 1, 64, 8, drafts=drafts), 1.0 + drafts)
        profit.learn_time(ProgramKey("greedy", 8, 64, 8, drafts=drafts), 1.0)
    assert profit.choose([s], "greedy", 1) == 0
    assert profit.choose([s], "greedy", 8) == 3


def test_times_of_steps_that_do_not_run_follow_the_others():
    """Steps without drafts were measured while the machine was busy."""
    profit = Profit(Speculation(tokens=1), "gpu")
    profit.learn_time(ProgramKey("greedy", 1, 64, 8), 4.0)
    for _ in range(30):
        profit.learn_time(ProgramKey("greedy", 1, 64, 8, drafts=1), 4.0)
    for _ in range(30):
        profit.learn_time(ProgramKey("greedy", 1, 64, 8, drafts=1), 1.0)
    assert 0.9 < profit.seconds("greedy", 1, 1) < 1.1
    assert profit.seconds("greedy", 1, 0) == profit.seconds("greedy", 1, 1)  # no more than with drafts


def test_what_pays_is_decided_for_each_step_where_steps_take_long():
    profit = Profit(Speculation(tokens=3), "cpu")
    assert not profit.has_long_steps("greedy", 1)
    profit.learn_time(ProgramKey("greedy", 1, 64, 8), 0.002)
    assert not profit.has_long_steps("greedy", 1)
    profit.learn_time(ProgramKey("greedy", 2, 64, 8, drafts=3), 0.02)
    assert profit.has_long_steps("greedy", 2)
    assert not profit.has_long_steps("greedy", 1)


def test_full_batches_draft_nothing():
    rows = sequences(512)
    profit = Profit(Speculation(tokens=3), "gpu")
    for s in rows:
        profit.learn(s, 8, 2)
    assert profit.choose(rows, "greedy", 512) == 0


# ---- what is asked for


def test_text_says_what_drafts():
    assert Speculation.read("ngram:5") == Speculation("ngram", 5)
    assert Speculation.read("ngram") == Speculation()
    assert Speculation.read("draft:hf:org/name:5") == Speculation("draft", 5, "hf:org/name")
    assert Speculation.read("draft:./a:b") == Speculation("draft", model="./a:b")
    assert str(Speculation("draft", 2, Path("x/y"))) == "draft:x/y:2"
    assert str(Speculation(tokens=2)) == "ngram:2"
    assert Speculation(tokens=5).counts == (1, 3, 5)
    assert Speculation(tokens=1).counts == (1,)


@pytest.mark.parametrize("wrong", ["eagle:3", "ngram:0", "ngram:16", "ngram:x", "draft", "draft:3", 3, "", Speculation])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ConfigurationError, match="speculation"):
        EngineOptions(speculation=wrong)


def test_more_drafts_than_prompt_tokens_of_a_step_are_refused():
    buckets = Buckets(prefill=(2,), batch=(1,), cache=(8,))
    with pytest.raises(ConfigurationError, match="draft 1, or take larger buckets"):
        EngineConfig(1, 8, buckets, speculation=Speculation(tokens=2))


def test_programs_for_fewer_drafts_are_planned():
    config = EngineConfig(2, 16, Buckets(prefill=(8,), batch=(1, 2), cache=(16,)), speculation=Speculation(tokens=3))
    keys = planned_keys(config, ["greedy", "processed"])
    drafting = {(key.rows, key.steps, key.drafts) for key in keys if key.drafts}
    assert drafting == {(rows, steps, drafts) for rows in (1, 2) for steps in (1, 8) for drafts in (1, 3)}
    # Other modes verify what grammars force, a step at a time.
    assert all(not key.chunks and (key.mode == "greedy" or key.steps == 1) for key in keys if key.drafts)
