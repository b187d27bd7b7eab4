"""Meshes and rules, and those that cannot be."""

from __future__ import annotations

import dataclasses
import re

import pytest
from jax.sharding import PartitionSpec

from inferlib import LLM
from inferlib.buckets import Buckets
from inferlib.config import EngineConfig
from inferlib.option_checks import ConfigurationError
from inferlib.sharding import axes
from inferlib.sharding.mesh import Parallelism, ShardingError, make_mesh
from inferlib.sharding.rules import PRESETS, Rules, preset
from inferlib.sharding.shards import Shards, make_shards, planned_shards
from tests.sharding.conftest import CHUNK, GREEDY, MAX_LEN, ROWS, requests


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "cannot read 'tp'"),
        ("tp=", "cannot read 'tp='"),
        ("pp=2", "cannot read 'pp=2'"),
        ("tp=two", "needs a number of devices"),
        ("tp=-2", "needs a number of devices"),
        ("tp=²", "needs a number of devices"),
        ("tp=0", "positive number of devices"),
        ("tp=2,tensor=4", "tensor appears twice"),
    ],
)
def test_parallelism_that_cannot_be_read(text, message):
    with pytest.raises(ShardingError, match=re.escape(message)):
        Parallelism.parse(text)


def test_parallelism():
    assert Parallelism.parse("") == Parallelism()
    both = Parallelism.parse(" tp=4, dp=2 ")
    assert (both, both.devices) == (Parallelism(tensor=4, data=2), 8)
    assert Parallelism.parse("cp=2,tp=4,ep=3") == Parallelism(tensor=4, sequence=2, expert=3, rules="cp")
    assert [Parallelism.parse(p).rules for p in ("dp=2", "cp=2", "cp=2,rules=helix")] == ["tp", "cp", "helix"]
    for text in ("tp=1", "tp=4,dp=2", "tp=1,rules=tp_sp", "tp=4,cp=2,ep=3,dp=5", "cp=2,rules=tp2d"):
        assert str(Parallelism.parse(text)) == text


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ((("widht", "tensor"),), "unknown logical axes ['widht']; known: "),
        (((axes.MLP, "model"),), "unknown mesh axes ['model']; known: "),
        (((axes.MLP, ("tensor", "model")),), "unknown mesh axes ['model']; known: "),
        (((axes.MLP, "tensor"), (axes.MLP, "data")), "twice"),
        (((axes.MLP, ("tensor", "sequence")),), "write ('sequence', 'tensor'), as the mesh"),
        (((axes.MLP, ("tensor", "tensor")),), "write ('tensor',)"),
    ],
)
def test_rules_that_name_what_there_is_not(table, message):
    with pytest.raises(ShardingError, match=re.escape(message)):
        Rules("mine", table)


def test_rules():
    rules = Rules("mine", ((axes.MLP, ("data", "tensor")), (axes.EMBED, "tensor")))
    assert rules.spec((axes.EMBED, None, axes.QUERIES)) == PartitionSpec("tensor", None, None)
    assert rules.spec((axes.GATE_UP, axes.MLP)) == PartitionSpec(None, ("data", "tensor"))
    with pytest.raises(ShardingError, match=r"two dimensions of .* on one mesh axis"):
        rules.spec((axes.EMBED, axes.GATE_UP, axes.MLP))
    with pytest.raises(ShardingError, match="no sharding preset is called 'tpp'; known: tp, tp_sp, cp, helix, tp2d"):
        preset("tpp")
    for make in (make_shards, planned_shards):  # also where nothing is to be split
        with pytest.raises(ShardingError, match="no sharding preset is called 'best'"):
            make(Parallelism.parse("rules=best"))
    assert {preset(name).name for name in PRESETS} == set(PRESETS)
    with pytest.raises(ValueError, match="a mesh needs rules"):
        Shards(make_mesh(Parallelism(tensor=2)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "cp=2,tp=2,rules=tp",
            "parallel=tp=2,cp=2,rules=tp: rules 'tp' split nothing over the sequence axis; cp, ",
        ),
        ("cp=2,rules=tp_sp", "rules 'tp_sp' split nothing over the sequence axis; cp, helix, tp2d do"),
    ],
)
def test_axes_that_the_rules_have_no_use_for(text, message):
    for make in (make_shards, planned_shards):
        with pytest.raises(ShardingError, match=re.escape(message)):
            make(Parallelism.parse(text))


def test_more_devices_than_there_are(shape_of):
    with pytest.raises(ShardingError, match=r"parallel=tp=8,dp=2 needs 16 devices, and there are 8"):
        LLM(shape_of("llama"), max_len=MAX_LEN, parallel="tp=8,dp=2")


def test_rows_that_do_not_divide(shape_of):
    with pytest.raises(ConfigurationError, match="max_batch 3 does not divide over 2 replicas"):
        LLM(shape_of("llama"), max_batch=3, max_len=MAX_LEN, parallel="dp=2")


def test_prefill_buckets_are_dealt_out():
    shards = planned_shards(Parallelism(sequence=12, tensor=2))
    with pytest.raises(
        ConfigurationError, match=re.escape("which [16, 32] do not allow: take multiples, such as [24, 36]")
    ):
        EngineConfig(2, 64, Buckets((12, 16, 32), (2,), (64,)), shards=shards)
    # By default they are; the longest may have room for more than the cache.
    config = EngineConfig.make("tpu", 2, 50, shards=shards)
    assert config.buckets == Buckets(prefill=(36, 60), batch=(1, 2), cache=(50,))
    with pytest.raises(ConfigurationError, match=re.escape("prefill bucket (72) exceeds max_len (50)")):
        EngineConfig(2, 50, Buckets((72,), (2,), (50,)), shards=shards)


@pytest.mark.slow
def test_llm_takes_parallel(shape_of, expected):
    asked, passes = requests([GREEDY], seed=2), expected("passes", "smollm2")
    buckets = Buckets(prefill=(CHUNK,), batch=(ROWS,), cache=(MAX_LEN,))
    llm = LLM(
        shape_of("smollm2"),
        max_batch=ROWS,
        max_len=MAX_LEN,
        buckets=buckets,
        parallel=Parallelism(tensor=3),  # surplus devices stay unused
        progress=False,
    )
    assert {len(w.sharding.device_set) for w in llm.engine.weights} == {3}
    params = [dataclasses.replace(GREEDY, max_tokens=s.max_tokens) for s in asked]
    for s, output in zip(asked, llm.generate([s.prompt for s in asked], params), strict=True):
        s.tokens = output.outputs[0].token_ids
        assert len(s.tokens) == s.max_tokens
        assert list(s.tokens) == passes(s)[len(s.prompt) - 1 : -1].argmax(-1).tolist()
