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

    @staticmethod
    def of(rows, parts, inputs, columns, bits, group) -> dict[str, MxMatmul]:
        """Of the arguments of `blocks`."""
        schemes = {(4, 32): "mxfp4", (4, 128): "int4", (8, 32): "mxfp8", (8, 128): "fp8_block", (8, inputs): "fp8"}
        if (bits, group) not in schemes:
            raise ValueError(f"there are no cases of {bits} bits in groups of {group}")
        return {"product": MxMatmul(schemes[bits, group], rows, inputs, columns, parts)}

    @property
    def floor_bytes(self) -> int:
        weights = self.parts * self.inputs * self.outputs
        scales = {"mxfp8": weights // 32, "mxfp4": weights // 32, "fp8": 4 * self.parts * self.outputs}
        bits = 4 if self.scheme in ("mxfp4", "int4") else 8
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
        scales = {"mxfp8": (of(self.inputs // 32), "uint8"), "fp8": (of(1), "float32")}
        values = of(self.inputs), _DTYPES.get(self.scheme, self.scheme)
        return {"x": x, "values": values, "scales": scales.get(self.scheme, (of(self.inputs // 128), "float32"))}

    def scalars(self) -> dict[int, np.ndarray]:
        """What the kernel is given in scalar memory, in its order."""
        return {0: np.zeros(1, int)}


SCHEMES = ("mxfp4", "int4", "mxfp8", "fp8_block", "fp8")
CASES = {
    **{f"{scheme}, T 16": MxMatmul(scheme) for scheme in SCHEMES},
    **{f"{scheme}, T 64": MxMatmul(scheme, rows=64) for scheme in SCHEMES},
    **{f"{scheme}, T 1024": MxMatmul(scheme, rows=1024) for scheme in SCHEMES},
    "mxfp4, gate and up, tp 8": MxMatmul("mxfp4", outputs=1792, parts=2),
    "mxfp4, down, tp 8": MxMatmul("mxfp4", inputs=1792, outputs=4096),
}
