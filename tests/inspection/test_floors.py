"""The floor of a step: what its tokens see of the cache, and the operations on it. Under a second."""

from __future__ import annotations

import pytest

from inferlib import Buckets, configs
from inferlib.inspection.outcome import Outcome
from inferlib.inspection.report import ProgramReport, Report
from inferlib.programs.deployment import Deployment
from inferlib.programs.keys import ProgramKey
from inferlib.sharding.mesh import Parallelism
from tests.helpers.tpu_models import TINY

LAYERS, HEADS, KV_HEADS, SIZE = 2, 8, 4, 128
WINDOW = 256
HF = TINY | {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
HF |= {"head_dim": SIZE, "max_position_embeddings": 8192}
WINDOWED = HF | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": WINDOW}


def floors(hf: dict, *keys: ProgramKey) -> list[ProgramReport]:
    made = Deployment(hf, "v5e-1", "bfloat16", Buckets((128, 512), (8,), (1024, 4096)), Parallelism(), ("greedy",))
    return list(Report.of(made, [Outcome(key, "compiled") for key in keys]).programs)


def decode(rows: int, limit: int, drafts: int = 0) -> ProgramKey:
    return ProgramKey("greedy", rows, limit, steps=1, drafts=drafts)


def prefill(chunk: int, limit: int) -> ProgramKey:
    return ProgramKey("greedy", 0, limit, chunks=1, chunk=chunk)


POSITION = 2 * KV_HEADS * SIZE * 2 * LAYERS  # bytes of keys and values


def test_a_window_counts_the_window():
    """Not the slots of its ring, which has room for a chunk, nor what is before it."""
    short, long = floors(WINDOWED, decode(8, 1024), decode(8, 4096))
    assert short.floor_bytes == long.floor_bytes
    fewer, every = floors(HF, decode(8, 1024), decode(8, 4096))
    assert every.floor_bytes - fewer.floor_bytes == 8 * 3072 * POSITION
    assert fewer.floor_bytes - short.floor_bytes == 8 * (1024 - WINDOW) * POSITION
    assert fewer.flops - short.flops == 8 * (1024 - WINDOW) * 4 * HEADS * SIZE * LAYERS
    # A chunk's tokens see the window of each, 512 - 1 positions more than one of them.
    one, chunk = floors(WINDOWED, prefill(512, 1024), prefill(512, 4096))
    assert one.floor_bytes == chunk.floor_bytes
    whole = floors(HF, prefill(512, 1024))[0]
    assert whole.floor_bytes - one.floor_bytes == (1024 - (WINDOW + 511)) * POSITION


def test_drafts_see_one_position_more_each():
    alone, drafted = floors(WINDOWED, decode(8, 1024), decode(8, 1024, drafts=3))
    embeddings = 8 * 3 * HF["hidden_size"] * 2
    assert drafted.floor_bytes - alone.floor_bytes == 8 * 3 * POSITION + embeddings


def test_a_loop_reads_its_weights_once_and_cells_of_each_step():
    """The core of parcae-370m, four layers of width 1024; six of its twelve layers look a value up for each token."""
    hf = configs.load("parcae-370m") | {"block_size": 4096}
    eight, drafted = floors(hf, decode(8, 1024), decode(8, 1024, drafts=3))
    (four,) = floors(hf | {"loop_steps": 4}, decode(8, 1024))
    position = 2 * 1024 * 2
    assert eight.floor_bytes - four.floor_bytes == 4 * 4 * 8 * 1024 * position
    assert eight.flops - four.flops == 4 * 4 * 8 * (2 * 12 * 1024**2 + 4 * 1024 * 1024)
    assert drafted.floor_bytes - eight.floor_bytes == 8 * 3 * 6 * 1024 * 2


def test_prefill_counts_the_causal_half():
    """A chunk alone: the operations of half a square, with the diagonal; the last chunk of a row: of what precedes it
    as well."""
    first, last = floors(HF, prefill(512, 512), prefill(512, 1024))
    pairs = 512 * 512
    assert last.flops - first.flops == pairs * 4 * HEADS * SIZE * LAYERS
    shorter = floors(HF, prefill(256, 256))[0]
    products = 2 * shorter.flops - first.flops  # what does not grow with the square: the head, once
    half = (512 * 257 - 2 * 256 * 129) * 4 * HEADS * SIZE * LAYERS
    head = 2 * HF["hidden_size"] * HF["vocab_size"]
    assert products == pytest.approx(head - half, abs=0.02 * half)


def test_latents_of_a_chunk_are_expanded_once():
    """Those of the chunk itself by its products with the weights; those before it from the cache."""
    hf = configs.load("deepseek-v2-lite")
    alone, behind = floors(hf, prefill(512, 512), prefill(512, 1024))
    spec = floors_model(hf).layers[0].attention
    pairs = 2 * 512 * 512 * spec.heads * spec.pair_width(decode=False)
    expanded = 2 * 512 * spec.heads * spec.kv_rank * (spec.nope_dim + spec.value_dim)
    assert behind.flops - alone.flops == hf["num_hidden_layers"] * (pairs + expanded)


def floors_model(hf: dict):
    return Deployment(hf, "v5e-1", "bfloat16", Buckets((128,), (8,), (1024,)), Parallelism(), ("greedy",)).model
