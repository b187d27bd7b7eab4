"""Converted models: any mesh loads what the checkpoint's own loading gives, and nothing half-written is left.

About 45 s.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec

from inferlib import LLM, Buckets, convert
from inferlib.checkpoint.load import placement
from inferlib.checkpoint.safetensors import SafetensorsSource
from inferlib.checkpoint.source import CheckpointError
from inferlib.locks import locked
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.quantization import QUANTIZATIONS, Quantization
from inferlib.ops.backend import Backend
from inferlib.option_checks import ConfigurationError
from inferlib.programs.deployment import Deployment
from inferlib.sharding import axes
from inferlib.sharding.mesh import Parallelism, ShardingError
from inferlib.sharding.shards import Shards, make_shards
from tests.helpers.cli_model import COMMAND, TEMPLATE, Commands, error_of, make_model
from tests.helpers.gguf_files import write as write_gguf
from tests.helpers.oracle import make_checkpoint
from tests.helpers.oracle_cases import SMOLLM2_HEADS

_ONE, _TWO = {"num_hidden_layers": 1}, {"num_hidden_layers": 2}
_SLIDING, _FULL = "sliding_attention", "full_attention"
# 6 query and 2 KV heads, feed-forward 80, 131 tokens: on 4 and 8 devices heads are copied, the vocabulary is padded.
SHAPES = {
    "biased": ("llama", {**_TWO, "attention_bias": True, "mlp_bias": True, "intermediate_size": 84}),
    # 3 KV heads, tied: on 2 devices heads are padded.
    "smollm2": ("llama", _ONE | SMOLLM2_HEADS),
    "olmo2": ("olmo2", _ONE),  # QK-norm over all heads
    "minicpm3": ("minicpm3", _ONE),  # latent attention, 6 heads
    # States of two groups, which are copied, a layer without a feed-forward.
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp"]}),
    # 7 experts, one by one and fused; gated shared ones, a correction in float32, dense layers between.
    "experts": ("qwen2_moe", {"num_hidden_layers": 2, "mlp_only_layers": [1]}),
    "fused experts": ("granitemoe", _TWO | {"num_local_experts": 7}),
    "corrected experts": ("glm4_moe", _TWO),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 5, "layer_types": [_SLIDING, _FULL] * 2 + [_SLIDING]}),
}
RESTORED = {
    "biased": ["", "tp=8", "tp=2,cp=4,rules=helix"],
    "smollm2": ["tp=2"],
    "olmo2": ["tp=8"],
    "nemotron_h": ["tp=4"],
    "minicpm3": ["tp=4,cp=2,rules=tp2d"],
    "corrected experts": ["ep=2"],
}


FURTHER = ("smollm2", "olmo2")  # which `test_types` and `test_command` load on other meshes, and QK-norms


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    @functools.cache
    def build(shape: str) -> Path:
        family, options = SHAPES[shape]
        return make_checkpoint(tmp_path_factory.mktemp(shape), family, **options)

    return build


@pytest.fixture(scope="module")
def converted(checkpoint, tmp_path_factory) -> Callable[..., Path]:
    """`converted(shape, dtype="float32", parallel="tp=4")`; leave it as it is."""

    @functools.cache
    def build(shape: str, dtype: str = "float32", parallel: str = "tp=4") -> Path:
        out = tmp_path_factory.mktemp("converted") / shape
        convert(checkpoint(shape), out, dtype=dtype, parallel=parallel, progress=False)
        return out

    return build


SEPARATE = Backend(gate_up="separate")


@pytest.fixture
def copy(converted, tmp_path) -> Path:
    """A converted model to damage."""
    return Path(shutil.copytree(converted("biased"), tmp_path / "copy"))


def load(path: Path, dtype: str, parallel: str = "", **options) -> tuple[AbstractModel, tuple[jax.Array, ...]]:
    files, shards = ModelFiles.open(path), make_shards(Parallelism.parse(parallel))
    model = abstract_model(files.config, dtype, shards=shards, **options)
    return model, files.load(model, shards=shards)


def assert_same(path: Path, expected: Path, dtype: str, parallel: str = "", **options) -> None:
    """Bit by bit, and on the same devices."""
    model, got = load(path, dtype, parallel, **options)
    _, want = load(expected, dtype, parallel, **options)
    for spec, a, b in zip(model.specs, got, want, strict=True):
        assert (a.shape, a.dtype) == (spec.shape, spec.dtype), spec.name
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), spec.name
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=spec.name)


# ---- the same weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "parallel"),
    [
        # Heads are copied on the mesh of "tp=8" as well, and "minicpm3" has eight devices of two axes.
        pytest.param(shape, p, marks=[pytest.mark.release] if "helix" in p or shape in FURTHER else [])
        for shape, meshes in RESTORED.items()
        for p in meshes
    ],
)
def test_saved_on_four_devices_restored_on_others(shape, parallel, checkpoint, converted):
    assert_same(converted(shape), checkpoint(shape), "float32", parallel)


@pytest.mark.slow
def test_saved_on_others(checkpoint, converted):
    assert_same(converted("smollm2", parallel="tp=2,dp=2"), checkpoint("smollm2"), "float32", "tp=4")


@pytest.mark.slow
def test_experts_saved_where_they_do_not_divide(checkpoint, converted):
    assert_same(converted("experts", parallel="ep=2,tp=2"), checkpoint("experts"), "float32", "ep=4")


@pytest.mark.slow
def test_stacked_layers(checkpoint, converted):
    """A pattern of two that repeats, then a layer alone."""
    assert_same(converted("gemma3"), checkpoint("gemma3"), "float32", "tp=4", scan=True)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_gate_and_up_as_two_arrays(quantization, checkpoint, converted):
    """Those of the joint array, from a checkpoint and from converted weights."""
    options = dict(quantization=quantization and Quantization.named(quantization))
    assert_same(converted("biased"), checkpoint("biased"), "float32", "tp=2", backend=SEPARATE, **options)
    both = (load(converted("biased"), "float32", backend=backend, **options) for backend in (SEPARATE, Backend()))
    separate, joint = ({spec.name: x for spec, x in zip(model.specs, arrays, strict=True)} for model, arrays in both)
    for ending in ["", ".scales"] if quantization else [""]:
        name = "blocks.0.mlp.gate_up"
        halves = np.moveaxis(joint[name + ending], -2, 0)
        for half, values in zip(("gate", "up"), halves, strict=True):
            np.testing.assert_array_equal(separate[f"{name}.{half}{ending}"], values)


@pytest.mark.slow
def test_stacked_experts(checkpoint, converted):
    assert_same(converted("fused experts"), checkpoint("fused experts"), "bfloat16", "ep=2", scan=True)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["", "tp=4"])
def test_types(parallel, checkpoint, converted):
    """As stored, rounded once, widened."""
    original, narrow = checkpoint("smollm2"), converted("smollm2", "bfloat16")
    assert_same(narrow, original, "bfloat16", parallel)
    assert_same(converted("smollm2"), original, "bfloat16", parallel)
    _, wide = load(narrow, "float32", parallel)
    _, stored = load(narrow, "bfloat16", parallel)
    for a, b in zip(wide, stored, strict=True):
        assert a.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b).astype(np.float32))


@pytest.mark.parametrize(
    ("scheme", "stored"),
    [
        # Whether inputs are rounded does not change what is stored.
        *(pytest.param(s, True, marks=[pytest.mark.release] if "_a8" in s else []) for s in sorted(QUANTIZATIONS)),
        *(("int4", False), ("int8", False)),
    ],
)
@pytest.mark.fast_cases(2)
def test_every_quantization_runs_from_converted_weights(scheme, stored, checkpoint, converted, tmp_path):
    """Quantised when they are stored or when they are loaded, in a program that is compiled ahead of its call, as those
    of engines are; on a mesh too, or refused before anything is read."""
    original = converted("smollm2")
    if stored:
        original = tmp_path / "out"
        convert(checkpoint("smollm2"), original, dtype="float32", quantization=scheme, progress=False)
    files, reference = map(ModelFiles.open, (original, checkpoint("smollm2")))
    model = abstract_model(files.config, "float32", quantization=files.quantization(scheme))
    want = reference.load(model)
    structs = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in model.specs]
    program = jax.jit(lambda *x: [y.astype("float32") for y in x]).lower(*structs).compile()
    for arrays in (files.load(model), want):
        for spec, a, b in zip(model.specs, program(*arrays), want, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b).astype(np.float32), err_msg=spec.name)
    options = dict(max_batch=2, max_len=32, buckets=Buckets((16,), (2,), (32,)), quantization=scheme, progress=False)
    packed = any(jax.dtypes.itemsize_bits(spec.dtype) < 8 for spec in model.specs)
    deployment = Deployment(files.hf, "cpu", "float32", options["buckets"], quantization=files.quantization(scheme))
    if not packed:
        deployment.program_set(deployment.shards(jax.devices()), [])
        return
    with pytest.raises(ConfigurationError, match="weights work on a single CPU"):
        LLM(original, parallel="dp=2", **options)
    with pytest.raises(ConfigurationError, match="weights work on a single CPU"):
        deployment.program_set(deployment.shards(jax.devices()), [])


# ---- what is read and held


def test_a_device_holds_its_part_also_where_heads_do_not_divide():
    shards = make_shards(Parallelism(tensor=8))

    def spec(names: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
        return placement(shards, names, shape).spec

    qkv = (axes.EMBED, axes.KV_HEADS, axes.QUERIES, axes.HEAD_DIM)
    assert spec(qkv, (96, 8, 5, 24)) == PartitionSpec(None, "tensor", None, None)
    assert spec(qkv, (96, 2, 5, 24)) == PartitionSpec("tensor", None, None, None)
    assert spec((axes.VOCAB, axes.EMBED), (131, 96)) == PartitionSpec(None, "tensor")
    assert spec((axes.KV_HEADS, axes.HEAD_DIM), (2, 12)) == PartitionSpec(None, None)  # nothing divides
    assert placement(Shards(), qkv, (96, 2, 5, 24)) is None


def test_one_layer_at_a_time(checkpoint, tmp_path, monkeypatch):
    """While a layer is written no other is held, but for the first weight of the next."""
    before, seen = sum(x.nbytes for x in jax.live_arrays()), []
    save = ocp.Checkpointer.save

    def counted(self, *args, **options):
        seen.append(sum(x.nbytes for x in jax.live_arrays()) - before)
        return save(self, *args, **options)

    monkeypatch.setattr(ocp.Checkpointer, "save", counted)
    total = convert(checkpoint("gemma3"), tmp_path / "out", dtype="float32", progress=False)
    assert len(seen) == 5 + 1
    assert max(seen[:-1]) < 1.5 * (total - seen[-1]) / 5


# ---- the rest of the directory


def test_tokenizer_and_template_come_along(tmp_path):
    model = make_model(tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    (model / "notes.txt").write_text("not copied")
    convert(model, tmp_path / "out", progress=False)
    assert_same_text(ModelFiles.open(tmp_path / "out"), ModelFiles.open(model))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    described = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert names == described | {"inferlib.json", "weights"}
    assert not (tmp_path / "out.partial").exists()


def assert_same_text(got: ModelFiles, want: ModelFiles) -> None:
    assert got.config == want.config
    text = "Hello, wörld <eos> 12"
    for tokenizer in (got.tokenizer, want.tokenizer):
        assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    assert got.tokenizer.encode(text) == want.tokenizer.encode(text)
    assert got.tokenizer.bos_token_id == want.tokenizer.bos_token_id
    assert got.tokenizer.eos_token_ids == want.tokenizer.eos_token_ids
    messages = [{"role": "user", "content": "hi"}]
    assert got.tokenizer.chat_template.render(messages) == want.tokenizer.chat_template.render(messages)


@pytest.mark.slow
def test_gguf(tmp_path):
    rng = np.random.default_rng(0)
    tokens = ["<unk>", "<bos>", "<eos>", "<|im_end|>", *"abcdefghi", "Ġ", "ab"]
    width, features, heads, kv = 48, 64, 48, 16
    shapes = {"token_embd": (len(tokens), width), "output_norm": (width,)}
    for i in range(2):
        shapes |= {f"blk.{i}.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{i}.attn_{name}": (n, width) for name, n in (("q", heads), ("k", kv), ("v", kv))}
        shapes |= {f"blk.{i}.attn_output": (width, heads), f"blk.{i}.ffn_down": (width, features)}
        shapes |= {f"blk.{i}.ffn_{name}": (features, width) for name in ("gate", "up")}
    file = write_gguf(
        tmp_path / "model.gguf",
        {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()},
        **{
            "attention.layer_norm_rms_epsilon": 1e-5,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [2, 3, 3, 3] + [1] * 11,
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.chat_template": TEMPLATE,
        },
    )
    convert(file, tmp_path / "out", dtype="float32", parallel="tp=2", progress=False)
    assert_same(tmp_path / "out", file, "float32", "tp=4")
    got, want = ModelFiles.open(tmp_path / "out"), ModelFiles.open(file)
    assert want.tokenizer.eos_token_ids == (2, 3)
    assert_same_text(got, want)


# ---- directories that are refused


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def assert_refused(path: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(path, "float32", "tp=2")
    for part in parts:
        assert part in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_config_of_another_model(copy):
    edit(copy / "config.json", num_key_value_heads=6, rms_norm_eps=0.5)
    assert_refused(copy, "num_key_value_heads was 2 and is 6", "rms_norm_eps was 0.001 and is 0.5", "config.json")


def test_another_version_of_the_format(copy):
    edit(copy / "inferlib.json", format=1)
    assert_refused(copy, "format 1", "reads format 2", "convert the original again")


def test_no_manifest(copy):
    (copy / "inferlib.json").unlink()
    assert_refused(copy, "no inferlib.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 2, "dtype": "x", "weights": {}}'])
def test_damaged_manifest(text, copy):
    (copy / "inferlib.json").write_text(text)
    assert_refused(copy, "inferlib.json is damaged")


def test_manifest_of_other_weights(copy):
    arrays = json.loads((copy / "inferlib.json").read_text())["weights"]
    edit(copy / "inferlib.json", weights=arrays | {"embed": [[131, 95], "float32"], "extra": [[1], "int8"]})
    assert_refused(
        copy, "embed was ((131, 95), 'float32') and is ((131, 96),", "extra was ((1,), 'int8') and is absent"
    )


def test_arrays_of_another_model(copy, converted):
    shutil.rmtree(copy / "weights")
    shutil.copytree(converted("smollm2") / "weights", copy / "weights")
    assert_refused(copy, "weights/layer0000 is damaged")


def data_file(path: Path) -> Path:
    return max((p for p in (path / "weights" / "layer0001").rglob("d/*")), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize("damage", ["truncated", "gone", "layer gone"])
def test_damaged_arrays(damage, copy):
    file = data_file(copy)
    match damage:
        case "truncated":
            os.truncate(file, file.stat().st_size // 2)
        case "gone":
            file.unlink()
        case "layer gone":
            shutil.rmtree(copy / "weights" / "layer0001")
    assert_refused(copy, "weights/layer0001 is damaged; convert the original again")


# ---- whole or not at all


def on_second_save(monkeypatch, act: Callable[[], None]) -> None:
    """`act` as the second layer is written; the first is on the disk then."""
    save, calls = ocp.Checkpointer.save, []

    def acting(self, *args, **options):
        calls.append(args)
        if len(calls) == 2:
            act()
        return save(self, *args, **options)

    monkeypatch.setattr(ocp.Checkpointer, "save", acting)


@pytest.mark.slow
def test_a_failed_write_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    def fail():
        raise ValueError("No space left on device")

    on_second_save(monkeypatch, fail)
    with pytest.raises(OSError, match="the weights could not be written: No space left on device"):
        convert(checkpoint("biased"), tmp_path / "out", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    """The layer that is being written is finished first: it would appear again after it was removed."""
    on_second_save(monkeypatch, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            convert(checkpoint("biased"), tmp_path / "out", progress=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_read_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    read = SafetensorsSource.read

    def failing(self, name, rows=None):
        if "layers.1" in name:
            raise CheckpointError("the disk is gone")
        return read(self, name, rows)

    monkeypatch.setattr(SafetensorsSource, "read", failing)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        convert(checkpoint("biased"), tmp_path / "out", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_conversion_is_cleaned_up(checkpoint, tmp_path):
    (tmp_path / "out.partial" / "weights" / "layer0000").mkdir(parents=True)
    (tmp_path / "out.partial" / "config.json").write_text("{")
    (tmp_path / ".out.lock").touch()
    convert(checkpoint("biased"), tmp_path / "out", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "weights" / "layer0000" / "x").exists()


def test_one_conversion_writes_at_a_time(checkpoint, tmp_path):
    (tmp_path / "out.partial").mkdir()
    with locked(tmp_path / "out") as ours, locked(tmp_path / "out") as theirs:
        assert (ours, theirs) == (True, False)
        with pytest.raises(FileExistsError, match="another process is writing"):
            convert(checkpoint("biased"), tmp_path / "out", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]


@pytest.mark.slow
def test_writes_that_fail_together_are_one_line(checkpoint, tmp_path):
    """Orbax writes the arrays of a layer side by side: all of them fail where files may not grow, and it would print
    each failure that nobody waits for."""
    # Python 3.11 would also keep the first 3,000 bytes of a compiled module, and every later process would read those.
    script = "import sys; sys.dont_write_bytecode = True; "
    script += "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)); "
    script += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from inferlib.cli import app; app()"
    options = ["convert", str(checkpoint("biased")), str(tmp_path / "out")]
    command = [sys.executable, "-P", "-c", script, *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 2, run.stderr
    assert run.stderr.startswith("error: the weights could not be written: ")
    assert run.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["out", "out.partial"])
def test_what_exists_is_kept(name, checkpoint, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "file").write_text("mine")
    with pytest.raises(FileExistsError, match=f"{name} exists"):
        convert(checkpoint("biased"), tmp_path / "out", progress=False)
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == [name, f"{name}/file"]


def test_bad_requests_write_nothing(checkpoint, converted, tmp_path, monkeypatch):
    def refused(error: type, message: str, model: Path, **options) -> None:
        with pytest.raises(error, match=message):
            convert(model, tmp_path / "out", progress=False, **options)
        assert list(tmp_path.iterdir()) == []

    model = checkpoint("biased")
    refused(ConfigurationError, "dtype 'int3' is not supported; choose one of float32", model, dtype="int3")
    refused(ShardingError, "needs 16 devices, and there are 8", model, parallel="tp=16")
    refused(CheckpointError, "is converted already", converted("biased"))
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refused(OSError, r"0.0 GB free, and the weights take 0.0 GB", model)


# ---- several processes

PROCESS = """
import sys
import jax, numpy as np
model, out, address, index = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(address, 2, int(index))
from inferlib import Parallelism, convert
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import abstract_model
from inferlib.sharding.shards import make_shards
convert(model, out, dtype="float32", parallel="tp=4", progress=False)
for parallel in (Parallelism(tensor=4), Parallelism(tensor=2, data=2)):
    files, shards = [ModelFiles.open(path) for path in (out, model)], make_shards(parallel)
    abstract = abstract_model(files[0].config, "float32", shards=shards)
    for a, b in zip(*(f.load(abstract, shards=shards) for f in files), strict=True):
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(x.data), np.asarray(y.data))
print("equal")
"""


@pytest.mark.slow
def test_two_processes_convert_together(checkpoint, tmp_path):
    """Each holds and writes the parts of its two devices, and loads them again."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    arguments = [str(checkpoint("biased")), str(tmp_path / "out"), address]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, *arguments, str(index)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
            assert output.endswith("equal\n")
    finally:
        for process in processes:
            process.kill()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# ---- command line


