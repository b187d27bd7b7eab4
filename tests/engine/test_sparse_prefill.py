"""Prompts that attend to listed blocks: the same alone, in batches, in chunks and behind prefixes. About 25 s."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import numpy as np
import pytest

from inferlib import LLM, Buckets, SamplingParams, configs
from inferlib.config import DeviceKind, EngineOptions
from inferlib.engine import memory
from inferlib.models.abstract import abstract_model
from inferlib.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig
from inferlib.models.families import config_from_hf
from inferlib.option_checks import ConfigurationError
from inferlib.pallas_kernels import prefill_attention_hopper_gpu
from inferlib.programs.counter import compilations
from inferlib.programs.deployment import Deployment
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import planned_shards
from tests.helpers.llms import build_llm, new_engine, random_prompts
from tests.helpers.poison import before_each_dispatch, poison, tokens_of

LENGTH = 640  # five blocks, of which three are listed
BUCKETS = Buckets((256,), (4,), (LENGTH,), tile=128)  # one batch size: fewer programs
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SHARED = random_prompts([400], seed=1)[0]
# Around the ends of tiles and of chunks; two begin alike.
PROMPTS = [*random_prompts([1, 127, 128, 129, 257], seed=2), [*SHARED, 3, 4, 5], SHARED + [6] * 200]

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama mesh": {"parallel": "dp=2,tp=2", "scan": True, "kv_cache_dtype": "int8"},
    "llama mesh quest": {"parallel": "dp=2,tp=2", "scan": True, "kv_cache_dtype": "int8"}
    | {"attention_pages": "quest:4:16", "speculation": "ngram:3"},
    "gpt_oss": {},  # rings, and sinks
}


@pytest.fixture(scope="module")
def sparse(checkpoint):
    """`sparse(kind)`: a shared LLM of four rows; `sparse(kind, option)`: with other lists."""

    @functools.cache
    def build(kind: str, lists: str | None = "xattention:0.5:0.5", length: int = 1 << 10) -> LLM:
        options = {
            "buckets": BUCKETS,
            "max_len": LENGTH,
            "decode_steps": 1,
            "sparse_prefill": lists,
            "page_size": 128,
            **KINDS[kind],
        }
        return build_llm(checkpoint(kind.split()[0], max_position_embeddings=length), **options)

    return build


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "llama mesh" else pytest.mark.release) for kind in KINDS],
)
def test_rows_are_what_they_are_alone(kind, sparse):
    """With NaN in all that is not valid, and behind prompts that were there before. Nothing compiles. A mesh has
    whole caches, as one device."""
    llm = sparse(kind)
    llm.warmup(["greedy"])
    before, alone = compilations(), []
    for prompt in PROMPTS:
        llm.reset_prefix_cache()
        alone += tokens_of(llm, [prompt], GREEDY)
    for _ in range(2):  # the second time each prompt goes on from the cells of the first
        assert tokens_of(llm, PROMPTS, GREEDY) == alone
    assert compilations() == before
    assert llm.stats.cached_tokens or llm.engine.plan.snapshots
    with before_each_dispatch(llm, poison):
        assert tokens_of(llm, PROMPTS, GREEDY) == alone


@pytest.mark.slow
def test_all_blocks_are_full_attention(sparse):
    """Bit by bit, if all are listed; short lists leave something out."""

    def cells(llm: LLM) -> np.ndarray:
        """Of a prompt in all layers: those of the second are made of what the first has read."""
        with new_engine(llm, prefix_caching=False) as engine:
            tokens_of(llm, PROMPTS[-1:], dataclasses.replace(GREEDY, max_tokens=1))
            return np.stack([np.asarray(array) for array in engine.cache])

    full, every, some = (cells(sparse("llama", x)) for x in (None, "xattention:1:1", "xattention:0.5:0.5"))
    assert full[2:].any()
    np.testing.assert_array_equal(every, full)
    assert not np.allclose(some, full, rtol=0, atol=1e-5)


def resolve(platform: str = "cpu", parallel: str | None = None, **options: Any):
    shards = None if parallel is None else planned_shards(Parallelism.parse(parallel))
    sizes = {"max_batch": 8, "max_len": 512, "sparse_prefill": "xattention:0.9"}
    return EngineOptions(**sizes | options).resolve(DeviceKind(platform), shards)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparse_prefill": "xattention"}, "sparse_prefill is text such as 'xattention:0.9'"),
        ({"sparse_prefill": "mean:2"}, "is above 0 and at most 1"),
        ({"parallel": "cp=2"}, "leave cp out of parallel"),
        ({"platform": "neuron"}, "does not run on Trainium"),
        ({"platform": "gpu"}, "only that for Hopper takes.*backend='prefill_attention=xla'"),
    ],
)
def test_what_cannot_be_sparse(options, message, monkeypatch):
    monkeypatch.setattr(prefill_attention_hopper_gpu, "is_hopper", lambda: False)
    with pytest.raises(ConfigurationError, match=message):
        resolve(**options)


def test_models_platforms_and_artifacts():
    attention = AttentionSpec(heads=1, kv_heads=1, head_dim=2, scale=1.0, rope=None, window=8)
    model = ModelConfig("test", vocab=64, dim=2, layers=(LayerSpec(attention, MlpSpec(hidden=2)),), context=512)
    with pytest.raises(ConfigurationError, match=r"sparse_prefill .* is of layers that keep"):
        resolve().check_model(model)
    assert str(resolve("gpu", backend="prefill_attention=xla").sparse_prefill) == "xattention:0.9:0.25"
    made = Deployment(configs.load("llama3-8b"), "cpu", "bfloat16", Buckets((128,), (2,), (4096,)))
    sparse = dataclasses.replace(made, sparse_prefill="mean:0.9")
    assert Deployment.from_json(json.loads(json.dumps(sparse.to_json()))) == sparse
    (key, *_) = [key for key in made.keys() if key.chunks]  # noqa: SIM118
    assert made.program_hash(key, None) != sparse.program_hash(key, None)


@pytest.mark.parametrize(
    ("page", "dtype", "gathers"), [(128, None, False), (64, None, False), (128, "int8", True), (128, "fp8", True)]
)
def test_keys_that_a_kernel_reads_in_place_take_no_memory(page, dtype, gathers):
    """On a TPU, where pages have 128 positions at least: of one chunk as long as the bucket, 8 KV heads of 4,096
    positions, twice."""
    model = abstract_model(config_from_hf(configs.load("llama3-8b") | {"num_hidden_layers": 1}), "bfloat16")
    sizes = {"max_len": 4096, "buckets": Buckets((512,), (8,), (4096,)), "page_size": page, "kv_cache_dtype": dtype}
    config = resolve("tpu", "tp=1", **sizes)
    needed = memory._by_xla(config, model)
    assert needed == (2 * 8 * 4096 * 128 * 2 if gathers else 0)


def test_estimates_that_have_no_kernel_are_told(caplog):
    made = Deployment(configs.load("llama3-8b"), "v6e-1", "bfloat16", Buckets((512,), (2,), (4096,)), page_size=128)
    for estimate in ("xattention:1", "sample:1"):
        dataclasses.replace(made, sparse_prefill=estimate).planned()
    (message,) = caplog.messages
    assert message.startswith("block scores in 32 of 32 layers runs in XLA, not in the TPU kernel: 'sample' has none")
