"""The feed-forwards of the experts that a decode-sized batch chooses, on TPUs: gate, up, activation, down, sum.

All tokens go through every expert that any of them chose, and each expert's weights are read once, one after the other.
Reading takes longer than multiplying by so few tokens, and nothing has to be sorted, gathered or brought back.
Where a device has two cores, each takes every second piece of the experts and makes a sum of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.attention_values import Shaped
from inferlib.pallas_kernels.arithmetic_tpu import first_nonzero
from inferlib.pallas_kernels.expert_weights_tpu import ExpertBlocks, Stored, in_hbm, matrix_bytes, shape_of, unfit
from inferlib.pallas_kernels.generations_tpu import by_vmem, cores, vmem_limit
from inferlib.pallas_kernels.packed_weights_tpu import Weight, permute
from inferlib.pallas_kernels.tuned_tpu import tuned

LANES, SUBLANES = 128, 16
# Chosen by `benchmarks/kernels.py` on v5e, v5p, v6e and v7x.
VMEM_BYTES = 52 << 20  # of 64 MiB, see `by_vmem`
MARGIN_BYTES = 8 << 20  # of VMEM, left to the compiler
WEIGHT_BYTES = 4 << 20  # largest block of an expert's weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Experts:
    """The experts of layer `layer` of the stacks gate_up [L, E, 2, D, F] and down [L, E, 1, F, D].

    gate_up_bias [L, E, 2, F], gate_up_scales [L, E, 2, F] and down_scales [L, E, D] are stacks too. The scales belong
    to weights quantised by channel; a `Weight` has its own.
    """

    gate_up: jax.Array | Weight
    down: jax.Array | Weight
    gate_up_scales: jax.Array | None = None
    down_scales: jax.Array | None = None
    gate_up_bias: jax.Array | None = None
    layer: jax.Array | int = 0


@dataclass(frozen=True)
class Blocks:
    """columns: columns of gate and up, and rows of down, that are copied together. buffers: number of them in VMEM."""

    columns: int
    buffers: int = 2

    def __post_init__(self):
        if self.buffers < 2:
            raise ValueError("copies run ahead of the computation: there are at least two buffers")

    def of(self, gate_up: Stored, down: Stored) -> tuple[ExpertBlocks, ExpertBlocks]:
        """The blocks of gate_up [L, E, 2, D, F] and of down [L, E, 1, F, D]. If F is packed and padded, it is one
        piece."""
        (dim, hidden), (inputs, outer) = shape_of(gate_up)[-2:], shape_of(down)[-2:]
        depth = inputs if self.columns == hidden else self.columns
        return (
            ExpertBlocks.of(gate_up, dim, self.columns, self.buffers),
            ExpertBlocks.of(down, depth, outer, self.buffers),
        )

    def vmem_bytes(self, x: Shaped, gate_up: Stored, down: Stored) -> int:
        """Bytes of VMEM that x [T, D], gate_up [L, E, 2, D, F] and down [L, E, 1, F, D] need."""
        (_, experts, _, dim, hidden), tokens = shape_of(gate_up), _rounded_up(x.shape[0], SUBLANES)
        wide, row = _rounded_up(self.columns, LANES), _rounded_up(dim, LANES)
        scales = 4 * experts * (4 * _rounded_up(hidden, LANES) + row) * 2
        rows = 4 * row * x.dtype.itemsize + 8 * row + 16 * wide
        if isinstance(gate_up, Weight):
            rows += (row + wide) * x.dtype.itemsize
        return sum(blocks.nbytes for blocks in self.of(gate_up, down)) + scales + tokens * rows + by_vmem(MARGIN_BYTES)


@tuned("expert_mlp", Blocks)
def default_blocks(x: Shaped, gate_up: Stored, down: Stored) -> Blocks:
    """The largest blocks whose first copy is short, for x [T, D], gate_up [L, E, 2, D, F] and down [L, E, 1, F, D]."""
    hidden, whole = shape_of(gate_up)[-1], 2 * matrix_bytes(gate_up) + matrix_bytes(down)
    tiles = hidden // LANES if hidden % LANES == 0 else 1
    pieces = [n for n in range(1, tiles + 1) if tiles % n == 0 and not _lacks(Blocks(hidden // n), gate_up, down)]
    fit = [n for n in pieces if whole <= n * by_vmem(WEIGHT_BYTES)]
    return Blocks(hidden // (fit or pieces[-1:])[0])


def unsupported(x: Shaped, gate_up: Stored, down: Stored, *, blocks: Blocks | None = None) -> str | None:
    """Why the kernel cannot send x [T, D] through gate_up [L, E, 2, D, F] and down [L, E, 1, F, D]; None if it can."""
    if reason := unfit(x.dtype, gate_up) or unfit(x.dtype, down):
        return reason
    if isinstance(gate_up, Weight) != isinstance(down, Weight):
        return "it takes experts whose matrices are all packed, or none"
    blocks = blocks or default_blocks(x, gate_up, down)
    if reason := _lacks(blocks, gate_up, down):
        return reason
    if (need := blocks.vmem_bytes(x, gate_up, down)) > (have := by_vmem(VMEM_BYTES)):
        size = " x ".join(map(str, shape_of(gate_up)[-2:]))
        return f"experts of {size} need {need} bytes of on-chip memory, and there are {have}"
    return None


def _lacks(blocks: Blocks, gate_up: Stored, down: Stored) -> str | None:
    first, second = blocks.of(gate_up, down)
    return first.lacks or second.lacks


def expert_mlp(
    x: jax.Array,
    weights: Experts,
    factors: jax.Array,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    scale_input: bool = False,
    read: float = 1.0,
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Send x [T, D] through a layer's experts -> [T, D] in x's dtype.

    Row t is the sum of factors[t, e] * (activation(x gate_e, x up_e) down_e) over the experts e whose factor is not 0,
    accumulated in float32. scale_input: factors multiply x instead. factors [T, E] float32; experts without any factor
    are not read. read: expected share of experts that are read, for the compiler's cost estimate. Raises ValueError
    with the reason of `unsupported`.
    """
    _check(x, weights, blocks)
    gate_up, down, dtype, shares = weights.gate_up, weights.down, x.dtype, cores()
    blocks = blocks or default_blocks(x, gate_up, down)
    (tokens, dim), chosen = x.shape, jnp.max((factors != 0).astype(jnp.int32), axis=0)
    inputs = _operands(x, factors, weights, interpret)
    x, streams, count = inputs.x, blocks.of(gate_up, down), len(inputs.weights[0])
    scales_and_bias = (_of_layer(array) for array in inputs[2:5])
    specs = _Inputs(_whole(inputs.x), _whole(inputs.factors), *scales_and_bias, weights=_in_place(count))
    out = pl.pallas_call(
        functools.partial(_kernel, weights=streams, activation=activation, scale_input=scale_input, shares=shares),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(shares,),
            in_specs=(specs,),
            out_specs=pl.BlockSpec((x.shape[0], dim), lambda core, *_: (core, 0)),
            scratch_shapes=[_scratch(x, dim, streams, count, blocks.buffers, shares)],
        ),
        out_shape=jax.ShapeDtypeStruct((shares * x.shape[0], dim), dtype if shares == 1 else jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary" if shares == 1 else "parallel",),
            disable_bounds_checks=True,
            vmem_limit_bytes=vmem_limit(blocks.vmem_bytes(x, gate_up, down)),
        ),
        cost_estimate=_cost(x, dim, gate_up, down, read),
        interpret=interpret,
        name="expert_mlp",
    )(jnp.asarray(weights.layer, jnp.int32).reshape(1), chosen, inputs)
    if shares > 1:
        out = functools.reduce(jnp.add, jnp.split(out, shares)).astype(dtype)
    return out[:tokens]


