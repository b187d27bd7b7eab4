"""Weights that lie in memory as the compiler chose: loading, and programs held to it. About 10 s."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jax.experimental.layout import Layout

from inferlib import LLM, Buckets, SamplingParams
from inferlib.checkpoint.load import load_weights
from inferlib.config import EngineConfig
from inferlib.engine.engine import Engine
from inferlib.llm import ModelFiles
from inferlib.models.abstract import abstract_model
from inferlib.models.families import family_of
from inferlib.models.quantization import Quantization
from inferlib.programs.program_set import ProgramSet
from tests.helpers.cli_model import make_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    path = make_model(tmp_path_factory.mktemp("model"))
    llm = LLM(path, max_batch=2, max_len=64, buckets=Buckets((16,), (2,), (64,)), decode_steps=1, progress=False)
    llm.path = path
    return llm


def engine_config(llm: LLM, **changes) -> EngineConfig:
    return replace(llm.config, scan=True, **changes)


@pytest.mark.slow
def test_programs_run_on_weights_in_any_layout(llm, monkeypatch):
    """Stacked and single weights, every dimension the other way round; the same tokens as in the usual layout. The
    weights decide; programs do below."""
    expected = llm.generate(["to be", "or not"], GREEDY)
    files = ModelFiles.open(llm.path)
    model, config = abstract_model(files.config, "float32", scan=True), engine_config(llm, free_layouts=True)
    layouts = [Layout(tuple(reversed(range(len(spec.shape))))) for spec in model.specs]
    programs = ProgramSet.make(model, config, layouts)
    weights = load_weights(files.source, family_of(files.hf), model, formats=programs.formats)
    orders = [weight.format.layout.major_to_minor for weight in weights]
    assert orders == [layout.major_to_minor for layout in layouts]
    engine = Engine(model, weights, config)
    monkeypatch.setattr(llm._runner, "engine", engine)
    outputs = llm.generate(["to be", "or not"], GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert [layout.major_to_minor for layout in engine.programs.layouts] == orders


def test_the_decode_step_decides_for_all(llm):
    model = abstract_model(llm.model_config, "float32", scan=True)
    programs = ProgramSet.make(model, engine_config(llm, free_layouts=True))
    programs.choose_layouts()
    assert programs.compiled == 1
    assert len(programs.layouts) == len(model.specs)
    chosen = programs.get(programs.decisive).input_formats[0][0]
    assert [format.layout for format in chosen] == list(programs.layouts)


def test_layouts_are_left_alone_where_they_are_not_free(llm):
    programs = ProgramSet.make(abstract_model(llm.model_config, "float32"), llm.config)
    programs.choose_layouts()
    assert programs.layouts is None
    assert programs.compiled == 0
    assert set(programs.formats) == {None}


@pytest.mark.slow
@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.release), True])
def test_gpus_have_inputs_side_by_side_where_they_are_rounded(llm, scan, monkeypatch):
    """Tokens are those of weights in the usual layout; random weights lie as those that are loaded."""
    files, scheme = ModelFiles.open(llm.path), Quantization.named("int8_a8")
    model, tokens = abstract_model(files.config, "float32", quantization=scheme, scan=scan), []
    for platform in ("cpu", "gpu"):
        programs = ProgramSet.make(model, replace(llm.config, scan=scan, platform=platform))
        weights = load_weights(files.source, family_of(files.hf), model, formats=programs.formats)
        if not scan:
            continue  # the same programs, but for the loop
        monkeypatch.setattr(llm._runner, "engine", Engine(model, weights, programs.config, programs=programs))
        tokens.append([output.outputs[0].token_ids for output in llm.generate(["to be", "or not"], GREEDY)])
    assert not tokens or tokens[0] == tokens[1]
    orders = {spec.part: weight.format.layout.major_to_minor for spec, weight in zip(model.specs, weights, strict=True)}
    assert orders["attn.o"] == ((0, 4, 1, 2, 3) if scan else (3, 0, 1, 2))
    assert orders["mlp.gate_up"] == ((0, 2, 3, 1) if scan else (1, 2, 0))
    assert orders["attn.o.scales"] == tuple(range(1 + scan))
    random = programs.random_weights()
    assert [weight.format.layout for weight in random] == [weight.format.layout for weight in weights]
