"""The sampler against plain numpy: how logits are penalised, how often each token is drawn."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from jax.sharding import PartitionSpec

from inferlib.sampling import (
    SamplingParams,
    count_tokens,
    follow_bad_words,
    is_stop,
    mark_prompt,
    pack,
    sample,
    unpack,
)
from inferlib.sampling.sampler import Vocabulary, _gumbel, process
from inferlib.sharding import axes
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import make_shards
from tests.helpers.sampler_reference import counts_of, reference_probs, reference_process


@functools.partial(jax.jit, static_argnames="mode")
def jit_sample(logits, ints, floats, counts, generated, mode):
    return sample(logits, unpack(ints, floats), counts, generated, mode=mode)


@jax.jit
def draw_row(logits, ints, floats, counts, seeds, generated):
    """Tokens [N] of one row, drawn for each of N seeds and positions."""
    batch = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (len(seeds), x.shape[-1])), (logits[None], ints, floats, counts[None])
    )
    params = unpack(batch[1], batch[2])._replace(seed=seeds)
    return sample(batch[0], params, batch[3], generated, mode="sample").token


def draw(logits, rows, *, counts=None, generated=None, mode="sample"):
    """Sampled (as numpy) for logits [N, V] and N entries of `pack`."""
    logits = np.asarray(logits, np.float32)
    counts = np.zeros(logits.shape, np.int32) if counts is None else counts
    generated = np.zeros(len(logits), np.int32) if generated is None else np.asarray(generated, np.int32)
    out = jit_sample(logits, *pack(rows), counts, generated, mode=mode)
    return jax.tree.map(np.asarray, out)


# --- Greedy ---------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_among_equals_and_reads_only_logits():
    logits = np.full((4, 9), -np.inf, np.float32)
    logits[0, [3, 7]] = 2.0
    logits[1, 8] = -1e4
    logits[2] = np.nan
    token = np.asarray(sample(jnp.asarray(logits), None, None, None, mode="greedy").token)
    assert token.tolist()[:2] == [3, 8]
    assert token.dtype == np.int32
    assert 0 <= token[2] < 9, "an inactive row must still yield a token that an embedding can look up"
    assert 0 <= token[3] < 9


def test_devices_that_split_the_vocabulary_find_the_same_token():
    """Equal elements on two devices, none of a device that is finite, and a row of NaN; by one collective."""
    shards = make_shards(Parallelism(tensor=4))
    logits = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    logits[0, [20, 40]] = 9.0
    logits[1, :48] = -np.inf
    logits[2] = np.nan
    logits[3] = -np.inf
    split = PartitionSpec(None, shards.mesh_axes(axes.VOCAB))
    greedy = lambda logits: sample(logits, None, None, None, mode="greedy", vocabulary=Vocabulary(shards)).token  # noqa: E731
    run = jax.jit(jax.shard_map(greedy, mesh=shards.mesh, in_specs=split, out_specs=PartitionSpec(), check_vma=False))
    token = np.asarray(run(logits))
    want = np.asarray(sample(jnp.asarray(logits), None, None, None, mode="greedy").token)
    np.testing.assert_array_equal(token, want)
    assert token[0] == 20
    text = str(jax.make_jaxpr(run)(logits))
    assert sum(text.count(f" {name}[") for name in ("all_gather", "pmax", "pmin", "psum")) == 1


@pytest.mark.slow
def test_greedy_rows_among_sampling_rows_take_the_argmax_of_processed_logits():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 40)) * 5
    params = SamplingParams(temperature=0, top_k=3, top_p=0.1, frequency_penalty=2.0, logit_bias={7: 3.0})
    outputs = [rng.integers(40, size=20) for _ in range(6)]
    counts = np.stack([counts_of(40, (), output) for output in outputs])
    rows = [(params, 1, ()) if i % 2 else (SamplingParams(), i, ()) for i in range(6)]
    token = draw(logits, rows, counts=counts, generated=[20] * 6).token
    for i in (1, 3, 5):
        assert token[i] == reference_process(logits[i], params, (), outputs[i]).argmax()


def test_empty_rows_are_plain():
    logits = np.random.default_rng(1).normal(size=(3, 30))
    assert draw(logits, [None] * 3).token.tolist() == logits.argmax(-1).tolist()


# --- What is drawn --------------------------------------------------------------------------------

DISTRIBUTIONS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.4),
    "top_k": SamplingParams(temperature=1.5, top_k=7),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(temperature=2.0, min_p=0.1),
    "all": SamplingParams(
        temperature=1.3,
        top_k=30,
        top_p=0.95,
        min_p=0.005,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={4: 2.0, 5: -100.0},
        min_tokens=20,
        max_tokens=None,
        stop_token_ids=[6],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution(name):
    """Draws over seeds and over positions, by chi-square; tokens that must not occur do not."""
    params, vocab, draws = DISTRIBUTIONS[name], 50, 12_288
    rng = np.random.default_rng(2)
    logits = (rng.normal(size=vocab) * 2).astype(np.float32)
    logits[[11, 12]] = -np.inf
    prompt, output = [1, 2, 2, 3], [3, 4, 8, 8, 8]
    probs = reference_probs(reference_process(logits, params, prompt, output), params)

    seeds, positions = np.divmod(np.arange(draws), 16)
    counts = counts_of(vocab, prompt, output)
    tokens = draw_row(logits, *pack([(params, 0, ())]), counts, np.uint32(seeds), np.int32(positions))
    observed = np.bincount(tokens, minlength=vocab)

    assert observed[probs == 0].sum() == 0
    expected = probs * draws
    large = expected >= 5
    rest = [expected[~large].sum()]
    cells = np.append(expected[large], rest if rest[0] > 0 else [])
    seen = np.append(observed[large], observed[~large].sum() if rest[0] > 0 else [])
    assert scipy.stats.chisquare(seen, cells, sum_check=False).pvalue > 1e-3


@pytest.mark.slow
def test_neighbouring_seeds_and_positions_are_independent():
    seeds, positions, vocab = 128, 128, 4
    rows = [(SamplingParams(), seed, ()) for seed in range(seeds) for _ in range(positions)]
    generated = np.tile(np.arange(positions), seeds)
    tokens = draw(np.zeros((len(rows), vocab)), rows, generated=generated).token.reshape(seeds, positions)
    for a, b in ((tokens[1:], tokens[:-1]), (tokens[:, 1:], tokens[:, :-1])):
        table = np.bincount((a * vocab + b).ravel(), minlength=vocab**2).reshape(vocab, vocab)
        assert scipy.stats.chi2_contingency(table).pvalue > 1e-3


def test_noise_is_gumbel_with_a_fine_tail():
    noise = np.asarray(_gumbel(jnp.uint32(3), jnp.int32(5), 1 << 18))
    assert np.isfinite(noise).all()
    assert scipy.stats.kstest(noise, "gumbel_r").pvalue > 1e-3
    # 23 random bits would collide dozens of times in the 2000 largest.
    assert len(np.unique(np.sort(noise)[-2000:])) >= 1998


def test_extreme_temperatures_and_logits_stay_finite():
    logits = np.tile(np.float32([1e4, 1e4 - 1, -1e4, -np.inf]), (3, 1))
    rows = [(SamplingParams(temperature=t, top_p=0.99), 1, ()) for t in (1e-5, 1.0, 100.0)]
    tokens = np.stack([draw(logits, rows, generated=[step] * 3).token for step in range(64)], 1)
    assert set(tokens[0]) == {0}
    assert set(tokens[1]) == set(tokens[2]) == {0, 1}


# --- Logit processing ----------------------------------------------------------------------------


def test_processing_equals_a_direct_implementation():
    rng = np.random.default_rng(5)
    vocab, rows = 60, []
    for _ in range(16):
        params = SamplingParams(
            temperature=float(rng.choice([0, 1])),
            max_tokens=None,
            min_tokens=int(rng.integers(20)),
            repetition_penalty=float(rng.uniform(0.5, 2)),
            presence_penalty=float(rng.uniform(-2, 2)),
            frequency_penalty=float(rng.uniform(-2, 2)),
            logit_bias={int(t): float(rng.uniform(-100, 100)) for t in rng.choice(vocab, 10, replace=False)},
            allowed_token_ids=rng.choice(vocab, 30).tolist() if rng.integers(2) else None,
            bad_words=[rng.integers(4, size=rng.integers(1, 5)).tolist() for _ in range(20)],
            stop_token_ids=rng.choice(vocab, 3).tolist(),
            ignore_eos=bool(rng.integers(2)),
        )
        prompt, output = (rng.integers(vocab, size=size).tolist() for size in rng.integers(20, size=2))
        output += rng.integers(4, size=8).tolist()  # which bad words are made of
        rows.append((params, prompt, output))
    logits = (rng.normal(size=(16, vocab)) * 5).astype(np.float32)
    logits[:, 17] = -np.inf
    eos = (59, 0)
    got = jax.jit(process)(
        logits,
        unpack(*pack([(params, 0, eos, output) for params, _, output in rows])),
        np.stack([counts_of(vocab, prompt, output) for _, prompt, output in rows]),
        np.int32([len(output) for _, _, output in rows]),
    )
    expected = [
        reference_process(x, p, prompt, output, eos) for x, (p, prompt, output) in zip(logits, rows, strict=True)
    ]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("allowed", [None, range(6)])
def test_a_bad_word_is_banned_exactly_where_it_would_be_complete(allowed):
    """Outputs of few tokens, in which words begin everywhere, overlap and repeat."""
    rng, vocab, rows, steps = np.random.default_rng(11), 9, 16, 40
    words = [[tuple(rng.integers(vocab, size=rng.integers(1, 6)).tolist()) for _ in range(6)] for _ in range(rows)]
    asked = [(SamplingParams(bad_words=w, allowed_token_ids=allowed), row, ()) for row, w in enumerate(words)]
    ints, floats = pack(asked)
    counts, outputs, banned = np.zeros((rows, vocab), np.int32), [()] * rows, 0
    step = jax.jit(lambda params, counts, generated: process(jnp.zeros((rows, vocab)), params, counts, generated))
    follow = jax.jit(lambda ints, floats, token: follow_bad_words(unpack(ints, floats), floats, token))
    for generated in range(steps):
        logits = np.asarray(step(unpack(ints, floats), counts, np.full(rows, generated, np.int32)))
        for output, row_words, got in zip(outputs, words, logits, strict=True):
            ends = [(*output, token) for token in range(vocab)]
            bad = [any(end[-len(word) :] == word for word in row_words) for end in ends]
            bad = [b or (allowed is not None and token not in allowed) for token, b in enumerate(bad)]
            assert np.isneginf(got).tolist() == bad
            banned += sum(bad)
        tokens = rng.integers(vocab, size=rows)
        outputs = [(*output, int(token)) for output, token in zip(outputs, tokens, strict=True)]
        floats = follow(ints, floats, np.int32(tokens))
        again = pack([(*entry, output) for entry, output in zip(asked, outputs, strict=True)])
        np.testing.assert_array_equal(floats, again[1])
    assert banned > rows * steps // 2


def test_allowed_tokens_and_bad_words_fill_the_table_and_no_more():
    logits = np.arange(400)[None] * 0.1
    params = SamplingParams(
        temperature=0, allowed_token_ids=range(290), bad_words=[[289], [1] * 9], logit_bias={399: 9}
    )
    assert draw(logits, [(params, 0, ())]).token.tolist() == [288]
    with pytest.raises(ValueError, match="are 301 entries together; the compiled sampler has room for 300"):
        pack([(dataclasses.replace(params, bad_words=[[289], [1] * 10]), 0, ())])
    with pytest.raises(ValueError, match="'cat' has no token ids yet"):
        pack([(SamplingParams(bad_words="cat"), 0, ())])


def test_logit_bias_forces_and_bans():
    logits = np.random.default_rng(6).normal(size=(64, 20))
    logits[:, 3] += 10
    forced = draw(logits, [(SamplingParams(logit_bias={19: 100}), seed, ()) for seed in range(64)])
    assert set(forced.token) == {19}
    banned = draw(logits, [(SamplingParams(logit_bias={3: -100}), seed, ()) for seed in range(64)])
    assert 3 not in banned.token
    assert len(set(banned.token)) > 5


def test_as_many_biases_and_stop_tokens_as_the_tables_hold():
    vocab = 400
    bias = {vocab - 1 - i: -50.0 for i in range(300)}
    params = SamplingParams(temperature=0, logit_bias=bias, min_tokens=1, stop_token_ids=list(range(16)))
    # Most likely is the last token, then the one before it...: biases and the ban leave 99 as the best.
    token = draw(np.arange(vocab)[None] * 0.1, [(params, 0, ())]).token
    assert token.tolist() == [99]
    token = draw(np.arange(vocab)[None] * -0.1, [(params, 0, ())]).token
    assert token.tolist() == [16]


def test_no_stop_token_before_min_tokens():
    logits = np.zeros((4, 10))
    logits[:, [2, 5]] = 100, 50
    params = SamplingParams(min_tokens=3, stop_token_ids=[2])
    eos = (5,)
    for generated, expected in ((0, None), (2, None), (3, 2)):
        out = draw(logits, [(params, seed, eos) for seed in range(4)], generated=[generated] * 4)
        if expected is None:
            assert not {2, 5} & set(out.token)
        else:
            assert set(out.token) == {expected}
    # Past the ignored end of sequence, only the request's own stop token is held back.
    ignoring = SamplingParams(min_tokens=3, stop_token_ids=[2], ignore_eos=True)
    assert set(draw(logits, [(ignoring, seed, eos) for seed in range(4)]).token) == {5}


def test_is_stop():
    rows = [(SamplingParams(stop_token_ids=[4]), 0, (2,)), (SamplingParams(ignore_eos=True), 0, (2,)), None]
    params = unpack(*pack(rows))
    for token, expected in ((2, [True, False, False]), (4, [True, False, False]), (0, [False] * 3)):
        assert is_stop(params, jnp.full(3, token)).tolist() == expected


# --- Counting -------------------------------------------------------------------------------------


def test_counts_follow_chunked_prompts_and_generated_tokens():
    """Prompts arrive in padded chunks, some for no row at all; then rows generate, not always all of them."""
    rng = np.random.default_rng(7)
    rows, vocab, chunk = 4, 30, 5
    mark, count = jax.jit(mark_prompt), jax.jit(count_tokens)
    prompts = [rng.integers(vocab, size=size).tolist() for size in (12, 5, 1, 8)]
    # The rows' previous users left their counts behind.
    counts = jnp.asarray(rng.integers(1 << 30, size=(rows, vocab)), jnp.int32)
    for start in range(0, 15, chunk):
        pieces = [prompt[start : start + chunk] for prompt in prompts]
        tokens = np.array([piece + [7] * (chunk - len(piece)) for piece in pieces])
        valid = np.array([[i < len(piece) for i in range(chunk)] for piece in pieces])
        targets = np.int32([row if piece else rows + row for row, piece in enumerate(pieces)])
        # A dropped chunk claims everything, and must change nothing.
        valid[targets >= rows] = True
        first = np.array([start == 0 or target >= rows for target in targets])
        order = rng.permutation(rows)
        counts = mark(counts, targets[order], tokens[order], valid[order], first[order])
    outputs = [[] for _ in range(rows)]
    for _ in range(40):
        tokens, active = rng.integers(vocab, size=rows), rng.random(rows) < 0.7
        counts = count(counts, tokens, active)
        for row in np.flatnonzero(active):
            outputs[row].append(tokens[row])
    expected = [counts_of(vocab, *pair) for pair in zip(prompts, outputs, strict=True)]
    np.testing.assert_array_equal(counts, expected)
    # Flagging again (a prompt recomputed in part) keeps what was generated.
    again = mark(counts, np.int32([0]), np.array([prompts[0][:chunk]]), np.ones((1, chunk), bool), np.array([False]))
    np.testing.assert_array_equal(again, expected)


# --- Seeds and neighbours -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_anywhere_in_any_batch():
    rng = np.random.default_rng(8)
    vocab, steps = 300, 12
    params = SamplingParams(temperature=1.2, top_k=100, top_p=0.95, min_p=0.001, presence_penalty=0.5)
    logits = (rng.normal(size=(steps, vocab)) * 2).astype(np.float32)

    def generate(batch, position, seed):
        tokens = []
        for step in range(steps):
            x = rng.normal(size=(batch, vocab)).astype(np.float32)
            x[position] = logits[step]
            rows = [(SamplingParams(temperature=2.0), int(rng.integers(1 << 32)), ()) for _ in range(batch)]
            rows[position] = (params, seed, ())
            generated = rng.integers(100, size=batch)
            generated[position] = step
            tokens.append(int(draw(x, rows, generated=generated).token[position]))
        return tokens

    alone = generate(1, 0, 1234)
    assert len(set(alone)) > 3
    for batch, position in ((2, 1), (8, 0), (8, 5)):
        assert generate(batch, position, 1234) == alone
    assert generate(1, 0, 1235) != alone


def test_seed_bits():
    """All 32 bits count, and no more than those."""
    logits = np.zeros((1, 1000))
    tokens = {seed: draw(logits, [(SamplingParams(), seed, ())]).token[0] for seed in (5, 5 + 2**31, 5 + 2**32)}
    assert tokens[5] == tokens[5 + 2**32] != tokens[5 + 2**31]


def test_garbage_in_a_row_stays_there():
    rng = np.random.default_rng(9)
    logits = rng.normal(size=(6, 100)).astype(np.float32)
    params = SamplingParams(top_p=0.9, top_k=50, frequency_penalty=1.0, logit_bias={5: 1.0}, min_tokens=2)
    rows = [(params, seed, (3,)) for seed in range(6)]
    clean = draw(logits, rows, mode="logprobs")
    good = [0, 2, 3, 5]
    for garbage in (np.nan, np.inf, -np.inf):
        bad = logits.copy()
        bad[[1, 4]] = garbage
        got = draw(bad, [None if i == 1 else row for i, row in enumerate(rows)], mode="logprobs")
        for a, b in zip(got, clean, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_array_equal(a[good], b[good])
        assert ((got.token >= 0) & (got.token < 100)).all()


# --- Log-probabilities ----------------------------------------------------------------------------


@pytest.mark.slow
def test_logprobs_are_those_of_the_raw_logits():
    rng = np.random.default_rng(10)
    vocab = 200
    logits = (rng.normal(size=(16, vocab)) * 3).astype(np.float32)
    logits[1] += 1e4
    logits[2, 50:] = -np.inf
    logits[3] = np.round(logits[3])  # many ties
    params = SamplingParams(temperature=3.0, frequency_penalty=1.0, logit_bias={9: 3.0})
    rows = [(params, seed, ()) for seed in range(16)]
    counts = rng.integers(3, size=logits.shape).astype(np.int32)
    out = draw(logits, rows, counts=counts, mode="logprobs")
    assert out.token.tolist() == draw(logits, rows, counts=counts).token.tolist()

    exact = scipy.special.log_softmax(logits.astype(np.float64), -1)
    np.testing.assert_allclose(out.logprob, exact[np.arange(16), out.token], rtol=1e-5, atol=1e-5)
    ranks = 1 + (logits > logits[np.arange(16), out.token][:, None]).sum(-1)
    assert out.rank.tolist() == ranks.tolist()
    assert len(set(ranks)) > 8
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :20]
    np.testing.assert_array_equal(out.top_ids, order)
    np.testing.assert_allclose(out.top_logprobs, np.take_along_axis(exact, order, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_only_the_mode_asked_for_is_filled():
    logits, rows = np.eye(5)[:2], [(SamplingParams(), 0, ())] * 2
    assert draw(logits, rows, mode="greedy")[1:] == draw(logits, rows)[1:] == (None,) * 5
    small = draw(logits, rows, mode="logprobs")
    assert small.top_ids.shape == small.top_logprobs.shape == (2, 5)


# --- Form -----------------------------------------------------------------------------------------


def test_pack_and_unpack_agree():
    params = SamplingParams(
        temperature=0.5,
        top_k=40,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        min_tokens=4,
        stop_token_ids=[8],
        logit_bias={6: -1.5, 3: 2.0, 5: 1.0},
        allowed_token_ids=[6, 3],
        bad_words=[[7, 9]],
    )
    ints, floats = pack([None, (params, 2**32 - 2, (1,)), (SamplingParams(temperature=1e-6, top_k=-1), 0, ())])
    rows = jax.tree.map(np.asarray, unpack(ints, floats))
    scalars = {name: value.tolist() for name, value in rows._asdict().items() if value.ndim == 1}
    assert scalars == {
        "temperature": [0, 0.5, 0],
        "top_p": [1, 0.25, 1],
        "min_p": [0, 0.125, 0],
        "repetition": [1, 1.5, 1],
        "presence": [0, -0.5, 0],
        "frequency": [0, 0.75, 0],
        "top_k": [0, 40, 0],
        "seed": [0, 2**32 - 2, 0],
        "min_tokens": [0, 4, 0],
        "allowed": [0, 2, 0],
    }
    assert rows.stop_ids[1].tolist() == [8, 1] + [-1] * 14
    assert dict(zip(rows.bias_ids[1], rows.bias_values[1], strict=True)) == {
        6: -1.5,
        3: 2.0,
        7: 1e3,
        9: -math.inf,
        -1: 0.0,
    }
    assert (rows.stop_ids[[0, 2]] == -1).all()
    assert (rows.bias_ids[[0, 2]] == -1).all()
    # A row alone packs as it does among others.
    for whole, alone in zip((ints, floats), pack([(params, 2**32 - 2, (1,))]), strict=True):
        np.testing.assert_array_equal(whole[1], alone[0])


@pytest.mark.slow
def test_compiles_to_plain_reductions():
    """No sort, and branches on TPUs alone: some targets lack control flow, or are slow at it."""
    abstract = functools.partial(jax.ShapeDtypeStruct, (2, 64))
    traced = jax.jit(functools.partial(sample, mode="sample")).trace(
        abstract(jnp.float32),
        jax.eval_shape(unpack, *pack([None] * 2)),
        abstract(jnp.int32),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    for platform in ("tpu", "cuda", "neuron"):
        module = traced.lower(lowering_platforms=(platform,)).compiler_ir("hlo").get_hlo_module().to_string()
        operations = set(re.findall(r" ([\w-]+)\(", module))
        assert "reduce" in operations
        assert not operations & {"sort", "topk", "while", "custom-call"}
        assert ("conditional" in operations) == (platform == "tpu")
