"""Rules: one frozen table from logical axis names to mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from inferlib.sharding import axes
from inferlib.sharding.mesh import DATA, TENSOR, ShardingError

_LOGICAL = frozenset(value for name, value in vars(axes).items() if name.isupper())


@dataclass(frozen=True)
class Rules:
    """table: logical axis -> mesh axis; a name that is not listed is not split.

    split_tokens: between the matrix products, a step's tokens are split over the tensor axis (sequence parallelism
    of the norms): each sum over the axis becomes a reduce-scatter, and an all-gather precedes the next product.
    """

    name: str
    table: tuple[tuple[str, str], ...]
    split_tokens: bool = False

    def __post_init__(self):
        logical, mesh_axes = [name for name, _ in self.table], {axis for _, axis in self.table}
        unknown = sorted(set(logical) - _LOGICAL)
        if unknown:
            raise ShardingError(f"rules {self.name!r} name unknown logical axes {unknown}; known: {sorted(_LOGICAL)}")
        strange = sorted(mesh_axes - {DATA, TENSOR})
        if strange:
            raise ShardingError(f"rules {self.name!r} name unknown mesh axes {strange}; known: {[DATA, TENSOR]}")
        if len(set(logical)) < len(logical):
            raise ShardingError(f"rules {self.name!r} list a logical axis twice: {logical}")

    def spec(self, names: Sequence[str | None]) -> PartitionSpec:
        """The partition of an array with these logical axes. Raises ShardingError if two share a mesh axis."""
        mesh_axes = [self.axis_of(name) for name in names]
        used = [axis for axis in mesh_axes if axis]
        if len(set(used)) < len(used):
            raise ShardingError(
                f"rules {self.name!r} put two dimensions of {tuple(names)} on one mesh axis: {mesh_axes}"
            )
        return PartitionSpec(*mesh_axes)

    def axis_of(self, name: str | None) -> str | None:
        """The mesh axis that carries a logical axis, None if it is not split."""
        return dict(self.table).get(name)


_TENSOR = (
    (axes.KV_HEADS, TENSOR),
    (axes.MLP, TENSOR),
    (axes.VOCAB, TENSOR),
    (axes.PAGES, DATA),
    (axes.ROWS, DATA),
)
# tp: Megatron's split (Shoeybi et al. 2019), two all-reduces a layer. tp_sp: the same with split norms (Korthikanti et
# al. 2022). Both replicate over the data axis, which splits rows and their cache.
PRESETS = {"tp": Rules("tp", _TENSOR), "tp_sp": Rules("tp_sp", _TENSOR, split_tokens=True)}


def preset(name: str) -> Rules:
    """A preset by name. Raises ShardingError listing the known ones."""
    if name not in PRESETS:
        raise ShardingError(f"no sharding preset is called {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]
