"""Models by name, from a stand-in for the hub on loopback and its cache. About 10 s, most of it one command."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import huggingface_hub
import pytest

from inferlib.checkpoint.source import CheckpointError
from inferlib.hub import HubName
from inferlib.model_files import ModelFiles, read_config
from tests.helpers.cli_model import COMMAND
from tests.helpers.hub import COMMIT, StandIn

NAME = "someone/tiny-llama"
UNUSED = {
    "README.md": b"#",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same weights again",
    "original/model.safetensors": b"and again",
    "onnx/model.onnx": b"onnx",
}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and no hub to reach."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def serve(cache, monkeypatch):
    """`serve(files)`: a hub that is reached, with one repository."""
    stack = []

    def start(files: dict[str, bytes], **options) -> StandIn:
        hub = StandIn(NAME, files, **options)
        context = hub.serve()
        stack.append(context)
        context.__enter__()
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        return hub

    yield start
    for context in stack:
        context.__exit__(None, None, None)


def indexed(*shards: str) -> dict[str, bytes]:
    index = {"weight_map": {f"tensor{i}": shard for i, shard in enumerate(shards)}}
    return {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()} | {
        shard: shard.encode() for shard in shards
    }


def test_names():
    assert HubName.parse("Qwen/Qwen3-0.6B") == HubName("Qwen/Qwen3-0.6B") == HubName.parse("hf:Qwen/Qwen3-0.6B")
    assert HubName.parse("hf:a/b/q4/c.gguf") == HubName("a/b", "q4/c.gguf")
    for path in ("smollm2", "/a/b", "./a/b", "../b", "~/b", "a/b/c.gguf", "a/", "a\\b", Path("a/b")):
        assert HubName.parse(path) is None
    for wrong in ("hf:", "hf:a", "hf:a/b/c", "hf:/a/b", "hf:../b", "hf:a/b/c.bin"):
        with pytest.raises(CheckpointError, match="after hf: comes ORGANISATION/NAME"):
            HubName.parse(wrong)


def test_a_model_is_downloaded_once_and_then_read_offline(serve, cache, checkpoint, monkeypatch):
    folder = checkpoint("llama")
    hub = serve(StandIn.of(NAME, folder).files | UNUSED)
    files = ModelFiles.open(NAME)
    assert files.config == ModelFiles.open(folder).config
    assert files.tokenizer is not None
    assert files.path.is_relative_to(cache)
    downloaded = {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} & hub.files.keys()
    assert sorted(hub.downloads) == sorted(downloaded)
    ModelFiles.open(f"hf:{NAME}", revision=COMMIT)
    assert len(hub.downloads) == len(downloaded)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert ModelFiles.open(NAME).path == ModelFiles.open(NAME, "main").path == files.path
    with pytest.raises(CheckpointError, match="not in the cache, and HF_HUB_OFFLINE is set"):
        ModelFiles.open(NAME, "v2")


def test_the_cache_stands_in_for_a_hub_that_is_not_reached(serve, monkeypatch, caplog):
    serve(indexed("a.safetensors"))
    folder = HubName(NAME).download()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert HubName(NAME).download() == folder
    assert "what is in the cache is used" in caplog.text
    with pytest.raises(CheckpointError, match=r"^model 'a/b': it is no local path, and it could not be downloaded"):
        HubName("a/b").download()


def test_the_index_says_which_files_are_needed(serve, monkeypatch):
    hub = serve(indexed("model-1.safetensors", "[x]*.safetensors") | UNUSED)
    folder = HubName(NAME).download(progress=False)
    assert sorted(hub.downloads) == sorted(indexed("model-1.safetensors", "[x]*.safetensors"))
    (folder / "model-1.safetensors").unlink()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors is not in the cache \(1 of 2 files are missing\)"):
        HubName(NAME).download()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert (HubName(NAME).download() / "model-1.safetensors").is_file()


def test_a_damaged_index(serve):
    for index in (b"{", b"[]", b'{"weight_map": []}', b'{"weight_map": {}}', b'{"weight_map": {"a": 1}}'):
        serve({"config.json": b"{}", "model.safetensors.index.json": index})
        huggingface_hub.constants.HF_HUB_CACHE += "x"
        with pytest.raises(CheckpointError, match=r"is damaged|is not valid JSON|must hold"):
            HubName(NAME).download()


def test_a_config_comes_without_the_weights(serve):
    hub = serve(indexed("a.safetensors"))
    assert read_config(NAME) == {}
    assert "a.safetensors" not in hub.downloads


def test_gguf_files(serve):
    hub = serve({"q4/tiny-Q4_0.gguf": b"four", "README.md": b"#"})
    path = HubName(NAME).download()
    assert path.read_bytes() == b"four"
    hub.files["tiny-Q8_0.gguf"] = b"eight"
    huggingface_hub.constants.HF_HUB_CACHE += "2"
    with pytest.raises(CheckpointError, match=rf"holds 2 \.gguf files: name one, as in hf:{NAME}/q4/tiny-Q4_0\.gguf"):
        HubName(NAME).download()
    path = HubName(NAME, "tiny-Q8_0.gguf").download()
    assert path.read_bytes() == b"eight"
    assert hub.downloads == ["q4/tiny-Q4_0.gguf", "tiny-Q8_0.gguf"]
    with pytest.raises(CheckpointError, match="name one, as in"):
        HubName(NAME, "tiny-Q2_K.gguf").download()


def test_what_cannot_be_had(serve, monkeypatch):
    hub = serve({"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(CheckpointError, match=r"holds neither safetensors nor a \.gguf file"):
        HubName(NAME).download()
    with pytest.raises(CheckpointError, match="has no revision 'v9'"):
        ModelFiles.open(NAME, "v9")
    with pytest.raises(CheckpointError, match=r"'no/such': .* does not exist, or is private"):
        ModelFiles.open("no/such")
    with pytest.raises(CheckpointError, match=r"'a/b--c' is neither a local path nor a valid name"):
        ModelFiles.open("a/b--c")
    hub.gated = True
    huggingface_hub.constants.HF_HUB_CACHE += "x"
    with pytest.raises(CheckpointError, match=r"is gated: accept its terms at .* and log in with"):
        ModelFiles.open(NAME)


def test_a_local_directory_comes_first_if_it_exists(serve, checkpoint):
    hub = serve(indexed("a.safetensors"))
    Path("someone").mkdir()
    Path(NAME).symlink_to(checkpoint("llama"))
    assert ModelFiles.open(NAME).config.family == "llama"
    assert hub.downloads == []
    with pytest.raises(CheckpointError, match="revision 'main' is for models of the hub"):
        ModelFiles.open(NAME, "main")
    with pytest.raises(CheckpointError, match="revision 'v1' is for models of the hub"):
        ModelFiles.open("smollm2", "v1")
    assert read_config(f"hf:{NAME}") == {}


@pytest.mark.slow
def test_a_command_takes_a_name_with_the_settings_of_the_environment(tmp_path, checkpoint):
    with StandIn.of(NAME, checkpoint("llama")).serve() as hub:
        hub.gated = True
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "0"}
        environment = os.environ | settings
        command = [*COMMAND, "info", NAME, "--revision", "main", "--json"]
        shown = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["family"] == "llama"
    assert hub.tokens == {"Bearer hf_secret"}
    assert (tmp_path / "hub" / "models--someone--tiny-llama" / "refs" / "main").read_text() == COMMIT
