"""Programs compiled ahead of time: the round trip through a directory, and what is refused. About 25 s."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

from inferlib import LLM, Buckets, SamplingParams
from inferlib.aot import child
from inferlib.aot import compile as aot
from inferlib.aot.artifacts import ArtifactError, Artifacts, ArtifactWriter
from inferlib.aot.compile import CompileError, check_compiler, compile_programs
from inferlib.cli import app
from inferlib.deploy.compile import CompileResult
from inferlib.inspection.outcome import Outcome
from inferlib.inspection.report import Report
from inferlib.inspection.report_html import page
from inferlib.llm import ModelFiles
from inferlib.models.quantization import Quantization
from inferlib.option_checks import ConfigurationError
from inferlib.programs.deployment import Deployment
from inferlib.programs.program_set import UnplannedProgramError
from inferlib.sharding.mesh import Parallelism, ShardingError
from inferlib.speculation.settings import Speculation
from inferlib.targets import parse_target
from tests.helpers.cli_model import COMMAND, make_model
from tests.helpers.damaged_files import damaged_json, problem
from tests.helpers.eagle3 import make_head
from tests.helpers.oracle import make_checkpoint

needs_gpu = pytest.mark.skipif(jax.devices()[0].platform != "gpu", reason="needs a GPU")
BUCKETS = ("--prefill-buckets", "16", "--batch-buckets", "2", "--cache-buckets", "64")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    """Compiled by the command line, for two modes."""
    folder = tmp_path_factory.mktemp("compiled") / "artifacts"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder.with_name("cache")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        result = compile_into(folder, model)
    assert result.exit_code == 0, result.output
    return folder


def compile_into(folder: Path, model: Path, *more: str):
    return CliRunner().invoke(
        app, ["compile", str(model), *BUCKETS, "--modes", "greedy,embed", "--out", str(folder), *more]
    )


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def deployment_of(model: Path, **changes) -> Deployment:
    buckets = Buckets((16,), (2,), (64,))
    made = Deployment(ModelFiles.open(model).hf, "cpu", "float32", buckets, modes=("greedy",))
    return replace(made, **changes)


@pytest.mark.release
def test_layers_with_budgets_of_their_own(tmp_path):
    """The programs of a model whose layers keep 16 and 48 positions."""
    model, folder, policy = make_model(tmp_path / "model", layers=2), tmp_path / "artifacts", "pyramidkv:32:4"
    result = CliRunner().invoke(
        app, ["compile", str(model), *BUCKETS, "--modes", "greedy", "--out", str(folder), "--cache-policy", policy]
    )
    assert result.exit_code == 0, result.output
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    there = LLM(model, artifacts=folder, progress=False)
    sizes = {"max_batch": 2, "max_len": 64, "buckets": Buckets((16,), (2,), (64,))}
    here = LLM(model, cache_policy=policy, progress=False, **sizes)
    assert there.config.compacted.budgets == here.config.compacted.budgets == (16, 48)
    made, expected = (llm.generate(["to be, or not to be"], greedy)[0].outputs[0].token_ids for llm in (there, here))
    assert made == expected
    assert not there.stats.program_misses


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_another_process_runs_what_was_compiled_and_compiles_nothing(model, folder, tmp_path, target):
    if target == "cuda":
        folder = tmp_path / "artifacts"
        result = compile_into(folder, model, "--target", "cuda")
        assert result.exit_code == 0, result.output
    script = """
import sys
from inferlib import LLM, SamplingParams
from inferlib.programs.counter import compilations

