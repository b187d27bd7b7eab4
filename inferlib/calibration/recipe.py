"""What a method consists of, by the name that users write, such as "awq+gptq"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from inferlib.models.quantization import Quantization
from inferlib.option_checks import ConfigurationError, brief

METHODS = ("nearest", "clip", "gptq", "awq", "smoothquant", "hadamard", "spinquant", "lowrank")
_ROUNDINGS = ("nearest", "clip", "gptq")
_STEPS = 40  # by which spinquant learns
_FORMS = {"hadamard": "hadamard or hadamard:merged", "spinquant": "spinquant, spinquant:100 or spinquant:merged"}


@dataclass(frozen=True)
class Recipe:
    """The steps of a method, in their order.

    rotate: the residual stream and values are rotated, by Hadamard matrices ("hadamard") or by what is learned from
    these in `steps` ("spinquant"); online: and inputs while the model runs. smooth: factors that move between
    activations and weights. rounding: how each matrix is rounded. rank: of the branch beside each matrix; 0: there is
    none. branches: the parts that have one, see `Quantization`.
    """

    rotate: Literal["hadamard", "spinquant"] | None
    smooth: Literal["awq", "smoothquant"] | None
    rounding: Literal["nearest", "clip", "gptq"]
    rank: int = 0
    branches: tuple[str, ...] = ()
    online: bool = True
    steps: int = _STEPS

    @staticmethod
    def read(method: str, quantization: Quantization) -> Recipe:
        """The recipe of a method's name for a quantization. Raises ConfigurationError for a name that there is not, and
        for methods that mean nothing together or for the quantization."""
        parts = method.split("+") if isinstance(method, str) else []
        parts, options = _parted(parts)
        if unknown := [part for part in parts if part not in METHODS] or (not parts and [method]):
            raise ConfigurationError(
                f"no method is called {brief(unknown[0])}; methods are {', '.join(METHODS)}, and several of them with "
                "+ between, such as awq+gptq"
            )
        if len(set(parts)) < len(parts):
            raise ConfigurationError(f"method {method!r} names {max(parts, key=parts.count)} twice: name each once")
        roundings = [part for part in parts if part in _ROUNDINGS]
        rotates = [part for part in ("hadamard", "spinquant") if part in parts]
        smooths = [part for part in ("awq", "smoothquant") if part in parts]
        for several in (roundings, smooths, rotates):
            if len(several) > 1:
                raise ConfigurationError(f"method {method!r} has {' and '.join(several)}, of which a weight takes one")
        rotate, smooth, scheme = next(iter(rotates), None), next(iter(smooths), None), quantization.scheme
        if rotate == "hadamard" and not roundings:
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
        return Recipe(rotate, smooth, next(iter(roundings), default), **options)  # pyright: ignore[reportArgumentType]


def _parted(parts: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The names of a method's parts, and the fields of a recipe by what follows their colons: a rank of lowrank:16, the
    matrices of lowrank:16:mlp, steps of spinquant:100, and no rotations while the model runs of hadamard:merged and
    spinquant:merged."""
    names, options = [], {}
    for part in parts:
        name, colon, value = part.partition(":")
        if name not in METHODS:
            name = part
        elif name == "lowrank":
            rank, colon, where = value.partition(":")
            if not _positive(rank):
                raise ConfigurationError(f"{brief(part)} has no rank: give one after a colon, such as lowrank:16")
            branches = tuple(where.split(",")) if colon else ()
            if not all(branches):
                raise ConfigurationError(f"{brief(part)} names no parts: write lowrank:{rank}, or lowrank:{rank}:mlp")
            options |= {"rank": int(rank), "branches": branches}
        elif name == "spinquant" and _positive(value):
            options["steps"] = int(value)
        elif name in ("hadamard", "spinquant") and value == "merged":
            options["online"] = False
        elif colon:
            raise ConfigurationError(f"{brief(part)} is no part of a method: write {_FORMS.get(name, name)}")
        names.append(name)
    return names, options


def _positive(value: str) -> bool:
    """True for a number of up to nine digits: Python does not read thousands of them."""
    return value.isascii() and value.isdigit() and len(value) < 10 and int(value) > 0
