"""Programs for Trainium: the lint and its rules, every dense family, what compile writes. About 30 s."""

from __future__ import annotations

import json
import os
import re
import stat
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typer.testing import CliRunner

from inferlib import LLM, SamplingParams
from inferlib.aot.artifacts import ArtifactError
from inferlib.aot.neuron import command, small_ids
from inferlib.aot.neuron_lint import lint
from inferlib.buckets import Buckets
from inferlib.cli import app
from inferlib.config import EngineConfig
from inferlib.inspection.hlo import Module
from inferlib.models.abstract import abstract_model
from inferlib.models.families import config_from_hf
from inferlib.ops.gated_delta import gated_delta_chunk
from inferlib.ops.kimi_delta import kimi_delta_chunk
from inferlib.ops.state_space import state_space_chunk
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program_set import ProgramSet, planned_keys
from inferlib.sampling import sampler
from inferlib.targets import parse_target
from tests.helpers.cli_model import make_model
from tests.helpers.oracle_cases import FAMILIES, SIZES

FLOATS, INTS = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.int32)
ROWS = np.arange(4)


def findings(lowered) -> list:
    return lint(Module(lowered.compiler_ir("hlo").get_hlo_module().to_string()))


def broken(function, *arguments) -> set[str]:
    """Names of the rules that a function breaks."""
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("neuron",))
    return {finding.rule.name for finding in findings(lowered)}


# ---- the lint


def summed(x):
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    return jax.shard_map(lambda x: lax.psum(x, "x"), mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())(x)


VIOLATIONS = {
    "loop": (lambda x: lax.fori_loop(0, 9, lambda i, x: x * i, x), FLOATS),
    "branch": (lambda x: lax.cond(x[0, 0] > 0, lambda x: x + 1, lambda x: x * 2, x), FLOATS),
    "custom call": (jax.ffi.ffi_call("a_host_function", FLOATS), FLOATS),
    "variadic reduce": (lambda x: jnp.argmax(x, -1), FLOATS),
    "sort": (lambda x: jnp.sort(x), FLOATS),
    "integer top-k": (lambda x: lax.top_k(x, 3), INTS),
    "integer scatter": (lambda x: x.at[ROWS, x[:, 0]].add(1), INTS),
    "integer dot": (lambda x: x @ x.T, INTS),
    "integer all-reduce": (summed, INTS),
    "narrow shift": (lambda x: lax.shift_right_arithmetic(x, jnp.int8(2)), jax.ShapeDtypeStruct((4,), jnp.int8)),
    "random algorithm": (
        lambda k: lax.rng_bit_generator(k, (8,), algorithm=lax.RandomAlgorithm.RNG_PHILOX),
        jax.ShapeDtypeStruct((4,), jnp.uint32),
    ),
    "wide type": (lambda s: jax.random.bits(jax.random.key(s), (8,)), jax.ShapeDtypeStruct((), jnp.uint32)),
}


@pytest.mark.parametrize("rule", VIOLATIONS)
def test_a_planted_violation_is_found(rule):
    assert rule in broken(*VIOLATIONS[rule])


def test_what_the_compiler_takes_passes():
    def fine(x, i):
        x = x.at[ROWS, i[:, 0]].add(1.0)  # floats may be combined, integers overwritten
        i = i.at[ROWS, i[:, 1]].set(7)
        x = lax.fori_loop(0, 3, lambda n, x: x * n, x, unroll=True)
        top, at = lax.top_k(x, 3)
        return x @ x.T, top, at, x.max(-1), i.min(-1), jnp.take(x, i[0], axis=1, mode="clip"), i >> 2

    assert broken(fine, FLOATS, INTS) == set()


@pytest.mark.parametrize("rule", [gated_delta_chunk, kimi_delta_chunk, state_space_chunk])
def test_chunks_of_recurrent_rules_pass(rule):
    """Of more tokens than one product takes."""
    keys, values, of_heads = (1, 150, 2, 8), (1, 150, 2, 3, 6), (1, 150, 2, 3)
    shapes = {
        gated_delta_chunk: (keys, keys, values, of_heads, of_heads, (1, 6, 8, 6)),
        kimi_delta_chunk: (keys, keys, (1, 150, 2, 6), keys, (1, 150, 2), (1, 2, 8, 6)),
        state_space_chunk: (keys, keys, values, of_heads, (1, 6, 6, 8)),
    }[rule]
    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert broken(rule, *inputs, jax.ShapeDtypeStruct((1, 150), jnp.bool)) == set()


