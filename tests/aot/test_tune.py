"""Searching block sizes, the tables it writes and the kernels that consult them. About 10 s; half a minute with the
slow one, which is skipped without libtpu."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from typer.testing import CliRunner

from inferlib import Buckets
from inferlib.aot import child
from inferlib.aot.artifacts import device_facts
from inferlib.aot.child import Child
from inferlib.aot.compile import CompileError
from inferlib.cli import app
from inferlib.pallas_kernels import generations_tpu, tuned_tpu
from inferlib.pallas_kernels.decode_attention_tpu import default_blocks
from inferlib.pallas_kernels.prefill_attention_tpu import Blocks, blocks
from inferlib.pallas_kernels.tuned_tpu import FOLDER, Entry, read, trying
from inferlib.programs import program_set
from inferlib.programs.deployment import Deployment
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import Shards
from inferlib.targets import parse_target
from inferlib.tuning import tune
from inferlib.tuning.kernel_cases import standing_for
from inferlib.tuning.kernel_cases.decode_attention import DecodeAttention
from inferlib.tuning.kernels import KernelCompiler
from inferlib.tuning.tune import Result, climb
from tests.helpers.cli_model import error_of
from tests.helpers.tpu_models import EXPERTS

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='needs pip install "jax[tpu]"')

SHAPE = {"width": 128, "group": 4, "size": 128, "itemsize": 2}
WIDE = {"queries": 128, "keys": 1024, "rows": 128, "edge": 512}
ENTRY = Entry("prefill_attention", SHAPE, WIDE, 9.0, 10.0, 0.1, "libtpu 1")


# ---- tables


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of tables in place of the library's, in which v5e has one."""
    tune.write(tmp_path / "v5e.json", [ENTRY])
    monkeypatch.setattr(tuned_tpu, "FOLDER", tmp_path)
    tuned_tpu._table.cache_clear()
    yield tmp_path
    tuned_tpu._table.cache_clear()


def test_kernels_take_what_the_table_of_their_generation_has_for_their_shape(folder, monkeypatch):
    rule = blocks(**SHAPE)
    assert rule != Blocks(**WIDE)
    traced_for(monkeypatch, "TPU v5 lite")
    assert blocks(*SHAPE.values()) == Blocks(**WIDE)
    assert blocks(**SHAPE | {"group": 8}) == Blocks(128, 512)
    with trying(None) as asked:
        assert blocks(**SHAPE) == rule
    with trying({"queries": 128, "keys": 256}):
        assert blocks(**SHAPE) == Blocks(128, 256)
    assert [(one.kernel, one.shape, one.blocks) for one in asked] == [("prefill_attention", SHAPE, vars(rule))]
    for kind in ("TPU7x", "cpu"):
        traced_for(monkeypatch, kind)
        assert blocks(**SHAPE) == rule


def test_more_is_computed_at_once_where_memory_waits(monkeypatch):
    shape = dict(cache=(8, 4096, 128), arrays=2, itemsize=1, pages=None, seen=None)
    for kind, tokens, part in (("TPU v5 lite", 1, 512), ("TPU7x", 1, 1024), ("TPU7x", 2, 512)):
        traced_for(monkeypatch, kind)
        assert default_blocks(q=(32, tokens, 8, 4, 128), **shape).part == part


def test_a_generation_has_the_names_that_jax_knows(monkeypatch):
    kinds = {"v5e": ("TPU v5 lite", "TPU v5e"), "v5p": ("TPU v5", "TPU v5p"), "v6e": ("TPU v6 lite", "TPU v6e")}
    for name, known in (kinds | {"v4": ("TPU v4",), "v7x": ("TPU7x",)}).items():
        for kind in known:
            traced_for(monkeypatch, kind)
            assert generations_tpu.generation() == device_facts(kind, "tpu") == name


def traced_for(monkeypatch, kind: str) -> None:
    mesh = SimpleNamespace(abstract_device=SimpleNamespace(device_kind=kind))
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)


