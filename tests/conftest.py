"""Shared fixtures: tiny random models, each written and compiled once per session.

torch and transformers are imported where they are needed: many tests do without, and they take seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from jax.experimental.pallas import triton
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from inferlib import LLM, Buckets
from inferlib.engine.engine import Engine
from inferlib.outputs import RequestOutput

# Devices of the sharding tests; everything else runs on the first.
jax.config.update("jax_num_cpu_devices", 8)
# Programs are compiled in a third of the time, and run slower. XLA reads its flags once, with the first program; child
# processes inherit them. Parts of a program side by side would be for idle cores, and take more time together.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
FLAGS = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"

# The same examples each time: a change is judged by what it changes. `--hypothesis-profile=fresh` draws others.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
hypothesis.settings.register_profile("fresh", deadline=None)
hypothesis.settings.load_profile("suite")

VOCAB = 131
MAX_LEN = 96
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"

# Windows of 8: with prefill chunks of at most 16 their rings have 24 slots and wrap four times in MAX_LEN.
TINY: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "gemma2": {"num_hidden_layers": 2, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
    "minicpm3": {"num_hidden_layers": 2},
    "gpt_oss": {"num_hidden_layers": 2},
    # Stacked, two layers, then two that attend to the second one's cache.
    "gemma3n_text": {"num_hidden_layers": 4, "layer_types": [_FULL] * 4, "num_kv_shared_layers": 2}
    | {"intermediate_size": 80, "activation_sparsity_pattern": [0.7] * 4},
    # Two in chunks, then one without positions.
    "llama4_text": {"num_hidden_layers": 3, "no_rope_layer_interval": 3},
    "qwen3_moe": {"num_hidden_layers": 2},
    "gpt2": {"num_hidden_layers": 2},
    # A ring, and a layer whose heads are larger and fewer, then two that attend to their caches.
    "gemma4_text": {"num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL] * 2, "num_kv_shared_layers": 2}
    | {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 131},
    "mimo_v2_flash": {"num_hidden_layers": 2, "layer_types": [_FULL, _SLIDING]},
    # One layer of its own count.
    "longcat_flash": {"num_hidden_layers": 2, "num_layers": 1},
    # Stacked, a layer of linear attention and one of attention, twice.
    "qwen3_5_text": {"layer_types": [_LINEAR, _FULL] * 2},
    # Likewise, of convolutions.
    "lfm2": {},
    "minimax": {},
    "olmo_hybrid": {"num_hidden_layers": 2, "layer_types": [_LINEAR, _FULL]},
    # And latent attention.
    "kimi_linear": {"layer_types": [_LINEAR, _FULL], "num_hidden_layers": 2},
    # Stacked, a layer of state space alone and one of attention with a feed-forward, twice.
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"] * 2},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    # Stacked, these are a pattern of two that repeats twice, then a single layer.
    "ministral": {"num_hidden_layers": 5, "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING]},
}


# Files of long tests, the longest first.
LONG = ("test_notebooks", "test_bundles", "test_smollm2", "test_backends", "test_compile_tpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests start first: the last ones of a run may leave a core idle."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """Garbage is not searched for in torch, transformers and JAX again and again."""
    gc.freeze()


@pytest.fixture(scope="module")
def optimized_programs() -> Iterator[None]:
    """Programs are compiled as a user's are: for those that compute much."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """`checkpoint(family, **overrides)`: the folder of a tiny model with a tokenizer (see `TINY`). Lists as tuples."""
    from tests.helpers.oracle import make_checkpoint

    @functools.cache
    def build(family: str, **overrides: Any) -> Path:
        lists = {name: list(value) for name, value in overrides.items() if isinstance(value, tuple)}
        folder = make_checkpoint(tmp_path_factory.mktemp(family), family, **TINY[family] | overrides | lists)
        write_tokenizer(folder)
        return folder

    return build


@pytest.fixture(scope="session")
def llm_of(checkpoint) -> Callable[..., LLM]:
    """`llm_of(family, scan=False, kv_cache_dtype=None)`: a shared LLM of 4 rows with prefill buckets 8 and 16.

    Leave it idle, and use it for greedy tokens and logits: every other mode is a dozen programs to compile.
    """

    @functools.cache
    def build(family: str, scan: bool = False, kv_cache_dtype: str | None = None) -> LLM:
        buckets = Buckets(prefill=(8, 16), batch=(4,), cache=(MAX_LEN,))
        return build_llm(checkpoint(family), buckets, scan=scan, kv_cache_dtype=kv_cache_dtype)

    return build


@pytest.fixture(scope="session")
def llama(llm_of) -> LLM:
    return llm_of("llama")


@pytest.fixture(scope="session")
def small(checkpoint) -> LLM:
    """One layer, two rows, 64 positions, two steps per dispatch: quick to compile in all modes. Leave it idle."""
    buckets = Buckets(prefill=(8,), batch=(1, 2), cache=(64,))
    return build_llm(checkpoint("llama", num_hidden_layers=1), buckets, decode_steps=2)


def build_llm(path: Path | str, buckets: Buckets, *, dtype: str = "float32", **options: Any) -> LLM:
    """An LLM of these buckets. options: other keyword arguments of `LLM`."""
    sizes = {"max_batch": buckets.batch[-1], "max_len": buckets.cache[-1], "buckets": buckets}
    return LLM(path, dtype=dtype, progress=False, **sizes, **options)


