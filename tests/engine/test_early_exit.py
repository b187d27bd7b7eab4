"""Tokens of a looped model that leave its core once their states hardly change."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from inferlib import LLM, AsyncLLM, Buckets, SamplingParams
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.config import ConfigError
from inferlib.models.early_exit import EarlyExit
from inferlib.models.exit_rules import Divergence, relative_change
from inferlib.option_checks import ConfigurationError
from inferlib.programs.counter import compilations
from inferlib.programs.depthwise import Quorum
from inferlib.sharding.shards import Shards
from tests.helpers.llms import MAX_LEN, build_llm, new_engine, random_prompts
from tests.helpers.looped import HUGINN, PARCAE, make_looped, oracle_of
from tests.helpers.poison import before_each_dispatch, poison, tokens_of
from tests.helpers.tokenizer import write_tokenizer

BUCKETS = Buckets(prefill=(16,), batch=(4,), cache=(MAX_LEN,))
STEPS = 6
FEWER = {"mean_recurrence": STEPS, "n_layers_in_prelude": 1, "n_layers_in_coda": 1}
MODELS = {
    "parcae": PARCAE | FEWER | {"recurrent_intermediation_embedding_dimension": 128},
    "huginn": HUGINN | {"mean_recurrence": STEPS},
}
PROMPTS = random_prompts([20, 7, 33, 12, 41, 3], seed=2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)  # as sampled ones: one mode
PARAMS = [
    replace(GREEDY, exit_threshold=threshold, depth=depth)
    for threshold, depth in [(0.25, None), (0.2, 5), (None, None), (0.3, None), (0.25, 4), (None, 3)]
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("looped")
    paths = {name: make_looped(folder / name, hf) for name, hf in MODELS.items()}
    for path in paths.values():
        write_tokenizer(path)
    return paths


@pytest.fixture(scope="module")
def llm(paths) -> LLM:
    return build_llm(paths["parcae"], BUCKETS, early_exit=True, decode_steps=1)


@pytest.fixture(scope="module")
def expected(llm) -> list[Answer]:
    with new_engine(llm, prefix_caching=False):
        return [answers_of(llm, [prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


class Answer(NamedTuple):
    tokens: list[int]
    depths: list[int] | None


def answers_of(llm: LLM, prompts: list[list[int]], params) -> list[Answer]:
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    return [Answer(output.token_ids, output.depths) for output in outputs]


def assert_chosen_by_the_oracle(
    hf: dict, prompt: list[int], answer: Answer, params: SamplingParams, rule: str = "change"
) -> list[int]:
    """In one full pass over the prompt and its tokens; returns how many steps each token took."""
    tokens, depths = answer
    model = oracle_of(hf | {"mean_recurrence": params.depth or STEPS})
    model.exit_threshold = params.exit_threshold or 0.0
    model.reads = model.without_coda if rule == "kl" else None
    with torch.no_grad():
        logits = model(torch.tensor([*prompt, *tokens[:-1]])).numpy()[len(prompt) - 1 :]
    assert (logits.max(-1) - logits[np.arange(len(tokens)), tokens]).max() < 1e-3
    assert np.nanmin(np.abs(np.stack(model.changes) - model.exit_threshold)) > 1e-5  # of 1 %: no rounding decides
    taken = model.taken.tolist()
    assert depths == taken[len(prompt) - 1 :]
    return taken


@pytest.mark.slow
def test_tokens_are_those_of_the_oracle(llm, expected):
    """Prompts and decoding, of rows of different thresholds and depths in one batch, and alone; nothing compiles."""
    with new_engine(llm, prefix_caching=False) as engine:
        llm.warmup(["logprobs"])
        before = compilations()
        assert answers_of(llm, PROMPTS, PARAMS) == expected
        assert compilations() == before
    taken = [
        assert_chosen_by_the_oracle(MODELS["parcae"], *of_row) for of_row in zip(PROMPTS, expected, PARAMS, strict=True)
    ]
    assert [sorted(set(steps)) for steps in taken] == [[3, 4, 5], [3, 4, 5], [6], [3], [3, 4], [3]]
    assert min(len(set(tokens)) for tokens, _ in expected) > 4
    stats = engine.stats
    assert (stats.core_tokens, stats.core_steps) == (sum(map(len, taken)), sum(map(sum, taken)))
    assert stats.core_passes < stats.core_runs < stats.core_passes * STEPS


@pytest.mark.slow
def test_rows_without_a_threshold_are_as_without_early_exits(paths, expected):
    other = build_llm(paths["parcae"], BUCKETS, decode_steps=1)
    assert other.engine.state.threshold is None
    for i in (2, 5):
        assert answers_of(other, [PROMPTS[i]], PARAMS[i]) == [Answer(expected[i].tokens, None)]


@pytest.mark.slow
def test_rows_that_are_preempted(llm, expected):
    """With few pages, and NaN in whatever is not valid."""
    with before_each_dispatch(llm, poison, pages=llm.engine.plan.columns * 4 // 3):
        assert answers_of(llm, PROMPTS, PARAMS) == expected
        assert llm.engine.scheduler.preemptions > 0


@pytest.mark.slow
def test_depths_of_a_stream_that_a_stop_token_ends(llm, expected):
    tokens, depths = expected[0]
    count = next(i for i in range(8, len(tokens)) if tokens[i] not in tokens[:i]) + 1

    async def streamed() -> list[Answer]:
        params = replace(PARAMS[0], stop_token_ids=[tokens[count - 1]])
        async with AsyncLLM(llm) as served:
            outputs = [output.outputs[0] async for output in served.generate(PROMPTS[0], params)]
        return [Answer(output.token_ids, output.depths) for output in outputs]

    answers = asyncio.run(streamed())
    assert depths is not None
    assert answers == [Answer(tokens[: len(x.tokens)], depths[: len(x.tokens)]) for x in answers]
    assert len(answers[-1].tokens) == count


@pytest.mark.slow
def test_prompts_share_pages_with_those_of_their_threshold_alone(llm):
    hits = []
    with new_engine(llm):
        for threshold in (0.25, 0.2, None, 0.25):
            params = replace(GREEDY, exit_threshold=threshold)
            (output,) = llm.generate(PROMPTS[4], params)
            answer = Answer(output.outputs[0].token_ids, output.outputs[0].depths)
            assert_chosen_by_the_oracle(MODELS["parcae"], PROMPTS[4], answer, params)
            hits.append(output.num_cached_tokens)
    assert hits[:3] == [0, 0, 0]
    assert hits[3] > 0


@pytest.mark.slow
def test_cells_of_steps_that_are_left_out_are_those_of_the_last(llm):
    """A threshold that every step meets is a depth of one."""
    first = replace(GREEDY, depth=1)
    with new_engine(llm) as engine:
        tokens = tokens_of(llm, PROMPTS, replace(GREEDY, exit_threshold=100.0))
        blocks = [block for block in engine.plan.view(engine.cache) if block.arrays[0].ndim == 5]
        for array in (np.asarray(array) for block in blocks for array in block.arrays):
            assert array.any()
            for of_step in array[1:]:
                np.testing.assert_array_equal(of_step, array[0])
        assert tokens_of(llm, PROMPTS, first) == tokens


def test_a_pass_ends_when_all_its_tokens_have_left(llm):
    """States that halve change by their own size at each step: only rows with a threshold above 1 leave."""
    counted: list[int] = []

    def step(number, state, caches):
        jax.debug.callback(lambda n: counted.append(int(n)), number)
        return state / 2, caches

    @jax.jit
    def run(lengths, depths, thresholds):
        ctx = StepContext(StepBatch.of_rows(lengths, lengths), llm.model_config, MAX_LEN)
        leaving = EarlyExit(step, depths, thresholds, relative_change, ctx)
        left = leaving(jnp.ones((4, 2)), (), STEPS, STEPS)
        return left.state[:, 0], left.taken

    for lengths, depths, thresholds, taken in (
        ([5, 5, 5, 5], [6, 6, 6, 6], [2, 2, 2, 2], [1, 1, 1, 1]),
        ([5, 5, 5, 5], [6, 6, 3, 1], [2, 0.5, 0.5, 0], [1, 6, 3, 1]),
        ([5, 0, 5, 5], [6, 6, 3, 1], [2, 0.5, 0.5, 0], [1, 0, 3, 1]),
        ([0, 0, 0, 0], [6, 6, 6, 6], [0, 0, 0, 0], [0, 0, 0, 0]),
    ):
        counted.clear()
        numbers = np.array(lengths, np.int32), np.array(depths, np.int32), np.array(thresholds, np.float32)
        state, (counts, each) = run(*numbers)
        assert each.tolist() == taken
        np.testing.assert_array_equal(state, 0.5 ** np.array(taken))
        assert counts.tolist() == [1, max(taken), np.count_nonzero(lengths), sum(taken)]
        jax.effects_barrier()
        assert sorted(counted) == list(range(max(taken)))


def assert_counted(llm: LLM, answers: list[Answer]) -> None:
    """Each token of prompts and answers went through the core once, and not with all steps."""
    stats, tokens = llm.stats, [answer.tokens for answer in answers]
    assert stats.core_tokens == sum(map(len, [*PROMPTS, *tokens])) - len(PROMPTS)
    assert stats.core_tokens < stats.core_steps < stats.core_tokens * STEPS


@pytest.mark.release
def test_depths_of_drafts_and_of_tokens_that_the_host_chooses(paths, expected):
    other = build_llm(paths["parcae"], BUCKETS, early_exit=True, speculation="ngram:3")
    assert answers_of(other, PROMPTS, PARAMS) == expected
    assert other.stats.core_tokens < other.stats.core_steps < other.stats.core_tokens * STEPS
    host = [replace(x, logits_processors=[lambda tokens, logits: logits]) for x in PARAMS]
    assert answers_of(other, PROMPTS, host) == expected


KL = [
    replace(GREEDY, exit_threshold=threshold, depth=depth)
    for threshold, depth in [(0.02, None), (0.05, 5), (None, None), (0.01, None), (0.02, 4), (None, 3)]
]


def test_a_divergence_is_that_of_whole_logits():
    """In blocks of tokens, and with columns that pad the vocabulary."""
    rng = np.random.default_rng(0)
    old, new, head = (rng.standard_normal(shape, np.float32) for shape in ((130, 8), (130, 8), (8, 20)))

    def logits(x):
        return jnp.pad(x @ head, [(0, 0), (0, 4)], constant_values=-jnp.inf)

    for count in (130, 64, 3):
        rule = jax.jit(Divergence(lambda x: 2 * x, logits, Shards()))
        p, q = (torch.log_softmax(torch.tensor(2 * x[:count] @ head), -1) for x in (old, new))
        expected = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        np.testing.assert_allclose(rule(old[:count], new[:count]), expected, rtol=1e-4)


def assert_leave_by_the_head(llm: LLM) -> list[Answer]:
    """In one batch all tokens and depths are the oracle's. Returns them."""
    answers = answers_of(llm, PROMPTS, KL)
    assert_counted(llm, answers)
    rows = zip(PROMPTS, answers, KL, strict=True)
    taken = [assert_chosen_by_the_oracle(MODELS["parcae"], *of_row, rule="kl") for of_row in rows]
    assert len(set(taken[0])) > 2
    assert [set(taken[2]), set(taken[5])] == [{STEPS}, {3}]
    return answers


