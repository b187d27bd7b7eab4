"""What `explain` promises, against what devices hold and what compiled programs say."""

from __future__ import annotations

import json
from collections import Counter

import jax
import pytest
from typer.testing import CliRunner

from inferlib import configs
from inferlib.buckets import Buckets
from inferlib.cli import app
from inferlib.config import EngineConfig
from inferlib.models.abstract import abstract_model
from inferlib.models.families import config_from_hf
from inferlib.ops.backend import Backend
from inferlib.planning.explain import explain
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program_set import ProgramSet
from inferlib.sharding import axes
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.rules import PRESETS
from inferlib.sharding.shards import Shards, planned_shards
from tests.helpers.hlo import assert_collectives_equal
from tests.sharding.conftest import CHUNK, MAX_LEN, ROWS

# Those of the families' greedy programs are read where these run (test_models.py).


@pytest.mark.slow
def test_collectives_of_rarer_layers_are_those_promised(programs_of):
    """QK-norm over all heads; others are read where they run."""
    programs = programs_of("olmo2", "cp=2,tp=2")
    rows = programs.config.rows
    assert_collectives_equal(programs, ProgramKey("greedy", rows, MAX_LEN, steps=4))
    assert_collectives_equal(programs, ProgramKey("greedy", rows, MAX_LEN, chunks=1, chunk=CHUNK))


@pytest.mark.parametrize("parallel", ["cp=2,tp=2,rules=helix", pytest.param("dp=2", marks=pytest.mark.release)])
@pytest.mark.slow
def test_collectives_of_sampling_are_those_promised(parallel, programs_of):
    programs = programs_of("llama", parallel)
    rows = programs.config.rows
    for key in (
        ProgramKey("logprobs", 0, MAX_LEN, chunks=1, chunk=CHUNK, detail="logprobs"),
        ProgramKey("sample", rows, MAX_LEN),
    ):
        counts = assert_collectives_equal(programs, key)
        # All that replicas say is whether any row has a top_k, and whether any has a top_p.
        assert parallel != "dp=2" or counts == {("all-reduce", "data", 2 * 4): 1}


@pytest.mark.slow
def test_collectives_of_stacked_layers_are_those_promised(programs_of):
    programs = programs_of("smollm2", "tp=2,dp=2", scan=True)
    counts = assert_collectives_equal(programs, ProgramKey("greedy", 2, MAX_LEN, steps=4))
    assert counts["all-reduce", "tensor", 4 * 2 * 72] == 1 + 2 * 2  # the embedding, two in each layer
    assert counts["all-reduce", "data", 4 * 2] == 1  # whether to go on


def test_steps_that_are_counted_do_not_ask_whether_to_go_on():
    programs = _planned("tp=2,dp=2", platform="gpu")
    assert "whether to go on" not in purposes(programs, ProgramKey("greedy", 2, MAX_LEN, steps=4))


@pytest.mark.parametrize(("rows", "chunks", "fused"), [(4, 0, True), (512, 0, False), (4, 1, False)])
def test_sums_that_the_fused_kernel_makes_are_told_apart(rows, chunks, fused):
    programs = _planned("tp=4", platform="gpu", backend=Backend(all_reduce="pallas"))
    key = ProgramKey("greedy", rows, MAX_LEN, chunks=chunks, chunk=CHUNK * chunks)
    (step,) = explain(programs.model, programs.plan, programs.config, [key]).steps
    kinds = {c.purpose: c.kind for c in step.collectives if c.purpose in ("embedding", "attention", "feed-forward")}
    layers = "fused all-reduce" if fused else "all-reduce"
    assert kinds == {"embedding": "all-reduce", "attention": layers, "feed-forward": layers}
    assert ("mailboxes" in purposes(programs, key)) == fused


def _planned(parallel: str, **options) -> ProgramSet:
    """Of a model that the fused kernel takes."""
    shards = planned_shards(Parallelism.parse(parallel))
    config = config_from_hf(configs.load("llama3-8b") | {"num_hidden_layers": 2})
    model = abstract_model(config, "bfloat16", shards=shards)
    buckets = Buckets(prefill=(CHUNK,), batch=(512,), cache=(MAX_LEN,))
    return ProgramSet.make(model, EngineConfig(512, MAX_LEN, buckets, decode_steps=4, shards=shards, **options))


def purposes(programs: ProgramSet, key: ProgramKey) -> set[str]:
    (step,) = explain(programs.model, programs.plan, programs.config, [key]).steps
    return {c.purpose for c in step.collectives}


