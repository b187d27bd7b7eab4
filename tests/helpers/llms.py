"""Tiny random models, and what transformers computes for them.

torch and transformers are imported inside functions: many tests do without, and they take seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from inferlib import LLM, BeamSearchParams, Buckets
from inferlib.engine.engine import Engine
from inferlib.engine.scheduler import Scheduler
from inferlib.ops.hadamard import rotation_matrix
from inferlib.outputs import RequestOutput
from tests.helpers.tokenizer import VOCAB

MAX_LEN = 96
Rounding = Callable[[np.ndarray, str, int], np.ndarray]  # keys ("k") or values ("v") [B, K, T, h] of a layer
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"

# Overrides of the oracle's configurations. Windows are 8 positions: with chunks of at most 16 tokens a ring has 24
# slots and wraps four times within MAX_LEN.
TINY: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "gemma2": {"num_hidden_layers": 2, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
    "minicpm3": {"num_hidden_layers": 2},
    "gpt_oss": {"num_hidden_layers": 2},
    # Two stacked layers, then two that read the cache of the second.
    "gemma3n_text": {"num_hidden_layers": 4, "layer_types": [_FULL] * 4, "num_kv_shared_layers": 2}
    | {"intermediate_size": 80, "activation_sparsity_pattern": [0.7] * 4},
    # Two layers with chunked attention, then one without positions.
    "llama4_text": {"num_hidden_layers": 3, "no_rope_layer_interval": 3},
    "qwen3_moe": {"num_hidden_layers": 2},
    "gpt2": {"num_hidden_layers": 2},
    # A ring and a layer with fewer, larger heads, then two layers that read their caches.
    "gemma4_text": {"num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL] * 2, "num_kv_shared_layers": 2}
    | {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 131},
    "mimo_v2_flash": {"num_hidden_layers": 2, "layer_types": [_FULL, _SLIDING]},
    # Its `num_layers` counts pairs of layers.
    "longcat_flash": {"num_hidden_layers": 2, "num_layers": 1},
    # A stacked pattern of linear attention and attention, repeated twice.
    "qwen3_5_text": {"layer_types": [_LINEAR, _FULL] * 2},
    # The same pattern with convolutions.
    "lfm2": {},
    "minimax": {},
    "olmo_hybrid": {"num_hidden_layers": 2, "layer_types": [_LINEAR, _FULL]},
    # Linear attention and latent attention.
    "kimi_linear": {"layer_types": [_LINEAR, _FULL], "num_hidden_layers": 2},
    # A stacked pattern of a state space layer, attention with a feed-forward and one alone, repeated twice.
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "mlp"] * 2},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    # Stacked: a pattern of two layers that repeats twice, then a single layer.
    "ministral": {"num_hidden_layers": 5, "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING]},
}


def build_llm(path: Path | str, buckets: Buckets, *, dtype: str = "float32", **options: Any) -> LLM:
    """An LLM of these buckets, in pages of 16 positions. options: other keyword arguments of `LLM`."""
    sizes = {"max_batch": buckets.batch[-1], "max_len": buckets.cache[-1], "buckets": buckets, "page_size": 16}
    return LLM(path, dtype=dtype, progress=False, **sizes | options)


@contextlib.contextmanager
def new_engine(llm: LLM, *, pages: int | None = None, **options: Any) -> Iterator[Engine]:
    """Give `llm` a new engine whose config differs in `options`, with the same weights and programs.

    pages: how many of the device's it may give to rows. A warm-up binds this engine alone.
    """
    before, strict = llm.engine, llm.engine.programs.strict
    config = dataclasses.replace(before.config, **options)
    engine = Engine(before.model, before.weights, config, programs=before.programs)
    if pages is not None:
        cascade, plan = engine.scheduler.cascade, dataclasses.replace(engine.plan, pages=pages)
        engine.scheduler = Scheduler(config, plan, cascade, engine.source, engine.adapters)
    llm._runner.engine = engine
    try:
        yield engine
    finally:
        llm._runner.engine, before.programs.strict = before, strict


@contextlib.contextmanager
def stopped_engine(calls: int) -> Iterator[threading.Event]:
    """Engines stop after so many calls of `advance` until the event is set, which the end of the block does too."""
    advance, event, left = Engine.advance, threading.Event(), iter(range(calls))

    def stopping(engine: Engine, **options: Any):
        if next(left, None) is None:
            assert event.wait(300)
        return advance(engine, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "advance", stopping)
        try:
            yield event
        finally:
            event.set()


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """One prompt of random token ids per length, without special tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, length).tolist() for length in lengths]


