"""Prompts of which later layers see some tokens: as transformers and numpy have it, alone and in batches."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import long_contexts
from inferlib import LLM, Buckets, SamplingParams
from inferlib.config import DeviceKind, EngineOptions
from inferlib.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig
from inferlib.option_checks import ConfigurationError
from inferlib.programs.counter import compilations
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import planned_shards
from tests.helpers.llms import build_llm, new_engine, random_prompts
from tests.helpers.poison import before_each_dispatch, poison, tokens_of
from tests.helpers.propagation import generated

LENGTH, SEGMENT, LAYER, SHARE = 320, 128, 2, 0.5
# Chunks of 48, for what is left of a prompt, or 128.
BUCKETS = Buckets((48, 2 * SEGMENT), (4,), (LENGTH,), tile=SEGMENT)
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
# Around the ends of segments, of chunks and of what goes on of them.
PROMPTS = random_prompts([1, 32, 33, 48, 49, 64, 65, 127, 128, 129, 176, 177, 256, 300], seed=2)
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "int8 mesh": {"kv_cache_dtype": "int8", "parallel": "dp=2,tp=2", "decode_steps": 2},
}


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("llama", num_hidden_layers=3, max_position_embeddings=512)


@pytest.fixture(scope="module")
def fastkv(path):
    """`fastkv(option, kind)`: a shared LLM of four rows."""

    @functools.cache
    def build(option: str | None = f"fastkv:{LAYER}:0.5", kind: str = "llama") -> LLM:
        options = {"decode_steps": 1, "page_size": 8, "sparse_prefill": option, **KINDS[kind]}
        return build_llm(path, BUCKETS, **options)

    return build


@pytest.fixture(scope="module")
def expected(path) -> list[list[int]]:
    return [generated(path, prompt, GREEDY.max_tokens or 0, LAYER, SHARE, SEGMENT) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "llama" else pytest.mark.release) for kind in KINDS]
)
def test_tokens_are_the_papers(kind, fastkv, expected):
    """Alone and in a batch, with NaN in all that is not valid. Nothing compiles after the warm-up."""
    llm = fastkv(kind=kind)
    llm.warmup(["greedy"])
    before = compilations()
    alone = [tokens for prompt in PROMPTS for tokens in tokens_of(llm, [prompt], GREEDY)]
    assert tokens_of(llm, PROMPTS, GREEDY) == alone
    assert compilations() == before
    with before_each_dispatch(llm, poison):
        assert tokens_of(llm, PROMPTS, GREEDY) == alone
    if kind == "llama":
        assert alone == expected
    assert "packs the cells of later layers" in str(llm.no_prefix_caching)


@pytest.mark.slow
def test_later_layers_have_fewer_cells(fastkv):
    """So many as the device says, and zeros behind them."""
    llm = fastkv()
    with new_engine(llm) as engine:
        tokens_of(llm, [PROMPTS[-1]], GREEDY)
        tokens, rows = len(PROMPTS[-1]) + 4, int(engine.state.skipped[0])
        assert rows == SEGMENT + 44 - 32  # of two segments, and of 44 tokens
        counts = [int(np.any(np.asarray(keys) != 0, axis=(1, 3)).sum()) for keys in engine.cache[::2]]
        assert counts == [tokens, tokens, tokens - rows]


@pytest.mark.slow
def test_all_tokens_are_full_attention(fastkv):
    """Bit by bit, if all go on; but for rounding, if a prompt is short. A smaller share leaves something out."""
    full, every, some = (fastkv(x) for x in (None, f"fastkv:{LAYER}:1", f"fastkv:{LAYER}:0.5"))

    def cells(llm: LLM, prompt: list[int]) -> np.ndarray:
        """All cells of a prompt."""
        with new_engine(llm, prefix_caching=False) as engine:
            tokens_of(llm, [prompt], replace(GREEDY, max_tokens=1))
            return np.stack(jax.tree.map(np.asarray, engine.cache))

    for prompt, equal in ((PROMPTS[-1], False), (PROMPTS[1][:29], True)):
        expected = cells(full, prompt)
        np.testing.assert_array_equal(cells(every, prompt), expected)
        assert np.allclose(cells(some, prompt), expected, rtol=0, atol=1e-5) == equal


@pytest.mark.slow
def test_preempted_sequences(fastkv, expected):
    """They are prefilled again. Short ones lose no tokens by that, and the first in order is not preempted."""
    llm = fastkv()
    short = random_prompts([8, 8, 8], seed=5)
    long = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)  # 32 tokens in all, which all go on
    alone = [tokens for prompt in short for tokens in tokens_of(llm, [prompt], long)]
    with new_engine(llm, pages=LENGTH // 8) as engine:
        requests = [PROMPTS[-1][:230], *short]
        first = tokens_of(llm, requests[:1], long)
        assert tokens_of(llm, requests, long) == first + alone
        assert engine.scheduler.preemptions


def resolve(platform: str = "cpu", parallel: str | None = None, **options: Any):
    shards = None if parallel is None else planned_shards(Parallelism.parse(parallel))
    sizes = EngineOptions(**{"max_batch": 8, "max_len": 2048, "sparse_prefill": "fastkv:1:0.3", **options})
    return sizes.resolve(DeviceKind(platform), shards)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": "cp=2"}, "with tp, ep and dp alone"),
        ({"parallel": "tp=2,rules=tp_sp"}, "with tp, ep and dp alone"),
        ({"platform": "neuron"}, "does not run on Trainium"),
        ({"scan": True}, "leave scan out"),
        ({"host_cache": "1GiB"}, "leave host_cache and disk_cache out"),
        ({"speculation": "ngram:3"}, "does not work with speculation yet"),
        ({"attention_pages": "quest:16"}, "does not work with attention_pages yet"),
        ({"cache_policy": "keydiff:512"}, "does not work with sparse_prefill yet"),
        ({"cascade": True}, "fastkv packs cells by row"),
        ({"itl": 0.1}, "does not work with itl yet"),
        ({"sparse_prefill": "fastkv:1:0.3:512", "buckets": Buckets((32, 128), (8,), (2048,))}, "has up to 128 tokens"),
    ],
)
def test_what_cannot_be_propagated(options, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve(**options)


def test_defaults_of_platforms():
    for platform in ("cpu", "gpu", "tpu"):
        made = resolve(platform)
        assert (made.segment, made.scan, made.cascade) == (2048, False, False)
        assert made.buckets.prefill[:3] == (128, 512, 2048)
    assert resolve(sparse_prefill="fastkv:1:0.3:512", max_len=4096).segment == 512
    assert resolve(sparse_prefill="fastkv:1:0.3:512", max_len=300).segment == 300


def model(count: int = 4, **options: Any) -> ModelConfig:
    """A model of so many layers. options: of the last one's attention."""
    attention = AttentionSpec(heads=1, kv_heads=1, head_dim=2, scale=1.0, rope=None)
    specs = [*[attention] * (count - 1), replace(attention, **options)]
    layers = tuple(LayerSpec(spec, MlpSpec(hidden=2)) for spec in specs)
    return ModelConfig("test", vocab=64, dim=2, layers=layers, context=4096)


