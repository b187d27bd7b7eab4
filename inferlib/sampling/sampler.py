"""Sampling on the device: one row per sequence, every parameter an array, no sort of the vocabulary.

Each row is processed in vLLM's order: its mask, logit bias, allowed tokens and bad words, min_tokens, penalties,
temperature, min_p, top_k, top_p, then a draw by the Gumbel-max trick. Rows never mix: NaN or other rubbish in an
inactive row changes no other row.

Shapes: N rows; V columns of logits on this device, all tokens or this device's shard of the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry_2x32

from inferlib.ops.by_platform import by_platform
from inferlib.sampling import token_table
from inferlib.sampling.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKENS, SamplingParams
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that the V columns of a device stand for: all tokens, or its shard of a split vocabulary."""

    shards: Shards = field(default_factory=Shards)

    def ids(self, x: jax.Array) -> jax.Array:
        """The token id of each element of x [N, V]."""
        return lax.broadcasted_iota(jnp.int32, x.shape, 1) + self.shards.index(axes.VOCAB) * x.shape[1]

    def columns(self, ids: jax.Array, width: int) -> jax.Array:
        """The column of each token id; `width`, which scatters drop, for negative ids and tokens of other devices."""
        local = ids - self.shards.index(axes.VOCAB) * width
        return jnp.where((ids >= 0) & (local >= 0) & (local < width), local, width)

    def sum(self, x: jax.Array, dtype=None) -> jax.Array:
        """Sum of each row, [N, 1]."""
        return self.shards.sum(x.sum(-1, keepdims=True, dtype=dtype), axes.VOCAB)

    def max(self, x: jax.Array) -> jax.Array:
        return self.shards.max(x.max(-1, keepdims=True), axes.VOCAB)

    def local(self, x: jax.Array, width: int) -> jax.Array:
        """This device's columns [N, width] of x, which has a column per token of the whole vocabulary."""
        return lax.dynamic_slice_in_dim(x, self.shards.index(axes.VOCAB) * width, width, axis=1)

    def size(self, width: int) -> int:
        return width * self.shards.size(axes.VOCAB)

    @property
    def split(self) -> bool:
        return self.shards.size(axes.VOCAB) > 1


WHOLE = Vocabulary()

# Set in `counts` for the tokens of the prompt; the bits below it count how often the token was generated.
PROMPT_FLAG = 1 << 30
_ALL = 2**31 - 1  # the threshold that all elements stay below


class RowParams(NamedTuple):
    """Sampling parameters of N rows."""

    temperature: jax.Array  # [N] f32, 0 for greedy
    top_p: jax.Array  # [N] f32
    min_p: jax.Array  # [N] f32
    repetition: jax.Array  # [N] f32
    presence: jax.Array  # [N] f32
    frequency: jax.Array  # [N] f32
    top_k: jax.Array  # [N] int32, 0 for off
    seed: jax.Array  # [N] uint32
    min_tokens: jax.Array  # [N] int32
    allowed: jax.Array  # [N] int32, number of entries of the table that are the only tokens; 0 for all
    stop_ids: jax.Array  # [N, MAX_STOP_TOKENS] int32, padded with -1
    bias_ids: jax.Array  # [N, MAX_LOGIT_BIAS] int32, padded with -1; see `token_table`
    bias_values: jax.Array  # [N, MAX_LOGIT_BIAS] f32


class Sampled(NamedTuple):
    """One token for each of N rows; only the mode "logprobs" fills more than `token`.

    Log-probabilities and ranks are of the model's own logits, before any processing. K: MAX_LOGPROBS, or the size of
    the vocabulary if that is smaller. Sampling leaves `depth` to programs of models whose tokens may leave a loop.
    """

    token: jax.Array  # [N] int32
    logprob: jax.Array | None = None  # [N] f32, of `token`
    rank: jax.Array | None = None  # [N] int32, of `token`; 1 is the most likely
    top_ids: jax.Array | None = None  # [N, K] int32, most likely first, equal ones by id
    top_logprobs: jax.Array | None = None  # [N, K] f32
    depth: jax.Array | None = None  # [N] int32, steps of the loop's core behind the logits


