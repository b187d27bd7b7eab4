"""Which weights of a model are quantised, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from inferlib.models.config import ConfigError
from inferlib.ops.quantized import SCHEMES, Scheme

# Schemes by the names that users write. With _a8, the inputs of products are rounded too: to MXFP8, or by token to int8
# or fp8.
_ROUNDING = ("int8", "fp8", "mxfp8", "mxfp4")
QUANTIZATIONS = SCHEMES | {f"{name}_a8": replace(SCHEMES[name], round_inputs=True) for name in _ROUNDING}


@dataclass(frozen=True)
class Quantization:
    """`scheme` stores the weights of products (see `layers.param`), except for the parts `unquantized` ("head",
    "mlp.down", ...).

    Embeddings, norms, biases, routers and the taps of convolutions keep the model's dtype, and so does a head that is
    the embedding. name: the name that users write.
    """

    name: str
    scheme: Scheme
    unquantized: tuple[str, ...] = ()

    @staticmethod
    def named(name: str) -> Quantization:
        """The quantization of a name. Raises ConfigError, which lists the known names, for any other."""
        if not isinstance(name, str) or name not in QUANTIZATIONS:
            raise ConfigError(f"no quantization is called {name!r}; known: {', '.join(QUANTIZATIONS)}")
        return Quantization(name, QUANTIZATIONS[name])

    @staticmethod
    def from_json(value: Mapping[str, Any] | None) -> Quantization | None:
        """Undo `dataclasses.asdict`, after JSON. Manifests of earlier versions say "kept" for `unquantized`."""
        if value is None:
            return None
        unquantized = value["unquantized"] if "unquantized" in value else value["kept"]
        return Quantization(value["name"], Scheme(**value["scheme"]), tuple(unquantized))

    def __str__(self) -> str:
        return self.name