def _check(x: jax.Array, weights: Experts, blocks: Blocks | None) -> None:
    """Raise ValueError for weights that the kernel cannot take."""
    gate_up, down = weights.gate_up, weights.down
    if reason := unsupported(x, gate_up, down, blocks=blocks):
        raise ValueError(f"the TPU kernel does not run these experts: {reason}")
    by_channel = not isinstance(gate_up, Weight) and gate_up.dtype != x.dtype
    if len({by_channel, weights.gate_up_scales is not None, weights.down_scales is not None}) != 1:
        raise ValueError("weights quantised by channel need scales, and others have none")


class _Inputs(NamedTuple):
    """On chip: x [T, D], or of fewer columns if the kernel puts it in order and D is padded; factors [T, E]; and of the
    layer gate_up_scales [E, 2, F], down_scales [E, D] and gate_up_bias [E, 2, F]. HBM: the arrays of gate_up
    [L, E, 2, D, F] and of down [L, E, 1, F, D]."""

    x: Any
    factors: Any
    gate_up_scales: Any
    down_scales: Any
    gate_up_bias: Any
    weights: tuple[Any, ...]


class _Scratch(NamedTuple):
    """sum [T, D], of one core; several add up in their results. in_buffer: the expert (E: none) and the piece of its
    width in each buffer. state: the expert and the piece to copy next. inner [T, C]: the activations that down
    multiplies. rooms, unpacked: the buffers of each weight's `ExpertBlocks`. ordered: x in the order of the weight's
    bytes, for MXFP4."""

    sum: Any
    in_buffer: Any
    state: Any
    semaphores: Any
    inner: Any
    rooms: Any
    unpacked: Any
    ordered: Any