@pytest.mark.release
def test_tokens_of_replicas_leave_by_what_the_head_makes_of_them(paths):
    """One device is below, with stacked layers."""
    parallel = "tp=2,dp=2,rules=dp_attention"
    assert_leave_by_the_head(build_llm(paths["parcae"], BUCKETS, early_exit="kl", parallel=parallel))


def both_ways(path: Path, **options: Any) -> tuple[LLM, LLM]:
    """By passes, and with rows at different depths in one batch."""
    options = {"early_exit": True} | options
    return build_llm(path, BUCKETS, **options), build_llm(path, BUCKETS, depthwise_batching=True, **options)


@pytest.mark.slow
def test_depths_in_one_batch_are_those_of_passes(paths, llm, expected):
    """Sampled and greedy tokens, log-probabilities, stop tokens, and rows that are preempted; nothing compiles."""
    # By fours the pages of rows end with programs.
    depthwise = build_llm(paths["parcae"], BUCKETS, early_exit=True, depthwise_batching=2, decode_steps=4)
    sampled = {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.3, "bad_words": ["a b"], "logprobs": 2}
    stopped = {"temperature": 1.0, "seed": 4, "min_tokens": 4, "stop_token_ids": list(range(3, 14)), "logprobs": 1}

    def results(of: LLM) -> tuple[list[Any], list[float]]:
        params = [replace(x, **more) for more in (sampled, stopped) for x in PARAMS]
        chosen = [output.outputs[0] for output in of.generate(PROMPTS * 2, params)]
        answers = [(x.token_ids, x.depths, x.finish_reason) for x in chosen]
        return answers, [entry.logprob for x in chosen for step in x.logprobs or () for entry in step.values()]

    def greedy(of: LLM) -> Any:
        with new_engine(of, prefix_caching=False) as engine:
            assert answers_of(of, PROMPTS, PARAMS) == expected
            return engine.stats

    with new_engine(llm):
        of_passes = results(llm)

    def assert_same() -> None:
        answers, logprobs = results(depthwise)
        assert answers == of_passes[0]
        np.testing.assert_allclose(logprobs, of_passes[1], atol=1e-5)  # chunks of prompts are cut in other ways

    depthwise.warmup(["logprobs"])
    before = compilations()
    assert_same()
    stats = greedy(depthwise)
    assert compilations() == before
    passes = greedy(llm)
    assert (stats.core_tokens, stats.core_steps) == (passes.core_tokens, passes.core_steps)
    assert stats.core_runs < passes.core_runs
    pages = depthwise.engine.plan.columns
    with before_each_dispatch(depthwise, poison, pages=pages):  # of tokens in the core, the prelude's cells stay
        assert_same()
        assert depthwise.engine.scheduler.preemptions > 0


