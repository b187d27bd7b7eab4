from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from inferlib.checkpoint.safetensors import SafetensorsSource
from inferlib.checkpoint.source import CheckpointError

TORCH_TYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.bool: np.bool_,
}


def tensors(names: str, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(5, 3, generator=generator) for name in names}


def write_raw(path: Path, header: str, data: bytes = b"") -> None:
    """A file with exactly this header."""
    path.write_bytes(struct.pack("<Q", len(header.encode())) + header.encode() + data)


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2,), offsets: tuple[int, ...] = (0, 8)) -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})


def test_reads_every_type_without_copying(tmp_path):
    rng = np.random.default_rng(0)
    # One tensor of bytes puts those behind it at odd addresses.
    source = {"odd": torch.from_numpy(rng.integers(0, 255, 7, dtype=np.uint8))}
    source |= {str(t): torch.from_numpy(rng.normal(size=(7, 3)) * 3).to(t) for t in TORCH_TYPES}
    source |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}
    save_file(source, tmp_path / "model.safetensors")
    checkpoint = SafetensorsSource(tmp_path)
    assert set(checkpoint.names()) == set(source)
    for torch_type, dtype in TORCH_TYPES.items():
        name, expected = str(torch_type), source[str(torch_type)].double().numpy()
        assert checkpoint.dtype(name) == dtype
        assert checkpoint.shape(name) == (7, 3)
        assert checkpoint.nbytes(name) == 21 * np.dtype(dtype).itemsize
        for rows in (None, slice(2, 5), slice(6, None), slice(3, 3)):
            array = checkpoint.read(name, rows)
            assert array.dtype == dtype
            assert not array.flags.owndata  # a view of the file
            np.testing.assert_array_equal(array.astype(np.float64), expected[rows or slice(None)])
    assert checkpoint.read("empty").shape == (0, 3)
    assert checkpoint.read("scalar") == 2.5


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads what is resident from /proc")
def test_reading_keeps_no_memory(tmp_path):
    """Walking through a large checkpoint must not make it resident."""
    status = Path("/proc/self/statm")
    rows, columns, count = 4096, 1024, 24  # 16 MiB each
    size = rows * columns * 4
    header = {
        f"t{i}": {"dtype": "F32", "shape": [rows, columns], "data_offsets": [i * size, (i + 1) * size]}
        for i in range(count)
    }
    path = tmp_path / "model.safetensors"
    write_raw(path, json.dumps(header))
    os.truncate(path, path.stat().st_size + count * size)  # a hole reads as zeros
    checkpoint = SafetensorsSource(tmp_path)

    def resident() -> int:
        return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, peak = resident(), 0
    for name in checkpoint.names():
        array = checkpoint.read(name)
        assert array[:, ::512].sum() == 0  # touches every page
        peak = max(peak, resident())
        del array
    assert peak - before < 3 * size


def test_sharded_with_an_index_reads_only_what_it_lists(tmp_path):
    save_file(tensors("ab", 1), tmp_path / "model-00001-of-00002.safetensors")
    save_file(tensors("cd", 2), tmp_path / "model-00002-of-00002.safetensors")
    save_file(tensors("ab", 3), tmp_path / "consolidated.safetensors")
    weight_map = {n: f"model-0000{1 + (n > 'b')}-of-00002.safetensors" for n in "abc"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = SafetensorsSource(tmp_path)
    assert set(checkpoint.names()) == set("abc")
    np.testing.assert_array_equal(checkpoint.read("b"), tensors("ab", 1)["b"].numpy())
    np.testing.assert_array_equal(checkpoint.read("c"), tensors("cd", 2)["c"].numpy())


def test_without_an_index(tmp_path):
    save_file(tensors("ab", 1), tmp_path / "one.safetensors")
    save_file(tensors("cd", 2), tmp_path / "two.safetensors")
    assert set(SafetensorsSource(tmp_path).names()) == set("abcd")
    save_file(tensors("ab", 3), tmp_path / "model.safetensors")
    checkpoint = SafetensorsSource(tmp_path)
    assert set(checkpoint.names()) == set("ab")
    np.testing.assert_array_equal(checkpoint.read("a"), tensors("ab", 3)["a"].numpy())


def test_unknown_name(tmp_path):
    save_file(tensors("a"), tmp_path / "model.safetensors")
    checkpoint = SafetensorsSource(tmp_path)
    for method in (checkpoint.shape, checkpoint.dtype, checkpoint.nbytes, checkpoint.read):
        with pytest.raises(CheckpointError, match=r"no tensor 'b'"):
            method("b")


def test_no_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        SafetensorsSource(tmp_path)


def test_index_names_missing_files(tmp_path):
    save_file(tensors("a"), tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors", "c": "z.safetensors"}})
    )
    with pytest.raises(CheckpointError, match=r"y\.safetensors, z\.safetensors"):
        SafetensorsSource(tmp_path)


def test_index_disagrees_with_its_file(tmp_path):
    save_file(tensors("a"), tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": "x.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"'b' is in x.safetensors, which does not hold it"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_damaged_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json (is damaged|is not valid JSON|must hold a JSON object)"):
        SafetensorsSource(tmp_path)


def test_tensor_in_two_files(tmp_path):
    save_file(tensors("ab"), tmp_path / "one.safetensors")
    save_file(tensors("bc"), tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"'b' is in both .*one\.safetensors and .*two\.safetensors"):
        SafetensorsSource(tmp_path)


def test_truncated_data_says_how_much_is_missing(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(tensors("ab"), path)
    full = path.stat().st_size
    os.truncate(path, full - 4)
    with pytest.raises(CheckpointError, match=rf"model.safetensors is truncated: .* {full} bytes, .* {full - 4}"):
        SafetensorsSource(tmp_path)


@pytest.mark.slow
def test_every_truncation_and_any_damage_to_the_header_is_an_error_or_harmless(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(tensors("ab"), path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model.safetensors"):
            SafetensorsSource(tmp_path)
    rng = np.random.default_rng(0)
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for _ in range(500):
        damaged = bytearray(whole)
        damaged[rng.integers(header)] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            checkpoint = SafetensorsSource(tmp_path)
            for name in checkpoint.names():
                checkpoint.read(name)
        except CheckpointError:
            continue


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("not json", "damaged header"),
        ("[]", "damaged header"),
        ('{"a": 1}', "damaged header"),
        ('{"a": {"dtype": "F32"}}', "damaged header"),
        (f'{{"a": {entry(offsets=(0,))}}}', "damaged header"),
        (f'{{"a": {entry(offsets=(0, 12))}}}', r"'a' of shape \(2,\) and type F32 needs 8 bytes, .* 12"),
        (f'{{"a": {entry(offsets=(-8, 0))}}}', "damaged header"),
        (f'{{"a": {entry(shape=(-1, -2))}}}', "damaged header"),
        (f'{{"a": {entry(dtype="F4")}}}', "type F4 of tensor 'a' is not supported; known: BOOL"),
        (f'{{"a": {entry()}, "a": {entry()}}}', "'a' is there twice"),
    ],
)
def test_damaged_header(tmp_path, header, message):
    write_raw(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=message):
        SafetensorsSource(tmp_path)