# The parameters of an empty row: temperature, top_p, min_p, repetition, presence, frequency.
_NEUTRAL = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
_INT_COLUMNS = 4  # top_k, seed, min_tokens, allowed; then the stop ids and the bias ids


class RowEntry(NamedTuple):
    """What is packed for a row.

    seed: derived from `params.seed` and the index of the output; only its low 32 bits are used. output: the tokens that
    the row has generated, if it is not at its beginning.
    """

    params: SamplingParams
    seed: int
    eos_ids: tuple[int, ...]
    output: Sequence[int] = ()


def pack(rows: Sequence[tuple | None]) -> tuple[np.ndarray, np.ndarray]:
    """Pack the parameters of N rows into two host arrays, so that a change costs two transfers; see `unpack`.

    Args:
        rows: a `RowEntry`, or its fields, for each row; None for an empty row.

    Returns:
        int32 [N, 320] and float32 [N, 306]. Rows are independent: the row of `pack([row])` can replace a row of
        an earlier pack.

    Raises:
        ValueError: a row has more stop tokens, biases, allowed tokens or bad words than the sampler holds.
    """
    ints = np.full((len(rows), _INT_COLUMNS + MAX_STOP_TOKENS + MAX_LOGIT_BIAS), -1, np.int32)
    ints[:, :_INT_COLUMNS] = 0
    floats = np.zeros((len(rows), len(_NEUTRAL) + MAX_LOGIT_BIAS), np.float32)
    floats[:, : len(_NEUTRAL)] = _NEUTRAL
    for row, entry in enumerate(rows):
        if entry is None:
            continue
        params, seed, eos_ids, output = RowEntry(*entry)
        seed_bits = np.uint32(seed & 0xFFFFFFFF).view(np.int32)
        ids, values, allowed = token_table.entries(params, output)
        ints[row, :_INT_COLUMNS] = max(params.top_k, 0), seed_bits, params.min_tokens, allowed
        stop_ids = params.stop_ids(eos_ids)
        ints[row, _INT_COLUMNS : _INT_COLUMNS + len(stop_ids)] = stop_ids
        bias_start = _INT_COLUMNS + MAX_STOP_TOKENS
        ints[row, bias_start : bias_start + len(ids)] = ids
        floats[row, : len(_NEUTRAL)] = (
            0.0 if params.greedy else params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        floats[row, len(_NEUTRAL) : len(_NEUTRAL) + len(ids)] = values
    return ints, floats


def unpack(ints: jax.Array, floats: jax.Array) -> RowParams:
    """The parameters in the two arrays of `pack`, on the device."""
    temperature, top_p, min_p, repetition, presence, frequency = (floats[:, i] for i in range(len(_NEUTRAL)))
    bias_start = _INT_COLUMNS + MAX_STOP_TOKENS
    return RowParams(
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        top_k=ints[:, 0],
        seed=lax.bitcast_convert_type(ints[:, 1], jnp.uint32),
        min_tokens=ints[:, 2],
        allowed=ints[:, 3],
        stop_ids=ints[:, _INT_COLUMNS:bias_start],
        bias_ids=ints[:, bias_start:],
        bias_values=floats[:, len(_NEUTRAL) :],
    )


@partial(jax.jit, static_argnames=("mode", "vocabulary"))  # traced once for all programs of equal shapes
def sample(
    logits: jax.Array,
    params: RowParams | None,
    counts: jax.Array | None,
    generated: jax.Array | None,
    *,
    mode: Literal["greedy", "sample", "logprobs"],
    vocabulary: Vocabulary = WHOLE,
    mask: jax.Array | None = None,
) -> Sampled:
    """Choose the next token of each row.

    Args:
        logits: [N, V] float32; -inf for tokens that do not exist.
        params: parameters of the rows.
        counts: [N, V] int32, tokens seen so far (`mark_prompt`, `count_tokens`).
        generated: [N] int32, tokens that each row has generated before this one.
        mode: static. "greedy" takes the most likely token (the lowest id among equals) and reads nothing but
            logits and masks, so the other arguments may be None; "sample" samples by each row's parameters; "logprobs"
            also reports log-probabilities.
        vocabulary: the tokens that this device's columns stand for.
        mask: the only tokens that may be chosen, see `permitted`; None: all. Log-probabilities do not regard it.

    Returns:
        The tokens, always in [0, V), even where the logits of a row are NaN.
    """
    left = logits if mask is None else jnp.where(permitted(mask, logits.shape[-1], vocabulary), logits, -jnp.inf)
    if mode == "greedy":
        return Sampled(_argmax(left, vocabulary))
    assert params is not None
    assert counts is not None
    assert generated is not None
    processed = process(left, params, counts, generated, vocabulary)
    # The distance to the best token in units of temperature, which is at least 0 whatever the scale of the logits.
    sampled = params.temperature > 0
    temperature = jnp.where(sampled, params.temperature, 1.0)
    distance = (vocabulary.max(processed) - processed) / temperature[:, None]
    noise = jax.vmap(_gumbel, (0, 0, None))(params.seed, generated, vocabulary.size(logits.shape[-1]))
    noise = vocabulary.local(noise, logits.shape[-1])
    scores = jnp.where(sampled[:, None], noise, 0.0) - distance
    token = _argmax(jnp.where(keep(distance, params, vocabulary), scores, -jnp.inf), vocabulary)
    if mode == "sample":
        return Sampled(token)
    return score(logits, token, vocabulary)


def mask_words(vocab: int) -> int:
    """How many words a mask of `vocab` tokens has."""
    return -(-vocab // 32)


def permitted(mask: jax.Array, width: int, vocabulary: Vocabulary = WHOLE) -> jax.Array:
    """A mask [N, W] int32 as bool [N, V], of this device's `width` columns. Bit `i % 32` of word `i // 32` stands for
    token i; bit 0 is the lowest.
    """
    bits = (mask[:, :, None] >> jnp.arange(32)) & 1
    return vocabulary.local(bits.reshape(mask.shape[0], -1)[:, : vocabulary.size(width)], width) != 0


def process(
    logits: jax.Array, params: RowParams, counts: jax.Array, generated: jax.Array, vocabulary: Vocabulary = WHOLE
) -> jax.Array:
    """Logits [N, V] after logit bias, the ban on bad words, on tokens that are not allowed and on stop tokens before
    `min_tokens`, and penalties."""
    width = logits.shape[-1]
    rows = jnp.arange(logits.shape[0])[:, None]
    bias_columns = vocabulary.columns(params.bias_ids, width)
    logits = logits.at[rows, bias_columns].add(token_table.added(params.bias_values), mode="drop")
    allowed = params.allowed[:, None]
    allowed_ids = jnp.where(jnp.arange(MAX_LOGIT_BIAS) < allowed, params.bias_ids, -1)
    allowed_columns = vocabulary.columns(allowed_ids, width)
    permitted = jnp.take_along_axis(logits, allowed_columns, -1, mode="fill", fill_value=-jnp.inf)
    logits = jnp.where(allowed > 0, -jnp.inf, logits).at[rows, allowed_columns].set(permitted, mode="drop")
    banned = (generated < params.min_tokens)[:, None]
    stop_columns = vocabulary.columns(jnp.where(banned, params.stop_ids, -1), width)
    logits = logits.at[rows, stop_columns].set(-jnp.inf, mode="drop")

    repetition = jnp.where(counts > 0, params.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    output_counts = (counts & (PROMPT_FLAG - 1)).astype(jnp.float32)
    logits -= params.frequency[:, None] * output_counts
    return logits - params.presence[:, None] * (output_counts > 0)


def keep(distance: jax.Array, params: RowParams, vocabulary: Vocabulary = WHOLE) -> jax.Array:
    """A mask [N, V] of the tokens that min_p, top_k and top_p leave; the best token always stays.

    Tokens as likely as the last one that stays also stay, so equal logits can exceed top_k. top_p is a fraction of the
    probability that min_p and top_k leave.

    Args:
        distance: [N, V] float32, best logit of the row minus each logit, over the temperature; at least 0.
    """
    # Among floats that are at least 0, the order of the values is the order of their bits.
    bits, least = lax.bitcast_convert_type(distance, jnp.int32), -jnp.log(params.min_p)[:, None]
    uses_k, uses_p = params.top_k > 0, params.top_p < 1

    def needed() -> jax.Array:  # of any replica: they stay in step
        return vocabulary.shards.max(jnp.stack([uses_k.any(), uses_p.any()]).astype(jnp.int32), axes.ROWS) > 0

    always = partial(jnp.ones, 2, jnp.bool_)  # where nothing branches, replicas need not ask each other
    any_k, any_p = by_platform(cuda=always, neuron=always, default=needed)

    def one(bits: jax.Array) -> jax.Array:
        return jnp.ones(bits.shape, jnp.float32)

    top_k = jnp.where(uses_k, params.top_k, jnp.inf)[:, None]
    last = _searched(any_k, lambda: _threshold(bits, one, top_k, vocabulary), len(bits))

    def mass(bits: jax.Array) -> jax.Array:
        distance = lax.bitcast_convert_type(bits, jnp.float32)
        return jnp.where((distance <= least) & (bits <= last), jnp.exp(-distance), 0.0)

    def nucleus() -> jax.Array:
        target = params.top_p[:, None] * vocabulary.sum(mass(bits))
        return _threshold(bits, mass, jnp.where(uses_p[:, None], target, jnp.inf), vocabulary)

    last = jnp.minimum(last, _searched(any_p, nucleus, len(bits)))
    return (distance <= least) & (bits <= last)


def _searched(needed: jax.Array, search: Callable[[], jax.Array], rows: int) -> jax.Array:
    """The threshold [N, 1] that `search` finds, or `_ALL` without a search if no row needs one.

    GPUs always search: at a branch they wait for the host. Trainium has no branches. XLA would turn a branch of cheap
    operations into a selection, for which it computes both: an optimization barrier is not cheap to it.
    """

    def branch() -> jax.Array:
        return lax.cond(
            needed, lambda: lax.optimization_barrier(search()), lambda: jnp.full((rows, 1), _ALL, jnp.int32)
        )

    return by_platform(cuda=search, neuron=search, default=branch)


Weights: TypeAlias = Callable[[jax.Array], jax.Array]  # of elements [N, V], by their bits


def _threshold(bits: jax.Array, weights: Weights, target: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """The smallest t [N, 1] for which the elements with bits <= t weigh `target` or more; `_ALL` if there is none.

    It is also the largest t for which the elements with bits < t weigh less, and is built from the top. This needs no
    sort, and few numbers per row from each shard of a split vocabulary.

    Args:
        bits: [N, V] int32, not negative.
        weights: float32, not negative.
        target: [N, 1] float32.
    """
    bit_by_bit = partial(_threshold_bit_by_bit, bits, weights, target, vocabulary)
    by_digits = partial(_threshold_by_digits, bits, weights, target, vocabulary)
    # CPUs read from their caches, so that compares count. On GPUs the host starts each round of a loop. Trainium has no
    # loops, and none of its reductions is of several arrays.
    cuda, neuron = partial(by_digits, parts=_parts(*bits.shape)), partial(bit_by_bit, unroll=True)
    return by_platform(cuda=cuda, tpu=by_digits, neuron=neuron, default=bit_by_bit)


def _parts(rows: int, width: int) -> int:
    """In how many parts GPUs add up each row, one by a block of threads. XLA would make parts of 256 elements: several
    sums of so few take longer to combine than to add up. Of few rows it keeps more processors busy."""
    return 32 if rows >= 16 and width % 32 == 0 else 1


def _threshold_bit_by_bit(
    bits: jax.Array, weights: Weights, target: jax.Array, vocabulary: Vocabulary, unroll: bool | None = None
) -> jax.Array:
    """`_threshold` in 31 passes of one compare and sum."""
    weighed = weights(bits)

    def settle_bit(i: jax.Array, t: jax.Array) -> jax.Array:
        candidate = t | (1 << (30 - i))
        below = vocabulary.sum(jnp.where(bits < candidate, weighed, 0.0))
        return jnp.where(below < target, candidate, t)

    return lax.fori_loop(0, 31, settle_bit, jnp.zeros(target.shape, jnp.int32), unroll=unroll)


def _threshold_by_digits(
    bits: jax.Array, weights: Weights, target: jax.Array, vocabulary: Vocabulary, parts: int = 1
) -> jax.Array:
    """`_threshold` in 11 passes, each of which settles three bits by 7 compares and sums; or in 8 of four bits, if a
    pass takes a collective. A pass reads the bits alone: it computes the weights again, which the barrier keeps apart
    from those of other passes. parts: of a row, which are added up before the row is."""
    t, add = jnp.zeros(target.shape, jnp.int32), lambda a, b: [x + y for x, y in zip(a, b, strict=True)]
    width = 4 if vocabulary.split else 3
    for shift in reversed(range(0, 31, width)):
        read = lax.optimization_barrier(bits)
        weighed = weights(read)
        candidates = [t | (digit << shift) for digit in range(1, min(1 << width, 1 << (31 - shift)))]
        below = [jnp.where(read < candidate, weighed, 0.0) for candidate in candidates]
        zeros = [jnp.zeros((), x.dtype) for x in below]
        if parts > 1:
            below = lax.reduce([x.reshape(len(x), parts, -1) for x in below], zeros, add, (2,))
        sums = lax.reduce(below, zeros, add, (1,))
        if vocabulary.split:  # one collective for all sums
            sums = list(vocabulary.shards.sum(jnp.stack(sums), axes.VOCAB))
        passed = [(x[:, None] < target).astype(jnp.int32) for x in sums]
        t |= sum(passed[1:], passed[0]) << shift
    return t


def _gumbel(seed: jax.Array, generated: jax.Array, vocab: int) -> jax.Array:
    """Gumbel noise for each of `vocab` tokens, which depends only on the seed and the position."""
    # Equal seeds promise equal tokens, so the generator is named: its default is a global setting.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), generated)
    random_bits = partial(jax.random.bits, shape=(vocab,), dtype=jnp.uint32)
    bits = by_platform(key, neuron=partial(_bits_without_int64, size=vocab), default=random_bits)
    # All 32 bits are used, and the finest steps are near 0, where the largest noise comes from. jax.random.gumbel uses
    # 23 bits: too coarse for tokens less likely than 1e-7, of which a large vocabulary has many.
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))


def _bits_without_int64(key: jax.Array, size: int) -> jax.Array:
    """The bits of `jax.random.bits`, made without the 64-bit integers that Trainium lacks. Slower on XLA:CPU."""
    count = jnp.concatenate([jnp.zeros(size, jnp.uint32), jnp.arange(size, dtype=jnp.uint32)])
    high, low = jnp.split(threefry_2x32(jax.random.key_data(key), count), 2)
    return high ^ low


def _argmax(x: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """The token [N] int32 with the largest element of each row of x [N, V] float32, the lowest id among equals.

    Takes two reductions: the Trainium compiler rejects the reduction over pairs that jnp.argmax lowers to. Devices that
    split the vocabulary send each other their largest elements and these tokens at once: a collective takes longer to
    start than its bytes take.
    """
    # Where nothing equals the maximum (NaN), the result is the last token, so it always is a token.
    last = vocabulary.size(x.shape[-1]) - 1
    best = x.max(-1, keepdims=True)
    ids = jnp.where(x == best, vocabulary.ids(x), last).min(-1)
    if vocabulary.shards.size(axes.VOCAB) == 1:
        return ids
    pairs = jnp.stack([lax.bitcast_convert_type(best[:, 0], jnp.int32), ids])
    bests, all_ids = jnp.split(vocabulary.shards.stack(pairs, axes.VOCAB), 2, axis=1)
    bests = lax.bitcast_convert_type(bests, jnp.float32)
    return jnp.where(bests == bests.max(0), all_ids, last).min(0)[0]


def score(logits: jax.Array, token: jax.Array, vocabulary: Vocabulary = WHOLE) -> Sampled:
    """Log-probability and rank of `token` [N], and the most likely tokens, under `logits` [N, V]."""
    width = logits.shape[-1]
    best = vocabulary.max(logits)
    normaliser = jnp.log(vocabulary.sum(jnp.exp(logits - best)))
    columns = vocabulary.columns(token, width)[:, None]
    local = jnp.take_along_axis(logits, columns, -1, mode="fill", fill_value=-jnp.inf)
    chosen = vocabulary.shards.max(local, axes.VOCAB)
    top, columns = lax.top_k(logits, min(MAX_LOGPROBS, width))
    # The best tokens of each device, most likely first, device after device: equal ones stay in the order of their ids.
    top = vocabulary.shards.gather(top, axes.VOCAB, dim=1)
    top_ids = vocabulary.shards.gather(columns + vocabulary.shards.index(axes.VOCAB) * width, axes.VOCAB, dim=1)
    top, order = lax.top_k(top, min(MAX_LOGPROBS, top.shape[-1]))
    return Sampled(
        token=token,
        logprob=(chosen - best - normaliser)[:, 0],
        rank=1 + vocabulary.sum(logits > chosen, dtype=jnp.int32)[:, 0],
        top_ids=jnp.take_along_axis(top_ids, order, -1),
        top_logprobs=top - best - normaliser,
    )


def is_stop(params: RowParams, tokens: jax.Array) -> jax.Array:
    """For each of tokens [N]: True if it ends its row, [N] bool."""
    return (params.stop_ids == tokens[:, None]).any(-1)


def follow_bad_words(params: RowParams, floats: jax.Array, tokens: jax.Array) -> jax.Array:
    """The packed `floats` [N, 306] after each row's next token [N]: they say which bad words the output has begun."""
    values = token_table.followed(params.bias_ids, params.bias_values, tokens)
    return jnp.concatenate([floats[:, : len(_NEUTRAL)], values], axis=1)


def count_tokens(
    counts: jax.Array,
    tokens: jax.Array,
    active: jax.Array,
    vocabulary: Vocabulary = WHOLE,
) -> jax.Array:
    """`counts` [N, V] plus one for each of the new tokens [N], in the rows where `active` [N]."""
    rows, vocab = counts.shape
    where = jnp.arange(rows), vocabulary.columns(jnp.where(active, tokens, -1), vocab)
    # Each row has one token. Counts are read and overwritten, as Trainium cannot add integers in a scatter.
    return counts.at[where].set(counts.at[where].get(mode="fill", fill_value=0) + 1, mode="drop")


def counts_of(prompt: Sequence[int], generated: Sequence[int]) -> dict[int, int]:
    """What `mark_prompt` makes of tokens, by token; others have 0."""
    flags, counts = dict.fromkeys(prompt, PROMPT_FLAG), Counter(generated)
    return {token: flags.get(token, 0) | counts[token] for token in {*flags, *counts}}


def mark_prompt(
    counts: jax.Array,
    rows: jax.Array,
    tokens: jax.Array,
    kinds: jax.Array,
    first: jax.Array,
    vocabulary: Vocabulary = WHOLE,
) -> jax.Array:
    """`counts` [R, V] with the tokens of P prefill chunks flagged as prompt, or counted if they were generated.

    Args:
        rows: [P] int32, the row of each chunk; a chunk whose row is R or more is dropped.
        tokens, kinds: [P, C], the chunks' tokens, and what they are: 0 padding, 1 of the prompt, 2 generated.
        first: [P], not 0 if the chunk begins a prompt: its row is cleared first.
    """
    row_count, vocab = counts.shape
    counts = counts.at[jnp.where(first != 0, rows, row_count)].set(0, mode="drop")
    where = rows[:, None], vocabulary.columns(jnp.where(kinds > 0, tokens, -1), vocab)
    # All occurrences of a token write the same number: what its row has of it, and what the chunks add.
    row, token, kind = jnp.repeat(rows, tokens.shape[1]), tokens.reshape(-1), kinds.reshape(-1)
    same = (row[:, None] == row) & (token[:, None] == token)
    added = jnp.sum(same & (kind == 2), axis=1, dtype=jnp.int32)
    flag = jnp.where(jnp.any(same & (kind == 1), axis=1), PROMPT_FLAG, 0)
    old = counts.at[where].get(mode="fill", fill_value=0)
    return counts.at[where].set((old + added.reshape(tokens.shape)) | flag.reshape(tokens.shape), mode="drop")