@pytest.mark.slow
def test_command(checkpoint, tmp_path):
    """In a process of its own, since it makes as many CPU devices as it needs."""
    out = tmp_path / "out"
    options = ["convert", str(checkpoint("smollm2")), str(out), "--parallel", "tp=4", "--dtype", "float32"]
    run = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
    assert f"{out}: " in run.stderr
    assert "of float32 weights" in run.stderr
    assert_same(out, checkpoint("smollm2"), "float32", "tp=8")


def test_info_and_errors_of_the_command(checkpoint, converted, tmp_path):
    inferlib = Commands(checkpoint("smollm2"))
    facts = [json.loads(inferlib("info", path, "--json").stdout) for path in (converted("smollm2"), inferlib.model)]
    assert facts[0].pop("model") != facts[1].pop("model")
    assert facts[0] == facts[1]
    assert "exists; remove it" in error_of(inferlib("convert", inferlib.model, converted("smollm2")))
    assert "cannot read 'tp:2'" in error_of(inferlib("convert", inferlib.model, tmp_path / "x", "--parallel", "tp:2"))
    assert "is not supported" in error_of(inferlib("convert", inferlib.model, tmp_path / "x", "--dtype", "int8"))
    fuse = ("convert", inferlib.model, tmp_path / "x", "--fuse-ffn", tmp_path / "text.jsonl")
    assert "leave them out" in error_of(inferlib(*fuse, "--parallel", "tp=2"))
    assert "has no tokenizer" in error_of(inferlib(*fuse))
