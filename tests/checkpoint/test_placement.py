"""Where experts lie, and how many tokens choose them: the same outputs wherever, and the counts of transformers.
About 40 s."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from inferlib import LLM, Buckets, SamplingParams, convert
from inferlib.cli import app
from inferlib.model_files import ModelFiles
from inferlib.models.config import ModelConfig
from inferlib.option_checks import ConfigurationError
from inferlib.placement import ExpertPlacement, balanced, imbalance, read_load, write_load
from inferlib.sharding.mesh import ShardingError
from tests.helpers.llms import random_prompts

BUCKETS = Buckets(prefill=(16,), batch=(4,), cache=(64,))
EXPERTS, CHOSEN, LAYERS = 7, 3, 2
# A permutation; and copies of two experts, in other slots in each layer.
PERMUTED = ExpertPlacement(((3, 1, 6, 0, 2, 5, 4), (6, 5, 4, 3, 2, 1, 0)))
COPIED = ExpertPlacement(((3, 1, 6, 0, 2, 5, 4, 3, 3, 1), (6, 5, 4, 3, 2, 1, 0, 6, 6, 6)))
SIXTEEN = ExpertPlacement(tuple((*row, *range(6)) for row in COPIED.layers))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = random_prompts([20, 3, 9, 1, 16], seed=3)


def make(folder, **options) -> LLM:
    sizes = dict(max_batch=4, max_len=64, buckets=BUCKETS, decode_steps=1)
    return LLM(folder, dtype="float32", progress=False, **sizes, **options)


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def expected(folder):
    """Without a placement, on one device: logits of a prompt, the tokens of PROMPTS, and the load these make."""
    llm = make(folder, expert_load=True)
    assert llm.expert_load().tolist() == np.zeros((LAYERS, EXPERTS)).tolist()
    tokens = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    load = llm.expert_load()
    return llm.logits(PROMPTS[0]), tokens, load


def assert_same(llm: LLM, expected) -> None:
    logits, tokens, load = expected
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)] == tokens
    np.testing.assert_array_equal(llm.expert_load(), load)
    np.testing.assert_allclose(llm.logits(PROMPTS[0]), logits, rtol=0, atol=2e-5 * np.abs(logits).max())


@pytest.mark.slow
def test_load_is_what_transformers_routes(folder, expected):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    counts = np.zeros((LAYERS, EXPERTS), np.int64)
    for prompt, tokens in zip(PROMPTS, expected[1], strict=True):
        with torch.no_grad():
            routed = model(torch.tensor([[*prompt, *tokens[:-1]]]), output_router_logits=True).router_logits
        for layer, logits in enumerate(routed):
            counts[layer] += np.bincount(logits.topk(CHOSEN).indices.reshape(-1).numpy(), minlength=EXPERTS)
    np.testing.assert_array_equal(expected[2], counts)


@pytest.mark.parametrize(
    ("placement", "parallel", "scan"),
    [
        pytest.param(PERMUTED, None, True, marks=pytest.mark.release),
        pytest.param(SIXTEEN, "ep=4,tp=2,rules=tp_sp", False, marks=pytest.mark.release),
        pytest.param(COPIED, "tp=2,ep=2,rules=dp_attention", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_outputs_and_load_are_the_same(placement, parallel, scan, folder, expected, tmp_path):
    options = dict(parallel=parallel, expert_load=True)
    if placement is not None:
        placement.write(options.setdefault("expert_placement", tmp_path / "placement.json"))
    assert_same(make(folder, scan=scan, **options), expected)


@pytest.mark.release
def test_converted_and_quantised(folder, tmp_path):
    """Both orders of placing and quantising store the same numbers."""
    COPIED.write(tmp_path / "placement.json")
    convert(folder, tmp_path / "laid_out", dtype="float32", quantization="int8", progress=False)
    options = dict(quantization="int8", parallel="ep=2", expert_placement=tmp_path / "placement.json")
    alone, *sharded = (
        make(folder, quantization="int8"),
        make(folder, **options),
        make(tmp_path / "laid_out", **options),
    )
    for a, b in zip(sharded[0].engine.weights, sharded[1].engine.weights, strict=True):
        np.testing.assert_array_equal(a, b)
    want = alone.logits(PROMPTS[0])
    np.testing.assert_allclose(sharded[0].logits(PROMPTS[0]), want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    ("layers", "parallel", "message"),
    [
        ([list(range(7))], None, "has 1 layers, and the model 2 with experts"),
        ([[0, 1, 2, 3, 4, 5, 5]] * 2, None, "layer 0 of the expert placement has no slot for expert 6"),
        ([[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 7]], None, "layer 1 of the expert placement has expert 7"),
        ([[0, 1, 2, 3, 4, 5, 6], [0, 1, 2]], None, "equally many slots"),
        ([list(range(7))] * 2, "ep=2", "has 7 slots, which do not divide over 2 devices of the expert axis"),
        ("none", None, "must be a list of whole numbers for each layer"),
    ],
)
def test_placements_that_cannot_be(layers, parallel, message, folder, tmp_path):
    file = tmp_path / "placement.json"
    file.write_text(json.dumps({"expert_placement": layers}))
    with pytest.raises((ConfigurationError, ShardingError), match=message):
        make(folder, expert_placement=file, parallel=parallel)


def test_what_is_no_file_of_that_kind(folder, checkpoint, tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        make(folder, expert_placement=tmp_path / "none.json")
    write_load(tmp_path / "load.json", np.ones((2, 7), np.int64))
    with pytest.raises(ConfigurationError, match='must be a JSON object with "expert_placement"'):
        make(folder, expert_placement=tmp_path / "load.json")
    with pytest.raises(ConfigurationError, match="the model has no experts"):
        make(checkpoint("llama"), expert_load=True)


def test_load_of_layers_that_differ(folder, monkeypatch):
    files = ModelFiles.open(folder)
    first, second = files.config.layers
    router = dataclasses.replace(second.mlp.router, experts=8)
    more = dataclasses.replace(second, mlp=dataclasses.replace(second.mlp, router=router))
    files = dataclasses.replace(files, config=dataclasses.replace(files.config, layers=(first, more)))
    monkeypatch.setattr(ModelFiles, "open", lambda *_, **__: files)
    with pytest.raises(ConfigurationError, match="the model has layers of 7 and of 8 experts"):
        make(folder, expert_load=True)


def test_balance():
    """The file that a load makes; tokens spread better than in the order of the experts, best with copies."""
    rng = np.random.default_rng(0)
    load = (1000 / np.arange(1, 33) ** 1.2 * rng.permutation(32)[None]).astype(np.int64).repeat(3, axis=0)
    load = np.stack([rng.permutation(row) for row in load])
    as_they_are = ExpertPlacement((tuple(range(32)),) * 3)
    spread, copied = balanced(load, 8), balanced(load, 8, slots=48)
    assert [sorted(row) for row in spread.layers] == [list(range(32))] * 3
    assert copied.slots == 48
    before, after, best = (imbalance(load, placement, 8) for placement in (as_they_are, spread, copied))
    assert (after < before).all()
    assert (best < 1.05).all()
    for row in copied.layers:  # no device has an expert twice
        assert all(len(set(row[i : i + 6])) == 6 for i in range(0, 48, 6))
    assert balanced(np.zeros((1, 7)), 2).slots == 8
    with pytest.raises(ConfigurationError, match="do not divide over 8 devices: take a multiple, such as 40"):
        balanced(load, 8, slots=36)
    with pytest.raises(ConfigurationError, match=r"counts \[layers, experts\], got an array of shape \(32,\)"):
        balanced(load[0], 8)


def test_files_keep_what_is_written(tmp_path):
    COPIED.write(tmp_path / "placement.json")
    assert ExpertPlacement.read(tmp_path / "placement.json") == COPIED
    load = np.arange(14).reshape(2, 7)
    write_load(tmp_path / "load.json", load)
    np.testing.assert_array_equal(read_load(tmp_path / "load.json"), load)
    COPIED.check(_config_of(2, 7))


def _config_of(layers: int, experts: int) -> ModelConfig:
    from inferlib import configs
    from inferlib.models.families import config_from_hf

    hf = configs.load("qwen3-30b-a3b") | {"num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": 2}
    return config_from_hf(hf)


@pytest.mark.release
def test_from_load_to_placement_on_the_command_line(folder, tmp_path):
    """A load that is counted, a placement that is made of it, and programs compiled for its slots."""
    files = {name: str(tmp_path / name) for name in ("load.json", "placement.json", "programs")}

    def run(*arguments: str):
        return CliRunner().invoke(app, list(arguments), catch_exceptions=False)

    sizes = ("--max-batch", "4", "--max-len", "64")
    greedy = ("--max-tokens", "5", "--temperature", "0")
    dense = ("generate", "abc", "--model", str(folder), *sizes, *greedy)
    done = run(*dense, "--expert-load", files["load.json"])
    assert done.exit_code == 0, done.stderr
    load = read_load(files["load.json"])
    assert load.shape == (LAYERS, EXPERTS)
    assert load.sum(axis=1).tolist() == [CHOSEN * (3 + 5 - 1)] * LAYERS
    sharded = run("place", files["load.json"], files["placement.json"], "--devices", "2", "--slots", "10")
    assert "10 slots in each of 2 layers, the busiest device at 1." in sharded.stderr
    assert ExpertPlacement.read(files["placement.json"]) == balanced(load, 2, 10)
    assert "exists" in run("place", files["load.json"], files["placement.json"], "--devices", "2").stderr

    buckets = ("--prefill-buckets", "16", "--batch-buckets", "4", "--cache-buckets", "64", "--modes", "greedy")
    options = ("--expert-placement", files["placement.json"], *buckets, "--out", files["programs"])
    made = run("compile", str(folder), "--target", "cpu", *options)
    assert made.exit_code == 0, made.stderr
    run_these = ("generate", "abc", "--model", str(folder), "--artifacts", files["programs"], *greedy)
    assert run(*run_these, "--expert-placement", files["placement.json"]).stdout == done.stdout
    assert "for 10 expert slots, and the placement has none" in run(*run_these).stderr
    assert "do not count the experts' load" in run(*run_these, "--expert-load", files["load.json"]).stderr
    PERMUTED.write(tmp_path / "other.json")
    assert "expert_slots is 10" in run(*run_these, "--expert-placement", str(tmp_path / "other.json")).stderr
