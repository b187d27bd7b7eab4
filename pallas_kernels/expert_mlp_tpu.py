"""The feed-forwards of the experts that few tokens choose, on TPUs: gate, up, activation, down and the weighted sum.

All tokens go through every expert that any of them chose, whose weights are read once, one behind another: with few
tokens reading takes longer than multiplying, and nothing is sorted, gathered or brought back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.arithmetic_tpu import first_nonzero
from inferlib.pallas_kernels.tuned_tpu import tuned

LANES, SUBLANES = 128, 16
# Chosen by `benchmarks/kernels.py` on v5e, v5p, v6e and v7x.
VMEM_BYTES = 48 << 20  # of 64 MiB on v5p and v7x; v5e and v6e have twice as many
MARGIN_BYTES = 8 << 20  # of VMEM, for what the compiler keeps there
WEIGHT_BYTES = 4 << 20  # most of a block of an expert's weights


@dataclass(frozen=True)
class Blocks:
    """columns: of gate and up, and rows of down, that are copied together; buffers: for such blocks."""

    columns: int
    buffers: int = 2

    def __post_init__(self):
        if self.buffers < 2:
            raise ValueError("copies run ahead of the computation: there are at least two buffers")

    def vmem_bytes(self, x: jax.ShapeDtypeStruct, gate_up: jax.ShapeDtypeStruct) -> int:
        """What it takes for x [T, D] and gate_up [..., E, 2, D, F]."""
        (experts, _, dim, hidden), tokens = gate_up.shape[-4:], _rounded_up(x.shape[0], SUBLANES)
        wide, row = _rounded_up(self.columns, LANES), _rounded_up(dim, LANES)
        weights = 3 * self.buffers * _rounded_up(dim, LANES) * wide * gate_up.dtype.itemsize
        scales = 4 * experts * (4 * _rounded_up(hidden, LANES) + row) * 2
        return weights + scales + tokens * (4 * row * x.dtype.itemsize + 8 * row + 16 * wide) + MARGIN_BYTES


@tuned("expert_mlp", Blocks)
def default_blocks(x: jax.ShapeDtypeStruct, gate_up: jax.ShapeDtypeStruct) -> Blocks:
    """For x [T, D] and gate_up [..., E, 2, D, F]: an expert in as few pieces as are not waited for long."""
    dim, hidden = gate_up.shape[-2:]
    tiles = hidden // LANES if hidden % LANES == 0 else 1
    pieces = [n for n in range(1, tiles + 1) if tiles % n == 0]
    fit = [n for n in pieces if 3 * dim * (hidden // n) * gate_up.dtype.itemsize <= WEIGHT_BYTES]
    return Blocks(hidden // (fit or pieces[-1:])[0])


def unsupported(x: jax.ShapeDtypeStruct, gate_up: jax.ShapeDtypeStruct, *, blocks: Blocks | None = None) -> str | None:
    """Why the kernel cannot take x [T, D] through gate_up [L, E, 2, D, F] and a down of the same dtype, or None."""
    quantized = gate_up.dtype in (jnp.int8, jnp.float8_e4m3fn)
    if x.dtype not in (jnp.bfloat16, jnp.float32) or (
        x.dtype != jnp.bfloat16 if quantized else x.dtype != gate_up.dtype
    ):
        return (
            "it takes tokens of bfloat16 and weights of bfloat16, int8 or float8_e4m3fn, or both of float32, not "
            f"{x.dtype} and {gate_up.dtype}"
        )
    blocks, hidden = blocks or default_blocks(x, gate_up), gate_up.shape[-1]
    if hidden % blocks.columns or (blocks.columns != hidden and blocks.columns % LANES):
        return f"a width of {hidden} does not divide into blocks of {blocks.columns}, in tiles of {LANES}"
    if (need := blocks.vmem_bytes(x, gate_up)) > VMEM_BYTES:
        size = " x ".join(map(str, gate_up.shape[-2:]))
        return f"experts of {size} need {need} bytes of on-chip memory, and there are {VMEM_BYTES}"
    return None


def expert_mlp(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    factors: jax.Array,
    chosen: jax.Array,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    layer: jax.Array | int = 0,
    gate_up_scales: jax.Array | None = None,
    down_scales: jax.Array | None = None,
    gate_up_bias: jax.Array | None = None,
    scale_input: bool = False,
    read: float = 1.0,
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """x [T, D], gate_up [L, E, 2, D, F], down [L, E, F, D] of a layer -> [T, D] in x's dtype.

    Row t is the sum over experts e of factors[t, e] * (activation(x gate_e, x up_e) down_e), of those whose factor is
    not 0, accumulated in float32; scale_input: factors multiply x instead. factors [T, E] float32; chosen [E] int32: 0
    for experts that no token chose, which are not read. Of this layer: scales [E, 2, F] and [E, D] float32 of quantised
    weights, gate_up_bias [E, 2, F]. read: share of experts that is expected to be chosen, for the compiler's account.
    Raises ValueError where `unsupported` says why.
    """
    if reason := unsupported(x, gate_up, blocks=blocks):
        raise ValueError(f"the TPU kernel does not run these experts: {reason}")
    if len({gate_up.dtype != x.dtype, gate_up_scales is not None, down_scales is not None}) != 1:
        raise ValueError("quantised weights need scales, and others have none")
    blocks, (_, experts, _, dim, hidden) = blocks or default_blocks(x, gate_up), gate_up.shape
    tokens, columns = x.shape[0], blocks.columns
    x, factors = (jnp.pad(a, ((0, -tokens % SUBLANES), (0, 0))) for a in (x, factors.astype(jnp.float32)))
    if not interpret:  # or XLA would bring small weights to VMEM whole
        gate_up, down = (pltpu.with_memory_space_constraint(w, pltpu.HBM) for w in (gate_up, down))
    inputs = {"x": x, "factors": factors, "gate_up_scales": gate_up_scales, "down_scales": down_scales}
    inputs = {name: a for name, a in (inputs | {"gate_up_bias": gate_up_bias}).items() if a is not None}
    inputs = {name: a.reshape(-1, a.shape[-1]) for name, a in inputs.items()}
    weights = read * experts * 3 * dim * hidden
    kernel = functools.partial(_kernel, names=tuple(inputs), activation=activation, scale_input=scale_input)
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[
                *[pl.BlockSpec(a.shape, lambda *_: (0, 0)) for a in inputs.values()],
                *[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            ],
            out_specs=pl.BlockSpec(x.shape, lambda *_: (0, 0)),
            scratch_shapes=[
                pltpu.VMEM((blocks.buffers, 2, dim, columns), gate_up.dtype),
                pltpu.VMEM((blocks.buffers, columns, dim), down.dtype),
                pltpu.VMEM(x.shape, jnp.float32),
                pltpu.SMEM((blocks.buffers, 2), jnp.int32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((2, blocks.buffers)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            vmem_limit_bytes=blocks.vmem_bytes(x, gate_up),
        ),
        cost_estimate=pl.CostEstimate(
            flops=int(2 * x.shape[0] * weights),
            bytes_accessed=int(weights * gate_up.dtype.itemsize) + 2 * x.size * x.dtype.itemsize,
            transcendentals=int(read * x.shape[0] * experts * hidden),
        ),
        interpret=interpret,
        name="expert_mlp",
    )(jnp.asarray(layer, jnp.int32).reshape(1), chosen.astype(jnp.int32), *inputs.values(), gate_up, down)
    return out[:tokens]


def _kernel(layer_ref, chosen_ref, *refs, names, activation, scale_input):
    """All tokens through all chosen experts.

    Scalars: layer [1], chosen [E]. By name x [T, D], factors [T, E], scales [E * 2, F] and [E, D], gate_up_bias
    [E * 2, F]; gate_up [L, E, 2, D, F] and down [L, E, F, D] in HBM; out [T, D]. Scratch: blocks of weights
    [BUFFERS, 2, D, C] and [BUFFERS, C, D]; the sum [T, D]; of each block the expert (E: none) and the piece of its
    width; the expert and the piece to be copied next; semaphores.
    """
    given = dict(zip(names, refs, strict=False))
    gate_up_hbm, down_hbm, out_ref, gate_up_buf, down_buf, sum_ref, held, state, sems = refs[len(names) :]
    x_ref, factors_ref = given["x"], given["factors"]
    (experts,), (buffers, columns, _) = chosen_ref.shape, down_buf.shape
    pieces = down_hbm.shape[2] // columns
    exact = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def at(piece):
        return pl.ds(pl.multiple_of(piece * columns, columns), columns) if pieces > 1 else slice(None)

    def copies(expert, piece, buf):
        gate_up, down = gate_up_hbm.at[layer_ref[0], expert], down_hbm.at[layer_ref[0], expert]
        return (
            pltpu.make_async_copy(gate_up.at[:, :, at(piece)], gate_up_buf.at[buf], sems.at[0, buf]),
            pltpu.make_async_copy(down.at[at(piece)], down_buf.at[buf], sems.at[1, buf]),
        )

    def start_next(buf):
        expert, piece = state[0], state[1]
        held[buf, 0], held[buf, 1] = expert, piece

        @pl.when(expert < experts)
        def _():
            for copy in copies(expert, piece, buf):
                copy.start()
            ends = piece + 1 == pieces
            state[0] = first_nonzero(chosen_ref, expert + ends.astype(jnp.int32), experts)
            state[1] = jnp.where(ends, 0, piece + 1)

    def product(x, w):
        return jnp.dot(x, w, precision=exact, preferred_element_type=jnp.float32)

    def take(expert, piece, buf):
        """Add what all tokens have of a piece of an expert."""
        x = x_ref[...]
        lanes = lax.broadcasted_iota(jnp.int32, factors_ref.shape, 1)
        factor = jnp.sum(jnp.where(lanes == expert, factors_ref[...], 0.0), axis=1, keepdims=True)
        both = []
        for part in range(2):
            y, row = product(x, gate_up_buf[buf, part]), pl.ds(expert * 2 + part, 1)
            if "gate_up_scales" in given:
                y = y * given["gate_up_scales"][row, at(piece)]
            if scale_input:
                y = y * factor
            if "gate_up_bias" in given:
                y = y + given["gate_up_bias"][row, at(piece)].astype(jnp.float32)
            both.append(y)
        y = product(activation(*both).astype(x.dtype), down_buf[buf])
        if "down_scales" in given:
            y = y * given["down_scales"][pl.ds(expert, 1)]
        sum_ref[...] += jnp.where(factor != 0, y if scale_input else y * factor, 0.0)

    def step(carry):
        buf, _ = carry
        expert, piece = held[buf, 0], held[buf, 1]
        start_next(jnp.where(buf == 0, buffers - 1, buf - 1))
        for copy in copies(expert, piece, buf):
            copy.wait()
        take(expert, piece, buf)
        buf = jnp.where(buf == buffers - 1, 0, buf + 1)
        return buf, held[buf, 0] < experts

    sum_ref[...] = jnp.zeros_like(sum_ref)
    state[0], state[1] = first_nonzero(chosen_ref, 0, experts), 0
    lax.fori_loop(0, buffers - 1, lambda buf, _: start_next(buf), None)
    lax.while_loop(lambda carry: carry[1], step, (0, held[0, 0] < experts))
    out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def _rounded_up(size: int, multiple: int) -> int:
    return pl.cdiv(size, multiple) * multiple
