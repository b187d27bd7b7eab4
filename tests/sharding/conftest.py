"""Tiny models on meshes of fake CPU devices; programs and weights are made once per session."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from inferlib.buckets import Buckets
from inferlib.cache.plan import plan_cache
from inferlib.checkpoint.load import load_weights
from inferlib.checkpoint.safetensors import SafetensorsSource
from inferlib.config import EngineConfig
from inferlib.engine.engine import Engine
from inferlib.engine.sequence import Sequence
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.families import config_from_hf, family_of
from inferlib.programs.program_set import ProgramSet
from inferlib.sampling.params import SamplingParams
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import Shards, make_shards
from tests.helpers.llms import reference
from tests.helpers.oracle import make_checkpoint
from tests.helpers.oracle_cases import SMOLLM2_HEADS

ROWS, CHUNK, MAX_LEN = 4, 16, 64
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
# All with log-probabilities, so that one program chooses tokens.
MIXED = [
    SamplingParams(temperature=0.8, top_p=0.9, bad_words=[[t] for t in range(60, 90)], logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=5, repetition_penalty=1.2, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.2, logprobs=20, ignore_eos=True),
    SamplingParams(
        temperature=1.2,
        min_p=0.05,
        logit_bias={6: 2.0, 130: 3.0},
        allowed_token_ids=range(0, 131, 2),
        logprobs=1,
        ignore_eos=True,
    ),
]
# More prompts than rows, one of several chunks: rows are used again while others decode.
LENGTHS = [10, 3, 30, 1, 9, 16, 21]
PROMPT = np.random.default_rng(1).integers(0, 131, 40).tolist()

_LAYERS = lambda count: {"num_hidden_layers": count}  # noqa: E731
_LOCAL_GLOBAL = {**_LAYERS(2), "layer_types": ["sliding_attention", "full_attention"]}
# 6 query and 2 KV heads, 131 tokens: on 4 and 8 devices heads are copied and padded, the vocabulary nearly always.
SHAPES = {
    "llama": ("llama", _LAYERS(1)),
    "gemma3": ("gemma3_text", _LOCAL_GLOBAL),
    "gemma3, window 5": ("gemma3_text", {**_LOCAL_GLOBAL, "sliding_window": 5}),
    "deepseek": ("deepseek_v3", _LAYERS(2)),  # latent attention, and experts on the second layer
    "gpt_oss": ("gpt_oss", {**_LAYERS(1), "layer_types": ["full_attention"]}),  # sinks
    "gpt2": ("gpt2", _LAYERS(1)),  # learned positions
    # Chunks, then a layer without positions and with experts.
    "llama4": (
        "llama4_text",
        {**_LAYERS(2), "no_rope_layers": [1, 0], "attention_chunk_size": 7, "interleave_moe_layer_step": 2},
    ),
    # Parallel residuals, per-layer embeddings, a sparse gate; the last layer attends to the keys of the first.
    "gemma3n": (
        "gemma3n_text",
        {
            **_LAYERS(3),
            "layer_types": [*_LOCAL_GLOBAL["layer_types"], "sliding_attention"],
            "num_kv_shared_layers": 1,
            "intermediate_size": 80,
            "activation_sparsity_pattern": [0.7, 0.0, 0.0],
        },
    ),
    # Experts beside a dense feed-forward, with norms of their own.
    "gemma4": (
        "gemma4_text",
        {**_LOCAL_GLOBAL, "enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 40},
    ),
    # A gate on each number of a head's output.
    "gates": (
        "laguna",
        {**_LAYERS(1), "gating": "per-element", "layer_types": None, "mlp_layer_types": ["dense"]}
        | {"num_attention_heads_per_layer": None},
    ),
    # States, of two key heads with two value heads each, and gated attention.
    "qwen3_5": ("qwen3_5_text", {**_LAYERS(2), "layer_types": ["linear_attention", "full_attention"]}),
    # Channels of 6 heads, whose last inputs rows keep.
    "lfm2": ("lfm2", {**_LAYERS(2), "layer_types": ["conv", "full_attention"]}),
    # States of 6 heads, whose outputs are normed together, and residuals that are norms.
    "minimax": ("minimax", {**_LAYERS(2), "layer_types": ["linear_attention", "full_attention"]}),
    # States of 3 heads, norms before a layer's branches or behind them.
    "olmo_hybrid": ("olmo_hybrid", {**_LAYERS(2), "layer_types": ["linear_attention", "full_attention"]}),
    # Convolutions and states of 3 heads, and latents.
    "kimi_linear": ("kimi_linear", {**_LAYERS(2), "layer_types": ["linear_attention", "full_attention"]}),
    # States of two groups of three heads, which share a norm; a layer without a feed-forward, and one without a mixer;
    # experts without gates.
    "nemotron_h": (
        "nemotron_h",
        {"layers_block_type": ["mamba", "attention", "moe", "moe"], "n_routed_experts": 5, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56},
    ),
    # A window, sinks, and values smaller than keys.
    "mimo": ("mimo_v2_flash", {**_LAYERS(1), "layer_types": ["sliding_attention"]}),
    "smollm2": ("llama", _LAYERS(2) | SMOLLM2_HEADS),
    "biased": ("llama", {**_LAYERS(1), "attention_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", _LAYERS(1)),  # RMS norm over all heads together
    # 7 experts, which no even mesh divides, and gated shared ones; stacked, two layers.
    "experts": ("qwen2_moe", _LAYERS(2)),
    # So few of 8 experts for a token that all-to-all is worth it on 4 devices (test_exchange.py).
    "exchanged": ("qwen3_moe", {**_LAYERS(1), "num_local_experts": 8, "num_experts_per_tok": 2}),
    "cohere2": ("cohere2", _LAYERS(1)),  # layer norm, attention and feed-forward in parallel
}


@pytest.fixture(scope="session")
def shape_of(tmp_path_factory) -> Callable[[str], Path]:
    """`shape_of(name)`: the folder of a checkpoint of one of SHAPES."""

    @functools.cache
    def build(shape: str) -> Path:
        family, options = SHAPES[shape]
        return make_checkpoint(tmp_path_factory.mktemp(family), family, **options)

    return build


@pytest.fixture(scope="session")
def programs_of(shape_of) -> Callable[..., ProgramSet]:
    """`programs_of(shape, parallel, scan=False)`: programs without weights; "" is a single device."""

    @functools.lru_cache(maxsize=8)  # a program is a hundred memory maps, and Linux grants a process 65530
    def build(shape: str, parallel: str, scan: bool = False) -> ProgramSet:
        shards = make_shards(Parallelism.parse(parallel))
        config = config_from_hf(json.loads((shape_of(shape) / "config.json").read_text()))
        model = abstract_model(config, "float32", scan=scan, shards=shards)
        buckets = Buckets(prefill=(CHUNK,), batch=(ROWS,), cache=(MAX_LEN,))
        settings = EngineConfig(ROWS, MAX_LEN, buckets, decode_steps=4, scan=scan, shards=shards, page_size=4)
        plan = plan_cache(model, rows=ROWS, max_len=MAX_LEN, chunk=CHUNK, dtype="float32", pool=settings.pool)
        return ProgramSet(model, plan, settings)

    return build


@pytest.fixture(scope="session")
def engine_of(shape_of, programs_of) -> Callable[..., Engine]:
    """`engine_of(shape, parallel, scan=False)`: a new engine; weights and programs are shared."""

    @functools.lru_cache(maxsize=8)
    def weights(*which) -> tuple[jax.Array, ...]:
        return load(shape_of(which[0]), programs_of(*which).model, programs_of(*which).config.shards)

    def build(shape: str, parallel: str = "", scan: bool = False) -> Engine:
        programs = programs_of(shape, parallel, scan)
        return Engine(programs.model, weights(shape, parallel, scan), programs.config, programs=programs)

    return build


@pytest.fixture(scope="session")
def expected(shape_of) -> Callable:
    """`expected(what, shape)`: "logits", or "passes" over sequences with their tokens, of transformers, which compiles
    nothing."""

    @functools.cache
    def compute(what: str, shape: str):
        if what == "logits":
            return reference(shape_of(shape), PROMPT)
        assert what == "passes"
        return lambda s: reference(shape_of(shape), [*s.prompt, *s.tokens])

    return compute


def load(path: Path, model: AbstractModel, shards: Shards, wrap: Callable = lambda source: source):
    family = family_of(json.loads((path / "config.json").read_text()))
    return load_weights(wrap(SafetensorsSource(path)), family, model, shards=shards)


def run(engine: Engine, sequences: list[Sequence]) -> list[Sequence]:
    for s in sequences:
        engine.add(s)
    while engine.busy:
        engine.advance()
    return sequences


def requests(params: list[SamplingParams], seed: int, detail: str = "") -> list[Sequence]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 131, n).tolist() for n in LENGTHS]
    return [Sequence(p, params[i % len(params)], 8 + i, seed=i, detail=detail) for i, p in enumerate(prompts)]


def logits(engine: Engine) -> np.ndarray:
    """Of a prompt of three chunks."""
    (s,) = run(engine, [Sequence(PROMPT, GREEDY, 0, 0, detail="logits")])
    return np.concatenate(s.prompt_details)[:, : engine.model.config.vocab]


def assert_same_logits(engine, shape: str, expected) -> None:
    want = expected("logits", shape)
    assert np.abs(logits(engine) - want).max() < 2e-5 * np.abs(want).max()


def assert_same_logits_and_tokens(engine: Engine, shape: str, expected) -> None:
    """Of one run, which also returns the logits of its prompts: two programs instead of four. Each token is the best by
    transformers."""
    got, vocab = run(engine, requests([GREEDY], seed=2, detail="logits")), engine.model.config.vocab
    assert [len(s.tokens) for s in got] == [8 + i for i in range(len(LENGTHS))]
    for s in got:
        want, count = expected("passes", shape)(s), len(s.prompt)
        assert s.tokens == want[count - 1 : -1].argmax(-1).tolist()
        assert np.abs(np.concatenate(s.prompt_details)[:, :vocab] - want[:count]).max() < 2e-5 * np.abs(want).max()