def test_a_finding_says_where_and_why():
    def decode(x):
        with jax.named_scope("attention"):
            return lax.sort(x)

    (finding,) = findings(jax.jit(decode).trace(FLOATS).lower(lowering_platforms=("neuron",)))
    assert str(finding).startswith("sort: sort 'sort")
    assert "at jit(decode)/attention/sort" in str(finding)
    assert "take a top-k" in str(finding)


# ---- programs


@cache
def programs(family: str) -> ProgramSet:
    options = {**SIZES, **FAMILIES[family]}
    if not any("layer" in name for name in FAMILIES[family]):  # all alike
        options["num_hidden_layers"] = 1
    options = {k: v for k, v in options.items() if v is not None or k != "head_dim"}
    hf = AutoConfig.for_model(family, **options).to_dict()
    hf["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    config = EngineConfig.make("neuron", 4, 64, Buckets((16,), (1, 4), (32, 64)))
    return ProgramSet.make(abstract_model(config_from_hf(hf), "bfloat16"), config)


# What experts need, Trainium's compiler lacks.
REFUSED = {"qwen3_moe": {"sort", "loop"}}
DENSE = [family for family, options in FAMILIES.items() if not any("expert" in name for name in options)]
DENSE = [family for family in DENSE if family not in REFUSED]
# Families of operations that no other has: windows and latents, norms and activations, states and convolutions. What
# the others are made of is in these, and in the programs of llama.
ALONE_IN_OPERATIONS = (
    "gemma2",
    "gemma3n_text",
    "gemma4_text",
    "ministral3",
    "phi3",
    "cohere2",
    "minicpm3",
    "qwen3_5_text",
)
ALONE_IN_OPERATIONS += ("olmo_hybrid", "lfm2", "nemotron_h", "bamba", "gpt2")
BOTH = ProgramKey("greedy", 4, 32, chunks=1, chunk=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(x, marks=[pytest.mark.release] * (x not in ALONE_IN_OPERATIONS)) for x in DENSE]
)
def test_every_dense_family_passes(family):
    assert len(DENSE) > 20
    assert {*ALONE_IN_OPERATIONS} <= {*DENSE}
    assert [str(f) for f in findings(programs(family).lower(BOTH, "neuron"))] == []


@pytest.mark.parametrize("family", REFUSED)
def test_others_are_refused_by_what_they_need(family):
    assert REFUSED[family] <= {f.rule.name for f in findings(programs(family).lower(BOTH, "neuron"))}


@pytest.mark.slow
def test_every_program_of_a_set_passes():
    """Programs of chunks and rows together consist of those of each, so that one mode of them is enough."""
    keys = [key for key in planned_keys(programs("llama").config) if key.limit == 32 and key.rows != 1]
    keys = [key for key in keys if key.mode == "greedy" or not (key.chunks and key.rows)]
    assert {key.mode for key in keys} == {"greedy", "sample", "logprobs"}
    assert {key.steps for key in keys} == {1}
    for key in keys:
        assert [str(f) for f in findings(programs("llama").lower(key, "neuron"))] == [], str(key)


@pytest.mark.slow
def test_what_is_written_otherwise_for_trainium_draws_the_same_tokens(monkeypatch):
    rng = np.random.default_rng(0)
    rows, vocab = 6, 501
    logits = jnp.asarray(rng.normal(size=(rows, vocab)) * 4, jnp.float32)
    asked = [
        SamplingParams(temperature=1.3, top_k=k, top_p=p)
        for k, p in zip((0, 5, 40, 0, 5, 40), (1.0, 0.7, 0.95, 0.3, 1.0, 0.7), strict=True)
    ]
    params = sampler.unpack(*map(jnp.asarray, sampler.pack([(p, 17 * n, ()) for n, p in enumerate(asked)])))
    counts, generated = jnp.zeros((rows, vocab), jnp.int32), jnp.arange(rows)

    def draw() -> list[list[int]]:
        traced_anew = sampler.sample.__wrapped__
        sample = jax.jit(lambda n: traced_anew(logits, params, counts, generated + n, mode="sample").token)
        return [sample(n).tolist() for n in range(8)]

    expected = draw()
    chosen = []

    def on_trainium(*arguments, neuron, **others):
        chosen.append(neuron)
        return neuron(*arguments)

    monkeypatch.setattr(sampler.lax, "platform_dependent", on_trainium)
    assert draw() == expected
    assert chosen


