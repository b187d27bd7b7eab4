"""A cache of four bits whose keys are turned by what a text says of them: against numpy and transformers."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from inferlib import LLM, Buckets, SamplingParams
from inferlib.calibration.forward import LayerwiseForward
from inferlib.calibration.key_turns import calibrate_cache
from inferlib.calibration.opened import OriginalWeights
from inferlib.checkpoint.laid_out import stored_model
from inferlib.checkpoint.layer_arrays import TURNS
from inferlib.checkpoint.source import CheckpointError
from inferlib.deploy.compile import compile
from inferlib.deploy.explain import explain
from inferlib.model_files import ModelFiles
from inferlib.models.config import ConfigError
from inferlib.models.key_turns import turns_of
from inferlib.option_checks import ConfigurationError
from inferlib.texts import TextSample
from tests.helpers.llms import (
    assert_decoded,
    assert_rounded,
    build_llm,
    calibrated_cells,
    random_prompts,
    reference,
    rounded_by,
)
from tests.helpers.poison import tokens_of

BUCKETS = Buckets((16,), (2,), (64,))
PACKED = "int4_calibrated"
TEXT = TextSample(["".join(map(chr, np.random.default_rng(0).integers(97, 123, 2000)))], tokens=256, window=32)


@pytest.fixture(scope="module")
def path(checkpoint, tmp_path_factory):
    """A model with its turns."""
    folder = tmp_path_factory.mktemp("turns") / "ministral"
    kinds = ("sliding_attention", "full_attention") * 2  # stacked
    shutil.copytree(checkpoint("ministral", num_hidden_layers=len(kinds), layer_types=kinds), folder)
    assert calibrate_cache(folder, data=TEXT, progress=False) == TURNS.path_of(folder)
    return folder


@pytest.fixture(scope="module")
def packed(path) -> LLM:
    return build_llm(path, BUCKETS, kv_cache_dtype=PACKED, scan=True, decode_steps=1)


def expected_logits(path, tokens: list[int]) -> np.ndarray:
    """Of transformers, whose keys are turned, rounded and turned back."""
    turns = TURNS.read(path)

    def keys(x: np.ndarray, layer: int) -> np.ndarray:
        there, back = np.moveaxis(turns[TURNS.name_of(layer)].astype(np.float64), 1, 0)
        return calibrated_cells(x @ there) @ back.swapaxes(1, 2)

    return reference(path, tokens, rounded_by(keys))


@pytest.mark.parametrize("rank", [16, 3])
def test_turns_keep_products_and_share_what_varies(rank):
    """Keys and queries of a head vary alike in each quarter, the first most, and no diagonal factors do better. rank:
    of keys; the directions that they never had are not lost."""
    rng, size = np.random.default_rng(rank), 16
    k, q = rng.standard_normal((500, rank)) @ rng.standard_normal((rank, size)), rng.standard_normal((500, size))
    q *= np.exp(rng.standard_normal(size))
    keys, queries = turns_of(k.T @ k, q.T @ q)
    np.testing.assert_allclose(keys @ queries.T, np.eye(size), atol=1e-9)
    of_keys, of_queries = (
        np.sum((x @ turn) ** 2, axis=0).reshape(4, -1).sum(-1) for x, turn in ((k, keys), (q, queries))
    )
    assert np.all(np.diff(of_keys) < 0)
    least = np.sum(np.linalg.svd(k @ q.T, compute_uv=False)) ** 2
    assert of_keys.sum() * of_queries.sum() == pytest.approx(least, rel=0.1)
    if rank == size:
        np.testing.assert_allclose(of_keys, of_queries, rtol=0.05)


@pytest.mark.slow
def test_a_turned_model_has_the_logits_of_the_original(path):
    """In float32, before anything is rounded."""
    files = ModelFiles.open(path)
    assert files.tokenizer is not None
    windows, logits = TEXT.windows(files.tokenizer, files.config.context), []
    for of_cache in (None, PACKED):
        opened = files.with_cache(of_cache)
        model = stored_model(opened.config, "float32", None)
        weights, walk = OriginalWeights(opened, model), LayerwiseForward(model, windows)
        walk.begin(weights.load(None))
        for layer in range(len(opened.config.layers)):
            walk.advance(layer, weights.load(layer))
        logits.append(walk.logits(weights.load(None)))
    assert opened.config != files.config
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_logits_are_those_of_a_cache_that_rounds(path, packed):
    """Chunk by chunk and token by token, in whole rows and in rings that wrap."""
    (prompt,) = random_prompts([45])
    assert_rounded(packed.logits(prompt), expected_logits(path, prompt), reference(path, prompt))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=20)
    for output in packed.generate([prompt[:20], prompt[20:27]], params):
        assert_decoded(path, output, lambda tokens: expected_logits(path, tokens))


@pytest.mark.release
def test_a_mesh_gives_the_same_logits(path, packed):
    (prompt,) = random_prompts([40])
    several = build_llm(path, BUCKETS, kv_cache_dtype=PACKED, parallel="cp=2,tp=2")
    assert_rounded(several.logits(prompt), packed.logits(prompt), reference(path, prompt))


@pytest.mark.release
def test_artifacts_know_them(path, packed, tmp_path):
    """The model's turns are found though no option asks for them again."""
    made = compile(path, "cpu", buckets=BUCKETS, modes=["greedy"], kv_cache_dtype=PACKED, out=tmp_path / "x")
    assert made.ok
    llm, params = LLM(path, artifacts=tmp_path / "x", progress=False), SamplingParams(temperature=0, max_tokens=9)
    prompts = random_prompts([7, 19])
    assert tokens_of(llm, prompts, params) == tokens_of(packed, prompts, params)


def test_what_is_refused(checkpoint, path):
    def build(path, **options):
        return LLM(path, kv_cache_dtype=PACKED, max_batch=2, max_len=64, progress=False, **options)

    with pytest.raises(CheckpointError, match=r"inferlib calibrate-cache .* --data TEXT\.jsonl"):
        build(checkpoint("llama"))
    with pytest.raises(ConfigurationError, match="a model that drafts has none"):
        build(path, speculation=f"draft:{checkpoint('llama')}:3")
    for family, message in (("gemma3n_text", "cache of another layer"), ("minicpm3", "no layer keeps keys of heads")):
        with pytest.raises(ConfigError, match=message):
            calibrate_cache(checkpoint(family), data=TEXT, progress=False)


def test_commands_count_their_bytes():
    """Of a head of 128: 69 bytes of a key and 82 of a value; and two matrices for each KV head as weights."""
    rounded, turned = (explain("llama3-8b", max_len=2048, kv_cache_dtype=x) for x in ("int4", PACKED))
    assert turned.weight_bytes["bfloat16"] - rounded.weight_bytes["bfloat16"] == 32 * 8 * 2 * 128 * 128 * 4
    assert turned.cache_bytes["bfloat16"]["per_token"] == 32 * 8 * (69 + 82)
