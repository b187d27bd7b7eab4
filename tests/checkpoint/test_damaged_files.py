"""Damaged files of every kind end in an error of ours, soon. About 15 s."""

from __future__ import annotations

import json
import os
import struct
from itertools import islice

import pytest

from inferlib.checkpoint.gguf import GGUFCheckpoint
from inferlib.checkpoint.safetensors import SafetensorsSource
from inferlib.checkpoint.source import CheckpointError
from inferlib.models.config import ConfigError
from inferlib.models.families import config_from_hf
from inferlib.tokenizer import Tokenizer
from tests.helpers.cli_model import make_model
from tests.helpers.damaged_files import Cases, problem

COUNTS = {"config": 60, "tokenizer": 250, "safetensors": 100, "gguf": 300, "converted": 100, "template": 200}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 8,
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Cases:
    folder = tmp_path_factory.mktemp("damaged")
    return Cases(make_model(folder / "model", layers=1), folder)


@pytest.mark.parametrize("kind", Cases.KINDS)
@pytest.mark.fast_cases(1)
def test_damaged(cases, kind):
    wrong = list(filter(None, islice(cases.outcomes(kind, seed=0), COUNTS[kind])))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**6},
        {"num_attention_heads": 10**9},
        {"hidden_size": 10**12},
        {"head_dim": 2**63},
        {"vocab_size": 10**12},
        {"max_position_embeddings": 10**12},
        {"eos_token_id": {}},
        {"eos_token_id": [1, "x"]},
        {"rope_theta": 1e999},
    ],
)
def test_numbers_that_no_model_has(change):
    with pytest.raises(ConfigError, match=r"config\.json"):
        config_from_hf(LLAMA | change)


def test_things_that_are_no_files(tmp_path):
    """A pipe would be waited for; a pointer of git-lfs and a pickle say what to do."""
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match="is not a file"):
        SafetensorsSource(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle.*save_pretrained"):
        SafetensorsSource(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    for name in ("model.safetensors", "model.gguf", "tokenizer.json"):
        (tmp_path / name).write_text(pointer)
    for read in (
        lambda: SafetensorsSource(tmp_path),
        lambda: GGUFCheckpoint(tmp_path / "model.gguf"),
        lambda: Tokenizer.from_directory(tmp_path),
    ):
        with pytest.raises(CheckpointError, match="git lfs pull"):
            read()


@pytest.mark.parametrize("shard", ["../other/model.safetensors", "/dev/zero", "a\0b"])
def test_an_index_stays_in_its_directory(tmp_path, shard):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match="outside its directory"):
        SafetensorsSource(tmp_path)


def test_a_tokenizer_that_would_end_the_process(cases):
    """The package cuts the prefix off merged tokens, unseen: here in the middle of a character."""
    file = cases.model / "tokenizer.json"
    good = file.read_bytes()
    tokenizer = json.loads(good)
    tokenizer["model"] |= {"merges": ["a \u0120"], "continuing_subword_prefix": "\0"}
    hidden = json.dumps(tokenizer).replace("continuing_subword_prefix", "c\\u006fntinuing_subword_prefix")
    try:
        for text in (json.dumps(tokenizer), hidden):
            file.write_text(text)
            with pytest.raises(CheckpointError, match="without its continuing_subword_prefix"):
                Tokenizer.from_directory(cases.model)
    finally:
        file.write_bytes(good)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def test_gguf_files_that_took_the_square_of_their_size(tmp_path):
    """One long token, each split of which was tried; and many tensors, the last of them twice."""
    name = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    model = text(b"tokenizer.ggml.model") + struct.pack("<I", 8) + text(b"llama")
    tokens = [text(b"<unk>"), text(b"a" * 1_000_000)]
    tokens = text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + b"".join(tokens)
    scores = text(b"tokenizer.ggml.scores") + struct.pack("<IIQff", 9, 6, 2, 0, 0)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 4) + name + model + tokens + scores)
    assert problem("long token", GGUFCheckpoint(file).tokenizer) == ""
    tensors = [text(b"output.%d" % i) + struct.pack("<IQIQ", 1, 1, 0, 0) for i in (*range(60_000), 59_999)]
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1) + name + b"".join(tensors) + bytes(64))
    with pytest.raises(CheckpointError, match=r"tensor 'output\.59999' is there twice"):
        GGUFCheckpoint(file)
