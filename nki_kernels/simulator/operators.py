"""Operators that instructions take as `op`: names of nki.language that kernels pass and never call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from inferlib.nki_kernels.simulator.rules import SubsetError


@dataclass(frozen=True)
class Operator:
    """A member of nki.language: kind "arithmetic" or "bitvec" with two inputs, "activation" with one.

    reduction: whether reduce instructions take it. valid: (least, greatest) magnitude that an activation is exact for.
    """

    name: str
    kind: str
    apply: Callable
    reduction: bool = False
    valid: tuple[float, float] | None = None
    signed: bool = False

    def __call__(self, *args, **kwargs):
        raise SubsetError(f"nki.language.{self.name} as a function")

    def __repr__(self) -> str:
        return f"nl.{self.name}"


def _as_float(compare: Callable) -> Callable:
    return lambda x, y: compare(x, y).astype(np.float32)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


_ARITHMETIC = {
    "add": (np.add, True),
    "subtract": (np.subtract, False),
    "multiply": (np.multiply, True),
    "maximum": (np.maximum, True),
    "minimum": (np.minimum, True),
    "equal": (_as_float(np.equal), False),
    "not_equal": (_as_float(np.not_equal), False),
    "less": (_as_float(np.less), False),
    "less_equal": (_as_float(np.less_equal), False),
    "greater": (_as_float(np.greater), False),
    "greater_equal": (_as_float(np.greater_equal), False),
}
_BITVEC = {
    "bitwise_and": (np.bitwise_and, True),
    "bitwise_or": (np.bitwise_or, True),
    "bitwise_xor": (np.bitwise_xor, True),
    "left_shift": (np.left_shift, False),
    "right_shift": (np.right_shift, False),
}
# Activation functions of the Scalar engine, and the magnitudes that the vendor's table says they are valid for.
_ACTIVATIONS = {
    "copy": (lambda x: x, None, False),
    "exp": (np.exp, None, False),
    "tanh": (np.tanh, None, False),
    "sigmoid": (_sigmoid, None, False),
    "silu": (lambda x: x * _sigmoid(x), None, False),
    "gelu_apprx_tanh": (lambda x: 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3))), None, False),
    "relu": (lambda x: np.maximum(x, 0), None, False),
    "square": (np.square, None, False),
    "log": (np.log, (2.0**-64, 2.0**64), False),
    "sqrt": (np.sqrt, (2.0**-116, 2.0**118), False),
    "rsqrt": (lambda x: 1 / np.sqrt(x), (2.0**-87, 2.0**97), False),
    "reciprocal": (lambda x: 1 / x, (2.0**-42, 2.0**42), True),
}

OPERATORS = {
    **{name: Operator(name, "arithmetic", f, reduces) for name, (f, reduces) in _ARITHMETIC.items()},
    **{name: Operator(name, "bitvec", f, reduces) for name, (f, reduces) in _BITVEC.items()},
    **{name: Operator(name, "activation", f, False, v, signed) for name, (f, v, signed) in _ACTIVATIONS.items()},
}
