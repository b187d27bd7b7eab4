"""Models with lanes, against a plain reading of their description in torch and against themselves."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from inferlib import LLM, Buckets, SamplingParams, configs
from inferlib.cache.plan import plan_cache
from inferlib.calibration.calibrate import _original
from inferlib.checkpoint.eagle3 import new_head
from inferlib.checkpoint.source import CheckpointError
from inferlib.config import EngineConfig
from inferlib.model_files import ModelFiles
from inferlib.models import lanes
from inferlib.models.abstract import abstract_model
from inferlib.models.adapters import AdapterSlots
from inferlib.models.config import ConfigError
from inferlib.models.families import config_from_hf
from inferlib.models.quantization import Quantization
from inferlib.ops.backend import Backend
from inferlib.planning.collectives import LATE_SUMS
from inferlib.planning.costs import Deployed, step_time
from inferlib.planning.estimate import estimate
from inferlib.planning.recorder import record
from inferlib.programs.keys import ProgramKey
from inferlib.sharding.mesh import Parallelism, ShardingError
from inferlib.sharding.shards import planned_shards
from inferlib.targets import parse_target
from tests.helpers.hlo import assert_collectives_equal
from tests.helpers.lanes import CASES, LANES, lane_logits, make_lanes
from tests.helpers.llms import MAX_LEN, build_llm, random_prompts
from tests.helpers.poison import before_each_dispatch, poison, tokens_of
from tests.helpers.tokenizer import write_tokenizer
from tests.models.test_parity import one_pass

TOLERANCE = 1e-4
BUCKETS = Buckets(prefill=(16,), batch=(4,), cache=(MAX_LEN,))
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "max_position_embeddings")
QUICK = ("delay 1", "nothing early")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lanes")
    paths = {name: make_lanes(folder / name, hf) for name, hf in CASES.items()}
    for path in paths.values():
        write_tokenizer(path)
    return paths


@pytest.fixture(scope="module")
def alone(paths) -> LLM:
    """Four lanes on one device."""
    return build_llm(paths["delay 1"], BUCKETS, decode_steps=1)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in CASES])
def test_logits_equal_the_description(name, paths):
    """By the published names of tensors; stacked layers."""
    tokens = np.array(random_prompts([50])[0], np.int32)
    expected = lane_logits(CASES[name], tokens)
    assert expected.std() > 0.9
    np.testing.assert_allclose(one_pass(paths[name], tokens, stacked=True), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_decoding_equals_one_pass(alone):
    """Prompts of different lengths share four rows, and the longest ends at the last position."""
    prompts = random_prompts([7, 17, 33, 1, MAX_LEN - 10], seed=1)
    first = tokens_of(alone, prompts, GREEDY)
    assert tokens_of(alone, prompts, GREEDY) == first  # now from pages of the first time
    with before_each_dispatch(alone, poison):
        assert tokens_of(alone, prompts, GREEDY) == first
    for prompt, tokens in zip(prompts, first, strict=True):
        logits = lane_logits(CASES["delay 1"], [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        assert (logits.max(-1) - logits[np.arange(len(tokens)), tokens]).max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("delay 1", "tp=4"),
        pytest.param("delay 1", "dp=2,cp=2,tp=2", marks=pytest.mark.release),
        pytest.param("delay 2", "tp=8", marks=pytest.mark.release),
    ],
)
def test_meshes_give_the_same(name, parallel, paths):
    """One lane on each device, or several; the programs have the collectives that were promised."""
    llm = build_llm(paths[name], BUCKETS, parallel=parallel, decode_steps=1)
    prompts = random_prompts([20, 7, 33, 12], seed=4)
    for prompt, tokens in zip(prompts, tokens_of(llm, prompts, GREEDY), strict=True):
        logits = lane_logits(CASES[name], [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        assert (logits.max(-1) - logits[np.arange(len(tokens)), tokens]).max() < 1e-3
    programs = llm.engine.programs
    assert_collectives_equal(programs, ProgramKey("greedy", programs.config.rows, MAX_LEN, steps=1))


@pytest.mark.release
def test_models_whose_sums_are_large_give_the_same(paths, monkeypatch):
    monkeypatch.setattr(lanes, "MOST_BYTES", 0)
    test_meshes_give_the_same("delay 1", "tp=2", paths)


@pytest.mark.slow
def test_large_sums_are_made_at_once(monkeypatch):
    """As those of long chunks are; here all of them."""
    monkeypatch.setattr(lanes, "MOST_BYTES", 0)
    for name in ("delay 2", "nothing early"):
        recorded, estimated = collectives(config_from_hf(CASES[name]), "tp=4")
        assert Counter(estimated) == Counter(recorded)
        assert "collective-permute" not in {c.kind for c in recorded}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "margin"),
    [
        ({"backend": Backend(gate_up="separate"), "parallel": "tp=2"}, 1e-3),
        pytest.param({"speculation": "ngram:3"}, 1e-3, marks=pytest.mark.release),
        pytest.param({"quantization": "int8", "parallel": "tp=4"}, 0.3, marks=pytest.mark.release),
    ],
)
def test_options_go_with_lanes(options, margin, paths):
    """Tokens are the best ones, but for what rounding changes."""
    llm, prompts = build_llm(paths["delay 1"], BUCKETS, **options), random_prompts([20, 7, 33, 12], seed=4)
    for prompt, tokens in zip(prompts, tokens_of(llm, prompts, GREEDY), strict=True):
        logits = lane_logits(CASES["delay 1"], [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        assert (logits.max(-1) - logits[np.arange(len(tokens)), tokens]).max() < margin


@pytest.mark.slow
def test_embeddings_are_the_mean_of_the_lanes(alone, paths):
    """On one device and on several."""
    prompts = random_prompts([20, 7], seed=5)
    expected = alone.embed(prompts)
    assert expected.shape == (2, LANES["hidden_size"])
    got = build_llm(paths["delay 1"], BUCKETS, parallel="tp=4").embed(prompts)
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


def test_sums_that_arrive_late_are_permutations():
    """Of five layers, the first adds all sums at once, and the last sends none: 2 all-reduces, and permutations of the
    two branches of four layers, two steps of one hop each."""
    config, devices = config_from_hf(LANES), "tp=4"
    kinds = [layer.exchange for layer in config.layers if layer.exchange]
    assert [e.adds for e in kinds] == ["now", "late", "late", "late", "late"]
    assert [e.sends for e in kinds] == [True, True, True, True, False]
    recorded, _ = collectives(config, devices)
    late = [c for c in recorded if c.purpose == LATE_SUMS]
    assert [(c.kind, c.axis, c.count) for c in late] == [("collective-permute", "tensor", 4 * 2 * 2)]
    sums = {c.purpose: c.count for c in recorded if c.kind == "all-reduce" and c.nbytes == 4 * 64 * 4}
    assert sums == {"embedding": 1, "attention": 1, "feed-forward": 1, "head": 1}


@pytest.mark.parametrize(("name", "devices"), [("delay 2", "tp=8"), ("nothing", "tp=2"), ("nothing early", "tp=4")])
def test_estimated_collectives_are_those_recorded(name, devices):
    recorded, estimated = collectives(config_from_hf(CASES[name]), devices)
    assert Counter(estimated) == Counter(recorded)


def test_late_sums_cost_nothing_that_kernels_hide():
    """Of 70B in eight lanes on v6e: as long as the step's kernels take longer."""
    hf = configs.load("llama3-70b")
    config = config_from_hf(LANES | {key: hf[key] for key in SIZES} | {"num_lanes": 8})
    it = Deployed(config, parse_target("v6e:2x4"), Parallelism.parse("tp=8"))
    work = it.decode(32, 2048.0)
    late = tuple(c for c in work.collectives if c.purpose == LATE_SUMS)
    nothing, these, many = (
        step_time(replace(work, collectives=some), it.network)
        for some in ((), late, tuple(replace(c, count=10 * c.count) for c in late))
    )
    assert these.seconds == nothing.seconds < many.seconds
    assert these.network > 1e-3


