"""Rows that select the pages they read by bases of keys, which are measured on a text."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from inferlib import LLM, Buckets, SamplingParams
from inferlib.calibration.key_bases import measure_key_bases
from inferlib.checkpoint.layer_arrays import BASES
from inferlib.checkpoint.source import CheckpointError
from inferlib.cli import app
from inferlib.deploy.compile import compile
from inferlib.deploy.explain import explain
from inferlib.models.config import ConfigError
from inferlib.option_checks import ConfigurationError
from inferlib.texts import TextSample
from tests.helpers.llms import build_llm
from tests.helpers.poison import before_each_dispatch, cached_pages, poison, tokens_of
from tests.helpers.shared_beginnings import TAILS

BUCKETS = Buckets((16,), (4,), (96,), tile=8)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = [tail[:length] for length, tail in zip([7, 8, 9, 16, 17, 25], TAILS * 2, strict=False)]
TEXT = TextSample(["".join(map(chr, np.random.default_rng(0).integers(97, 123, 2000)))], tokens=256, window=32)


@pytest.fixture(scope="module")
def path(checkpoint, tmp_path_factory):
    """A model with its bases."""
    folder = tmp_path_factory.mktemp("bases") / "llama"
    shutil.copytree(checkpoint("llama"), folder)
    assert measure_key_bases(folder, data=TEXT, progress=False) == BASES.path_of(folder)
    return folder


@pytest.fixture(scope="module")
def selecting(path) -> LLM:
    return build_llm(path, BUCKETS, attention_pages="loki:3:8", decode_steps=1)


def assert_summaries(llm: LLM, path) -> None:
    """Of every whole block of cells that prompts can take: its smallest and largest keys in each direction."""
    engine, bases = llm.engine, BASES.read(path)
    checked = 0
    for layers, cache in zip(engine.model.blocks(), engine.plan.view(engine.cache), strict=True):
        keys, summaries = (np.asarray(x) for x in (cache.arrays[0], cache.summaries))
        if len(layers) == 1:
            keys, summaries = keys[None], summaries[None]
        for layer, of_layer, summary in zip(layers, keys, summaries, strict=True):
            basis = bases[BASES.name_of(layer)]
            for page, count in cached_pages(engine):
                for i in range(count // 8):
                    cells = of_layer[page, :, 8 * i : 8 * i + 8, : basis.shape[1]] @ basis
                    expected = np.concatenate([cells.min(axis=1), cells.max(axis=1)], axis=-1)
                    np.testing.assert_allclose(summary[page, i], expected, rtol=0, atol=1e-5)
                    checked += 1
    assert checked > 4


def test_bases_are_the_leading_components_of_the_keys(path):
    """Of transformers, behind the rotary embedding."""
    import torch
    from transformers import AutoModelForCausalLM

    from inferlib.model_files import ModelFiles

    files, bases = ModelFiles.open(path), BASES.read(path)
    assert files.tokenizer is not None
    windows = TEXT.windows(files.tokenizer, files.config.context)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        cache = model(torch.tensor(windows), use_cache=True).past_key_values
    assert len(bases) == len(files.config.layers)
    for layer in range(len(bases)):
        keys, basis = cache.layers[layer].keys.numpy(), bases[BASES.name_of(layer)]
        assert basis.shape == (keys.shape[1], keys.shape[3], keys.shape[3] // 4)
        for head in range(keys.shape[1]):
            flat = keys[:, head].reshape(-1, keys.shape[3])
            variances = np.linalg.eigvalsh(np.cov(flat.T, bias=True))[::-1]
            np.testing.assert_allclose(np.var(flat @ basis[head], axis=0), variances[: basis.shape[2]], rtol=1e-3)


@pytest.mark.slow
def test_rows_are_what_they_are_alone(selecting, path):
    """With NaN in all that is not valid, and behind prompts that were there before."""
    alone = []
    for prompt in PROMPTS:
        selecting.reset_prefix_cache()
        alone += tokens_of(selecting, [prompt], GREEDY)
    for _ in range(2):
        assert tokens_of(selecting, PROMPTS, GREEDY) == alone
    assert selecting.stats.cached_tokens
    assert_summaries(selecting, path)
    with before_each_dispatch(selecting, poison):
        assert tokens_of(selecting, PROMPTS, GREEDY) == alone


@pytest.mark.release
def test_other_forms(path, selecting):
    """Stacked, on a mesh, with drafts."""
    options = {"scan": True, "parallel": "dp=2,tp=2", "speculation": "ngram:3"}
    other = build_llm(path, BUCKETS, attention_pages="loki:3:8", decode_steps=4, **options)
    assert tokens_of(other, PROMPTS, GREEDY) == tokens_of(selecting, PROMPTS, GREEDY)


def test_what_is_refused(checkpoint, path):
    def build(path, **options):
        return LLM(path, attention_pages="loki:3:8", max_batch=4, max_len=96, progress=False, **options)

    with pytest.raises(CheckpointError, match=r"inferlib key-bases .* --data TEXT\.jsonl"):
        build(checkpoint("llama"))
    with pytest.raises(ConfigurationError, match="kv_cache_dtype int4 rotates them"):
        build(path, kv_cache_dtype="int4")
    for family, message in (("gemma3n_text", "cache of another layer"), ("minicpm3", "no layer that keeps keys")):
        with pytest.raises(ConfigError, match=message):
            measure_key_bases(checkpoint(family), data=TEXT, progress=False)
    damaged = path.parent / "damaged"
    shutil.copytree(path, damaged)
    BASES.path_of(damaged).write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="is damaged: remove it"):
        BASES.read(damaged)


def test_commands_know_them():
    """Summaries have half the bytes of Quest's for each quarter of the directions, twice: a minimum and a maximum."""
    mesh = explain("llama3-8b", "tp=4", max_len=2048, attention_pages="loki:64").mesh
    assert {p.name: p.local_shape for p in mesh.cache} == {
        "cache": (128, 2, 128, 128),
        "cache summaries": (128, 1, 2, 64),
    }
    missing = CliRunner().invoke(app, ["key-bases", "nothing-here", "--data", "none.jsonl"])
    assert missing.exit_code


@pytest.mark.release
def test_artifacts_know_them(path, selecting, tmp_path):
    """The model's bases are found though no option asks for them again."""
    made = compile(path, "cpu", buckets=BUCKETS, modes=["greedy"], attention_pages="loki:3:8", out=tmp_path / "out")
    assert made.ok
    llm = LLM(path, artifacts=tmp_path / "out", progress=False)
    assert tokens_of(llm, PROMPTS[:3], GREEDY) == tokens_of(selecting, PROMPTS[:3], GREEDY)