llm = LLM(sys.argv[1], artifacts=sys.argv[2], host_cache="1MiB", progress=False)
llm.sleep()
llm.wake()
outputs = llm.generate(["to be", "or not to be, that"], SamplingParams(temperature=0.0, max_tokens=20))
tokens = [o.outputs[0].token_ids for o in outputs]
assert llm.embed(["to be", "or not to be, that"], "mean").shape == (2, llm.model_config.dim)
print(tokens, compilations(), llm.stats.program_misses, llm.stats.compilations)
"""
    command = [sys.executable, "-c", script, str(model), str(folder)]
    environment = os.environ | {"JAX_PLATFORMS": target, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    here = LLM(model, max_batch=2, max_len=64, buckets=Buckets((16,), (2,), (64,)), progress=False)
    outputs = here.generate(["to be", "or not to be, that"], SamplingParams(temperature=0.0, max_tokens=20))
    assert done.stdout.split("\n")[0] == f"{[o.outputs[0].token_ids for o in outputs]} 0 0 0"


@pytest.mark.release
def test_another_process_has_tiers_of_states(checkpoint, tmp_path):
    """Linear attention calls a library whose functions JAX looks up when it compiles a triangular solve."""
    model, folder = checkpoint("qwen3_5_text"), tmp_path / "artifacts"
    result = compile_into(folder, model, "--modes", "greedy", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    script = """
import sys
from inferlib import LLM, SamplingParams
from inferlib.engine.fetch_rule import FetchRule
from inferlib.programs.counter import compilations

