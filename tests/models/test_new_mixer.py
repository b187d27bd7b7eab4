"""A mixer that the library does not know, all of it in this file: its spec, layer, state, cost, checkpoint and family.

It averages values: s <- a s + (1 - a) v for each channel, from s = 0, and returns s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from safetensors.numpy import save_file

from inferlib import Buckets
from inferlib.cache.plan import plan_cache
from inferlib.deploy.explain_text import layer_text
from inferlib.models import families
from inferlib.models.abstract import abstract_model
from inferlib.models.batch import StepContext
from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.models.families.common import LAYER, Family, Hf, mlp, model
from inferlib.models.heads import HeadLayout
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.param import param
from inferlib.models.mixers import states
from inferlib.models.mixers.common import EqualHeads
from inferlib.models.pieces import Assembly, Piece, assembly
from inferlib.models.recurrent import HeadCollective, StateArray
from inferlib.ops.matmul import Activations
from inferlib.planning.costs import Deployed
from inferlib.sharding import axes
from inferlib.sharding.mesh import Parallelism
from inferlib.targets import parse_target
from tests.helpers.llms import MAX_LEN, build_llm, random_prompts
from tests.helpers.sequences import logits_and_tokens
from tests.helpers.tokenizer import VOCAB, write_tokenizer

HEADS, SIZE, WIDTH, HIDDEN, LAYERS = 6, 8, 32, 40, 3


# ---- the mixer


@dataclass(frozen=True)
class AverageSpec(EqualHeads):
    title: ClassVar[str] = "moving average"

    def states(self, layout: HeadLayout) -> tuple[StateArray, ...]:
        return (StateArray("mean", (layout.groups, self.head_dim), (axes.KV_HEADS, axes.HEAD_DIM), wide=True),)

    def build(self, layout: HeadLayout, dim: int, dtype) -> Average:
        return Average(self, layout, dim, dtype)

    @property
    def token_products(self) -> int:
        return 2 * self.head_dim

    def collectives(self, layout: HeadLayout, devices: int) -> tuple[HeadCollective, ...]:
        return (HeadCollective("all-reduce", "mean of all heads", 1),)

    def assemblies(self, names: Mapping[str, str], dim: int) -> dict[str, Assembly]:
        k, width = self.heads, self.heads * self.head_dim
        return {
            "v": assembly(Piece(names["average.v"] + ".weight", (width, dim)), "(k h) d -> d k h", k=k),
            "fade": assembly(Piece(names["average.fade"], (width,)), "(k h) -> k h", k=k),
            "o": assembly(Piece(names["average.o"] + ".weight", (dim, width)), "d (k h) -> k 1 h d", k=k),
        }

    def summary(self) -> str:
        return f"{self.title} of {self.heads * self.head_dim} channels"


class Average(nnx.Module):
    """The channels' averages, less the mean of all heads' averages."""

    def __init__(self, spec: AverageSpec, layout: HeadLayout, dim: int, dtype):
        self.channels = spec.heads * spec.head_dim
        k, h, heads = layout.groups, spec.head_dim, (axes.KV_HEADS, axes.HEAD_DIM)
        self.v = param((dim, k, h), (axes.EMBED, *heads), dtype, contracting=(0,))
        self.fade = param((k, h), heads, jnp.float32, "zeros")
        self.o = param((k, 1, h, dim), (heads[0], axes.QUERIES, heads[1], axes.EMBED), dtype, contracting=(0, 1, 2))

    def __call__(self, x: Activations, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        v = ctx.matmul(x, self.v[...])
        out, cache = states.in_turn(self.rule, (v,), ctx.batch, cache)
        total = ctx.shards.sum(jnp.sum(out, axis=(1, 2), keepdims=True), axes.KV_HEADS)
        return ctx.matmul((out - total / self.channels).astype(v.dtype)[:, :, None], self.o[...], contract=3), cache

    def rule(self, inputs: list[jax.Array], old: states.States, lengths: jax.Array) -> tuple[jax.Array, states.States]:
        (v,), (mean,) = inputs, old
        fade, valid = jax.nn.sigmoid(self.fade[...]), jnp.arange(v.shape[1])[:, None] < lengths

        def token(mean: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            v, live = at
            mean = jnp.where(live[:, None, None], fade * mean + (1 - fade) * v.astype(jnp.float32), mean)
            return mean, mean

        mean, out = lax.scan(token, mean, (jnp.moveaxis(v, 1, 0), valid))
        return jnp.moveaxis(out, 0, 1), (mean,)


# ---- the family


def average(hf: Hf) -> ModelConfig:
    return model(hf, "average", [LayerSpec(AverageSpec(hf["mean_heads"], SIZE), mlp(hf))] * hf["num_hidden_layers"])


NAMES = LAYER | {"average.v": "mixer.v_proj", "average.fade": "mixer.fade", "average.o": "mixer.o_proj"}
AVERAGE = Family("average", ("AverageForCausalLM",), average, {"tie_word_embeddings": False}, NAMES)
HF = {
    "architectures": ["AverageForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "hidden_act": "silu",
    "mean_heads": HEADS,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    rng, shapes = np.random.default_rng(0), {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    shapes["lm_head.weight"] = VOCAB, WIDTH
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {layer + f"mlp.{part}_proj.weight": (HIDDEN, WIDTH) for part in ("gate", "up")}
        shapes |= {layer + "mlp.down_proj.weight": (WIDTH, HIDDEN), layer + "mixer.fade": (HEADS * SIZE,)}
        shapes |= {layer + "mixer.v_proj.weight": (HEADS * SIZE, WIDTH)}
        shapes |= {layer + "mixer.o_proj.weight": (WIDTH, HEADS * SIZE)}
        shapes |= {layer + f"{norm}_layernorm.weight": (WIDTH,) for norm in ("input", "post_attention")}
    return {name: rng.normal(0, 0.3 if len(shape) > 1 else 1, shape).astype("f") for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def folder(tensors, tmp_path_factory):
    path = tmp_path_factory.mktemp("average")
    (path / "config.json").write_text(json.dumps(HF))
    save_file(tensors, path / "model.safetensors")
    write_tokenizer(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "_BY_ARCHITECTURE", dict(families._BY_ARCHITECTURE))
        families.register(AVERAGE)
        yield path


def reference(tensors: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Logits [T, V], token by token."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + HF["rms_norm_eps"]) * tensors[name + ".weight"]

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    x = tensors["model.embed_tokens.weight"][tokens].astype(np.float64)
    for i in range(LAYERS):
        w = {name.removeprefix(f"model.layers.{i}."): value for name, value in tensors.items()}
        y, fade, mean, out = norm(x, f"model.layers.{i}.input_layernorm"), sigmoid(w["mixer.fade"]), 0.0, []
        for v in y @ w["mixer.v_proj.weight"].T:
            mean = fade * mean + (1 - fade) * v
            out.append(mean - mean.mean())
        x = x + np.stack(out) @ w["mixer.o_proj.weight"].T
        y = norm(x, f"model.layers.{i}.post_attention_layernorm")
        gate, up = (y @ w[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate * sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ tensors["lm_head.weight"].T


# ---- what the library makes of it


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "scan"), [pytest.param(None, False, marks=pytest.mark.release), ("tp=4", True)])
def test_prompts_and_decoding_equal_one_pass(parallel, scan, folder, tensors):
    """Chunks of 16, rows of different lengths; six heads on four devices are two each, with padding."""
    buckets = Buckets(prefill=(16,), batch=(4,), cache=(MAX_LEN,))
    llm = build_llm(folder, buckets, scan=scan, parallel=parallel, decode_steps=1)
    prompts = random_prompts([1, 7, 16, 17, 40])
    for prompt, of_prompt, tokens in zip(prompts, *logits_and_tokens(llm, prompts, 12), strict=True):
        np.testing.assert_allclose(of_prompt, reference(tensors, prompt), rtol=0, atol=1e-4)
        logits = reference(tensors, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        assert np.all(logits.max(-1) - logits[np.arange(len(tokens)), tokens] < 1e-3)


def test_cache_plan_and_cost_count_its_state(folder):
    config = families.config_from_hf(HF)
    plan = plan_cache(abstract_model(config, "bfloat16"), rows=5, max_len=MAX_LEN, chunk=16, dtype="bfloat16")
    assert [(x.shape, x.dtype.name) for x in plan.arrays] == [((5, HEADS, SIZE), "float32")] * LAYERS
    one, two = (
        Deployed(families.config_from_hf(HF | {"mean_heads": heads}), parse_target("v5e:1x1"), Parallelism())
        for heads in (HEADS, 2 * HEADS)
    )
    assert one.decode(3, 50).cache_bytes == 2 * 3 * LAYERS * HEADS * SIZE * 4
    assert one.decode(3, 50, drafts=3).cache_bytes == 3 * 3 * LAYERS * HEADS * SIZE * 4  # read, and replayed
    products = 2 * SIZE + 2 * SIZE * WIDTH  # beside those with weights, which grow as well
    assert two.decode(3, 50).flops - one.decode(3, 50).flops == 2 * 3 * LAYERS * HEADS * products


def test_collectives_and_summary_are_its_own(folder):
    deployed = Deployed(families.config_from_hf(HF), parse_target("v5e:2x2"), Parallelism.parse("tp=4"))
    ours = [c for c in deployed.decode(3, 50).collectives if c.purpose == "mean of all heads"]
    assert [(c.kind, c.count, c.nbytes) for c in ours] == [("all-reduce", LAYERS, 3 * 4)]
    assert layer_text(deployed.config.layers[0]).startswith("moving average of 48 channels, MLP silu 40")
