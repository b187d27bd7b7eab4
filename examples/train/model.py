"""The models that are trained, and their pass over whole rows: the library's decoder, with attention that has no cache.

Shapes: B rows of T tokens; D width; V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.distillation.training import cast
from inferlib.finetuning.whole_rows import RowAttend, row_kernel
from inferlib.models.abstract import AbstractModel, WeightSpec
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.decoder import Decoder
from inferlib.models.layers.attention import Attention
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.stream import Residual
from inferlib.ops.matmul import Activations
from inferlib.sharding.shards import Shards

# Layers of the prelude, the core and the coda, and how often the core runs.
LOOPS = {"a": (2, 2, 2, 1), "b": (2, 2, 2, 8), "c": (2, 16, 2, 1)}
# Lanes, and whether their sums reach each other, a layer late. One lane is tensor parallelism, computed on one device.
LANES = {"d-tensor": (1, False), "d-delayed": (8, True), "d-none": (8, False)}
LANE_LAYERS = 12
PRESETS = (*LOOPS, *LANES)
THROUGH = 8  # the last steps of the core, which gradients go through: all, in a pass of the mean number
FADING = math.sqrt(1 / 5)  # of a state at a step, at first, as published


def core_steps(preset: str) -> int:
    """How often the core of a preset runs, on average in training."""
    return LOOPS[preset][-1] if preset in LOOPS else 1


def config_of(
    preset: str,
    vocab: int,
    *,
    width: int = 512,
    length: int = 512,
    injection: str = "diagonal",
    state_norm: bool = False,
    steps: int = 0,
) -> dict:
    """The config.json of a preset. steps: how often the core runs, if not as the preset says."""
    if preset in LANES:
        return lane_config(preset, vocab, width, length)
    changed = {"state_norm": state_norm} | ({"mean_recurrence": steps} if steps else {})
    return loop_config(preset, vocab, width, length, injection) | changed


def lane_config(preset: str, vocab: int, width: int, length: int) -> dict:
    """Laneformer as published (Kog AI 2026): a Llama in lanes. All presets have the same weights."""
    lanes, exchanges = LANES[preset]
    return {
        "architectures": ["LaneformerTPForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": LANE_LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 8 * (width // 3),
        "max_position_embeddings": 2 * length,
        "rope_theta": 10000.0,
        "norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "num_lanes": lanes,
        "broadcast_delay": 1,
        "use_comm": exchanges,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def loop_config(preset: str, vocab: int, width: int, length: int, injection: str) -> dict:
    """Parcae as published (Prairie et al. 2026). One whose core runs once gets the prelude's output as its first state,
    so it is a transformer; behind the core it has a matrix that begins as 1."""
    prelude, core, coda, steps = LOOPS[preset]
    looped = steps > 1
    return {
        "model_class_name": "Parcae",
        "vocab_size": vocab,
        "padded_vocab_size": vocab,
        "n_embd": width,
        "num_attention_heads": max(1, width // 64),
        "num_key_value_heads": max(1, width // 64),
        "intermediate_size": 4 * width,
        "recurrent_embedding_dimension": width,
        "recurrent_intermediation_embedding_dimension": 4 * width,
        "block_size": 2 * length,
        "n_layers_in_prelude": prelude,
        "n_layers_in_recurrent_block": core,
        "n_layers_in_coda": coda,
        "mean_recurrence": steps,
        "mean_backprop_depth": THROUGH,
        "injection_type": injection if looped else "add",
        "prelude_norm": looped,
        "state_init": "like-init" if looped else "zero",
        "rope_settings": {"use_rope": True, "rope_condense_ratio": 1, "rope_base": 50_000},
        "qk_norm": True,
        "tie_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def first_weights(model: AbstractModel, seed: int, fading: float = FADING) -> tuple[jax.Array, ...]:
    """Random weights; every branch adds nothing at first, and the matrices around the core are 1. fading: what a state
    is multiplied by at a step of the core, at first."""
    return tuple(map(partial(_first, fading), model.weights, model.random_weights(seed)))


def _first(fading: float, weight: WeightSpec, drawn: jax.Array) -> jax.Array:
    if weight.part in ("attn.o", "mlp.down"):
        return jnp.zeros_like(drawn)
    if weight.part in ("loop.input", "loop.exit", "loop.injection.state"):
        return jnp.eye(len(drawn)) * (fading if weight.part.endswith("state") else 1.0)
    if weight.part == "loop.injection.step":  # softplus of it is -log of the fading
        return jnp.full_like(drawn, math.log(math.expm1(-math.log(fading))))
    return drawn


class RowAttention:
    """Causal attention of B whole rows with the projections of a layer. kernel: of `jax.nn.dot_product_attention`."""

    def __init__(self, layer: Attention, rows: int, kernel: str):
        self.layer, self.attend = layer, RowAttend(rows, layer.spec.scale, kernel)
        self.qkv, self.o, self.finished = layer.qkv, layer.o, layer.finished

    def __call__(self, x: Activations, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        """x [B T, D] -> [B T, D]. The cache stays empty."""
        heads, cache = self.attended(x, ctx, cache)
        return ctx.matmul(heads, self.o[...], contract=3), cache

    def attended(self, x: Activations, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        """What the output projection takes, [B T, K, G, h]."""
        return self.attend(*self.layer.project(x, ctx), cache, ctx)


def decoder_of(model: AbstractModel, weights: Sequence[jax.Array], rows: int) -> Decoder:
    """The decoder, its attention that of whole rows. Traceable."""
    decoder, kernel = model.merge(weights), row_kernel(model.dtype)
    for block in decoder.blocks:
        block.attn = RowAttention(block.attn, rows, kernel)
    return decoder


def context(model: AbstractModel, tokens: jax.Array) -> StepContext:
    """That of rows [B, T]. Traceable."""
    rows = jnp.arange(len(tokens), dtype=jnp.int32)
    ctx = StepContext(StepBatch.of_chunks(tokens, rows, jnp.zeros_like(rows)), model.config, model.config.context)
    _ = ctx.positions, ctx.rope  # computed here, outside of loops
    return ctx


def logits_of(
    model: AbstractModel, weights: Sequence[jax.Array], tokens: jax.Array, steps: jax.Array | int
) -> jax.Array:
    """Logits [B, T, V] float32 of rows [B, T], after `steps` steps of the core if that repeats. Gradients go through
    the last `THROUGH` steps: the others are a loop of any length, so that one program does for every number. Traceable.
    """
    rows, weights = len(tokens), cast(weights, model.dtype)
    decoder, spec, ctx = decoder_of(model, weights, rows), model.config.loop, context(model, tokens)
    if spec is None:
        return decoder.logits(lane_states(decoder, ctx), Shards()).reshape(*tokens.shape, -1)

    def run(decoder: Decoder, layers: slice, x: jax.Array) -> jax.Array:
        for block in decoder.blocks[layers]:
            x = block(Residual(x), ctx, LayerCache(()))[0].x
        return x

    def step(decoder: Decoder, state: jax.Array, injected: jax.Array) -> jax.Array:
        x = run(decoder, slice(spec.start, spec.stop), decoder.loop.injection(state, injected, ctx))
        return decoder.loop.state(x, ctx)

    x = run(decoder, slice(spec.start), decoder.embedding(ctx))
    injected, first = decoder.loop.injected(x, ctx), decoder.loop.first_state(context(model, tokens[:1]))
    state = jnp.tile(first, (rows, 1))  # it follows from positions alone
    if spec.steps == 1:
        state = step(decoder, state, injected)
    else:
        fixed, e = decoder_of(model, lax.stop_gradient(weights), rows), lax.stop_gradient(injected)
        before = jnp.maximum(steps - THROUGH, 0)
        state = lax.fori_loop(0, before, lambda _, h: step(fixed, h, e), state)
        for number in range(THROUGH):
            state = jnp.where(before + number < steps, step(decoder, state, injected), state)
    x = run(decoder, slice(spec.stop, None), decoder.loop.outputs(state, ctx))
    return decoder.logits(x, Shards()).reshape(*tokens.shape, -1)


def lane_states(decoder: Decoder, ctx: StepContext) -> jax.Array:
    """The last states of a model with lanes [B T, N D]. Gradients compute each layer again: lanes take memory."""
    residual = decoder.first_residual(decoder.embedding(ctx), ctx, None)
    for block in decoder.blocks:
        layer = jax.checkpoint(lambda residual, block=block: block(residual, ctx, LayerCache(()))[0])
        residual = layer(residual)
    return decoder.outputs(residual, ctx)


def flops_of(model: AbstractModel, length: int) -> int:
    """Estimate of the operations of a training step for each token: a multiplication and an addition for each weight of
    a product, attention to half a row on average, and twice that for each layer that gradients go through."""
    spec, config = model.config.loop, model.config
    backward = THROUGH if spec is not None and spec.steps > 1 else 1
    total = 6 * config.vocab * config.dim  # the head
    for weight in model.weights:
        core = spec is not None and weight.block is not None and spec.start <= weight.block < spec.stop
        forward, through = (spec.steps, backward) if spec is not None and core else (1, 1)
        attention = 2 * length * config.dim if weight.part == "attn.o" else 0
        product = 2 * math.prod(weight.shape) if weight.contracting or weight.part in ("loop.input", "loop.exit") else 0
        total += (product + attention) * (forward + 2 * through)
    return total