@functools.cache
def _reference_model(path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def reference(path: Path, tokens: list[int], kv_cache_dtype: str | Rounding | None = None) -> np.ndarray:
    """Logits [T, V] of one full pass of transformers over `tokens`; each model is loaded once.

    kv_cache_dtype: round keys and values as a cache of that dtype does, or by a function.
    """
    import torch
    from transformers import DynamicCache

    def rounding(x: np.ndarray, which: str, layer: int) -> np.ndarray:
        return kv_cache_dtype(x, which, layer) if callable(kv_cache_dtype) else _rounded(x, str(kv_cache_dtype), which)

    class Rounded(DynamicCache):
        def update(self, *pair, **kwargs):
            pair_of = zip(pair[:2], ("k", "v"), strict=True)
            keys, values = (torch.from_numpy(rounding(x.numpy(), which, pair[2])) for x, which in pair_of)
            return super().update(keys, values, *pair[2:], **kwargs)

    model = _reference_model(path)
    cache = Rounded(config=model.config) if kv_cache_dtype else None
    with torch.no_grad():
        output = model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=cache is not None)
    return output.logits[0].numpy()


def reference_hidden(path: Path, tokens: list[int]) -> np.ndarray:
    """Hidden states [T, D] after the final norm, by one full pass of transformers."""
    import torch

    with torch.no_grad():
        return _reference_model(path).base_model(input_ids=torch.tensor([tokens])).last_hidden_state[0].numpy()