def test_ids_are_small_and_the_module_is_the_same():
    computation = programs("qwen3").lower(ProgramKey("greedy", 4, 32), "neuron").compiler_ir("hlo")
    proto = computation.as_serialized_hlo_module_proto()
    module = computation.get_hlo_module()
    small = small_ids(proto)
    assert len(small) < len(proto)
    assert small_ids(small) == small
    again, before = (_printed(type(module).from_serialized_hlo_module_proto(p).to_string()) for p in (small, proto))
    assert again == before
    assert sum("input_output_alias" in line for line in again) == 1


def _printed(text: str) -> list[str]:
    """The lines of a module, names and all, but for the tables of source lines; the order may differ."""
    return sorted(re.sub(r"stack_frame_id=\d+", "", line) for line in text.splitlines() if not line[:1].isdigit())


# ---- the command


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), layers=1)


def run(model: Path, *more: str):
    buckets = ("--prefill-buckets", "16", "--batch-buckets", "2", "--cache-buckets", "64", "--modes", "greedy")
    return CliRunner().invoke(app, ["compile", str(model), "--target", "trn2", *buckets, *more])


def compiler(folder: Path, script: str, monkeypatch) -> None:
    """Put a `neuronx-cc` on the path."""
    file = folder / "neuronx-cc"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.slow
def test_programs_manifest_and_commands_are_written(model, tmp_path):
    out = tmp_path / "out"
    result = run(model, "--out", str(out), "--json")
    assert result.exit_code == 0, result.output
    manifest = json.loads((out / "manifest.json").read_text())
    files = [program["file"] for program in manifest["programs"]]
    assert len(files) == 4
    assert {p["status"] for p in json.loads(result.stdout)["programs"]} == {"lowered"}
    assert {p.name for p in out.iterdir()} == {*files, "manifest.json", "report.json", "report.html", "compile.sh"}
    script = (out / "compile.sh").read_text()
    for file in files:
        name = file.removesuffix(".hlo.pb")
        assert f"neuronx-cc compile {file} --framework XLA --target trn2 --lnc 2 " in script
        assert f"--output {name}.neff" in script
    with pytest.raises(ArtifactError, match="platform is neuron in its programs"):
        LLM(model, artifacts=out, progress=False)


@pytest.mark.slow
def test_an_installed_compiler_is_run(model, tmp_path, monkeypatch):
    compiler(tmp_path, 'while [ "$1" != --output ]; do shift; done; echo neff > "$2"', monkeypatch)
    result = run(model, "--out", str(tmp_path / "out"), "--json", "--modes", "embed")
    assert result.exit_code == 0, result.output
    statuses = [p["status"] for p in json.loads(result.stdout)["programs"]]
    assert statuses
    assert statuses == ["compiled"] * len(list((tmp_path / "out").glob("*.neff")))


@pytest.mark.slow
def test_what_does_not_compile_is_told_and_nothing_is_written(model, tmp_path, monkeypatch):
    compiler(tmp_path, "echo '[NCC_EVRF007] too many instructions' >&2; exit 70", monkeypatch)
    result = run(model, "--out", str(tmp_path / "out"), "--json", "--modes", "embed")
    assert result.exit_code == 1
    assert "NCC_EVRF007" in json.loads(result.stdout)["programs"][0]["error"]
    assert not (tmp_path / "out").exists()


def test_several_devices_are_refused(model):
    result = run(model, "--parallel", "tp=2")
    assert result.exit_code == 2
    assert "programs for trn2 are of one device so far" in result.output


@pytest.mark.slow
def test_a_model_too_large_for_a_core_is_refused_at_once():
    arguments = ["compile", "--config", "llama3-8b", "--dtype", "float32", "--target", "trn2", "--modes", "greedy"]
    result = CliRunner().invoke(app, [*arguments, "--batch-buckets", "1", "--json"])
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert [p["status"] for p in report["programs"]] == ["too large"]
    assert any("would do" in line for line in report["advice"])


def test_the_command_names_the_generation():
    assert command("a.hlo.pb", parse_target("trn3"))[:7] == [
        *("neuronx-cc", "compile", "a.hlo.pb"),
        *("--framework", "XLA", "--target", "trn3"),
    ]
