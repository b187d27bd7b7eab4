"""Models that repeat layers, against their published arithmetic in torch and against themselves."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib import LLM, Buckets, SamplingParams
from inferlib.cache.plan import plan_cache
from inferlib.calibration.calibrate import _original
from inferlib.checkpoint.eagle3 import new_head
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import abstract_model
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.config import ConfigError
from inferlib.models.families import config_from_hf
from inferlib.models.quantization import Quantization
from inferlib.ops.backend import Backend
from inferlib.sharding.mesh import Parallelism, ShardingError
from inferlib.sharding.shards import planned_shards
from tests.helpers.llms import MAX_LEN, build_llm, random_prompts
from tests.helpers.looped import CASES, HUGINN, PARCAE, looped_logits, make_looped
from tests.helpers.poison import before_each_dispatch, poison, tokens_of
from tests.helpers.sequences import run, sequence
from tests.helpers.tokenizer import VOCAB, write_tokenizer
from tests.models.test_parity import one_pass

TOLERANCE = 1e-4
BUCKETS = Buckets(prefill=(16,), batch=(4,), cache=(MAX_LEN,))
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
# Through the cache fewer layers outside the core, and of Huginn's one in it. `test_depth` has the same Parcae.
FEWER = {"n_layers_in_prelude": 1, "n_layers_in_coda": 1}
THROUGH = PARCAE | FEWER
# States that are drawn, as in published models.
DRAWN = HUGINN | FEWER | {"n_layers_in_recurrent_block": 1, "state_init": "like-init"}
DEPTHWISE = {"early_exit": True, "depthwise_batching": True}
# As wide as kernels for TPUs need.
WIDE = {"n_embd": 128, "recurrent_embedding_dimension": 128, "intermediate_size": 256}
WIDE |= {"recurrent_intermediation_embedding_dimension": 256, "n_layers_in_prelude": 1, "n_layers_in_coda": 1}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("looped")
    paths = {name: make_looped(folder / name, hf) for name, hf in {"parcae": THROUGH, "huginn": DRAWN}.items()}
    for path in paths.values():
        write_tokenizer(path)
    return paths


@pytest.fixture(scope="module")
def parcae(paths) -> LLM:
    return build_llm(paths["parcae"], BUCKETS, decode_steps=2)


@pytest.fixture(scope="module")
def huginn(paths) -> LLM:
    return build_llm(paths["huginn"], BUCKETS, decode_steps=1)


# ---- one pass


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_published_arithmetic(name, tmp_path):
    """By the published names of tensors; stacked layers outside the core, or none."""
    path, tokens = make_looped(tmp_path, CASES[name]), np.array(random_prompts([50])[0], np.int32)
    expected = looped_logits(CASES[name], tokens)
    assert expected.std() > 0.9
    np.testing.assert_allclose(one_pass(path, tokens, stacked=name == "parcae"), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_weights_are_stored_once_and_never_copied():
    """A program of six steps differs from one of two in the cells of its cache alone."""
    config, bytes_of = config_from_hf(HUGINN), {}
    for steps in (2, 6):
        looped = replace(config, loop=replace(config.loop, steps=steps))
        model = abstract_model(looped, "float32")
        plan = plan_cache(model, rows=4, max_len=64, chunk=16, dtype="float32")

        def run(weights, cache, tokens, model=model, plan=plan):
            ctx = StepContext(StepBatch.of_rows(tokens, tokens), model.config, plan.max_len)
            hidden, new, *_ = model.merge(weights)(ctx, plan.view(cache))
            return hidden, plan.flatten(new)

        arrays = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in specs] for specs in (model.specs, plan.arrays)]
        tokens = jax.ShapeDtypeStruct((4,), jnp.int32)
        memory = jax.jit(run, donate_argnums=1).lower(*arrays, tokens).compile().memory_analysis()
        cells = plan.nbytes
        bytes_of[steps] = model.nbytes, memory.argument_size_in_bytes - cells, memory.temp_size_in_bytes
    assert bytes_of[2] == bytes_of[6]
    assert bytes_of[2][1] == bytes_of[2][0] + 4 * 4  # weights and tokens
    core = sum(w.arrays[0].nbytes for w in model.weights if model.passes(w) > 1)
    assert bytes_of[6][2] < core / 2


# ---- through the cache


@pytest.mark.slow
def test_decoding_equals_one_pass(parcae):
    """Prompts of different lengths share four rows, and the longest ends at the last position. What is not valid may
    hold NaN."""
    prompts = random_prompts([7, 8, 17, 33, 1, MAX_LEN - 30], seed=1)
    first = tokens_of(parcae, prompts, GREEDY)
    assert tokens_of(parcae, prompts, GREEDY) == first  # now from pages of the first time
    for prompt, tokens in zip(prompts, first, strict=True):
        logits = looped_logits(THROUGH, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        assert (logits.max(-1) - logits[np.arange(len(tokens)), tokens]).max() < 1e-3
    with before_each_dispatch(parcae, poison):
        assert tokens_of(parcae, prompts, GREEDY) == first


@pytest.mark.slow
def test_states_are_drawn_by_position(huginn):
    """So they depend on neither the batch nor the chunks of a prompt, and decoding draws those of a full pass."""
    prompts = random_prompts([20, 9, 41, 3, 16], seed=2)
    together = tokens_of(huginn, prompts, GREEDY)
    for prompt, tokens in zip(prompts, together, strict=True):
        logits = huginn.logits([*prompt, *tokens[:-1]])
        np.testing.assert_allclose(logits[: len(prompt)], huginn.logits(prompt), rtol=0, atol=TOLERANCE)
        logits = logits[len(prompt) - 1 :]
        assert (logits.max(-1) - logits[np.arange(len(tokens)), tokens]).max() < 1e-3
    zero = looped_logits(DRAWN | {"state_init": "zero"}, prompts[0])
    assert np.abs(huginn.logits(prompts[0]) - zero).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("huginn", {"parallel": "cp=2,tp=2"}),
        pytest.param("huginn", {"parallel": "dp=2,cp=2,tp=2"}, marks=pytest.mark.release),
        pytest.param("parcae", {"speculation": "ngram:3", "max_adapters": 2}, marks=pytest.mark.release),
    ],
    ids=["devices", "replicas", "drafts and adapters"],
)
def test_tokens_are_the_same(name, options, paths, request):
    prompts, params = random_prompts([20, 7, 33, 12], seed=4), replace(GREEDY, max_tokens=10)
    expected = tokens_of(request.getfixturevalue(name), prompts, params)
    assert tokens_of(build_llm(paths[name], BUCKETS, decode_steps=1, **options), prompts, params) == expected


@pytest.mark.release
def test_weights_on_chip_change_no_token(tmp_path):
    """Where tokens leave the core one by one; `tests/ops/test_on_chip.py` has single products."""
    path = make_looped(tmp_path / "wide", PARCAE | WIDE | {"mean_recurrence": 2})
    buckets = Buckets(prefill=(16,), batch=(2,), cache=(32,))
    write_tokenizer(path)
    memory, on_chip = (
        build_llm(path, buckets, dtype="bfloat16", quantization="int8", backend=backend, **DEPTHWISE)
        for backend in (Backend(matmul="pallas_tpu"), Backend(matmul="pallas_tpu", loop_weights="pallas_tpu"))
    )
    assert on_chip.engine.programs.choices.fallbacks == {}
    sampling = replace(GREEDY, exit_threshold=0.1)

    def of(llm: LLM) -> tuple[list[list[int]], np.ndarray]:
        """Tokens, and logits of prompts, of one run: kernels are interpreted."""
        sequences = [sequence(prompt, 3, sampling, detail="logits") for prompt in random_prompts([12, 7], seed=5)]
        tokens = run(llm.engine, sequences)
        return tokens, np.concatenate([detail for s in sequences for detail in s.prompt_details])

    (tokens, logits), (expected, expected_logits) = of(on_chip), of(memory)
    assert tokens == expected
    np.testing.assert_array_equal(logits, expected_logits)


# ---- the number of steps


def test_the_number_of_steps_is_an_option(paths, huginn):
    files = ModelFiles.open(paths["parcae"])
    assert files.looped(5).config == replace(files.config, loop=replace(files.config.loop, steps=5))
    model = huginn.engine.model
    assert [block.shapes[0][:-4] for block in huginn.engine.plan.blocks] == [(), (3,), ()]
    assert model.config.depth == 1 + 3 * 1 + 1
    assert len([w for w in model.weights if w.part == "attn.qkv"]) == 3


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (0, "can run 1 to 256 times, not 0: give loop_steps"),
        (257, "can run 1 to 256 times, not 257"),
        (2.5, "loop_steps is a whole number, such as 3, got 2.5"),
        (True, "loop_steps is a whole number, such as 3, got True"),
    ],
)
def test_wrong_numbers_of_steps(steps, message, paths):
    with pytest.raises(ConfigError, match=message):
        LLM(paths["parcae"], loop_steps=steps, progress=False)


def test_steps_are_for_looped_models(checkpoint):
    with pytest.raises(ConfigError, match="loop_steps is for models that repeat layers, and llama does not"):
        LLM(checkpoint("llama"), loop_steps=2, progress=False)


# ---- what is refused, and what is left as it is


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        (HUGINN | {"bias": True}, "bias=True"),
        (HUGINN | {"injection_type": "ffn"}, "injection_type='ffn'"),
        (HUGINN | {"mean_recurrence": 0}, "1 to 256 times, not 0"),
        (HUGINN | {"n_layers_in_prelude": 0}, "leaves no prelude, core or coda"),
        (HUGINN | {"n_heads": 5}, "n_embd 48 in config.json does not divide into 5 heads"),
        (HUGINN | {"num_key_value_heads": 2}, "num_key_value_heads=2"),
        (HUGINN | {"state_init": "unit"}, "state_init='unit'"),
        (PARCAE | {"norm_class_name": "LayerNorm"}, "norm_class_name='LayerNorm'"),
        (PARCAE | {"recurrent_embedding_dimension": 64}, "recurrent_embedding_dimension=64"),
        (PARCAE | {"init_strategy": "takase"}, "init_strategy='takase'"),
        (PARCAE | {"model_class_name": "GPT"}, r"architecture \['GPT'\]"),
    ],
)
def test_unsupported_options_are_named(hf, message):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(hf)


def test_what_runs_layers_once_is_refused(paths):
    files = ModelFiles.open(paths["huginn"])
    with pytest.raises(ConfigError, match="huginn_raven repeats layers, and a calibration runs each once"):
        _original(files)
    with pytest.raises(ConfigError, match="an EAGLE-3 head takes states of layers that run once"):
        new_head(files.config, 64)
    for parallel in ("tp=2,rules=tp_sp", "cp=2,tp=2,rules=tp2d"):
        with pytest.raises(ShardingError, match="which a loop over layers cannot: use tp"):
            abstract_model(files.config, "float32", shards=planned_shards(Parallelism.parse(parallel)))


def test_matrices_around_the_core_are_not_quantised():
    model = abstract_model(config_from_hf(PARCAE), "float32", quantization=Quantization.named("int8"))
    schemes = {w.part: w.scheme for w in model.weights}
    assert schemes["attn.qkv"] is not None
    assert all(scheme is None for part, scheme in schemes.items() if part.startswith("loop."))


def test_random_published_vocabularies_are_padded():
    config = config_from_hf(json.loads(json.dumps(PARCAE | {"vocab_size": VOCAB - 3})))
    assert config.vocab == VOCAB
