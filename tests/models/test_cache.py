"""Through the cache: prefill by chunks, then decoding, equals one full pass of transformers.

Prefill buckets are 8 and 16, windows 8, rings 24 slots.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib import Buckets, SamplingParams, configs
from inferlib.cache.plan import plan_cache
from inferlib.models.abstract import abstract_model
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.config import AttentionSpec, ConfigError, LayerSpec, MlpSpec, ModelConfig
from inferlib.models.families import config_from_hf
from inferlib.option_checks import ConfigurationError
from inferlib.sharding.mesh import Parallelism, ShardingError
from inferlib.sharding.shards import planned_shards
from tests.helpers.llms import MAX_LEN, assert_greedy, build_llm, new_engine, random_prompts, reference
from tests.helpers.poison import before_each_dispatch, poison, tokens_of

# Logits have a standard deviation of 1 to 3; float32 sums in another order differ by 3e-5 at most.
TOLERANCE = 1e-4
# Experts decode in `test_attention_kinds` too, stacked ones in `tests/checkpoint/test_placement.py`.
FURTHER = pytest.param(("qwen3_moe", True), marks=pytest.mark.release)
MODELS = [("llama", False), ("gemma2", False), ("ministral", True), FURTHER]
# One token, around the buckets 8 and 16, several chunks, around the ring's 24 slots, nearly everything.
EDGES = [1, 7, 8, 9, 15, 16, 17, 24, 25, MAX_LEN - 1, MAX_LEN]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.fixture(params=MODELS, ids=lambda model: model[0])
def model(request, llm_of, checkpoint):
    """A shared LLM and its checkpoint."""
    family, scan = request.param
    return llm_of(family, scan), checkpoint(family)


@pytest.mark.slow
def test_prefill_equals_one_pass_at_every_bucket_edge(model):
    llm, path = model
    (tokens,) = random_prompts([MAX_LEN])
    expected = reference(path, tokens)
    assert expected.std() > 0.9
    for length in EDGES:
        logits = llm.logits(tokens[:length])
        assert logits.shape == (length, llm.model_config.vocab)
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, expected[:length], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_decoding_equals_one_pass(model):
    """Prompts of different lengths share four rows; they grow past two wraps of a ring or to the last position."""
    llm, path = model
    prompts = random_prompts([7, 8, 9, 15, 16, 17, 33, 1, MAX_LEN - 5], seed=1)
    until_full = dataclasses.replace(GREEDY, max_tokens=None)
    outputs = tokens_of(llm, prompts, [GREEDY] * 7 + [until_full] * 2)
    assert [len(tokens) for tokens in outputs] == [60] * 7 + [MAX_LEN - 1, 5]
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert_greedy(path, prompt, tokens)


@pytest.mark.fast_cases(1)
def test_poison_changes_nothing(model):
    """NaN in all that is not valid, at the start and before every dispatch: neither a token nor, bit by bit, a logit of
    a prompt of several chunks."""
    llm, _ = model
    prompts, shares = random_prompts([20, 1, 9, 33, 16, 4, 70], seed=10), []
    params = [dataclasses.replace(GREEDY, max_tokens=25)] * 7
    expected, logits = tokens_of(llm, prompts, params), llm.logits(prompts[-1])
    with before_each_dispatch(llm, lambda engine: shares.append(poison(engine))):
        assert tokens_of(llm, prompts, params) == expected
        np.testing.assert_array_equal(llm.logits(prompts[-1]), logits)
    assert len(shares) > 10
    assert shares[0] == 0
    assert 0 < max(shares) < 1


def test_layers_that_repeat_are_stacked(llm_of):
    """Five layers: a pattern of two that repeats and a single one, or five single ones."""
    stacked = llm_of("ministral", True).engine.model
    assert [len(s.pattern) * s.count for s in stacked.segments] == [4, 1]
    assert len(abstract_model(stacked.config, "float32", scan=False).segments) == 5


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"decode_steps": 1, "in_flight": 1}, {"in_flight": 4}], ids=str)
def test_the_pace_of_the_host_changes_nothing(options, llm_of):
    """Tokens do not depend on the steps of a dispatch or on how many are under way."""
    llm, prompts = llm_of("gemma2"), random_prompts([3, 20, 9, 1, 30, 8], seed=4)
    expected = tokens_of(llm, prompts, GREEDY)
    with new_engine(llm, **options):
        assert tokens_of(llm, prompts, GREEDY) == expected


@pytest.mark.slow
def test_cache_buckets(checkpoint):
    """Attention reads up to the smallest bucket that holds every row."""
    buckets, path = Buckets(prefill=(8,), batch=(2,), cache=(24, MAX_LEN)), checkpoint("llama", num_hidden_layers=1)
    llm = build_llm(path, buckets, decode_steps=1)
    prompts = random_prompts([10, 3, 30, 1], seed=5)
    seen = set()
    get = llm.engine.programs.get
    llm.engine.programs.get = lambda key: seen.add(key.limit) or get(key)
    for prompt, tokens in zip(prompts, tokens_of(llm, prompts, GREEDY), strict=True):
        assert_greedy(path, prompt, tokens)
    assert seen == set(buckets.cache)


def test_layers_with_a_window_keep_a_ring(llm_of):
    """A ring has window + chunk slots, if that is less than a full row."""
    model = llm_of("gemma2").engine.model
    k, h = model.config.layers[0].attention.kv_heads, model.config.layers[0].attention.head_dim

    def shapes(max_len, chunk):
        plan = plan_cache(model, rows=3, max_len=max_len, chunk=chunk, dtype=jnp.bfloat16)
        return [(*set(block.shapes), block.ring) for block in plan.blocks]

    full = ((3, k, 32, h), False)  # a row is one page
    assert shapes(25, chunk=16) == [((3, k, 24, h), True), full]
    assert shapes(25, chunk=17) == [full, full]
    assert shapes(300, chunk=16) == [((3, k, 24, h), True), ((9, k, 128, h), False)]
    assert [block.ring for block in llm_of("llama").engine.plan.blocks] == [False, False]


def test_rotary_keys_of_latents_are_folded_where_memory_is_tiled():
    """DeepSeek-V3's 576 numbers a position take no padding; pages are whole tiles of folded keys."""
    model = abstract_model(config_from_hf(configs.load("deepseek-v3") | {"num_hidden_layers": 4}), jnp.bfloat16)
    options = dict(rows=3, max_len=600, chunk=16, dtype=jnp.bfloat16)
    dense, tiled = (plan_cache(model, **options, platform=platform) for platform in ("cpu", "tpu"))
    assert [(block.shapes[0][-2:], block.shapes[1][-2:]) for block in dense.blocks] == [((128, 512), (128, 64))] * 4
    assert [(block.shapes[0][-2:], block.shapes[1][-2:]) for block in tiled.blocks] == [((256, 512), (128, 128))] * 4
    assert {block.folds for block in tiled.blocks} == {(1, 2)}
    assert (dense.pages, tiled.pages) == (15, 9)
    assert tiled.nbytes == 4 * 3 * 768 * 576 * 2