@pytest.mark.parametrize(("platform", "kind"), [("cpu", None), ("tpu", jax.devices()[0].device_kind)])
def test_programs_of_a_single_tpu_are_traced_for_it(platform, kind, monkeypatch):
    made = Deployment(EXPERTS, "cpu", "float32", Buckets((16,), (1,), (32,)), modes=("greedy",))
    programs = made.program_set(Shards())
    programs.config = replace(programs.config, platform=platform)
    seen = []

    def program(weights, cache, state, control):
        seen.append(jax.sharding.get_abstract_mesh().abstract_device)
        return cache, state

    monkeypatch.setattr(program_set, "build", lambda *_: program)
    programs.lower(programs.decisive)
    assert [device and device.device_kind for device in seen] == [kind]


def test_a_file_that_is_no_table_is_named(tmp_path):
    assert read(tmp_path / "v5e.json") == []
    for text in ("{", '[{"kernel": "prefill_attention"}]', "[1]"):
        (tmp_path / "v5e.json").write_text(text)
        with pytest.raises(ValueError, match=r"v5e.json is not a list of objects with kernel, shape, blocks"):
            read(tmp_path / "v5e.json")


def result(gain: float, **changes) -> Result:
    one = Result("prefill_attention", ("A",), SHAPE, WIDE, WIDE, 10e-6, 10e-6 * (1 - gain), 8e-6, gain, 3, ())
    return replace(one, **changes)


def test_a_search_takes_the_place_of_what_the_table_says_of_its_shape(tmp_path):
    file, other = tmp_path / "new" / "v6e.json", {**SHAPE, "width": 512}
    assert tune.update(file, [result(0.1), result(0.2, shape=other)], "libtpu 1")
    assert [(e.shape["width"], e.microseconds, e.compiler) for e in read(file)] == [
        (128, 9.0, "libtpu 1"),
        (512, 8.0, "libtpu 1"),
    ]
    assert tune.update(file, [result(0.3)], "libtpu 2")
    assert [(e.microseconds, e.compiler) for e in read(file)] == [(7.0, "libtpu 2"), (8.0, "libtpu 1")]
    assert tune.update(file, [result(0.01)], "libtpu 2")
    assert [e.shape for e in read(file)] == [other]
    assert not tune.update(file, [result(0.01)], "libtpu 3")


def test_a_table_is_written_whole_or_not_at_all(folder, monkeypatch):
    before = (folder / "v5e.json").read_bytes()
    with pytest.raises(TypeError):
        tune.write(folder / "v5e.json", [ENTRY, replace(ENTRY, blocks={"keys": object()})])
    monkeypatch.setattr(tune.Path, "replace", lambda *_: os.replace("absent", "absent"))
    with pytest.raises(FileNotFoundError):
        tune.write(folder / "v5e.json", [])
    assert [(file.name, file.read_bytes()) for file in folder.iterdir()] == [("v5e.json", before)]


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_the_tables_of_the_library_fit_its_kernels(file):
    assert file.stem in generations_tpu.GENERATIONS.values()
    entries = read(file)
    assert len({entry.key for entry in entries}) == len(entries) > 0
    for entry in entries:
        made = tune.blocks_of(entry.kernel)(**entry.blocks)
        module = inspect.getmodule(type(made))
        rule = getattr(module, "default_blocks", None) or module.blocks
        assert list(inspect.signature(rule).parameters) == list(entry.shape)
        assert entry.gain > tune.GAIN


# ---- the search


def search(*cases, floor: float = 0.0, **sizes) -> tuple:
    """cases: functions of sizes."""
    rule = WIDE | sizes
    seconds = [case(rule) for case in cases]
    return climb("prefill_attention", rule, seconds, [floor] * len(cases), lambda number, sizes: cases[number](sizes))


def test_it_finds_sizes_that_depend_on_each_other():
    """Of a function that is least where a block of 2048 keys has parts of 1024."""

    def seconds(sizes):
        return 1 + abs(sizes["keys"] - 2048) / 2048 + abs(sizes["edge"] - sizes["keys"] / 2) / 512

    best, seconds_there, tried, refused = search(seconds, keys=256, edge=256)
    assert (best["keys"], best["edge"], seconds_there) == (2048, 1024, [1.0])
    assert tried <= tune.MOST
    assert refused == []


