"""The rules that the stand-in enforces, by name, and the error that names the one that was broken."""

from __future__ import annotations

RULES = {
    "subset": "the stand-in runs only the part of NKI that the kernels use",
    "language": "kernels keep to the Python that every NKI compiler since 0.5 takes",
    "lnc": "a kernel is launched on as many cores as a logical NeuronCore has",
    "generation": "the instruction or dtype exists on this generation of NeuronCore",
    "argument": "arguments have the documented types and values",
    "partitions": "an on-chip tensor has at most 128 partitions and at least two dimensions",
    "partition-start": "more than 64 partitions start at 0, more than 32 at 0 or 64, fewer at 0, 32, 64 or 96",
    "partition-step": "an access pattern steps through partitions one by one",
    "access-pattern": "an access pattern stays inside its tensor and has at most 3 free dimensions",
    "view": "views alias contiguous storage; the partition dimension stays first and whole",
    "sbuf-capacity": "the SBUF tensors that live together fit its partitions",
    "psum-capacity": "the PSUM tensors that live together fit its 8 banks of 2 KiB",
    "psum-bank": "a matrix product's result lies in one PSUM bank",
    "unwritten": "nothing is read before it was written",
    "buffer": "each engine reaches only its memories: matrix operands SBUF, results PSUM, GpSimd SBUF",
    "dma-psum": "DMA reaches HBM and SBUF, never PSUM",
    "two-psum": "the two tensor inputs of a Vector engine instruction are not both in PSUM",
    "shape": "operands have the shapes that the instruction documents",
    "dtype": "operands have the dtypes that the instruction documents",
    "fp32-pair": "float32 multiplies only float32 on the Tensor engine",
    "float32-operand": "scalar operands and scales of arithmetic instructions are float32",
    "matmul-limits": "contraction and stationary size are at most 128, moving size at most 512",
    "accumulate": "accumulation starts with a matrix product that overwrites",
    "engine": "the instruction exists on the engine it was given to",
    "activation-range": "activation functions are valid on their documented range only",
    "reduce-registers": "reduction registers are reset before they accumulate, and again after they were read",
    "reduce-axis": "reductions cover trailing free axes",
    "fp8-overflow": "no finite value is written to a float8 that cannot hold it",
    "fill-value": "range_select and masks of scores fill with the least float32",
    "exact-index": "positions compared in float32 stay below 2**24",
    "mx-layout": "MX operands have a multiple of 32 partitions, an even stationary size, and scales in their quadrants",
    "element-count": "a copy has as many elements at its source as at its destination",
    "out-of-bounds": "indices of an indirect access lie inside its tensor",
    "core-race": "what one core writes the other touches only after a barrier",
    "core-pairing": "both cores reach the same exchange",
    "output": "a kernel returns shared HBM tensors, wholly written",
    "read-only": "a kernel does not write to its inputs",
}


class RuleError(Exception):
    """A kernel broke the rule `rule`; the message names it, the instruction and what was found."""

    def __init__(self, rule: str, detail: str):
        super().__init__(f"[{rule}] {detail}. The rule: {RULES[rule]}.")
        self.rule = rule


class SubsetError(RuleError, AttributeError):
    """A kernel used a name of NKI that the stand-in does not have."""

    def __init__(self, name: str):
        super().__init__("subset", f"{name} is not implemented by the stand-in")


def require(condition: bool, rule: str, detail: str) -> None:
    if not condition:
        raise RuleError(rule, detail)