@pytest.mark.release
def test_depths_in_one_batch_of_tokens_that_the_host_chooses(paths, expected):
    """Nothing compiles; rows are preempted, and what is not valid holds NaN."""
    host = [replace(x, logits_processors=[lambda tokens, logits: logits]) for x in PARAMS]
    llm = build_llm(paths["parcae"], BUCKETS, early_exit=True, depthwise_batching=True)
    llm.warmup(["processed"])
    before = compilations()
    assert answers_of(llm, PROMPTS, host) == expected
    assert compilations() == before
    with before_each_dispatch(llm, poison, pages=llm.engine.plan.columns * 4 // 3):
        assert answers_of(llm, PROMPTS, host) == expected
        assert llm.engine.scheduler.preemptions > 0


@pytest.mark.release
@pytest.mark.parametrize(
    "options",
    [
        {"platform": "gpu", "backend": "xla", "decode_steps": 4},
        {"parallel": "tp=2", "max_adapters": 2, "kv_cache_dtype": "int8"},
    ],
    ids=lambda value: "-".join(map(str, value.values())),
)
def test_other_forms(options, paths, expected):
    """By passes, and with rows at different depths."""
    llms = both_ways(paths["parcae"], **options)
    answers = [answers_of(llm, PROMPTS, PARAMS) for llm in llms]
    for llm in llms:
        assert_counted(llm, answers[0])
    if "kv_cache_dtype" in options:  # rounded cells change tokens, but not with the batch
        expected = [answers_of(llms[0], [prompt], of_row)[0] for prompt, of_row in zip(PROMPTS, PARAMS, strict=True)]
    assert answers == [expected] * 2


@pytest.mark.release
def test_other_forms_of_huginn(paths):
    """Random states never settle; by this threshold some happen to leave."""
    params = [replace(x, exit_threshold=x.exit_threshold and 0.95) for x in PARAMS]
    passes, depthwise = (answers_of(llm, PROMPTS, params) for llm in both_ways(paths["huginn"]))
    assert depthwise == passes
    rows = zip(PROMPTS, passes, params, strict=True)
    taken = [assert_chosen_by_the_oracle(MODELS["huginn"], *of_row) for of_row in rows]
    assert set(taken[0]) == {2, 3, 5, 6}


@pytest.mark.slow
def test_stacked_layers_and_what_the_head_makes_of_tokens(paths):
    """By passes, preempted."""
    passes = build_llm(paths["parcae"], BUCKETS, scan=True, early_exit="kl", decode_steps=1)
    answers = assert_leave_by_the_head(passes)
    with new_engine(passes, prefix_caching=False, pages=passes.engine.plan.columns * 4 // 3) as engine:
        assert answers_of(passes, PROMPTS, KL) == answers
        assert engine.scheduler.preemptions > 0


@pytest.mark.release
def test_rows_at_different_depths_by_what_the_head_makes_of_tokens(paths):
    """In stacked layers."""
    passes, depthwise = both_ways(paths["parcae"], scan=True, early_exit="kl")
    assert assert_leave_by_the_head(depthwise) == assert_leave_by_the_head(passes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"early_exit": False}, "leave a loop's core early, and this one of parcae does not let them: give early_exit"),
        ({"parallel": "dp=2"}, "splits layers over devices alone, with tp: leave dp, cp, ep and rules out"),
        ({"parallel": "cp=2"}, "splits layers over devices alone"),
        ({"speculation": "ngram:2"}, "verifies no drafts: leave speculation out"),
        ({"decode_steps": 1}, "needs decode_steps of 2 or more"),
        ({"cascade": True}, "cascade=True reads a prefix .* and depthwise_batching has rows at different steps"),
        ({"depthwise_batching": 5}, "depthwise_batching 5 is a number of rows, and max_batch is 4"),
        ({"depthwise_batching": 0.5}, "depthwise_batching is True, False or a number of rows from 1 on, got 0.5"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_what_depths_in_one_batch_do_not_go_with(options, message, paths):
    with pytest.raises(ConfigurationError, match=message):
        build_llm(paths["parcae"], BUCKETS, **{"early_exit": True, "depthwise_batching": True} | options)


def test_as_many_rows_wait_as_cost_least():
    """Of all numbers, by the cost that the module states."""
    for ratio in (0.2, 0.5, 1.0):
        quorum = Quorum(None, ratio)  # q, with S d = 1 and R = q^2 / 2
        for rows in (1, 4, 16, 64):
            costs = [1 / (rows - (e - 1) / 2) + ratio**2 / 2 / e for e in range(1, rows + 1)]
            assert costs[int(quorum(jnp.int32(rows))) - 1] < min(costs) * 1.02
    assert [int(Quorum(4, 0.5)(jnp.int32(rows))) for rows in (2, 9)] == [2, 4]


def test_what_is_refused(paths, llm, small):
    for threshold, message in (
        (-1, r"exit_threshold must be a number in \[0, 100\], got -1"),
        ("x", "exit_threshold must be a number"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingParams(exit_threshold=threshold)
    with pytest.raises(ValueError, match="exit_threshold is for models that repeat layers, and llama does not"):
        small.generate("a", SamplingParams(exit_threshold=0.1))
    with pytest.raises(ConfigError, match='early_exit is True, "kl" or False, got 1'):
        LLM(paths["parcae"], early_exit=1, progress=False)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigurationError, match="cache_policy follows every step of a loop, and with early_exit"):
        build_llm(paths["parcae"], BUCKETS, early_exit=True, cache_policy="knorm:64")


def test_thresholds_need_programs_for_them(paths):
    other = build_llm(paths["parcae"], BUCKETS)
    with pytest.raises(
        ValueError, match=r"exit_threshold=0.1 needs programs for it: build LLM\(..., early_exit=True\)"
    ):
        other.generate("a", SamplingParams(exit_threshold=0.1))