def test_what_does_not_compile_is_told_and_left_out():
    def seconds(sizes):
        if sizes["keys"] > 1024:
            raise CompileError("Ran out of memory in memory space vmem")
        return 1 / sizes["keys"]

    best, _, _, refused = search(seconds)
    assert best["keys"] == 1024
    assert {"Ran out of memory in memory space vmem"} == {one.reason for one in refused}
    assert all(one.blocks["keys"] > 1024 for one in refused)


def test_no_case_of_a_shape_pays_for_another():
    assert search(lambda sizes: 10 / sizes["keys"], lambda sizes: 1 + sizes["keys"] / 1024)[0] == WIDE


def test_nothing_is_compiled_where_the_floor_leaves_nothing_to_gain():
    best, _, tried, _ = climb("prefill_attention", WIDE, [1.0], [0.985], lambda *_: pytest.fail("compiled"))
    assert (best, tried) == (WIDE, 0)


MXFP4 = {"values": ["int32", 16, 2, 32, 128], "scales": ["int32", 16, 2, 2, 128], "tops": ["float32", 16, 2, 1, 128]}
SHAPES = [
    (
        "collective_matmul",
        {"rows": 32, "parts": 2, "inner": 256, "outer": 128, "itemsize": 2, "scatters": False},
    ),
    ("collective_matmul", {"rows": 32, "parts": 1, "inner": 128, "outer": 256, "itemsize": 2, "scatters": True}),
    ("decode_attention", {"q": [4, 1, 2, 4, 128], "cache": [2, 512, 128], "arrays": 2, "itemsize": 2}),
    ("decode_attention", {"q": [4, 1, 2, 4, 128], "cache": [2, 512, 128], "arrays": 1, "itemsize": 2}),
    ("decode_attention", {"q": [2, 2, 1, 4, 128], "cache": [1, 128, 128], "arrays": 2, "itemsize": 2, "pages": 3}),
    ("decode_attention", {"q": [2, 2, 1, 4, 128], "cache": [1, 512, 128], "arrays": 2, "itemsize": 1, "seen": 257}),
    (
        "expert_mlp",
        {"x": ["bfloat16", 8, 256], "gate_up": ["bfloat16", 16, 2, 256, 128], "down": ["bfloat16", 16, 1, 128, 256]},
    ),
    ("grouped_matmul", {"x": ["bfloat16", 48, 256], "w": ["int8", 16, 2, 256, 128]}),
    ("grouped_matmul", {"x": ["bfloat16", 48, 256], "w": MXFP4}),
    ("mla_decode_attention", {"width": 16, "unit": 256, "longest": 4096, "rank": 512, "itemsize": 2}),
    ("mla_prefill_attention", {"width": 512, "heads": 32, "unit": 256}),
    ("mx_matmul", {"rows": 16, "parts": 2, "inputs": 256, "columns": 512, "bits": 4, "group": 32}),
    ("mx_matmul", {"rows": 64, "parts": 1, "inputs": 256, "columns": 512, "bits": 8, "group": 256}),
    ("prefill_attention", {"width": 256, "group": 4, "size": 128, "itemsize": 2}),
]