def collectives(config, devices: str):
    """Those of a decode step, from a trace and by formulas."""
    shards = planned_shards(Parallelism.parse(devices))
    model = abstract_model(config, "float32", shards=shards)
    plan = plan_cache(model, rows=4, max_len=MAX_LEN, chunk=16, dtype="float32")
    settings, key = EngineConfig(4, MAX_LEN, BUCKETS, shards=shards), ProgramKey("greedy", 4, MAX_LEN, steps=1)
    return record(model, plan, settings, key), estimate(model, plan, shards, key, settings.backend)


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_lanes": 3}, "key/value heads do not divide over 3 lanes"),
        ({"num_lanes": 0}, "at least one lane"),
        ({"broadcast_delay": 0}, "at least one layer late"),
        ({"lm_head_type": "mean"}, "lm_head_type='mean'"),
        ({"lm_head_type": "vocab_parallel"}, "131 tokens of the vocabulary"),
        ({"lm_head_type": "lane", "pre_norm_lane_agg": True}, "goes with 'replicate'"),
        ({"use_comm": "yes"}, "use_comm='yes'"),
        ({"tie_word_embeddings": True}, "a head of its own"),
    ],
)
def test_odd_lanes_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(LANES | changes)


def test_a_checkpoint_of_another_exchange_is_refused(paths, tmp_path):
    with pytest.raises(ConfigError, match="num_lanes=4: its weights were trained with another"):
        config_from_hf(LANES | {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5})
    path = make_lanes(tmp_path, LANES)
    (path / "config.json").write_text(json.dumps(LANES | {"num_lanes": 2}))
    with pytest.raises(CheckpointError, match=r"wk.*4, 8, 64"):
        build_llm(path, BUCKETS)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ("tp=3", "4 lanes do not divide over 3 devices"),
        ("tp=8", r"they do over \[1, 2, 4\]"),
        ("tp=4,rules=tp_sp", "use tp, cp or dp"),
        ("cp=2,tp=2,rules=helix", "use tp, cp or dp"),
        ("cp=2,tp=2,rules=tp2d", "use tp, cp or dp"),
        ("tp=4,rules=dp_attention", "use tp, cp or dp"),
    ],
)
def test_meshes_that_cut_lanes_are_refused(parallel, message):
    with pytest.raises(ShardingError, match=message):
        abstract_model(config_from_hf(LANES), "float32", shards=planned_shards(Parallelism.parse(parallel)))


def test_what_does_not_go_with_lanes_is_refused(paths):
    config, files = config_from_hf(LANES), ModelFiles.open(paths["delay 1"])
    with pytest.raises(ConfigError, match="one lane on each device: use tp=4"):
        abstract_model(config, "float32", quantization=Quantization.named("int8"))
    with pytest.raises(ConfigError, match="no adapter changes"):
        abstract_model(config, "float32", adapters=AdapterSlots(2, 8))
    with pytest.raises(ConfigError, match="lanes"):
        _original(files)
    with pytest.raises(ConfigError, match="lanes"):
        new_head(config, 64)
    changed = replace(config.layers[0], exchange=None)
    with pytest.raises(ConfigError, match="exchange sums as its lanes say"):
        replace(config, layers=(changed, *config.layers[1:]))
