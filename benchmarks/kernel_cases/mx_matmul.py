"""Products of bfloat16 activations with quantised weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_DTYPES = {"mxfp8": "float8_e4m3fn", "fp8": "float8_e4m3fn", "fp8_block": "float8_e4m3fn"}


@dataclass(frozen=True)
class MxMatmul:
    """x [rows, inputs] times one of two layers' weights [parts, inputs, outputs] of a scheme."""

    scheme: str
    rows: int = 16
    inputs: int = 4096
    outputs: int = 14336
    parts: int = 1

    kernel = "mx_matmul"

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
        from inferlib.pallas_kernels.mx_matmul_tpu import Weight, mx_matmul

        return lambda x, **arrays: mx_matmul(x, Weight(**arrays))

    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes."""

        def of(rows: int) -> tuple[int, ...]:
            return 2, self.parts, rows, self.outputs

        x = (self.rows, self.inputs), "bfloat16"
        if self.scheme == "mxfp4":
            words, exponents = (of(self.inputs // 8), "int32"), (of(self.inputs // 128), "int32")
            return {"x": x, "values": words, "scales": exponents, "tops": (of(1), "float32")}
        values, by_channel = (of(self.inputs), _DTYPES.get(self.scheme, self.scheme)), (of(1), "float32")
        if self.scheme == "bfloat16":
            return {"x": x, "values": values}
        scales = {"mxfp8": (of(self.inputs // 32), "uint8"), "fp8": by_channel, "int8": by_channel}
        return {"x": x, "values": values, "scales": scales.get(self.scheme, (of(self.inputs // 128), "float32"))}

    def scalars(self) -> dict[int, np.ndarray]:
        """What the kernel is given in scalar memory, in its order."""
        return {0: np.zeros(1, int)}


SCHEMES = ("bfloat16", "int8", "mxfp4", "int4", "mxfp8", "fp8_block", "fp8")
CASES = {
    **{f"{scheme}, T 16": MxMatmul(scheme) for scheme in SCHEMES},
    **{f"{scheme}, T 64": MxMatmul(scheme, rows=64) for scheme in SCHEMES},
    **{f"{scheme}, T 1024": MxMatmul(scheme, rows=1024) for scheme in SCHEMES},
    "bfloat16, T 32, gate and up, tp 8": MxMatmul("bfloat16", rows=32, outputs=1792, parts=2),
    "bfloat16, T 32, qkv, tp 8": MxMatmul("bfloat16", rows=32, outputs=768),
    "bfloat16, T 32, o, tp 8": MxMatmul("bfloat16", rows=32, inputs=512, outputs=4096),
    "bfloat16, T 32, down, tp 8": MxMatmul("bfloat16", rows=32, inputs=1792, outputs=4096),
    "bfloat16, T 32, head, tp 8": MxMatmul("bfloat16", rows=32, inputs=4096, outputs=16032),
    "int8, T 32, gate and up, tp 8": MxMatmul("int8", rows=32, outputs=1792, parts=2),
    "int8, T 32, qkv, tp 8": MxMatmul("int8", rows=32, outputs=768),
    "mxfp4, gate and up, tp 8": MxMatmul("mxfp4", outputs=1792, parts=2),
    "mxfp4, down, tp 8": MxMatmul("mxfp4", inputs=1792, outputs=4096),
}