@pytest.mark.parametrize(("kernel", "shape"), SHAPES, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.fast_cases(4)
def test_a_shape_has_a_case_that_asks_for_it(kernel, shape):
    if kernel == "decode_attention":
        shape = shape | {name: shape.get(name) for name in ("pages", "seen")}
    for case in standing_for(kernel, shape, 4).values():
        assert getattr(case, "devices", 4) == 4
        assert tune._asked_by(case).shape == shape


@pytest.mark.slow
def test_what_a_deployment_needs():
    hf, buckets = EXPERTS | {"num_hidden_layers": 1}, Buckets((128,), (4,), (512,))
    made = Deployment(hf, "v5e-4", "bfloat16", buckets, Parallelism(tensor=4), ("greedy",))
    cases, failed = tune.needed(made)
    assert cases.keys() == {"decode_attention", "prefill_attention", "grouped_matmul", "expert_mlp", "mx_matmul"}
    name = "q 4 x 1 x 2 x 2 x 128, cache 2 x 128 x 128, arrays 2, itemsize 2, pages 4"
    assert cases["decode_attention"][f"{name}: full rows"] == DecodeAttention((512,) * 4, 2, 2, page=128)
    assert cases["decode_attention"][f"{name}: unequal rows"] == DecodeAttention((128, 256, 384, 512), 2, 2, page=128)
    assert failed == []


def test_a_child_that_is_late_is_killed_and_the_next_job_gets_another(tmp_path):
    (tmp_path / "sleeper.py").write_text(
        "import time\n"
        "from inferlib.aot.child import serve\n"
        "def answer(job):\n"
        "    time.sleep(job['seconds'])\n"
        "    return {'slept': job['seconds']}\n"
        "serve(lambda first: answer)\n"
    )
    sleeper = Child("sleeper", {}, os.environ | {"PYTHONPATH": str(tmp_path)})
    try:
        assert sleeper.ask({"seconds": 0}, limit=60) == {"slept": 0}
        assert sleeper.ask({"seconds": 60}, limit=1) == {"error": "it took more than 1 s"}
        assert sleeper.ask({"seconds": 0}, limit=60) == {"slept": 0}
        assert sleeper.ask({}) == {"error": "'seconds'"}
    finally:
        sleeper.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "v5e-9"], "there is no target 'v5e-9'"),
        (["--target", "cuda:h200"], "kernels are tuned for TPUs, not for cuda:h200"),
        (["--target", "v5e-1", "--target", "v5e-4"], "v5e is named twice"),
        (["softmax", "--target", "v5e-1"], r"no kernels \['softmax'\]; there are decode_attention"),
        (["collective_matmul", "--target", "v5e-8", "--target", "v6e-1"], "for 8 devices, and v6e:1x1 has fewer"),
        (["--target", "v5e-1", "--case", "Z"], r"no cases \['Z'\]"),
        (["--target", "v5e-1", "--parallel", "tp=2"], "give that too"),
        (["--target", "v5e-1", "--config", "llama3-8b", "--case", "A"], "whose programs say which"),
        (["--target", "v5e-1", "--config", "llama3-9b"], "no model shape is called 'llama3-9b'"),
    ],
)
def test_bad_commands_are_explained(words, message, monkeypatch):
    monkeypatch.setattr(child, "subprocess", None)  # nothing is started
    assert re.search(message, error_of(CliRunner().invoke(app, ["tune", *words])))


@pytest.mark.slow
@needs_compiler
def test_a_search_with_the_compiler(monkeypatch):
    monkeypatch.setattr(tune, "MOST", 2)
    target, case = parse_target("v5e-1"), DecodeAttention((2048,))
    with KernelCompiler(target) as compiler:
        with pytest.raises(CompileError, match="a block is a number of parts"):
            compiler.trial(case, {"block": 128, "part": 100})
        with pytest.raises(CompileError, match="bytes of on-chip memory"):
            compiler.trial(case, {"block": 1 << 16, "part": 1 << 16})
        rule, asked = compiler.trial(case, None)
        small, again = compiler.trial(case, {"block": 128, "part": 128})
        assert compiler.floor(case) <= rule.busy <= rule.whole
    assert (again.shape, again.blocks["block"]) == (asked.shape, 128)
    assert rule.cycles < small.cycles
    (one,), failed = tune.tune(target, {"decode_attention": {"one row": case}}, limit=60, workers=1)
    assert (one.rule, one.rule_seconds, failed) == (asked.blocks, rule.whole, [])
    assert 1 <= one.tried + len(one.refused) <= 2
    assert compiler.floor(case) < one.seconds <= one.rule_seconds
