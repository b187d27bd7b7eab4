"""Cases of products of bfloat16 activations with weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inferlib.tuning.kernel_cases.draws import stored

_DTYPES = {"mxfp8": "float8_e4m3fn", "fp8": "float8_e4m3fn", "fp8_block": "float8_e4m3fn"}


@dataclass(frozen=True)
class MxMatmul:
    """x [rows, inputs] times the weights [parts, inputs, outputs] of one of two layers, of a scheme. normed: an RMS
    norm precedes the product. gated: the two parts are the gate and the up half."""

    scheme: str
    rows: int = 16
    inputs: int = 4096
    outputs: int = 14336
    parts: int = 1
    normed: bool = False
    gated: bool = False

    kernel = "mx_matmul"

    @staticmethod
    def of(rows, parts, inputs, columns, bits, group) -> dict[str, MxMatmul]:
        """The case with these arguments of `blocks`."""
        schemes = {(4, 32): "mxfp4", (4, 128): "int4", (8, 32): "mxfp8", (8, 128): "fp8_block", (8, inputs): "fp8"}
        schemes |= {(16, inputs): "bfloat16"}
        if (bits, group) not in schemes:
            raise ValueError(f"there are no cases of {bits} bits in groups of {group}")
        return {"product": MxMatmul(schemes[bits, group], rows, inputs, columns, parts)}

    @property
    def floor_bytes(self) -> int:
        weights = self.parts * self.inputs * self.outputs
        by_channel = 4 * self.parts * self.outputs
        scales = {"mxfp8": weights // 32, "mxfp4": weights // 32, "fp8": by_channel, "int8": by_channel, "bfloat16": 0}
        bits = {"mxfp4": 4, "int4": 4, "bfloat16": 16}.get(self.scheme, 8)
        return weights * bits // 8 + scales.get(self.scheme, weights // 128 * 4)

    @property
    def floor_flops(self) -> int:
        return 2 * self.rows * self.parts * self.inputs * self.outputs

    def function(self):
        import jax

        from inferlib.pallas_kernels.mx_matmul_tpu import RmsNorm, mx_matmul
        from inferlib.pallas_kernels.packed_weights_tpu import Weight

        def run(x, norm=None, **arrays):
            rms_norm = None if norm is None else RmsNorm(norm, 1e-5)
            activation = (lambda gate, up: jax.nn.silu(gate) * up) if self.gated else None
            return mx_matmul(x, Weight(**arrays), norm=rms_norm, activation=activation)

        return run

    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:

        def of(rows: int) -> tuple[int, ...]:
            return 2, self.parts, rows, self.outputs

        x = {"x": ((self.rows, self.inputs), "bfloat16")}
        x |= {"norm": ((2, self.inputs), "bfloat16")} if self.normed else {}
        if self.scheme == "mxfp4":
            return x | stored("mxfp4", 2, self.parts, self.inputs, self.outputs)
        values, by_channel = (of(self.inputs), _DTYPES.get(self.scheme, self.scheme)), (of(1), "float32")
        if self.scheme == "bfloat16":
            return x | {"values": values}
        scales = {"mxfp8": (of(self.inputs // 32), "uint8"), "fp8": by_channel, "int8": by_channel}
        return x | {"values": values, "scales": scales.get(self.scheme, (of(self.inputs // 128), "float32"))}

    def scalars(self) -> dict[int, np.ndarray]:
        return {0: np.zeros(1, int)}


SCHEMES = ("bfloat16", "int8", "mxfp4", "int4", "mxfp8", "fp8_block", "fp8")
READABLE = ("bfloat16", "int8", "fp8")  # XLA reads these, and multiplies more rows by them than the kernel
CASES = {
    **{f"{scheme}, T 16": MxMatmul(scheme) for scheme in SCHEMES},
    **{f"{scheme}, T 64": MxMatmul(scheme, rows=64) for scheme in SCHEMES},
    **{f"{scheme}, T 1024": MxMatmul(scheme, rows=1024) for scheme in SCHEMES if scheme not in READABLE},
    "bfloat16, norm and qkv, tp 8": MxMatmul("bfloat16", rows=32, outputs=768, normed=True),
    "bfloat16, o, tp 8": MxMatmul("bfloat16", rows=32, inputs=512, outputs=4096),
    **{
        f"{scheme}, norm, gate and up, tp 8": MxMatmul(scheme, rows=32, outputs=1792, parts=2, normed=True, gated=True)
        for scheme in ("bfloat16", "int8", "mxfp4")
    },
    "bfloat16, down, tp 8": MxMatmul("bfloat16", rows=32, inputs=1792, outputs=4096),
    "bfloat16, head, tp 8": MxMatmul("bfloat16", rows=32, outputs=16032),
    "mxfp4, down, tp 8": MxMatmul("mxfp4", rows=32, inputs=1792, outputs=4096),
    "mxfp4, T 128": MxMatmul("mxfp4", rows=128),
    "mxfp4, norm and qkv, tp 8": MxMatmul("mxfp4", rows=32, outputs=768, normed=True),
    "mxfp4, o, tp 8": MxMatmul("mxfp4", rows=32, inputs=512, outputs=4096),
}