def test_models_that_it_is_not_for(fastkv):
    made = resolve()
    made.check_model(model())
    for odd in (model(window=8), model(cache_of=0)):
        with pytest.raises(ConfigurationError, match="windows, latents, states or layers that read the cache of"):
            made.check_model(odd)
    with pytest.raises(ConfigurationError, match="without the learned sinks"):
        made.check_model(model(sinks=True))
    with pytest.raises(ConfigurationError, match="two layers or more"):
        made.check_model(model(1))


def test_prompts_are_not_scored(fastkv):
    llm = fastkv()
    for call in (
        lambda: llm.generate([PROMPTS[3]], SamplingParams(prompt_logprobs=0)),
        lambda: llm.embed([PROMPTS[3]]),
    ):
        with pytest.raises(ValueError, match="computes no last hidden states of tokens that later layers do not see"):
            call()


@pytest.mark.release
def test_smollm2_finds_what_is_hidden():
    """With 32 % of the tokens in the last third of the layers, selected by the question."""
    llm = long_contexts.build("smollm2", 448, None, dtype="float32", sparse_prefill="fastkv:20:0.3:512")
    asked = long_contexts.questions(llm, long_contexts.TEXT.read_text(), 448, contexts=1)
    assert long_contexts.answers(llm, asked) == len(asked)
