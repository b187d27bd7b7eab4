"""Which weights of a model are quantised, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from inferlib.models.config import ConfigError
from inferlib.models.part_names import is_named
from inferlib.ops.hadamard import factors_of
from inferlib.ops.quantized import SCHEMES, Scheme

# Schemes by the names that users write. With _a8, the inputs of products are rounded too: to MXFP8, or by token to int8
# or fp8.
_ROUNDING = ("int8", "fp8", "mxfp8", "mxfp4")
_FINE = {"int4_g32": Scheme("int4", group=32, scales="bfloat16")}  # the bits of int4, in smaller groups
QUANTIZATIONS = SCHEMES | _FINE | {f"{name}_a8": replace(SCHEMES[name], round_inputs=True) for name in _ROUNDING}
# The parts of a dense feed-forward whose inputs may be rotated while the model runs.
ROTATED = ("mlp.down", "mlp.shared.down")
_VALUES = frozenset(scheme.values for scheme in QUANTIZATIONS.values())
_SCALES = frozenset(scheme.scales for scheme in QUANTIZATIONS.values())


@dataclass(frozen=True)
class Quantization:
    """`scheme` stores the weights of products (see `layers.param`), except for the parts `unquantized` ("head",
    "mlp.down", ...).

    Embeddings, norms, biases, routers and the taps of convolutions keep the model's dtype, and so does a head that is
    the embedding. name: the name that users write. rotation: how many consecutive inputs of a dense feed-forward's down
    projection are rotated together while the model runs, see `Scheme`; 0: they are not. rank: of the branch beside
    each quantised weight but those of experts, see `low_rank`; 0: there is none. branches: the parts that have one, or
    how their names begin ("mlp" for "mlp.down"); empty: all.
    """

    name: str
    scheme: Scheme
    unquantized: tuple[str, ...] = ()
    rotation: int = 0
    rank: int = 0
    branches: tuple[str, ...] = ()

    @staticmethod
    def named(name: str) -> Quantization:
        """The quantization of a name. Raises ConfigError, which lists the known names, for any other."""
        if not isinstance(name, str) or name not in QUANTIZATIONS:
            raise ConfigError(f"no quantization is called {name!r}; known: {', '.join(QUANTIZATIONS)}")
        return Quantization(name, QUANTIZATIONS[name])

    @staticmethod
    def from_json(value: Mapping[str, Any] | None) -> Quantization | None:
        """Undo `dataclasses.asdict`, after JSON. Manifests of earlier versions say "kept" for `unquantized`.

        Raises KeyError or TypeError for other JSON, and ConfigError for a scheme that there is not.
        """
        if value is None:
            return None
        unquantized = value["unquantized"] if "unquantized" in value else value["kept"]
        scheme = Scheme(**value["scheme"])
        group, known = scheme.group, (scheme.values in _VALUES, scheme.scales in _SCALES)
        if not all(known) or not (group is None or (type(group) is int and group > 0)):
            raise ConfigError(f"no weights are stored as {scheme}")
        branches = value.get("branches", ())
        if not all(isinstance(text, str) for text in (value["name"], *unquantized, *branches)):
            raise TypeError("name and parts of a quantization must be text")
        rotation, rank = value.get("rotation", 0), value.get("rank", 0)
        if not all(type(number) is int and number >= 0 for number in (rotation, rank)):
            raise TypeError("rotation and rank of a quantization must be sizes")
        try:
            factors_of(max(rotation, 1))
        except ValueError as error:
            raise ConfigError(f"no inputs are rotated by {rotation}: {error}") from None
        return Quantization(value["name"], scheme, tuple(unquantized), rotation, rank, tuple(branches))

    def scheme_of(self, part: str) -> Scheme | None:
        """The scheme of a weight that products multiply by; None if it is not quantised."""
        if part in self.unquantized:
            return None
        return replace(self.scheme, rotation=self.rotation) if part in ROTATED else self.scheme

    def rank_of(self, part: str) -> int:
        """The rank of the branch beside a quantised weight; 0: it has none."""
        return self.rank if is_named(part, self.branches) else 0

    def __str__(self) -> str:
        return self.name
