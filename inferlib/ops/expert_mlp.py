"""The feed-forwards of the experts that tokens choose, and their weighted sum, for few tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.grouped_matmul import check_kernel_takes
from inferlib.ops.matmul import matmul
from inferlib.ops.packed import PackedTensor
from inferlib.ops.quantized import QuantizedTensor


def most_tokens(gate_up: jax.Array | QuantizedTensor | PackedTensor) -> int:
    """With more, products of all tokens with an expert take longer than reading its weights, and tokens are for
    `grouped_matmul`."""
    return 32 if isinstance(gate_up, PackedTensor) and gate_up.bits == 4 else 128


def expert_mlp(
    x: jax.Array,
    gate_up: jax.Array | QuantizedTensor | PackedTensor,
    down: jax.Array | QuantizedTensor | PackedTensor,
    factors: jax.Array,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    layer: jax.Array | None = None,
    gate_up_bias: jax.Array | None = None,
    scale_input: bool = False,
    read: float = 1.0,
    backend: str = "xla",
) -> jax.Array:
    """x [T, D], gate_up [E, 2, D, F], down [E, F, D] -> [T, D], accumulated in float32.

    Row t is the sum over experts e of factors[t, e] * (activation(x gate_e, x up_e) down_e), of those whose factor is
    not 0; scale_input: factors multiply x instead. factors [T, E] float32; what rows without factors hold changes
    nothing. gate_up_bias [E, 2, F]. layer: all weights are stacks [L, ...], of which this one is used. read (static):
    share of experts that is expected to have factors, for the compiler's account of kernels.
    backend: "xla", which takes all tokens through all experts; "pallas_tpu", which reads only experts that have a
    factor, takes weights quantised by channel or packed, and is interpreted on CPU.
    """
    check_kernel_takes(gate_up, backend)
    check_kernel_takes(down, backend)
    if backend == "pallas_tpu":
        if isinstance(down, QuantizedTensor | PackedTensor) and down.round_inputs:
            raise ValueError("backend 'pallas_tpu' does not round the inputs of down; use grouped_matmul")
        static = dict(activation=activation, scale_input=scale_input, read=read)
        return _by_kernel(x, gate_up, down, factors, layer, gate_up_bias, static)
    if layer is not None:
        gate_up, down, gate_up_bias = jax.tree.map(lambda w: w[layer], (gate_up, down, gate_up_bias))

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


def _by_kernel(x, gate_up, down, factors, layer, gate_up_bias, static) -> jax.Array:
    """By the TPU kernel, which reads the stacks where they lie."""
    from inferlib.pallas_kernels import expert_mlp_tpu
    from inferlib.pallas_kernels.packed_weights_tpu import Weight

    gate_up, down = (w.of_experts(layer is not None) if isinstance(w, PackedTensor) else w for w in (gate_up, down))
    if layer is None:
        if not isinstance(gate_up, Weight):
            gate_up, down = jax.tree.map(lambda w: w[None], (gate_up, down))
        gate_up_bias, layer = None if gate_up_bias is None else gate_up_bias[None], jnp.int32(0)
    small = {} if gate_up_bias is None else {"gate_up_bias": gate_up_bias[layer]}
    if isinstance(gate_up, QuantizedTensor):
        small |= {"gate_up_scales": gate_up.scales[layer], "down_scales": down.scales[layer]}
        gate_up, down = gate_up.values, down.values
    if not isinstance(down, Weight):
        down = down[:, :, None]

    def kernel(x, gate_up, down, factors, layer, small, interpret=False):
        chosen = jnp.any(factors != 0, axis=0)
        options = dict(layer=layer, interpret=interpret, **static, **small)
        return expert_mlp_tpu.expert_mlp(x, gate_up, down, factors, chosen, **options)

    inputs = (x, gate_up, down, factors, layer, small)
    return lax.platform_dependent(*inputs, cpu=partial(kernel, interpret=True), default=kernel)
