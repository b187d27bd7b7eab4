"""Rules: one frozen table from logical axis names to mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from inferlib.sharding import axes
from inferlib.sharding.mesh import DATA, EXPERT, MESH_AXES, SEQUENCE, TENSOR, ShardingError

_LOGICAL = frozenset(value for name, value in vars(axes).items() if name.isupper())


@dataclass(frozen=True)
class Rules:
    """Which mesh axes split each logical axis.

    table: logical axis -> mesh axis, or several in the mesh's order; a name that is not listed is not split. Positions
    and the tokens of a chunk are dealt out in turn (see `sharding.stripe`); all other axes are cut into runs.
    split_tokens: between the matrix products, a step's tokens are split over the tensor axis (sequence parallelism of
    the norms): each sum over the axis becomes a reduce-scatter, and an all-gather precedes the next product.
    """

    name: str
    table: tuple[tuple[str, str | tuple[str, ...]], ...]
    split_tokens: bool = False

    def __post_init__(self):
        logical = [name for name, _ in self.table]
        unknown = sorted(set(logical) - _LOGICAL)
        if unknown:
            raise ShardingError(f"rules {self.name!r} name unknown logical axes {unknown}; known: {sorted(_LOGICAL)}")
        strange = sorted(self.mesh_axes - set(MESH_AXES))
        if strange:
            raise ShardingError(f"rules {self.name!r} name unknown mesh axes {strange}; known: {list(MESH_AXES)}")
        if len(set(logical)) < len(logical):
            raise ShardingError(f"rules {self.name!r} list a logical axis twice: {logical}")
        for name in logical:
            over = self.axes_of(name)
            if over != (ordered := tuple(axis for axis in MESH_AXES if axis in over)):
                raise ShardingError(f"rules {self.name!r} put {name} over {over}: write {ordered}, as the mesh")

    @property
    def mesh_axes(self) -> frozenset[str]:
        """The mesh axes that split anything."""
        return frozenset(axis for name, _ in self.table for axis in self.axes_of(name))

    def spec(self, names: Sequence[str | None]) -> PartitionSpec:
        """The partition of an array with these logical axes. Raises ShardingError if two share a mesh axis."""
        mesh_axes = [self.axes_of(name) for name in names]
        used = [axis for of_one in mesh_axes for axis in of_one]
        if len(set(used)) < len(used):
            raise ShardingError(
                f"rules {self.name!r} put two dimensions of {tuple(names)} on one mesh axis: {mesh_axes}"
            )
        return PartitionSpec(*(of_one if len(of_one) > 1 else next(iter(of_one), None) for of_one in mesh_axes))

    def axes_of(self, name: str | None) -> tuple[str, ...]:
        """The mesh axes that carry a logical axis; none if it is not split."""
        over = () if name is None else dict(self.table).get(name, ())
        return (over,) if isinstance(over, str) else over


# Replicas split rows and their cache. Outside of experts, the expert axis means more replicas.
_REPLICAS = (
    (axes.PAGES, (DATA, EXPERT)),
    (axes.ROWS, (DATA, EXPERT)),
    (axes.EXPERTS, EXPERT),
)
_SPLIT = (axes.KV_HEADS, axes.MLP, axes.VOCAB, axes.LANES)
_TENSOR = (*_REPLICAS, *((name, TENSOR) for name in _SPLIT))
_BOTH = (SEQUENCE, TENSOR)
_PRESETS = (
    # Megatron's split (Shoeybi et al. 2019): two all-reduces a layer. KV heads fewer than the devices are copied.
    Rules("tp", _TENSOR),
    # The same with split norms (Korthikanti et al. 2022): each all-reduce is a reduce-scatter and an all-gather.
    Rules("tp_sp", _TENSOR, split_tokens=True),
    # Context parallelism: prompts and the cache are dealt out over the sequence axis (Striped Attention, Brandon et
    # al. 2023). Prefill passes keys and values around a ring (Liu et al. 2023); decoding merges by log-sum-exp.
    Rules("cp", (*_TENSOR, (axes.TOKENS, SEQUENCE), (axes.POSITIONS, SEQUENCE))),
    # Helix parallelism (Bhatia et al. 2025), for more devices than KV heads: instead of copies of the heads, the cache
    # is dealt out over the sequence axis, whose devices join the tensor axis for everything but attention.
    Rules(
        "helix",
        (
            *_REPLICAS,
            (axes.KV_HEADS, TENSOR),
            (axes.POSITIONS, SEQUENCE),
            (axes.HEAD_OUT, SEQUENCE),
            (axes.MLP, _BOTH),
            (axes.VOCAB, _BOTH),
        ),
    ),
    # Two-dimensional weight-stationary (Pope et al. 2022), for many chips: the sequence axis splits the model's width
    # and the cache. A layer sums queries, keys and values, gate and up, and partial attention over it; the two
    # all-reduces of "tp" over the tensor axis shrink to a 1/n-th.
    Rules("tp2d", (*_TENSOR, (axes.EMBED, SEQUENCE), (axes.POSITIONS, SEQUENCE))),
    # Data parallel attention (DeepSeek-AI 2024, SGLang), for latents, which have one head, and for few KV heads: each
    # device of the tensor axis has rows and a cache for itself, and whole weights of attention, embedding and head. The
    # devices split the feed-forward, which gathers the tokens of all and scatters its sums.
    Rules(
        "dp_attention",
        (
            (axes.PAGES, (DATA, EXPERT, TENSOR)),
            (axes.ROWS, (DATA, EXPERT, TENSOR)),
            (axes.EXPERTS, EXPERT),
            (axes.MLP, TENSOR),
        ),
    ),
)
PRESETS = {rules.name: rules for rules in _PRESETS}


def preset(name: str) -> Rules:
    """A preset by name. Raises ShardingError listing the known ones."""
    if name not in PRESETS:
        raise ShardingError(f"no sharding preset is called {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]
