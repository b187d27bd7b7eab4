"""What a method consists of, by the name that users write, such as "awq+gptq"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inferlib.config import ConfigurationError, brief
from inferlib.models.quantization import Quantization

METHODS = ("nearest", "clip", "gptq", "awq", "smoothquant", "hadamard", "lowrank")
_ROUNDINGS = ("nearest", "clip", "gptq")


@dataclass(frozen=True)
class Recipe:
    """The steps of a method, in their order.

    rotate: Hadamard rotations of the residual stream and of values. smooth: factors that move between activations and
    weights. rounding: how each matrix is rounded. rank: of the branch beside each matrix; 0: there is none.
    """

    rotate: bool
    smooth: Literal["awq", "smoothquant"] | None
    rounding: Literal["nearest", "clip", "gptq"]
    rank: int = 0

    @staticmethod
    def read(method: str, quantization: Quantization) -> Recipe:
        """The recipe of a method's name for a quantization. Raises ConfigurationError for a name that there is not, and
        for methods that mean nothing together or for the quantization."""
        parts = method.split("+") if isinstance(method, str) else []
        parts, rank = _without_rank(parts)
        if unknown := [part for part in parts if part not in METHODS] or (not parts and [method]):
            raise ConfigurationError(
                f"no method is called {brief(unknown[0])}; methods are {', '.join(METHODS)}, and several of them with "
                "+ between, such as awq+gptq"
            )
        if len(set(parts)) < len(parts):
            raise ConfigurationError(f"method {method!r} names {max(parts, key=parts.count)} twice: name each once")
        roundings, rotate = [part for part in parts if part in _ROUNDINGS], "hadamard" in parts
        smooths = [part for part in ("awq", "smoothquant") if part in parts]
        for several in (roundings, smooths):
            if len(several) > 1:
                raise ConfigurationError(f"method {method!r} has {' and '.join(several)}, of which a weight takes one")
        smooth, scheme = next(iter(smooths), None), quantization.scheme
        if rotate and not roundings:
            raise ConfigurationError("hadamard only rotates: say how to round, such as hadamard+gptq")
        if smooth == "smoothquant" and not scheme.rounds_tokens:
            raise ConfigurationError(
                f"smoothquant makes inputs easier to round, and {quantization} rounds none with a scale for each "
                "token: take int8_a8 or fp8_a8, or the method awq"
            )
        if smooth == "awq" and scheme.round_inputs:
            raise ConfigurationError(
                f"awq makes inputs harder to round, and {quantization} rounds them: take smoothquant, gptq or clip"
            )
        default = "clip" if smooth == "awq" else "nearest"
        return Recipe(rotate, smooth, next(iter(roundings), default), rank)  # pyright: ignore[reportArgumentType]


def _without_rank(parts: list[str]) -> tuple[list[str], int]:
    """The names of a method's parts, and the rank that one of them has: of lowrank:16 16, without such a part 0."""
    names, rank = [part.partition(":")[0] for part in parts], 0
    for part, name in zip(parts, names, strict=True):
        value = part.partition(":")[2]
        if name == "lowrank":
            if not (value.isascii() and value.isdigit() and int(value) > 0):
                raise ConfigurationError(f"{brief(part)} has no rank: give one after a colon, such as lowrank:16")
            rank = int(value)
        elif ":" in part and name in METHODS:
            raise ConfigurationError(f"{name} takes no number: write {name} instead of {brief(part)}")
    return [part if name not in METHODS else name for part, name in zip(parts, names, strict=True)], rank
