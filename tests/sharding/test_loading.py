"""Sizes made to divide over devices, and checkpoints read into them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferlib import configs
from inferlib.checkpoint.safetensors import SafetensorsSource
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.config import AttentionSpec
from inferlib.models.families import config_from_hf
from inferlib.models.layout import Layout
from inferlib.sharding.mesh import Parallelism, ShardingError
from inferlib.sharding.shards import planned_shards
from tests.helpers.counted_reads import CountedReads
from tests.sharding.conftest import load

# ---- layouts


@given(kv_heads=st.integers(1, 12), group=st.integers(1, 7), shards=st.integers(1, 16))
def test_head_layout(kv_heads, group, shards):
    spec = AttentionSpec(kv_heads * group, kv_heads, 8, 1.0, None)
    layout = spec.head_layout(shards)
    assert layout.groups % shards == 0
    assert np.array(layout.source).shape == (layout.groups, layout.queries + 2)
    seen, groups_of_kv = [], Counter()
    for *queries, key, value in layout.source:
        assert key == value
        groups_of_kv[key] += 1
        heads = [q for q in queries if q >= 0]
        assert all(q // group == key for q in heads)
        seen += heads
    assert sorted(seen) == list(range(spec.heads))
    assert {groups_of_kv[kv] for kv in range(kv_heads)} == {layout.copies}
    # Padding is less than a device's share; whatever divides stays as it is.
    assert groups_of_kv[-1] < shards
    assert layout.unchanged == (kv_heads % shards == 0)


def planned(parallel: str):
    return planned_shards(Parallelism.parse(parallel))


def test_waste():
    def waste(parallel: str) -> dict[str, float]:
        spec = config_from_hf(SMOLLM2)
        return {name: round(share, 4) for name, share in Layout(spec, planned(parallel)).waste().items()}

    assert set(waste("").values()) == set(waste("tp=3").values()) == set(waste("cp=8").values()) == {0.0}
    assert waste("tp=2") == {"query heads": 0.25, "cache": 0.25, "feed-forward": 0.0, "vocabulary": 0.0}
    # 3 KV heads on 8 devices: two copies of each and two groups of zeros; 2 of 16 query slots per copy pair stay empty.
    assert waste("tp=8")["query heads"] == round(1 - 9 / 16, 4)
    assert waste("tp=8")["cache"] == round(1 - 3 / 8, 4)
    # A cache of latents has one head, which each device of a split over heads holds.
    latent = config_from_hf(configs.load("deepseek-v2-lite"))
    assert Layout(latent, planned("tp=4,ep=2")).waste()["cache"] == 0.75
    assert Layout(latent, planned("cp=4,ep=2,rules=helix")).waste()["cache"] == 0.0
    # The cache split along sequences instead: no copies.
    assert waste("cp=8,rules=helix")["cache"] == waste("cp=2,tp=3,rules=helix")["cache"] == 0.0


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            "cp=5,tp=2,rules=tp2d",
            "split the model width of 576, which does not divide over 5 devices of the sequence axis",
        ),
        ("cp=5,tp=2,rules=tp2d", "it does over [1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 32, 36, 48, 64, 72, 96"),
        (
            "cp=3,tp=2,rules=helix",
            "the value head size of 64, which does not divide over 3 devices of the sequence axis; it",
        ),
    ],
)
def test_sizes_that_must_divide(parallel, message):
    with pytest.raises(ShardingError, match=re.escape(message)):
        abstract_model(config_from_hf(SMOLLM2), "float32", shards=planned(parallel))


SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


# ---- loading


def laid_out(read: Callable[[str], np.ndarray], spec, model: AbstractModel) -> np.ndarray:
    """A Llama weight as `assemble` should lay it out, slot by slot."""
    if spec.block is None:
        x = read({"embed": "model.embed_tokens", "head": "lm_head", "final_norm": "model.norm"}[spec.part] + ".weight")
        out = np.zeros(spec.shape, np.float32)
        if spec.part == "head":
            out[:, : x.shape[0]] = x.T
        else:
            out[: x.shape[0]] = x
        return out
    attn = model.config.layers[spec.block].attention
    source, h = model.layout.heads(attn).source, attn.head_dim
    suffix = ".bias" if spec.part.endswith("_bias") else ".weight"
    get = lambda module: read(f"model.layers.{spec.block}.{module}{suffix}")  # noqa: E731
    out = np.zeros(spec.shape, np.float32)
    match spec.part.removesuffix("_bias"):
        case "attn.qkv":
            q, k, v = (get(f"self_attn.{x}_proj") for x in "qkv")
            for group, slots in enumerate(source):
                for slot, head in enumerate(slots):
                    x = q if slot < len(slots) - 2 else k if slot == len(slots) - 2 else v
                    if head >= 0:
                        out[..., group, slot, :] = x[head * h : (head + 1) * h].T
        case "attn.o" if suffix == ".weight":
            o = get("self_attn.o_proj")
            for group, (*slots, _, _) in enumerate(source):
                for slot, head in enumerate(slots):
                    if head >= 0:
                        out[group, slot] = o[:, head * h : (head + 1) * h].T
        case "mlp.gate_up":
            for i, name in enumerate(("gate", "up")):
                x = get(f"mlp.{name}_proj")
                out[..., i, : x.shape[0]] = x.T
        case "mlp.down" if suffix == ".weight":
            x = get("mlp.down_proj")
            out[: x.shape[1]] = x.T
        case module:
            names = {"pre_attn_norm": "input_layernorm", "pre_mlp_norm": "post_attention_layernorm"}
            names |= {"attn.o": "self_attn.o_proj", "mlp.down": "mlp.down_proj"}
            out[:] = get(names[module])
    return out


@pytest.mark.parametrize(
    ("shape", "parallel"),
    [
        ("biased", "tp=2"),
        ("biased", "tp=8"),
        ("smollm2", "tp=4,dp=2"),
        ("biased", "cp=2,tp=4,rules=helix"),
        ("biased", "cp=4,tp=2,rules=tp2d"),
    ],
)
@pytest.mark.fast_cases(1)
def test_loaded_weights_are_laid_out(shape, parallel, shape_of, programs_of):
    model, shards = programs_of(shape, parallel).model, programs_of(shape, parallel).config.shards
    source = SafetensorsSource(shape_of(shape))
    for spec, weight in zip(model.weights, load(shape_of(shape), model, shards), strict=True):
        assert weight.sharding.is_equivalent_to(shards.sharding(spec.axes), weight.ndim), spec.name
        np.testing.assert_array_equal(np.asarray(weight), laid_out(source.read, spec, model), err_msg=spec.name)


@pytest.mark.parametrize(
    ("parallel", "shares", "attention_shares"),
    [
        ("tp=4", 4, 4),
        ("dp=2,tp=2", 2, 2),  # replicas share what was read
        ("cp=2,tp=2", 2, 2),
        ("cp=2,tp=2,rules=helix", 4, 2),
        ("cp=2,tp=2,rules=tp2d", 4, 4),
    ],
)
def test_each_part_is_read_once(parallel, shares, attention_shares, shape_of, programs_of):
    sources = []

    def wrap(source):
        sources.append(CountedReads(source))
        return sources[0]

    programs = programs_of("llama", parallel)
    load(shape_of("llama"), programs.model, programs.config.shards, wrap)
    (source,) = sources
    assert set(source.taken) == set(source.names())
    split = [name for name in source.names() if re.search(r"_proj", name)]
    assert len(split) == 7
    for name in split:
        attention = attention_shares if "self_attn" in name else shares
        assert source.taken[name] == [source.nbytes(name) // attention] * attention, name
