"""The purpose of a program's collective, by the place of its call."""

from __future__ import annotations

from pathlib import Path

from jax.extend.core import JaxprEqn

from inferlib.planning.collectives import LATE_SUMS

# The purpose of a collective by the file, class or function that calls it, if need be with the primitive. The innermost
# listed caller decides; of its entries, the longest one.
PURPOSES = {
    "all_reduce_norm_gpu.open_mailboxes": "mailboxes",
    "attention": "queries, keys and values",
    "attention.Attention.gated": "gates of heads",
    "attention.Attention.qk_norm": "QK-norm",
    "batch": "which rows are active",
    "blocks.GeneralBlock.after_attention": "attention",
    "blocks.ParallelBlock reduce_scatter": "attention and feed-forward",
    "blocks.ParallelBlock psum": "attention and feed-forward",
    "context.ProgramContext.any_row": "whether to go on",
    "decoder.Decoder.__call__": "features that a head drafts from",
    "decoder.Decoder.embedding": "embedding",
    "decoder.Decoder.logits": "logits",
    "decoder.Decoder.outputs": "head",
    "early_exit.EarlyExit.goes_on": "whether to go on",
    "exchange all_gather": "tokens to experts",
    "exchange reduce_scatter": "experts to tokens",
    "exchange all_to_all": "tokens to experts and back",
    "exchange._returned all_to_all": "experts to tokens",
    "exchange ragged_all_to_all": "tokens to experts and back",
    "exchange pmax": "how many rounds",
    "exit_rules.Divergence": "next-token distributions",
    "forward_pass.ForwardPass.depths": "how many steps these took",
    "lanes.Sums ppermute": LATE_SUMS,
    "lane_decoder.LaneDecoder": "head",
    "lightning": "norm of all heads",
    "looped.Loop.steps": "how many steps of the core",
    "mamba2": "norms of groups of heads",
    "mla": "latents and queries",
    "mlp": "gate and up",
    "mlp.Mlp.cut": "mean and variance of gates",
    "moe": "gate and up",
    "moe pmax": "whether more rounds follow",
    "moe.Moe.run_shared": "gate of shared experts",
    "moe.Moe.with_norms": "feed-forward",
    "norm": "norms",
    "per_layer.PerLayerEmbedding": "per-layer embeddings",
    "per_layer.PerLayerInput": "gate of per-layer embeddings",
    "residual.AltUp": "modalities",
    "residual.Laurel": "learned residual",
    "residual.Streams": "magnitudes",
    "residual.Streams all_gather": "parallel residuals",
    "router": "router",
    "sampler._argmax": "best token",
    "sampler._threshold_bit_by_bit": "top-k and top-p",
    "sampler._threshold_by_digits": "top-k and top-p",
    "sampler.keep": "top-p mass",
    "sampler.sample": "best logit",
    "sampler.score": "log-probabilities",
    "sampler.score all_gather": "most likely tokens",
    "step_attention": "parts of attention",
    "step_attention all_gather": "log-sum-exps",
    "step_attention ppermute": "the rows' cache",
}


def purpose_of(eqn: JaxprEqn, scope: str) -> str:
    """The purpose of a collective. scope: the named scopes around it."""
    primitive, nearest = eqn.primitive.name, ""
    traceback = eqn.source_info.traceback
    for code in traceback.raw_frames()[0] if traceback else ():
        stem = Path(code.co_filename).stem
        names = [stem, *(part for part in code.co_qualname.split(".") if part != "<locals>")]
        for length in range(len(names), 0, -1):
            place = ".".join(names[:length])
            if purpose := PURPOSES.get(f"{place} {primitive}") or PURPOSES.get(place):
                return purpose
        if stem in ("blocks", "decoder", "lanes"):
            return ("input of " if primitive == "all_gather" else "") + branch_of(scope)
        nearest = nearest or (code.co_name if "inferlib" in code.co_filename else "")
    return nearest.replace("_", " ")


def branch_of(scope: str) -> str:
    """The branch of a layer that named scopes belong to."""
    return "feed-forward" if "mlp" in scope else "attention"