@pytest.mark.slow
def test_sampling_gathers_no_logits(programs_of):
    """The largest array that sampling sends has a few numbers per row, whatever the vocabulary."""
    for parallel, shares in (("tp=4", 4), ("cp=4,tp=2,rules=helix", 8)):
        programs = programs_of("llama", parallel)
        key = ProgramKey("logprobs", ROWS, MAX_LEN)
        (step,) = explain(programs.model, programs.plan, programs.config, [key]).steps
        sent = {c.nbytes for c in step.collectives if c.purpose not in ("log-sum-exps", "parts of attention")}
        most_likely = shares * min(20, -(-131 // shares))
        assert sent == {4 * ROWS * 96, 4 * ROWS, 4 * ROWS * most_likely, 8 * ROWS * shares}


def test_every_preset_sums_attention_and_feed_forward_alike():
    """Blocks that run both in parallel sum them at once; or attention has nothing to sum."""
    for rules in PRESETS.values():
        over = {axis for name in (axes.KV_HEADS, axes.HEAD_OUT) for axis in rules.axes_of(name)}
        assert over == (set() if rules.name == "dp_attention" else set(rules.axes_of(axes.MLP))), rules.name


@pytest.mark.slow
def test_explain_says_what_the_devices_hold(engine_of):
    for which in (("smollm2", "tp=4"), ("gemma3", "dp=2,cp=2,tp=2"), ("smollm2", "cp=2,tp=2,rules=tp2d")):
        engine = engine_of(*which)
        told = explain(engine.model, engine.plan, engine.config, [])
        for placements, arrays in (
            (told.weights, engine.weights),
            (told.cache, engine.cache),
            (told.state, engine.state),
        ):
            parts = [array.addressable_shards[0].data for array in jax.tree.leaves(arrays)]
            stored = Counter((part.shape, part.nbytes) for part in parts)
            said = Counter()
            for p in placements:
                said[p.local_shape, p.nbytes // p.count] += p.count
            assert said == stored
            assert sum(p.nbytes for p in placements) == sum(part.nbytes for part in parts)


def test_explain_as_text(programs_of):
    programs = programs_of("smollm2", "tp=4")
    key = ProgramKey("greedy", ROWS, MAX_LEN)
    text = str(explain(programs.model, programs.plan, programs.config, [key]))
    flat = " ".join(text.split())
    assert "Arrays on tensor 4, rules tp" in flat
    # 3 KV heads on 4 devices: a padded one.
    assert "attn.qkv 2 embed, kv_heads/tensor, queries, head_dim 72 x 4 x 5 x 8 72 x 1 x 5 x 8 23.0 kB" in flat
    assert "25.0% of query heads, 25.0% of cache" in flat
    assert "all-reduce tensor attention 2 1.2 kB 2.3 kB" in flat
    alone = programs_of("smollm2", "")
    text = str(explain(alone.model, alone.plan, alone.config, [key]))
    assert "no collectives" in text
    assert "Padding" not in text


def test_explain_counts_stacked_layers_one_by_one(programs_of):
    stacked, unrolled = (programs_of("smollm2", "tp=2,dp=2", scan) for scan in (True, False))
    told = [explain(p.model, p.plan, p.config, []) for p in (stacked, unrolled)]
    assert told[0] == told[1]


def test_explain_needs_no_devices():
    shards = planned_shards(Parallelism(tensor=64, data=32, rules="tp_sp"))
    assert (shards.size(axes.MLP), shards.replicas, shards.splits_tokens) == (64, 32, True)
    assert shards.sharding((axes.EMBED, axes.MLP)).shard_shape((8, 128)) == (8, 2)
    assert planned_shards(Parallelism()) == Shards()


@pytest.mark.slow
def test_info_of_a_mesh():
    """More devices than there are."""

    def info(parallel: str, *options: str):
        return CliRunner().invoke(app, ["info", "--config", "llama3-8b", "--parallel", parallel, *options])

    described = json.loads(info("tp=16,dp=4", "--json").stdout)
    attention = {"op": "decode_attention", "implementation": "pallas_tpu", "layers": "32 of 32", "reason": ""}
    assert attention in described["implementations"]
    facts = described["parallel"]
    assert facts["mesh"] == {"data": 4, "expert": 1, "sequence": 1, "tensor": 16}
    assert facts["waste"]["cache"] == 0.5
    decode, prefill = facts["steps"]
    assert (decode["tokens"], prefill["tokens"]) == (2, 512)  # 8 rows of 4 replicas
    by_purpose = {c["purpose"]: (c["count"], c["nbytes"]) for c in decode["collectives"]}
    assert by_purpose["attention"] == by_purpose["feed-forward"] == (32, 2 * 4096 * 2)
    text = info("tp=16,dp=4").stdout
    assert "Arrays on data 4 x tensor 16, rules tp" in text
    assert "Implementations on a TPU" in text
    ring = json.loads(info("cp=4,tp=2", "--json").stdout)["parallel"]["steps"][1]
    permuted = [c for c in ring["collectives"] if c["kind"] == "collective-permute"]
    # Keys and values of 4 heads, 512 of 2048 positions, to three devices in each of 32 layers.
    assert [(c["axis"], c["count"], c["nbytes"]) for c in permuted] == [("sequence", 32 * 2 * 3, 4 * 512 * 128 * 2)]
    assert "error: max_batch 8 does not divide over 3 replicas" in info("dp=3").stderr
    assert "error: cannot read 'tp:2'" in info("tp:2").stderr
