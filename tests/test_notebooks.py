"""The notebooks run from start to end in a fresh kernel, and are stored with the outputs of such a run.

Executing one takes a minute or two: real weights, and programs to compile.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

from tests.helpers.smollm2 import first_layers

FOLDER = Path(__file__).parents[1] / "notebooks"
CELL_SECONDS = 600
IMAGE_BYTES = 80_000
# By notebook, what its cells repeat for the sake of their figures, and how little of it runs the same programs.
# `{model}` is a file of the first two layers of SmolLM2: a program of all thirty takes five seconds to compile.
LESS = {
    "01_generate": {
        'llm = LLM("smollm2"': "llm = LLM({model}",
        "Buckets(prefill=(8, 64), batch=(1, 8)": "Buckets(prefill=(64,), batch=(1, 8)",
        "draws = 128": "draws = 16",
        "for _ in range(2)]": "for _ in range(1)]",
        "lengths = [4, 8, 9, 64, 65, 128, 129, 192]": "lengths = [8, 65, 192]",
        "    for _ in range(20)\n]": "    for _ in range(10)\n]",
        "batches = [1, 2, 4, 6, 8]": "batches = [1, 8]",
        "greedy = SamplingParams(temperature=0, max_tokens=40)": "greedy = SamplingParams(temperature=0, max_tokens=8)",
        "params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)": (
            "params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)"
        ),
        "rng.integers(6, 33)": "rng.integers(3, 12)",
    },
    "02_sharding": {
        '"num_hidden_layers": 2, "num': '"num_hidden_layers": 1, "num',
        "max_len=64, buckets=buckets, parallel=p": "max_len=64, buckets=buckets, decode_steps=1, parallel=p",
        'PLANS = ["dp=8", "tp=4,dp=2", "tp=8", "tp=8,rules=tp_sp"]': 'PLANS = ["tp=8,rules=tp_sp"]',
        'PLANS += ["tp=4,cp=2", "tp=4,cp=2,rules=helix", "tp=4,cp=2,rules=tp2d"]': 'PLANS += ["tp=4,cp=2"]',
    },
    "03_plan_and_compile": {
        "max_tokens=20": "max_tokens=4",
        'inferlib.compile("smollm2", ': "inferlib.compile({model}, ",
        'LLM("smollm2", artifacts': "LLM({model}, artifacts",
        "input_len=3840": "input_len=448",
        'plan("llama3-8b"': 'plan(inferlib.configs.load("llama3-8b") | dict(num_hidden_layers=1, vocab_size=2048)',
    },
    "04_experts_and_latents": {"LAYERS, EXPERTS, CHOSEN = 4, 32, 4": "LAYERS, EXPERTS, CHOSEN = 1, 32, 4"},
    "05_flash_decoding": {
        '    "8 rows as above": DecodeAttention(tuple(lengths.tolist())),\n': "",
        '    "32 rows x 1024": DecodeAttention((1024,) * 32),\n': "",
        '    "32 rows x 4096": DecodeAttention((4096,) * 32),\n': "",
    },
    "06_trainium_kernels": {
        "contexts = [1024, 2048, 4096, 8192]": "contexts = [1024, 2048]",
        'decode("trn2", 8192)': 'decode("trn2", 2048)',
        "(8, 2048)).astype(ml_dtypes.bfloat16), 2048": "(8, 1024)).astype(ml_dtypes.bfloat16), 1024",
    },
    "09_choosing_a_quantization": {'MODEL = "smollm2"': "MODEL = {model}"},
    "11_drafts": {
        'LLM("smollm2", **OPTIONS), LLM("smollm2", speculation': "LLM({model}, **OPTIONS), LLM({model}, speculation",
        '"summarise it": f"Summarise this text in your own words: {TEXT}",': "",
        "temperature=0, max_tokens=64": "temperature=0, max_tokens=16",
        "temperature=0.2, seed=7, max_tokens=64": "temperature=0.2, seed=7, max_tokens=8",
    },
    "12_serving": {  # of the whole model: two layers do not end the JSON that a client asks for
        "CLIENTS = [1, 2, 4, 8, 16]": "CLIENTS = [4]",
        "REQUESTS = 3": "REQUESTS = 1",
        "for _ in range(2):": "for _ in range(1):",
        "await run(4)  #": "#",
    },
    "10_prompts_that_begin_alike": {
        'LLM("smollm2", max_batch': "LLM({model}, max_batch",
        "max_tokens=12": "max_tokens=3",
        "first_tokens(forget=False)  # everything has run once\n": "",
    },
    "14_long_contexts": {
        'llm = LLM("smollm2", **SIZES)': "llm = LLM({model}, **SIZES)",
        "LAYER, HEAD = 12, 1": "LAYER, HEAD = 1, 1",
        'LLM("smollm2", **SIZES, **option)': "LLM({model}, **SIZES, **option)",
        "max_tokens=80": "max_tokens=8",
        '"quest": (64, 128), "keydiff": (128, 256), "h2o": (256,), "snapkv": (256,)': '"quest": (64,)',
    },
    "15_loops_and_lanes": {
        '"--steps", "100"': '"--steps", "4"',
        "DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)": "DEPTHS = (1, 8)",
        "THRESHOLDS = (0.01, 0.03, 0.1, 0.3)": "THRESHOLDS = (0.3,)",
        "max_tokens=120": "max_tokens=8",
        'if importlib.util.find_spec("libtpu") is None:': "if True:",  # notebook 3 compiles for TPUs
    },
    # GPTQ runs on single matrices of the whole before.
    "13_where_four_bits_hurt": {
        "inferlib.calibrate(MODEL": "inferlib.calibrate({model}",
        "against=MODEL": "against={model}",
        "tokens=1536": "tokens=512",
        "tokens=1024)": "tokens=512)",
        'method="hadamard+gptq", scheme="int4"': 'method="hadamard+nearest", scheme="int8"',
    },
}
# Outputs that name a machine: absolute paths, with slashes or on a Windows drive.
MACHINE = re.compile(r"(?<![\w.:/])/\w[\w.-]*/|\b[A-Z]:\\")

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What they show is tested at length elsewhere.
FURTHER = ("01_", "02_", "03_", "04_", "05_", "06_", "08_", "09_", "10_", "11_", "12_", "13_", "14_", "15_")
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def assert_ran_in_order(notebook: nbformat.NotebookNode) -> None:
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))


def test_there_are_notebooks():
    assert NOTEBOOKS


@every_notebook
def test_stored(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert_ran_in_order(notebook)
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert output.output_type != "error", cell.source
            assert output.get("name") != "stderr", f"{output.text}\nfrom\n{cell.source}"
            data = output.get("data", {})
            text = output.get("text", "") + data.get("text/plain", "") + data.get("text/html", "")
            assert not MACHINE.search(text), text
            assert len(data.get("image/png", "")) * 3 / 4 < IMAGE_BYTES, cell.source


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return first_layers(2, tmp_path_factory.mktemp("smollm2") / "smollm2.gguf")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=[pytest.mark.release] if p.name.startswith(FURTHER) else []) for p in NOTEBOOKS],
)
def test_runs(path, tmp_path, request):
    notebook = nbformat.read(path, as_version=4)
    for cell in code_cells(notebook):
        cell.execution_count, cell.outputs = None, []
    for more, less in LESS.get(path.stem, {}).items():
        (cell,) = (cell for cell in code_cells(notebook) if more in cell.source)
        if "{model}" in less:
            less = less.replace("{model}", repr(str(request.getfixturevalue("model"))))
        cell.source = cell.source.replace(more, less)
    # A kernel of this interpreter, whatever kernels the user has installed.
    write_kernel_spec(tmp_path / "python3")
    kernels = KernelSpecManager(kernel_dirs=[str(tmp_path)], ensure_native_kernel=False)
    NotebookClient(
        notebook,
        km=AsyncKernelManager(kernel_name="python3", kernel_spec_manager=kernels),
        timeout=CELL_SECONDS,
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute(cleanup_kc=True)
    assert_ran_in_order(notebook)
