"""The feed-forwards of the experts that tokens choose, and their weighted sum, for decode-sized batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.backend import Backend
from inferlib.ops.choice import Choice
from inferlib.ops.grouped_matmul import Weight
from inferlib.ops.interpreted import run_kernel
from inferlib.ops.matmul import matmul
from inferlib.ops.packed import PackedTensor
from inferlib.ops.quantized import QuantizedTensor

if TYPE_CHECKING:
    from inferlib.pallas_kernels.packed_weights_tpu import Weight as StoredWeight


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertWeights:
    """The weights gate_up [E, 2, D, F], down [E, F, D] and perhaps gate_up_bias [E, 2, F]; with `layer`, stacks [L,
    ...] of which this layer is used. activation (static): the gate's, by the name that the model's configuration gives
    it, for kernels that have activations by name."""

    gate_up: Weight
    down: Weight
    gate_up_bias: jax.Array | None = None
    layer: jax.Array | None = None
    activation: object = field(default=None, metadata={"static": True})


# Up to this many tokens the kernel is faster than sorting them by expert.
MOST_TOKENS = 128
MOST_TOKENS_4_BIT = 32  # the same for weights of four bits


def choose(tokens: int | None, weights: ExpertWeights, dtype, backend: str, *, split_inputs: bool = False) -> Choice:
    """The implementation that takes `tokens` tokens of a dtype through experts; "xla" stands for products by
    `grouped_matmul`.

    tokens None: a number for which the kernel is faster. weights: arrays or their shapes. split_inputs: the mesh splits
    D.
    """
    if backend not in ("pallas_tpu", "nki"):
        return Choice("xla")
    four = isinstance(weights.gate_up, PackedTensor) and weights.gate_up.bits == 4
    most = MOST_TOKENS_4_BIT if four else MOST_TOKENS
    if tokens is not None and tokens > most:
        return Choice("xla", f"products of {tokens} tokens with an expert take longer than reading its weights")
    if split_inputs:
        return Choice("xla", "it cannot sum over devices, which split the model's width, before the activation")
    lacks = _nki_kernel_lacks if backend == "nki" else _tpu_kernel_lacks
    return Choice.of(backend, lacks(tokens or most, weights, dtype))


def kernel_bytes(tokens: int, weights: ExpertWeights, backend: Backend) -> int:
    """Bytes of a TPU's on-chip memory that the kernel which takes `tokens` tokens of bfloat16 through experts works
    in."""
    from inferlib.pallas_kernels.expert_mlp_tpu import default_blocks
    from inferlib.pallas_kernels.expert_weights_tpu import shape_of
    from inferlib.pallas_kernels.generations_tpu import by_vmem
    from inferlib.pallas_kernels.grouped_matmul_tpu import VMEM_BYTES

    dtype = jnp.bfloat16
    if choose(tokens, weights, dtype, backend.expert_mlp).name != "pallas_tpu":
        return by_vmem(VMEM_BYTES)
    stack = partial(_stack, stacked=weights.layer is not None)
    gate_up, down = (jax.eval_shape(stack, w) for w in (weights.gate_up, weights.down))
    x = jax.ShapeDtypeStruct((tokens, shape_of(gate_up)[-2]), dtype)
    return default_blocks(x, gate_up, down).vmem_bytes(x, gate_up, down)


def _nki_kernel_lacks(tokens: int, weights: ExpertWeights, dtype) -> str | None:
    from inferlib.nki_kernels.expert_mlp import unsupported

    if weights.gate_up_bias is not None:
        return "it adds no biases"
    arrays: Any = weights.gate_up, weights.down
    if any(isinstance(w, QuantizedTensor | PackedTensor) for w in arrays):
        return "it takes no quantised weights"
    cut = int(weights.layer is not None)
    gate_up, down = (jax.ShapeDtypeStruct(w.shape[cut:], w.dtype) for w in arrays)
    return unsupported(tokens, gate_up, down, dtype, weights.activation)


def _tpu_kernel_lacks(tokens: int, weights: ExpertWeights, dtype) -> str | None:
    from inferlib.pallas_kernels.expert_mlp_tpu import unsupported
    from inferlib.pallas_kernels.expert_weights_tpu import shape_of

    both = weights.gate_up, weights.down
    if any(isinstance(w, QuantizedTensor) and (w.grouped or w.zeros is not None) for w in both):
        return "it takes weights quantised in groups only if they are packed, and none with zero points"
    gate_up, down = (jax.eval_shape(partial(_stack, stacked=weights.layer is not None), w) for w in both)
    if shape_of(gate_up)[2] != 2:
        return "it takes experts with gates"
    if any(isinstance(w, QuantizedTensor | PackedTensor) and w.round_inputs for w in both):
        return "it does not round what is multiplied by down"
    return unsupported(jax.ShapeDtypeStruct((tokens, shape_of(gate_up)[-2]), dtype), gate_up, down)


def _stack(w: Weight, stacked: bool) -> jax.Array | StoredWeight:
    """Values [L, E, P, K, N] as the TPU kernel takes them; packed weights come with their scales."""
    if isinstance(w, PackedTensor):
        return w.of_experts(stacked)
    values = w.values if isinstance(w, QuantizedTensor) else w
    values = values if stacked else values[None]
    return values if values.ndim == 5 else values[:, :, None]


def expert_mlp(
    x: jax.Array,
    weights: ExpertWeights,
    factors: jax.Array,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    scale_input: bool = False,
    read: float = 1.0,
    most: int | None = None,
    backend: str = "xla",
) -> jax.Array:
    """x [T, D] -> [T, D], accumulated in float32.

    Row t is the sum over experts e of factors[t, e] * (activation(x gate_e, x up_e) down_e), of those whose factor is
    not 0; scale_input: factors multiply x instead. factors [T, E] float32; rows of x with no factor may hold anything.
    read (static): the expected share of experts with a factor, for the compiler's cost estimate. most (static): no more
    experts have one. backend: "xla" takes all tokens through all experts; "pallas_tpu", which is interpreted on CPU,
    and "nki" for Trainium, whose program is as long as `most`, read only experts that have a factor.
    Raises ValueError for weights that the kernel does not take; see `choose`.
    """
    if backend == "pallas_tpu":
        static = dict(activation=activation, scale_input=scale_input, read=read)
        return _by_kernel(x, weights, factors, static)
    if backend == "nki":
        return _by_nki_kernel(x, weights, factors, scale_input, most)
    gate_up, down, gate_up_bias = weights.gate_up, weights.down, weights.gate_up_bias
    if isinstance(gate_up, PackedTensor) or isinstance(down, PackedTensor):
        raise ValueError("weights packed for the TPU kernel are read by pallas_tpu only, not by xla")
    if weights.layer is not None:
        gate_up, down, gate_up_bias = jax.tree.map(lambda w: w[weights.layer], (gate_up, down, gate_up_bias))

    def add(e: jax.Array, total: jax.Array) -> jax.Array:
        w_in, w_out, bias = jax.tree.map(lambda w: w[e], (gate_up, down, gate_up_bias))
        gate, up = (matmul(x, jax.tree.map(lambda w, p=p: w[p], w_in), out_dtype=jnp.float32) for p in range(2))
        factor = factors[:, e, None]
        if scale_input:
            gate, up = gate * factor, up * factor
        if bias is not None:
            gate, up = gate + bias[0], up + bias[1]
        y = matmul(activation(gate, up).astype(x.dtype), w_out, out_dtype=jnp.float32)
        return total + jnp.where(factor != 0, y if scale_input else y * factor, 0)

    return lax.fori_loop(0, factors.shape[1], add, jnp.zeros(x.shape, jnp.float32)).astype(x.dtype)


def _by_nki_kernel(
    x: jax.Array, weights: ExpertWeights, factors: jax.Array, scale_input: bool, most: int | None
) -> jax.Array:
    from inferlib.nki_kernels import expert_mlp as nki

    choice = choose(None, weights, x.dtype, "nki")
    if choice.reason:
        raise ValueError(f"the Trainium kernel does not run these experts: {choice.reason}")
    arrays: Any = weights.gate_up, weights.down
    gate_up, down = arrays if weights.layer is None else (w[weights.layer] for w in arrays)
    static: dict[str, Any] = dict(activation=weights.activation, scale_input=scale_input, most=most)
    return nki.expert_mlp(x, gate_up, down, factors, **static)


def _by_kernel(x: jax.Array, weights: ExpertWeights, factors: jax.Array, static: dict) -> jax.Array:
    """The TPU kernel, which reads the stacks in place."""
    from inferlib.pallas_kernels import expert_mlp_tpu

    choice = choose(None, weights, x.dtype, "pallas_tpu")
    if choice.reason:
        raise ValueError(f"the TPU kernel does not run these experts: {choice.reason}")
    stacked, layer = weights.layer is not None, weights.layer
    gate_up, down = (_stack(w, stacked) for w in (weights.gate_up, weights.down))
    small = {}
    if weights.gate_up_bias is not None:
        small["gate_up_bias"] = weights.gate_up_bias
    if isinstance(weights.gate_up, QuantizedTensor) and isinstance(weights.down, QuantizedTensor):
        small |= {"gate_up_scales": weights.gate_up.scales, "down_scales": weights.down.scales}
    small = small if stacked else jax.tree.map(lambda a: a[None], small)

    def kernel(x, gate_up, down, factors, layer, small, interpret=False):
        experts = expert_mlp_tpu.Experts(gate_up, down, **small, layer=layer)
        return expert_mlp_tpu.expert_mlp(x, experts, factors, interpret=interpret, **static)

    inputs = x, gate_up, down, factors, layer if stacked else jnp.int32(0), small
    return run_kernel(kernel, *inputs)