FetchRule.choose = lambda self, *_: {"host": True, "disk": True}
llm = LLM(sys.argv[1], artifacts=sys.argv[2], host_cache="8MiB", progress=False)
for _ in range(2):
    (output,) = llm.generate([list(range(5, 40))], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    print(output.outputs[0].token_ids)
    llm.sleep()
    llm.wake()
print(llm.stats.host_tokens, compilations(), llm.stats.program_misses)
"""
    done = subprocess.run([sys.executable, "-c", script, model, folder], capture_output=True, text=True, timeout=120)
    llm = LLM(model, dtype="float32", max_batch=2, max_len=64, buckets=Buckets((16,), (2,), (64,)), progress=False)
    (output,) = llm.generate([list(range(5, 40))], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    tokens = str(output.outputs[0].token_ids)
    assert (done.returncode, done.stdout.splitlines()) == (0, [tokens, tokens, "32 0 0"]), done.stderr


def test_the_manifest_says_what_was_compiled(folder):
    stored = Artifacts.open(folder)
    assert stored.deployment.max_len == 64
    assert stored.manifest["versions"]["jax"] == jax.__version__
    assert {p["key"]["mode"] for p in stored.programs} == {"greedy", "embed"}
    assert all(p["facts"]["memory"]["peak"] > 0 and p["facts"]["bytes"] > 0 for p in stored.programs)
    assert all(w["layout"]["major_to_minor"] for w in stored.manifest["weights"])
    report = json.loads((folder / "report.json").read_text())
    assert len(report["programs"]) == len(stored.programs)
    page = (folder / "report.html").read_text()
    assert page.count("<svg") >= 1
    assert 'src="' not in page


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_copies_of_the_cache_are_added_up_and_fail_but_on_a_cpu(model, target):
    made = deployment_of(model, target=target)
    report = Report.of(made, [Outcome(made.keys()[0], "lowered")])
    assert report.ok
    assert "fits, nothing copies the cache" in page(report, "m")
    (program,) = report.programs
    copies = [{"array": array, "nbytes": 1 << 21, "count": count} for array, count in (("k", 1), ("v", 1), ("k", 2))]
    told = replace(program, outcome=replace(program.outcome, facts={"cache_copies": copies}))
    report = replace(report, programs=(told,))
    assert report.ok == (target == "cpu")
    assert "nothing copies" not in page(report, "m")
    lines = [line for line in CompileResult("m", report).text().splitlines() if "copies the cache" in line]
    assert [line.partition("cache: ")[2] for line in lines] == ["k, 3 x 2.00 MiB a step", "v, 1 x 2.00 MiB a step"]


def test_what_was_not_compiled_is_refused_by_name(model, folder):
    llm = LLM(model, artifacts=folder, progress=False)
    with pytest.raises(UnplannedProgramError, match="'sample' was not compiled ahead of time"):
        llm.generate("a", SamplingParams(temperature=1.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype is float32 in its programs, and bfloat16 here"),
        ({"max_batch": 3}, "max_batch is 2 in its programs, and 3 here"),
        ({"max_len": 32}, "max_len is 64"),
        ({"parallel": "tp=2"}, "parallel is tp=1"),
        ({"backend": "xla"}, "backend is auto in its programs, and xla here"),
        ({"buckets": Buckets((8,), (2,), (64,))}, "buckets is prefill 16; batch 2; cache 64"),
        ({"speculation": "ngram:3"}, "speculation is None in its programs, and ngram:3 here"),
    ],
)
def test_settings_that_differ_are_named(model, folder, settings, message):
    with pytest.raises(ArtifactError, match=message):
        LLM(model, artifacts=folder, progress=False, **settings)


@pytest.mark.release
def test_quantised_programs_with_a_cache_of_four_bits(model, tmp_path):
    folder = tmp_path / "int8"
    result = compile_into(folder, model, "--quantization", "int8", "--kv-cache-dtype", "int4", "--modes", "greedy")
    assert result.exit_code == 0, result.output
    llm = LLM(model, artifacts=folder, progress=False)
    assert {array.dtype.name for array in llm.engine.cache} == {"uint8"}
    assert {spec.dtype.name for spec in llm.engine.model.specs} == {"float32", "int8"}
    assert llm.engine.model.nbytes == json.loads((folder / "report.json").read_text())["weights"]
    names = {w["name"]: w["dtype"] for w in json.loads((folder / "manifest.json").read_text())["weights"]}
    assert (names["blocks.0.attn.o"], names["blocks.0.attn.o.scales"]) == ("int8", "float32")
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    options = dict(max_batch=2, max_len=64, buckets=Buckets((16,), (2,), (64,)), progress=False)
    here = LLM(model, quantization="int8", kv_cache_dtype="int4", **options)
    tokens = [x.generate([[5, 6, 7]], greedy)[0].outputs[0].token_ids for x in (llm, here)]
    assert tokens[0] == tokens[1]
    assert llm.stats.program_misses == 0
    result = compile_into(tmp_path / "int4", model, "--quantization", "int4")
    assert (result.exit_code, "int4 weights work on a single CPU" in result.output) == (2, True)
    for option, stored, other in (("quantization", "int8", "fp8"), ("kv_cache_dtype", "int4", "int8")):
        with pytest.raises(ArtifactError, match=f"{option} is {stored} in its programs, and {other} here"):
            LLM(model, artifacts=folder, progress=False, **{option: other})


@pytest.mark.release
def test_programs_with_a_draft_model(model, tmp_path):
    folder, other = tmp_path / "compiled", Path(shutil.copytree(model, tmp_path / "draft"))
    drafts = f"draft:{other}:2"
    result = compile_into(folder, model, "--speculation", drafts, "--modes", "greedy")
    assert result.exit_code == 0, result.output
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    here = LLM(model, max_batch=2, max_len=64, buckets=Buckets((16,), (2,), (64,)), progress=False)
    llm = LLM(model, artifacts=folder, progress=False)
    tokens = [x.generate([[5, 6, 7]], greedy)[0].outputs[0].token_ids for x in (llm, here)]
    assert tokens[0] == tokens[1]
    assert llm.config.speculation == Speculation.read(drafts)
    assert llm.stats.accepted_drafts == llm.stats.drafts > 0
    facts = json.loads((folder / "report.json").read_text())
    assert facts["weights"] == 2 * sum(spec.nbytes for spec in here.engine.model.specs)
    hf = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(hf | {"rms_norm_eps": 0.5}))
    with pytest.raises(ArtifactError, match=r"draft\.norm\.eps is .* in its programs, and 0\.5 here"):
        LLM(model, artifacts=folder, progress=False)


def loaded_with_the_same_tokens(folder: Path, model: Path) -> LLM:
    """The engine of artifacts, after a text that an engine without drafts continues alike."""
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    here = LLM(model, max_batch=2, max_len=64, buckets=Buckets((16,), (2,), (64,)), progress=False)
    llm = LLM(model, artifacts=folder, progress=False)
    tokens = [x.generate([[5, 6, 7]], greedy)[0].outputs[0].token_ids for x in (llm, here)]
    assert tokens[0] == tokens[1]
    return llm


@pytest.mark.release
def test_programs_with_a_head(model, tmp_path):
    folder, head = tmp_path / "compiled", make_head(tmp_path / "head", model, 100)
    result = compile_into(folder, model, "--speculation", f"eagle3:{head}:1", "--modes", "greedy")
    assert result.exit_code == 0, result.output
    assert loaded_with_the_same_tokens(folder, model).stats.drafts
    hf = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(hf | {"rms_norm_eps": 0.5}))
    with pytest.raises(ArtifactError, match=r"draft\.model\.norm\.eps is .* in its programs, and 0\.5 here"):
        LLM(model, artifacts=folder, progress=False)


def test_another_model_is_named_by_its_field(folder, tmp_path):
    other = make_checkpoint(tmp_path / "other", "llama", vocab_size=260, num_hidden_layers=1, rope_theta=5000.0)
    with pytest.raises(ArtifactError, match=r"model\.layers\[0\]\.attention\.rope\.base is"):
        LLM(other, artifacts=folder, progress=False)


@pytest.mark.parametrize("name", ["jax", "code", "jaxlib"])
def test_other_versions_are_named(model, copy, name):
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["versions"][name] = "0.0.1"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=f"version of {name} is 0.0.1 in its programs"):
        LLM(model, artifacts=copy, progress=False)


def test_damage_is_found(model, copy):
    program = next(copy.glob("decode*.xla"))
    data = bytearray(program.read_bytes())
    data[len(data) // 2] ^= 1
    program.write_bytes(data)
    with pytest.raises(ArtifactError, match=f"{program.name} is damaged"):
        LLM(model, artifacts=copy, progress=False)
    program.unlink()
    with pytest.raises(ArtifactError, match=f"{program.name} is missing"):
        LLM(model, artifacts=copy, progress=False)
    (copy / "manifest.json").write_text('{"format"')
    with pytest.raises(ArtifactError, match=r"manifest\.json is damaged"):
        LLM(model, artifacts=copy, progress=False)
    with pytest.raises(ArtifactError, match="holds no compiled programs"):
        LLM(model, artifacts=copy / "nothing", progress=False)


def test_the_compilation_cache_of_jax_is_left_alone(folder):
    """An executable from it cannot be serialised again."""
    assert not folder.with_name("cache").exists()


class Shell:
    def __reduce__(self):
        return os.system, ("touch evil",)


def put(folder: Path, data: bytes, **entry: str) -> None:
    """Replace the first program, so that the manifest agrees."""
    manifest = json.loads((folder / "manifest.json").read_text())
    program = manifest["programs"][0]
    (folder / program["file"]).write_bytes(data)
    program |= {"sha256": hashlib.sha256(data).hexdigest(), **entry}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_pickle_runs_nothing(model, copy, tmp_path, monkeypatch):
    """Neither around the executable nor within it."""
    monkeypatch.chdir(tmp_path)
    first = Artifacts.open(copy).programs[0]["file"]
    ((name, (payload, inputs, outputs)),) = pickle.loads((copy / first).read_bytes()).items()
    for data in (Shell(), {name: (pickle.dumps(Shell()), inputs, outputs)}, {name: (payload, Shell(), outputs)}):
        put(copy, pickle.dumps(data))
        with pytest.raises(ArtifactError, match=f"{first} is no use: it holds (posix|nt).system"):
            LLM(model, artifacts=copy, progress=False)
    put(copy, b"not a pickle")
    with pytest.raises(ArtifactError, match=f"{first} is no use: UnpicklingError"):
        LLM(model, artifacts=copy, progress=False)
    assert not (tmp_path / "evil").exists()


def test_programs_stay_in_their_directory_and_are_those_of_their_names(model, copy):
    names = [program["file"] for program in Artifacts.open(copy).programs]
    other = (copy / names[1]).read_bytes()
    put(copy, other)
    with pytest.raises(ArtifactError, match="another program than its name says"):
        LLM(model, artifacts=copy, progress=False)
    (copy.parent / "outside.xla").write_bytes(other)
    put(copy, other, file="../outside.xla")
    with pytest.raises(ArtifactError, match=r"an entry is of the file '\.\./outside\.xla'"):
        Artifacts.open(copy)
    put(copy, other, file=names[0])
    (copy / names[0]).unlink()
    (copy / names[0]).symlink_to(copy.parent / "outside.xla")
    with pytest.raises(ArtifactError, match=f"{names[0]} is missing"):
        Artifacts.open(copy).load()


def test_damaged_manifests(copy):
    """In any place; what is read of one is compared before a program is loaded."""
    file, draw = copy / "manifest.json", random.Random(0)
    good = json.loads(file.read_text())
    for program in good["programs"]:
        program["facts"] = {"layouts": []}
    wrong = []
    for _ in range(150):
        data, what = damaged_json(draw, good)
        file.write_bytes(data)
        wrong.append(problem(what, lambda: Artifacts.open(copy)))
    assert not any(wrong), "\n".join(filter(None, wrong))


def test_unchanged_programs_are_reused_and_changed_ones_are_not(model, copy):
    made = deployment_of(model)
    keys = made.keys()
    with ArtifactWriter(copy, made) as writer:
        first = writer.reuse(keys[0], None)
        assert first["layouts"]
        assert all(writer.reuse(key, first["layouts"]) for key in keys[1:])
        assert sorted(p.name for p in writer.staging.iterdir()) == sorted(
            aot.file_name(key, made.slice) for key in keys
        )
    with ArtifactWriter(copy, replace(made, dtype="bfloat16")) as writer:
        assert writer.reuse(keys[0], None) is None
    next(copy.glob("*.xla")).write_bytes(b"")
    with ArtifactWriter(copy, made) as writer:
        again = [writer.reuse(keys[0], None), *(writer.reuse(key, first["layouts"]) for key in keys[1:])]
        assert again.count(None) == 1


@pytest.mark.slow
def test_more_buckets_compile_only_what_is_new(model, copy):
    result = compile_into(copy, model, "--json", "--modes", "embed", "--prefill-buckets", "8,16")
    assert result.exit_code == 0, result.output
    programs = json.loads(result.stdout)["programs"]
    assert {p["key"]["chunk"]: p["status"] for p in programs} == {8: "compiled", 16: "reused"}
    assert {(p["key"]["mode"], p["key"]["chunk"]) for p in Artifacts.open(copy).programs} == {
        ("embed", 8),
        ("embed", 16),
    }


def test_only_one_process_writes_a_directory(model, tmp_path):
    made = deployment_of(model)
    with (
        ArtifactWriter(tmp_path / "out", made),
        pytest.raises(ArtifactError, match="another process is compiling into"),
        ArtifactWriter(tmp_path / "out", made),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_full_disk_leaves_what_was_there(model, copy, monkeypatch):
    before = {p.name: p.read_bytes() for p in copy.iterdir()}

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    result = compile_into(copy, model)
    assert result.exit_code == 2
    assert "No space left on device" in result.stderr
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == before
    assert [p.name for p in copy.parent.iterdir()] == [copy.name]


def test_other_directories_are_not_touched(model, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    with (
        pytest.raises(ArtifactError, match="holds other things"),
        ArtifactWriter(tmp_path / "photos", deployment_of(model)),
    ):
        pass
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b"cat"
    with (
        pytest.raises(ArtifactError, match="is a file"),
        ArtifactWriter(tmp_path / "photos" / "cat.jpg", deployment_of(model)),
    ):
        pass
    assert [p.name for p in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


def test_a_commit_cut_off_between_its_renames_is_mended(model, copy):
    copy.rename(copy.with_name(f".{copy.name}.old"))
    with ArtifactWriter(copy, deployment_of(model)) as writer:
        assert writer.reuse(deployment_of(model).keys()[0], None)


def test_a_compiler_that_dies_fails_its_program_only(model, tmp_path, monkeypatch):
    """A stand-in for the worker that is killed by the second program."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys\n"
        "sys.stdin.readline()\n"
        "for line in sys.stdin:\n"
        "    if json.loads(line)['key']['steps'] == 8:\n"
        "        print('F0000 check failed', file=sys.stderr, flush=True)\n"
        "        os.abort()\n"
        "    print(json.dumps({'status': 'compiled', 'layouts': [], 'memory': {}}), flush=True)\n"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(
        child.subprocess, "Popen", lambda command, **options: popen([sys.executable, str(script)], **options)
    )
    made = deployment_of(model)
    outcomes, _ = compile_programs(made, made.keys(), tmp_path)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    assert [outcome.key.steps for outcome in failed] == [8]
    assert "killed by signal 6" in failed[0].error
    assert "F0000 check failed" in failed[0].error
    assert len(outcomes) == len(made.keys()) > 3


@pytest.mark.slow
@pytest.mark.skipif(jax.devices()[0].platform == "gpu", reason="there are GPUs")
def test_programs_for_gpus_need_gpus(model, tmp_path):
    outcomes, layouts = compile_programs(deployment_of(model, target="cuda"), deployment_of(model).keys(), tmp_path)
    assert layouts is None
    assert "JAX finds none here" in outcomes[0].error


def test_missing_compilers_are_named(monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompileError, match=r'pip install "jax\[tpu\]"'):
        check_compiler(parse_target("v5e-8"))


def test_deployments_that_cannot_work_are_refused(model):
    with pytest.raises(ShardingError, match=r"parallel=tp=2 is 2 devices, and v5e:2x4 has 8: .*tp=8"):
        deployment_of(model, target="v5e-8", parallel=Parallelism(tensor=2))
    with pytest.raises(ConfigurationError, match="exceeds the model's context of 256"):
        deployment_of(model, buckets=Buckets((16,), (2,), (512,)))
    with pytest.raises(ConfigurationError, match="dtype 'float64'"):
        deployment_of(model, dtype="float64")
    with pytest.raises(ValueError, match="modes are a list of"):
        deployment_of(model, modes=("beam",))


def test_deployments_survive_json(model):
    options = dict(modes=("greedy", "sample"), backend="xla", speculation="ngram:3")
    made = deployment_of(model, parallel=Parallelism(tensor=2, data=2, rules="tp_sp"), **options)
    assert Deployment.from_json(json.loads(json.dumps(made.to_json()))) == made
    options |= dict(speculation="draft:x:3", draft=dict(made.hf), draft_quantization=Quantization.named("int8"))
    made = deployment_of(model, **options)
    assert Deployment.from_json(json.loads(json.dumps(made.to_json()))) == made
    with pytest.raises(ConfigurationError, match="give both, such as draft="):
        deployment_of(model, speculation="draft:x:3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a model"),
        (["--config", "llama3-8b", "--plan", "llama3-8b-v5e-8"], "give either a model"),
        (["--plan", "llama3-8b-v5e-8", "--dtype", "bfloat16"], "--plan says"),
        (["--plan", "llama9"], "no plan is called 'llama9'"),
        (["--config", "llama9"], "no model shape is called 'llama9'"),
        (["--config", "llama3-8b", "--target", "v5e-7"], "there is no target 'v5e-7'"),
        (["--config", "llama3-8b", "--batch-buckets", "1;8"], "numbers with commas"),
        (["--config", "llama3-8b", "--batch-buckets", "8,1"], "ascending"),
        (["--config", "llama3-8b", "--batch-buckets", ""], "numbers with commas"),
        (["--config", "llama3-8b", "--backend", "pallas"], "backend 'pallas' is neither 'auto' nor 'xla'"),
    ],
)
def test_bad_commands_are_explained(arguments, message):
    result = CliRunner().invoke(app, ["compile", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_help_needs_no_device():
    done = subprocess.run([*COMMAND, "compile", "--help"], capture_output=True, text=True, timeout=300)
    assert "--prefill-buckets" in done.stdout
