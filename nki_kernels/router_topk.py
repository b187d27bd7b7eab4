"""The router of a mixture of experts on Trainium: scores, the best experts, and their weights in one kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import nki
import nki.isa as nisa
import nki.language as nl

from inferlib.nki_kernels.call import call
from inferlib.nki_kernels.decode_linear import add_product, check_width, turn

MOST_CHOSEN, TOKENS = 8, 128


def router_topk(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    chosen: int,
    renormalize: bool,
    lnc: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """x [M, D] times w [D, E], plus bias [E]: the best experts [M, chosen] int32 and their weights float32, descending.

    A weight is the softmax over all experts, or with renormalize over the chosen ones. M at most 128, E from 8 to 512,
    chosen at most 8. Equal scores give the lower expert first. lnc: physical cores; one works.
    """
    (tokens, size), experts = x.shape, w.shape[1]
    if tokens > TOKENS:
        raise ValueError(f"{tokens} tokens: the decode kernels take at most {TOKENS}")
    if w.shape[0] != size or w.dtype != x.dtype:
        raise ValueError(f"w {w.shape} {w.dtype} must be [{size}, E] in x's dtype, {x.dtype}")
    if not 8 <= experts <= 512 or not 1 <= chosen <= MOST_CHOSEN:
        raise ValueError(f"{chosen} of {experts} experts: the kernel takes 1 to {MOST_CHOSEN} of 8 to 512")
    check_width(size)
    bias = jnp.zeros((experts,)) if bias is None else bias
    results = (
        jax.ShapeDtypeStruct((tokens, chosen), jnp.uint32),
        jax.ShapeDtypeStruct((tokens, chosen), jnp.float32),
    )
    static = dict(chosen=chosen, renormalize=renormalize)
    experts, weights = call("router_topk", route, lnc, results, x, w, bias.astype(jnp.float32), **static)
    return experts.astype(jnp.int32), weights


@nki.jit
def route(x, w, bias, chosen, renormalize):
    """x [M, D], w [D, E], bias [E] float32 -> (experts [M, chosen] uint32, weights [M, chosen] float32)."""
    tokens, experts = x.shape[0], w.shape[1]
    chosen_experts = nl.ndarray((tokens, chosen), dtype=nl.uint32, buffer=nl.shared_hbm)
    weights = nl.ndarray((tokens, chosen), dtype=nl.float32, buffer=nl.shared_hbm)
    if nl.program_id(0) == 0:
        loaded = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=loaded, src=x)
        scores = nl.ndarray((tokens, experts), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=scores, src=bias.ap(pattern=[[0, tokens], [1, experts]]))
        sums = nl.ndarray((tokens, experts), dtype=nl.float32, buffer=nl.psum)
        add_product(sums, turn(loaded), w, 0, experts, 0, w.shape[0])
        nisa.tensor_tensor(dst=scores, data1=scores, data2=sums, op=nl.add)
        best = nl.ndarray((tokens, 8), dtype=nl.float32, buffer=nl.sbuf)
        places = nl.ndarray((tokens, 8), dtype=nl.uint32, buffer=nl.sbuf)
        nisa.max8(dst=best, src=scores)
        nisa.nc_find_index8(dst=places, data=scores, vals=best)
        nisa.dma_copy(dst=chosen_experts, src=places[:, 0:chosen])
        shift = nl.ndarray((tokens, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=shift, data=best[:, 0:1], op0=nl.multiply, operand0=-1.0)
        raised = nl.ndarray((tokens, chosen), dtype=nl.float32, buffer=nl.sbuf)
        total = nl.ndarray((tokens, 1), dtype=nl.float32, buffer=nl.sbuf)
        add_exponentials(raised, total, best[:, 0:chosen], shift)
        if not renormalize:
            every = nl.ndarray((tokens, experts), dtype=nl.float32, buffer=nl.sbuf)
            add_exponentials(every, total, scores, shift)
        nisa.reciprocal(dst=total, data=total)
        nisa.tensor_scalar(dst=raised, data=raised, op0=nl.multiply, operand0=total)
        nisa.dma_copy(dst=weights, src=raised)
    return chosen_experts, weights


def add_exponentials(dst, total, scores, shift):
    """dst = exp(scores + shift), and total [M, 1] its sum."""
    nisa.activation(
        dst=dst,
        op=nl.exp,
        data=scores,
        bias=shift,
        reduce_op=nl.add,
        reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