@contextlib.contextmanager
def new_engine(llm: LLM, **options: Any) -> Iterator[Engine]:
    """`llm` with a new engine whose config differs in `options`; weights and programs are the old one's."""
    old = llm.engine
    config = dataclasses.replace(old.config, **options)
    llm.engine = Engine(old.model, old.weights, config, programs=old.programs)
    try:
        yield llm.engine
    finally:
        llm.engine = old


def copies_of(names: Iterable[str], early: Iterable[str]) -> pytest.MarkDecorator:
    """Cases, by `name` and `mode`, of a TPU kernel that must have no races: its copies happen not before they are
    waited for, and in those of `early` also when they are started. Either mode finds races; they spoil other values.
    """
    cases = [*((name, "on_wait") for name in names), *((name, "eager") for name in early)]
    return pytest.mark.parametrize(("name", "mode"), cases)


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Token ids without the special ones."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, length).tolist() for length in lengths]


@functools.cache
def _reference_model(path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def reference(path: Path, tokens: list[int], kv_cache_dtype: str | None = None) -> np.ndarray:
    """Logits [T, V] of one full pass of transformers; like the oracle's, but the model is loaded once.

    kv_cache_dtype: keys and values are rounded as in a cache of that dtype.
    """
    import torch
    from transformers import DynamicCache

    class Rounded(DynamicCache):
        def update(self, *pair, **kwargs):
            keys, values = (torch.from_numpy(_rounded(x.numpy(), kv_cache_dtype)) for x in pair[:2])
            return super().update(keys, values, *pair[2:], **kwargs)

    model = _reference_model(path)
    cache = Rounded(config=model.config) if kv_cache_dtype else None
    with torch.no_grad():
        found = model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=cache is not None)
    return found.logits[0].numpy()


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Heads [..., h] in a dtype, with a scale each."""
    most = 127 if dtype == "int8" else 448
    scales = np.abs(x).max(-1, keepdims=True) / np.float32(most)
    values = x / np.where(scales == 0, 1, scales)
    values = np.rint(values) if dtype == "int8" else values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values * scales


def assert_greedy(path: Path, prompt: list[int], tokens: list[int]) -> None:
    """Each token is the most likely one after those before it, by one full pass of transformers.

    Logits of order 1 that differ by less than 1e-3 count as equal.
    """
    logits = reference(path, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    short = logits.max(-1) - logits[np.arange(len(tokens)), tokens]
    assert short.max() < 1e-3, f"step {short.argmax()} of {len(tokens)}: {short.max()} below the best logit"


def assert_rounded(found: np.ndarray, expected: np.ndarray, plain: np.ndarray) -> None:
    """found: logits of a cache that rounds; plain: of one that does not.

    Where float32 differs in its last bit, a number of the cache may be its neighbour, and others in later layers.
    Logits of these models move by up to a third of what rounding makes, on average by a tenth; one may by more.
    """
    error, effect = np.abs(found - expected), np.abs(expected - plain)
    assert error.mean() < effect.mean() / 4
    assert error.max() < effect.max()


def assert_decoded(path: Path, output: RequestOutput, rounding: Callable[[list[int]], np.ndarray]) -> None:
    """Its log-probabilities are, at the same tokens, those of a pass over them all with a cache that rounds alike.

    rounding: tokens [T] -> logits [T, V] of such a pass.
    """
    (made,), start = output.outputs, len(output.prompt_token_ids) - 1
    tokens = [*output.prompt_token_ids, *made.token_ids[:-1]]
    ids = np.array([list(step) for step in made.logprobs])

    def taken(logits: np.ndarray) -> np.ndarray:
        logits = logits[start:].astype(np.float64)
        return np.take_along_axis(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), ids, -1)

    found = np.array([[entry.logprob for entry in step.values()] for step in made.logprobs])
    assert_rounded(found, taken(rounding(tokens)), taken(reference(path, tokens)))


def kernels_in(function: Callable, *args, of_gpus: bool = True) -> set[str]:
    """The names of the Pallas kernels that it calls, within loops and branches too, also those of other platforms."""
    found, jaxprs = set(), [jax.make_jaxpr(function)(*args).jaxpr]
    while jaxprs:
        for equation in jaxprs.pop().eqns:
            if equation.primitive.name == "pallas_call":
                if of_gpus or not isinstance(equation.params["compiler_params"], triton.CompilerParams):
                    found.add(equation.params["name"])
            else:
                jaxprs += jaxprs_in_params(equation.params)
    return found


def lowered_for_cuda(function: Callable, *args) -> str:
    """Where there is no GPU: what Pallas lacks on GPUs it says here. Its lowering needs none, but jax 0.12 the name of
    one."""
    known = inspect.signature(AbstractDevice).parameters
    device = dict(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    device = AbstractDevice(**{name: value for name, value in device.items() if name in known})
    checks = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)(*args).mlir_module()


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of VOCAB tokens: 3 special, ASCII, some pairs of letters, the bytes of "é"."""
    letters = ["Ġ", *(chr(code) for code in range(33, 127)), "Ã", "©"]
    pairs = [(a, b) for a in "aeiour" for b in "nstlm"] + [("t", "h")]
    vocab = ["<unk>", "<s>", "</s>", *letters, *(a + b for a, b in pairs)]
    assert len(vocab) == VOCAB
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: i for i, token in enumerate(vocab)}, pairs, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
