"""One step's tokens: prefill chunks and decode rows that share a pass over the weights."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, get_args, get_type_hints

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from inferlib.models.config import MlaSpec, ModelConfig, RopeSpec
from inferlib.models.layers.rope import rope_angles
from inferlib.models.recurrent import Mixer, Recurrent
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


class StepBatch(NamedTuple):
    """P chunks of C tokens and B decode rows; either may be 0.

    chunk_tokens [P, C]: padded at the end with anything; where tokens are dealt out, this device's. chunk_rows [P]:
    cache row of each chunk, rows or more if the slot is absent; chunk_starts [P]: position of the first token;
    chunk_lengths [P]: tokens that are not padding, 0 if the slot is absent;
    decode_tokens [B]: row b's last token; decode_lengths [B]: positions of row b including that token, 0 if it is
    inactive. All int32.
    """

    chunk_tokens: jax.Array
    chunk_rows: jax.Array
    chunk_starts: jax.Array
    chunk_lengths: jax.Array
    decode_tokens: jax.Array
    decode_lengths: jax.Array

    @property
    def tokens(self) -> jax.Array:
        """[T] with T = P * C + B."""
        return jnp.concatenate([self.chunk_tokens.reshape(-1), self.decode_tokens])

    @staticmethod
    def of_chunks(tokens: jax.Array, rows: jax.Array, starts: jax.Array) -> StepBatch:
        """Without padding."""
        # jnp, not np: XLA of jax 0.11 crashes on a captured constant without elements inside shard_map.
        none = jnp.zeros((0,), jnp.int32)
        return StepBatch(tokens, rows, starts, jnp.full_like(starts, tokens.shape[1]), none, none)

    @staticmethod
    def of_rows(tokens: jax.Array, lengths: jax.Array) -> StepBatch:
        none = jnp.zeros((0,), jnp.int32)
        return StepBatch(jnp.zeros((0, 0), jnp.int32), none, none, none, tokens, lengths)


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Which implementation of an operation a program is built with."""

    decode_attention: Literal["xla", "pallas_gpu", "pallas_tpu", "nki"] = "xla"
    qkv_attention: Literal["xla", "pallas_gpu"] = "xla"  # and what precedes it, see `Attention.in_one`
    prefill_attention: Literal["xla", "pallas_tpu", "nki"] = "xla"
    grouped_matmul: Literal["xla", "pallas_gpu", "pallas_tpu"] = "xla"  # and the order of its rows
    expert_mlp: Literal["xla", "pallas_tpu"] = "xla"  # of few tokens; "xla": as grouped products
    matmul: Literal["xla", "pallas_tpu"] = "xla"  # with weights
    add_norm: Literal["xla", "pallas_gpu"] = "xla"  # residual sums and the norms of few rows, on one device
    all_reduce: Literal["xla", "pallas"] = "xla"
    collective_matmul: Literal["xla", "pallas_tpu"] = "xla"  # where tokens are split, see `models.layers.ring`
    exchange: Literal["padded", "ragged"] = "padded"  # of tokens with experts, see `models.layers.exchange`
    generation: Literal[None, "v4", "v5e", "v5p", "v6e", "v7x"] = None  # of TPUs: what is planned for, not a choice

    def __post_init__(self):
        for name, kind in get_type_hints(Backend).items():
            known, given = get_args(kind), getattr(self, name)
            if given not in known:
                raise ValueError(f"backend {name}={given!r} is none of {', '.join(map(repr, known))}")

    @staticmethod
    def for_platform(platform: str, shards: Shards, cores: int = 1, generation: str | None = None) -> Backend:
        """The best choice on "cpu", "gpu", "tpu" or "neuron"; NKI kernels where the Neuron compiler is installed.

        cores: of a device. XLA multiplies on both of those that v4 and v5p have, kernels on one. generation: of a TPU,
        such as v7x."""
        if platform == "neuron" and importlib.util.find_spec("neuronxcc"):
            return Backend(decode_attention="nki", prefill_attention="nki")
        if platform == "tpu":
            kernels = ["decode_attention", "prefill_attention", "grouped_matmul", "expert_mlp", "matmul"]
            kernels += ["collective_matmul"] * (shards.splits_tokens and cores == 1)
            return Backend(**dict.fromkeys(kernels, "pallas_tpu"), exchange="ragged", generation=generation)
        if platform != "gpu":
            return Backend()
        all_reduce = "pallas" if _are_peers(shards) else "xla"
        kernels = dict.fromkeys(("decode_attention", "qkv_attention", "grouped_matmul", "add_norm"), "pallas_gpu")
        return Backend(**kernels, all_reduce=all_reduce, exchange="ragged")