def _operands(x: jax.Array, factors: jax.Array, weights: Experts, interpret: bool | pltpu.InterpretParams) -> _Inputs:
    """The inputs, their rows padded to whole tiles, and x to the weight's inputs unless it is put in order on chip."""
    gate_up, (tokens, dim) = weights.gate_up, x.shape
    ordered = isinstance(gate_up, Weight) and gate_up.ordered
    x = jnp.pad(x, ((0, -tokens % SUBLANES), (0, 0 if ordered else shape_of(gate_up)[-2] - dim)))
    factors = jnp.pad(factors.astype(jnp.float32), ((0, -tokens % SUBLANES), (0, 0)))
    stored = tuple(tuple(in_hbm(w, interpret)) for w in (weights.gate_up, weights.down))
    return _Inputs(x, factors, weights.gate_up_scales, weights.down_scales, weights.gate_up_bias, stored)


def _whole(x: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def _of_layer(stack: jax.Array | None) -> pl.BlockSpec | None:
    """The current layer of a stack, if there is one."""
    if stack is None:
        return None
    return pl.BlockSpec((None, *stack.shape[1:]), lambda core, layer, *_: (layer[0], *(0,) * (stack.ndim - 1)))


def _in_place(count: int) -> tuple[tuple[pl.BlockSpec, ...], ...]:
    """The specs of `count` arrays of each of both weights."""
    return ((pl.BlockSpec(memory_space=pl.ANY),) * count,) * 2


def _scratch(
    x: jax.Array, dim: int, streams: tuple[ExpertBlocks, ExpertBlocks], count: int, buffers: int, shares: int
) -> _Scratch:
    """The kernel's scratch for x of whole tiles of rows, results of width `dim`, and `count` arrays of each weight."""
    return _Scratch(
        pltpu.VMEM((x.shape[0], dim), jnp.float32) if shares == 1 else None,
        pltpu.SMEM((buffers, 2), jnp.int32),
        pltpu.SMEM((2,), jnp.int32),
        (pltpu.SemaphoreType.DMA((count, buffers)),) * 2,
        pltpu.VMEM((x.shape[0], streams[1].depth), x.dtype),
        [stream.room for stream in streams],
        [stream.unpacked for stream in streams],
        pltpu.VMEM((x.shape[0], streams[0].depth), x.dtype) if streams[0].ordered else None,
    )


def _cost(x: jax.Array, dim: int, gate_up: Stored, down: Stored, read: float) -> pl.CostEstimate:
    """The cost of the kernel where a share `read` of the experts is read."""
    rows, (_, experts, _, _, hidden) = x.shape[0], shape_of(gate_up)
    return pl.CostEstimate(
        flops=int(read * experts * 6 * rows * dim * hidden),
        bytes_accessed=int(read * experts * (2 * matrix_bytes(gate_up) + matrix_bytes(down)))
        + 2 * x.size * x.dtype.itemsize,
        transcendentals=int(read * rows * experts * hidden),
    )


def _kernel(
    layer_ref, chosen_ref, inputs: _Inputs, out_ref, scratch: _Scratch, *, weights, activation, scale_input, shares
):
    """Send all tokens through all chosen experts -> out [T, D], or through one of `shares` equal parts of their pieces.
    Scalars: layer [1], chosen [E]."""
    x_ref, factors_ref, hbm = inputs.x, inputs.factors, inputs.weights
    sum_ref, in_buffer, state, sems, inner_ref, rooms, unpacked, _ = scratch
    core = 0 if shares == 1 else pl.program_id(0)
    if shares > 1:
        sum_ref = out_ref
    xs_ref = scratch.ordered if weights[0].ordered else x_ref
    (experts,), (buffers, _, _, columns) = chosen_ref.shape, rooms[0][0].shape
    pieces = hbm[0][0].shape[-1] // columns
    if weights[0].ordered:
        permute(x_ref, xs_ref)

    def at(piece):
        return pl.ds(pl.multiple_of(piece * columns, columns), columns) if pieces > 1 else slice(None)

    def copies(expert, piece, buf):
        for n in range(2):
            yield from weights[n].copies(hbm[n], rooms[n], sems[n], layer_ref[0], expert, piece, buf)

    def place(expert, piece, most):
        """The expert of a piece, and the piece's number there. It is counted from the first piece of `expert`, and its
        expert is at most `most` chosen ones further."""
        for _ in range(most):
            ends = piece >= pieces
            expert = first_nonzero(chosen_ref, expert + ends.astype(jnp.int32), experts)
            piece = jnp.where(ends, piece - pieces if shares > 1 else 0, piece)
        return expert, piece

    def start_next(buf):
        expert, piece = state[0], state[1]
        in_buffer[buf, 0], in_buffer[buf, 1] = expert, piece

        @pl.when(expert < experts)
        def _():
            for copy in copies(expert, piece, buf):
                copy.start()
            state[0], state[1] = place(expert, piece + shares, (pieces - 1 + shares) // pieces)

    def take(expert, piece, buf):
        """Add all tokens' results of one piece of an expert."""
        lanes = lax.broadcasted_iota(jnp.int32, factors_ref.shape, 1)
        factor = jnp.sum(jnp.where(lanes == expert, factors_ref[...], 0.0), axis=1, keepdims=True)
        both = []
        for part in range(2):
            y = weights[0].product(xs_ref, rooms[0], unpacked[0], piece, buf, part)
            if inputs.gate_up_scales is not None:
                y = y * inputs.gate_up_scales[expert, :, at(piece)][part : part + 1]
            if scale_input:
                y = y * factor
            if inputs.gate_up_bias is not None:
                y = y + inputs.gate_up_bias[expert, :, at(piece)].astype(jnp.float32)[part : part + 1]
            both.append(y)
        inner = activation(*both).astype(x_ref.dtype)
        if weights[1].depth > columns:
            inner = jnp.concatenate([inner, jnp.zeros((inner.shape[0], weights[1].depth - columns), inner.dtype)], 1)
        inner_ref[...] = inner
        if weights[1].ordered:
            permute(inner_ref, inner_ref)
        y = weights[1].product(inner_ref, rooms[1], unpacked[1], piece, buf, 0)
        if inputs.down_scales is not None:
            y = y * inputs.down_scales[pl.ds(expert, 1)]
        sum_ref[...] += jnp.where(factor != 0, y if scale_input else y * factor, 0.0)

    def step(carry):
        buf, _ = carry
        expert, piece = in_buffer[buf, 0], in_buffer[buf, 1]
        start_next(jnp.where(buf == 0, buffers - 1, buf - 1))
        for copy in copies(expert, piece, buf):
            copy.wait()
        take(expert, piece, buf)
        buf = jnp.where(buf == buffers - 1, 0, buf + 1)
        return buf, in_buffer[buf, 0] < experts

    sum_ref[...] = jnp.zeros_like(sum_ref)
    state[0], state[1] = place(first_nonzero(chosen_ref, 0, experts), core, (shares - 1) // pieces)
    lax.fori_loop(0, buffers - 1, lambda buf, _: start_next(buf), None)
    lax.while_loop(lambda carry: carry[1], step, (0, in_buffer[0, 0] < experts))
    if shares == 1:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def _rounded_up(size: int, multiple: int) -> int:
    return pl.cdiv(size, multiple) * multiple