def test_plan_allocates_what_it_says(llm_of):
    for llm in (llm_of("gemma2"), llm_of("ministral", True)):
        plan = llm.engine.plan
        arrays = plan.allocate()
        assert sum(array.nbytes for array in arrays) == plan.nbytes
        assert [(x.shape, x.dtype) for x in arrays] == [(x.shape, x.dtype) for x in plan.arrays]
        assert plan.flatten(plan.view(arrays)) == arrays
        assert all(len(x.axes) == len(x.shape) for x in plan.arrays)


@pytest.mark.slow
def test_layers_that_share_a_cache_hold_none(llm_of):
    """Stacked: two layers with a cache, and two that attend to that of the second."""
    llm = llm_of("gemma3n_text", True)
    plan, spec = llm.engine.plan, llm.model_config.layers[0].attention
    shape = (2, plan.pages, spec.kv_heads, plan.page, spec.head_dim)
    cached = [(block.shared, [array.shape for array in block.owned]) for block in plan.blocks]
    assert cached == [(False, [shape, shape]), (True, [])]
    assert [array.shape for array in llm.engine.cache] == [shape, shape]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (({}, {"cache_of": 0}, {}), "must be the last ones"),
        (({}, {"cache_of": 1}), "layer 1 shares the cache of layer 1, which has none"),
        (({}, {"cache_of": 0}, {"cache_of": 1}), "layer 2 shares the cache of layer 1, which has none"),
        (({"window": 8}, {"cache_of": 0}), "layer 1 shares the cache of layer 0 and has window=None instead of 8"),
        (({}, {"cache_of": 0, "head_dim": 8}), "head_dim=8 instead of 4"),
    ],
)
def test_caches_that_cannot_be_shared(specs, message):
    attention = AttentionSpec(heads=2, kv_heads=1, head_dim=4, scale=0.5, rope=None)
    layers = tuple(
        LayerSpec(dataclasses.replace(attention, value_dim=0, **options), MlpSpec(hidden=8)) for options in specs
    )
    with pytest.raises(ConfigError, match=message):
        ModelConfig("test", vocab=16, dim=8, layers=layers, context=64)


