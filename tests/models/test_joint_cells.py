"""Cells of the cache that several KV heads share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib import Buckets, SamplingParams, configs
from inferlib.cache.plan import CachePlan, plan_cache
from inferlib.config import PoolSize
from inferlib.models.abstract import abstract_model
from inferlib.models.families import config_from_hf
from inferlib.models.layers.joint_cells import heads_of_a_cell, joint_cells, joint_queries, outputs_of_heads
from inferlib.ops.selected_pages import PageSelection
from tests.helpers.llms import MAX_LEN, assert_greedy, build_llm, random_prompts
from tests.helpers.poison import tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.mark.parametrize(
    ("heads", "group", "size", "count"),
    [
        *((8, 4, 64, 1), (8, 4, 112, 1)),  # a key and its value fill tiles, or nearly
        *((8, 4, 80, 2), (8, 4, 96, 2), (8, 4, 32, 2), (8, 4, 72, 4)),
        *((1, 4, 80, 1), (3, 4, 80, 1), (6, 2, 72, 2)),  # as many as divide the heads
        *((8, 8, 80, 2), (8, 9, 80, 1)),  # and as have at most 16 queries together
    ],
)
def test_cells_have_as_many_heads_as_fill_lanes(heads, group, size, count):
    assert heads_of_a_cell(heads, group, 2 * size, 128) == count


@pytest.mark.parametrize("count", [1, 2, 4])
def test_attention_over_joint_cells_is_that_of_each_head(count):
    rng = np.random.default_rng(0)
    heads, group, size = 4, 3, 5
    q, k, v = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((2, heads, group, size), (2, 7, heads, size), (2, 7, heads, size))
    )

    def attend(q, keys, values):
        logits = jnp.einsum("bkgh,btkh->bkgt", q, keys, precision="highest")
        out = jnp.einsum("bkgt,btkh->bkgh", jax.nn.softmax(logits), values, precision="highest")
        return out, jax.nn.logsumexp(logits, axis=-1)

    out, lse = attend(joint_queries(q, count), joint_cells(k, count), joint_cells(v, count))
    assert out.shape == (2, heads // count, count * group, count * size)
    for ours, theirs in zip(outputs_of_heads(out, lse, count), attend(q, k, v), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.release  # one device is in `test_backends`
def test_devices_have_joint_cells_of_their_heads(checkpoint):
    """A window whose ring wraps, and sinks of each query head; a device has two of four KV heads."""
    sizes = dict(head_dim=96, num_attention_heads=8, num_key_value_heads=4)
    path, prompts = checkpoint("gpt_oss", num_hidden_layers=1, **sizes), random_prompts([1, 20, 40])
    buckets = Buckets(prefill=(16,), batch=(2,), cache=(MAX_LEN,))
    llm = build_llm(path, buckets, platform="tpu", decode_steps=1, parallel="tp=2")
    assert cells_of(llm.engine.plan) == {(2, 384)}
    for prompt, tokens in zip(prompts, tokens_of(llm, prompts, GREEDY), strict=True):
        assert_greedy(path, prompt, tokens)


@pytest.mark.parametrize(
    ("pool", "cells"),
    [
        (PoolSize(), (16, 384)),
        (PoolSize(selection=PageSelection("quest", 8)), (32, 256)),
        (PoolSize(bounds=(1024,)), (32, 256)),
    ],
    ids=["all", "selected pages", "bounded"],
)
def test_what_tells_heads_apart_keeps_their_cells_apart(pool, cells):
    model = abstract_model(config_from_hf(configs.load("phi3-mini") | {"num_hidden_layers": 1}), "bfloat16")
    assert cells_of(
        plan_cache(model, rows=2, max_len=2048, chunk=512, dtype="bfloat16", platform="tpu", pool=pool)
    ) == {cells}


def cells_of(plan: CachePlan) -> set[tuple[int, int]]:
    """Cells of a position and the numbers of each, in all blocks of layers."""
    return {(x.shape[-3], x.shape[-1]) for x in plan.arrays}
