"""The abstract model: names, shapes, dtypes and logical axes of every weight, without allocating any.

It is the single source that loading, random initialisation, budgets and compilation derive from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from inferlib.models.config import ModelConfig
from inferlib.models.decoder import Decoder, Segment, segments_of
from inferlib.models.layers.param import random_leaf
from inferlib.models.layout import Layout
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


@dataclass(frozen=True)
class WeightSpec:
    """One weight. `block` is its index in `Decoder.blocks`, None outside the layers; `part` its name there."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str, ...]
    init: str
    block: int | None
    part: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclass(frozen=True)
class AbstractModel:
    """A model's structure. Programs take `weights`, a flat tuple of arrays in the order of `specs`."""

    layout: Layout
    segments: tuple[Segment, ...]
    specs: tuple[WeightSpec, ...]
    _graph: nnx.GraphDef
    _tree: jax.tree_util.PyTreeDef

    @property
    def config(self) -> ModelConfig:
        return self.layout.config

    def merge(self, weights: Sequence[jax.Array]) -> Decoder:
        """The decoder over these weights; call it inside a traced function."""
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, weights))

    def layers_of(self, block: int) -> range:
        """Indices of the model's layers whose weights `blocks[block]` holds."""
        at = 0
        for segment in self.segments:
            if block < at + len(segment.pattern):
                return segment.layers(block - at)
            at += len(segment.pattern)
        raise IndexError(block)

    def blocks(self) -> Iterator[range]:
        """For each block, the indices of its layers."""
        for segment in self.segments:
            for offset in range(len(segment.pattern)):
                yield segment.layers(offset)

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(spec.shape)) for spec in self.specs)

    @property
    def active_parameters(self) -> int:
        """Those that one token uses: of experts, as many as it chooses."""
        total = 0.0
        for spec in self.specs:
            share = 1.0
            if axes.EXPERTS in spec.axes:
                experts = self.config.layers[self.layers_of(spec.block)[0]].mlp
                share = experts.router.chosen / experts.experts
            total += share * int(np.prod(spec.shape))
        return round(total)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    def random_weights(self, seed: int = 0, shards: Shards = Shards()) -> tuple[jax.Array, ...]:  # noqa: B008
        """Random weights, drawn on their devices one by one; equal shapes share a compilation."""
        draw = cache(lambda sharding: jax.jit(random_leaf, static_argnums=(1, 2, 3), out_shardings=sharding))
        keys = jax.random.split(jax.random.key(seed), len(self.specs))
        return tuple(
            draw(shards.sharding(spec.axes))(key, spec.shape, spec.dtype.name, spec.init)
            for key, spec in zip(keys, self.specs, strict=True)
        )


def abstract_model(
    config: ModelConfig,
    dtype,
    *,
    scan: bool = False,
    shards: Shards = Shards(),  # noqa: B008
) -> AbstractModel:
    """The structure of `config` with weights of `dtype`.

    scan: stack repeating layers (see `segments_of`). shards: the mesh, over which heads, feed-forward and vocabulary
    are made to divide (see `Layout`).
    """
    segments, layout = segments_of(config.layers, scan=scan), Layout(config, shards)
    model = nnx.eval_shape(lambda: Decoder(layout, segments, jnp.dtype(dtype)))
    graph, state = nnx.split(model)
    params, tree = jax.tree.flatten(state, is_leaf=lambda p: isinstance(p, nnx.Param))
    leaves, tree = jax.tree.flatten(state)
    paths = [path for path, _ in nnx.to_flat_state(state)]
    if [p.shape for p in params] != [leaf.shape for leaf in leaves] or len(paths) != len(leaves):
        raise AssertionError("flax changed the order of a flattened state")
    specs = tuple(_weight_spec(path, p) for path, p in zip(paths, params, strict=True))
    return AbstractModel(layout, segments, specs, graph, tree)


def _weight_spec(path: tuple, p: nnx.Param) -> WeightSpec:
    block, parts = (path[1], path[2:]) if path[0] == "blocks" else (None, path)
    part = ".".join(str(x) for x in parts).removesuffix(".weight")
    return WeightSpec(
        name=".".join(str(x) for x in path),
        shape=p.shape,
        dtype=np.dtype(p.dtype),
        axes=p.axes,
        init=p.init,
        block=block,
        part=part,
    )