def test_stacked_layers_without_rotary_embedding():
    """What the layers of a step share must not be born inside the scan over the first of them."""
    attention = AttentionSpec(heads=2, kv_heads=1, head_dim=4, scale=0.5, rope=None)
    windowed = dataclasses.replace(attention, window=4)
    layers = [LayerSpec(spec, MlpSpec(hidden=8)) for spec in (attention, attention, windowed, windowed)]
    model = abstract_model(ModelConfig("test", vocab=16, dim=8, layers=tuple(layers), context=64), "float32", scan=True)
    assert [segment.count for segment in model.segments] == [2, 2]
    plan = plan_cache(model, rows=1, max_len=64, chunk=8, dtype=jnp.float32)

    def run(weights, cache, tokens):
        zero = jnp.zeros(1, jnp.int32)
        context = StepContext(StepBatch.of_chunks(tokens, zero, zero), model.config, plan.max_len)
        return model.merge(weights)(context, plan.view(cache))[0]

    weights = tuple(jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in model.specs)
    cache = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in plan.arrays)
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    assert jax.eval_shape(run, weights, cache, tokens).shape == (8, 8)


def hybrid(parallel: str = "tp=1"):
    """Qwen3-Next's first four layers, planned for devices that need not be there."""
    hf = configs.load("qwen3-next-80b-a3b") | {"num_hidden_layers": 4, "num_experts": 16}
    return abstract_model(config_from_hf(hf), jnp.bfloat16, shards=planned_shards(Parallelism.parse(parallel)))


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, "int8"])
def test_states_have_the_size_of_a_row_whatever_its_length(kv_dtype):
    """A quantised cache is that of the layers with attention."""
    plans = [plan_cache(hybrid(), rows=3, max_len=length, chunk=64, dtype=kv_dtype) for length in (100, 1000)]
    for block, other in zip(plans[0].blocks[:3], plans[1].blocks[:3], strict=True):
        assert block == other
        assert [(x.shape, x.dtype) for x in block.owned] == [
            ((3, 3, 16, 512), jnp.bfloat16),
            ((3, 32, 128, 128), jnp.float32),
        ]
        assert block.row_bytes() == 3 * 16 * 512 * 2 + 32 * 128 * 128 * 4
        assert sum(x.position_bytes() for x in block.arrays) == 0
    values = plans[0].blocks[3].arrays[0]
    assert values.shape == (3, 2, 128, 256)  # a page of each row
    assert values.dtype == (jnp.int8 if kv_dtype == "int8" else jnp.bfloat16)


def test_a_quantised_cache_needs_keys_and_values():
    hf = configs.load("qwen3-next-80b-a3b") | {"num_hidden_layers": 3, "num_experts": 16}
    with pytest.raises(ConfigurationError, match=r"'int8' is of keys and values, and no layer .* leave it out"):
        plan_cache(abstract_model(config_from_hf(hf), "bfloat16"), rows=3, max_len=100, chunk=64, dtype="int8")


@pytest.mark.parametrize("parallel", ["cp=2", "cp=2,tp=2,rules=helix", "cp=2,tp=2,rules=tp2d"])
def test_states_cannot_be_dealt_out_by_position(parallel):
    with pytest.raises(ShardingError, match="2 devices of the sequence axis, and recurrent layers"):
        hybrid(parallel)
