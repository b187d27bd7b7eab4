"""Which implementation of each operation a program prefers."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

import jax
from jax.sharding import Mesh

from inferlib.sharding.shards import Shards


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Which implementation of each operation a program prefers.

    An op that cannot run the preferred implementation on its shapes takes another; its `choose` says which and why.
    """

    decode_attention: Literal["xla", "pallas_gpu", "pallas_tpu", "nki"] = "xla"
    qkv_attention: Literal["xla", "pallas_gpu"] = "xla"  # decode attention fused with what precedes it
    prefill_attention: Literal["xla", "pallas_gpu", "pallas_tpu", "nki"] = "xla"
    grouped_matmul: Literal["xla", "pallas_gpu", "pallas_tpu"] = "xla"  # and the sort of its rows by group
    expert_mlp: Literal["xla", "pallas_tpu", "nki"] = "xla"  # experts of decode-sized batches; "xla": grouped products
    choose_experts: Literal["xla", "pallas_gpu"] = "xla"  # scores and top-k of decode-sized batches
    matmul: Literal["xla", "pallas_gpu", "pallas_tpu"] = "xla"  # products with weights
    loop_weights: Literal["xla", "pallas_tpu"] = "xla"  # of a loop's decode steps: "xla" reads them at every trip
    fetch_ahead: Literal["xla", "pallas_tpu"] = "xla"  # of stacked layers' weights, during the collective before
    add_norm: Literal["xla", "pallas_gpu"] = "xla"  # residual sum + norm of decode-sized batches on one device
    all_reduce: Literal["xla", "pallas"] = "xla"
    collective_matmul: Literal["xla", "pallas_tpu"] = "xla"  # where tokens are split, see `models.layers.ring`
    exchange: Literal["padded", "ragged"] = "padded"  # of tokens with experts, see `models.layers.exchange`
    gate_up: Literal["merged", "separate"] = "merged"  # how unrolled dense layers store both; a kernel needs one array
    generation: Literal[None, "v4", "v5e", "v5p", "v6e", "v7x"] = None  # the TPU generation planned for; not a choice

    def __post_init__(self):
        for name, kind in get_type_hints(Backend).items():
            known, value = get_args(kind), getattr(self, name)
            if value not in known:
                raise ValueError(f"backend {name}={value!r} is none of {', '.join(map(repr, known))}")

    @property
    def loops_on_device(self) -> bool:
        """False on a GPU with kernels: there the host checks a loop's condition, and the device waits."""
        return self.grouped_matmul != "pallas_gpu"

    @property
    def on_torus(self) -> bool:
        """True if devices reach others by way of those between them: TPUs do, GPUs by a switch."""
        return self.generation is not None

    @staticmethod
    def for_platform(platform: str, shards: Shards, cores: int = 1, generation: str | None = None) -> Backend:
        """The best choice on "cpu", "gpu", "tpu" or "neuron"; NKI kernels where the Neuron compiler is installed.

        cores: of a device. v4 and v5p have two: XLA multiplies on both, most kernels on one. generation: the TPU's,
        such as "v7x"."""
        if platform == "neuron" and importlib.util.find_spec("neuronxcc"):
            return Backend(decode_attention="nki", prefill_attention="nki", expert_mlp="nki")
        if platform == "tpu":
            kernels = ["decode_attention", "prefill_attention", "grouped_matmul", "expert_mlp", "matmul"]
            kernels += ["loop_weights", "fetch_ahead"]
            kernels += ["collective_matmul"] * (shards.splits_tokens and cores == 1)
            fields: dict[str, Any] = {**dict.fromkeys(kernels, "pallas_tpu"), "generation": generation}
            return Backend(exchange="ragged", **fields)
        if platform != "gpu":
            return Backend()
        all_reduce = "pallas" if _are_peers(shards) else "xla"
        kernels = ["decode_attention", "qkv_attention", "prefill_attention", "grouped_matmul", "choose_experts"]
        fields = dict.fromkeys([*kernels, "matmul", "add_norm"], "pallas_gpu")
        return Backend(all_reduce=all_reduce, exchange="ragged", **fields)


def _are_peers(shards: Shards) -> bool:
    """Whether these GPUs can run the fused all-reduce kernel: Hopper or newer, all in one process and on one axis, with
    a jax that lets kernels reach the memory of other devices."""
    if shards.only_axis is None or not isinstance(shards.mesh, Mesh) or shards.several_processes:
        return False
    devices = shards.mesh.devices.flat
    return jax.__version_info__ >= (0, 11) and all(float(d.compute_capability) >= 9 for d in devices)