def reference_beams(
    path: Path, prompt: list[int], params: BeamSearchParams, eos: tuple[int, ...] = ()
) -> list[tuple[list[int], float]]:
    """Tokens, without padding, and scores of transformers' beam search."""
    import torch

    output = _reference_model(path).generate(
        torch.tensor([prompt]),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        eos_token_id=list(eos) or -1,  # none: the model's own does not count
        pad_token_id=-1,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    tokens = [[token for token in row if token >= 0] for row in output.sequences.tolist()]
    if params.beam_width == 1:  # that is greedy search, which returns no scores of sequences
        transitions = _reference_model(path).compute_transition_scores(
            output.sequences, output.scores, normalize_logits=True
        )
        return [(tokens[0], transitions.sum().item() / params.max_tokens**params.length_penalty)]
    return list(zip(tokens, output.sequences_scores.tolist(), strict=True))


def _rounded(x: np.ndarray, dtype: str, which: str) -> np.ndarray:
    """`x` [..., h] rounded to a dtype with one scale per head; for int4 rotated, and keys ("k") in six bits."""
    if dtype == "int4":
        turn = rotation_matrix(x.shape[-1])
        return (rounded_cells(x @ turn, which) @ turn.T).astype(np.float32)
    most = 127 if dtype == "int8" else 448
    scales = np.abs(x).max(-1, keepdims=True) / np.float32(most)
    values = x / np.where(scales == 0, 1, scales)
    values = np.rint(values) if dtype == "int8" else values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values * scales


def rounded_by(keys: Callable[[np.ndarray, int], np.ndarray]) -> Rounding:
    """Keys [..., K, T, h] of a layer rounded by a function, and values as a cache of int4 does it."""
    return lambda x, which, layer: _rounded(x, "int4", "v") if which == "v" else keys(x, layer).astype(np.float32)


def calibrated_cells(x: np.ndarray) -> np.ndarray:
    """Turned keys [..., h] as cells of `inferlib.ops.calibrated_cells` have them, float64."""
    quarters = np.asarray(x, np.float64).reshape(*x.shape[:-1], 4, -1)
    largest = np.abs(quarters).max(-1, keepdims=True)
    top = largest.max(-2, keepdims=True).astype(ml_dtypes.bfloat16).astype(np.float64)
    middles, best, least = 2.0 ** np.array([5, 3, 2, 2])[:, None], None, np.inf
    for share in (1, 0.85, 0.7):
        codes = np.clip(np.ceil(largest * share / np.where(top == 0, 1, top) * 255), 0, 255)
        codes[..., 0, :] = 255
        steps = codes / 255 * top / (middles - 0.5)
        numbers = np.clip(np.floor(quarters / np.where(steps == 0, 1, steps)), -middles, middles - 1) + 0.5
        error = np.sum((numbers * steps - quarters) ** 2, axis=-1, keepdims=True)
        best = np.where(error < least, numbers * steps, 0 if best is None else best)
        least = np.minimum(error, least)
    return np.asarray(best).reshape(x.shape)


def rounded_cells(x: np.ndarray, which: str) -> np.ndarray:
    """Keys ("k") or values ("v") [..., h] as packed cells have them (see `inferlib.ops.int4_cells`), float64."""
    groups, most = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, 8), 32 if which == "k" else 8
    largest = np.abs(groups).max(-1, keepdims=True)
    top = largest.max(-2, keepdims=True).astype(ml_dtypes.bfloat16).astype(np.float64)
    steps = np.clip(np.ceil(largest / np.where(top == 0, 1, top) * 255), 0, 255) / 255
    steps = (1 if which == "k" else steps) * top / (most - 0.5)
    numbers = np.clip(np.floor(groups / np.where(steps == 0, 1, steps)), -most, most - 1) + 0.5
    return (numbers * steps).reshape(x.shape)


def assert_greedy(path: Path, prompt: list[int], tokens: list[int]) -> None:
    """Assert that each token is the most likely one after those before it, by one full pass of transformers.

    Logits are of order 1; those that differ by less than 1e-3 count as equal.
    """
    logits = reference(path, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    short = logits.max(-1) - logits[np.arange(len(tokens)), tokens]
    assert short.max() < 1e-3, f"step {short.argmax()} of {len(tokens)}: {short.max()} below the best logit"


def assert_rounded(logits: np.ndarray, expected: np.ndarray, unrounded: np.ndarray) -> None:
    """Assert that logits of a quantised cache are closer to the expected ones than to those of an exact cache.

    A difference in the last bit of a float32 can round a cached number to its neighbour, and so in later layers. In
    these models the logits then move by a tenth of the effect of rounding on average and by a third at most, single
    ones by more.
    """
    error, effect = np.abs(logits - expected), np.abs(expected - unrounded)
    assert error.mean() < effect.mean() / 4
    assert error.max() < effect.max()


def assert_decoded(path: Path, output: RequestOutput, rounding: Callable[[list[int]], np.ndarray]) -> None:
    """Assert that the output's log-probabilities are those of one pass over all its tokens with the same rounding.

    rounding: tokens [T] -> logits [T, V] of such a pass.
    """
    (completion,), start = output.outputs, len(output.prompt_token_ids) - 1
    tokens = [*output.prompt_token_ids, *completion.token_ids[:-1]]
    ids = np.array([list(step) for step in completion.logprobs])

    def logprobs_of(logits: np.ndarray) -> np.ndarray:
        logits = logits[start:].astype(np.float64)
        return np.take_along_axis(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), ids, -1)

    logprobs = np.array([[entry.logprob for entry in step.values()] for step in completion.logprobs])
    assert_rounded(logprobs, logprobs_of(rounding(tokens)), logprobs_of(reference(path, tokens)))