def _are_peers(shards: Shards) -> bool:
    """Whether the fused all-reduce of `pallas_kernels` runs on these GPUs: Hopper or newer, all in one process and on
    one axis, with a jax that lets kernels reach the memory of other devices."""
    if shards.only_axis is None or not isinstance(shards.mesh, Mesh) or shards.several_processes:
        return False
    devices = shards.mesh.devices.flat
    return jax.__version_info__ >= (0, 11) and all(float(d.compute_capability) >= 9 for d in devices)


def kernel_lacks(spec: Mixer, backend: Backend, operation: str, scaled: bool = False) -> str:
    """What the kernel of an attention, "decode_attention" or "prefill_attention", cannot do of a layer, which XLA then
    does; "" if nothing.

    scaled: its cache is quantised."""
    kernel = getattr(backend, operation)
    if isinstance(spec, Recurrent):
        return ""  # it attends to nothing
    if isinstance(spec, MlaSpec) and kernel not in ("pallas_tpu", "pallas_gpu"):
        return "latent attention"
    if scaled and kernel != "pallas_tpu":
        return "a cache of int8 or fp8"
    if isinstance(spec, MlaSpec):
        tiles = spec.kv_rank % 128 == 0 and spec.rope.dim in (32, 64, 128)
        if kernel == "pallas_gpu":
            from inferlib.pallas_kernels.mla_decode_attention_gpu import fits

            tiles = fits(spec.kv_rank, spec.rope.dim)
        return "" if tiles else f"latents of {spec.kv_rank} and rotary keys of {spec.rope.dim}"
    if spec.value_dim != spec.head_dim and kernel != "pallas_tpu":
        return "values of another size than keys"
    return "chunked attention" if spec.chunk else ""


@dataclass(frozen=True)
class StepContext:
    """What every layer of a step shares, computed once.

    limit (static): no position of this step reaches it. max_len: the longest sequence, which fixes
    length-dependent rotary frequencies. counted [T] bool: tokens whose choices of experts are counted; None: none
    are.
    """

    batch: StepBatch
    config: ModelConfig
    max_len: int
    limit: int | None = None
    backend: Backend = Backend()
    shards: Shards = field(default_factory=Shards)
    counted: jax.Array | None = None

    @property
    def tokens(self) -> int:
        """T."""
        p, c = self.batch.chunk_tokens.shape
        return p * c + self.batch.decode_tokens.shape[0]

    @cached_property
    def chunk_positions(self) -> jax.Array:
        """[P, C] position of each token of the chunks."""
        stripe, (_, width) = self.shards.stripe(axes.TOKENS), self.batch.chunk_tokens.shape
        offsets = jnp.arange(0, width * stripe.count, stripe.count, dtype=jnp.int32) + stripe.index
        return self.batch.chunk_starts[:, None] + offsets

    @cached_property
    def positions(self) -> jax.Array:
        """[T] position of each token; -1 for an inactive decode row."""
        return jnp.concatenate([self.chunk_positions.reshape(-1), self.batch.decode_lengths - 1])

    @cached_property
    def fed(self) -> jax.Array:
        """[T] whether each token is of an active row; of all tokens that the feed-forward takes (see `Shards.fed`)."""
        return self.shards.fed(self.positions) >= 0

    @cached_property
    def pages(self) -> jax.Array:
        """[T] cache page of each token: in contiguous mode, its row."""
        rows, (_, width) = self.batch.chunk_rows, self.batch.chunk_tokens.shape
        decode = jnp.arange(self.batch.decode_tokens.shape[0], dtype=jnp.int32)
        return jnp.concatenate([jnp.repeat(rows, width), decode])

    @cached_property
    def rope(self) -> dict[RopeSpec, tuple[jax.Array, jax.Array]]:
        """cos and sin [T, dim / 2] for each kind of rotary embedding in the model."""
        specs = {layer.attention.rope for layer in self.config.layers} - {None}
        return {spec: rope_angles(spec, self.max_len, self.positions) for spec in specs}
