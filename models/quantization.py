"""Which weights of a model are quantised, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inferlib.models.config import ConfigError
from inferlib.ops.quantized import SCHEMES, Scheme


@dataclass(frozen=True)
class Quantization:
    """All matrices of products are stored by `scheme` but those of the parts `kept` ("head", "mlp.down", ...).

    Embeddings, norms and biases keep the model's dtype; so does a head that is the embedding. name: as users give it.
    """

    name: str
    scheme: Scheme
    kept: tuple[str, ...] = ()

    @staticmethod
    def named(name: str) -> Quantization:
        """One of SCHEMES. Raises ConfigError listing them for another name."""
        if name not in SCHEMES:
            raise ConfigError(f"no quantization is called {name!r}; known: {', '.join(SCHEMES)}")
        return Quantization(name, SCHEMES[name])

    @staticmethod
    def from_json(value: Mapping[str, Any] | None) -> Quantization | None:
        """Undo `dataclasses.asdict`, after JSON."""
        return value and Quantization(value["name"], Scheme(**value["scheme"]), tuple(value["kept"]))

    def __str__(self) -> str:
        return self.name
