"""The model's layers one at a time, over all windows of the text, with recorded inputs of products.

The decoder's own blocks run. Only one layer's weights are on the device; the residual of all windows is on the host.
Several devices share the windows of a step, each with the layer's weights, and add up what they recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from inferlib.cache.plan import BlockCache, BlockState, CachePlan, plan_cache
from inferlib.calibration.compiled import compiled
from inferlib.calibration.layer_weights import Weights
from inferlib.config import PoolSize
from inferlib.models.abstract import AbstractModel
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.config import ModelConfig
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.segments import block_of
from inferlib.models.stream import Residual
from inferlib.ops.observed import InputSums, ObservedWeight, observing
from inferlib.sharding.shards import Shards

_STEP_TOKENS = 2048  # of the windows that run at once
_WINDOWS = "windows"  # the axis of a mesh whose devices share windows
Recorded = dict[tuple[str, ...], InputSums]


@dataclass(frozen=True)
class _Static:
    """What programs are compiled for. mesh: the devices that share windows, if there are several."""

    config: ModelConfig
    width: int
    mesh: Mesh | None
    cache: BlockCache | BlockState | None = None
    lends: bool = False


@dataclass
class LayerwiseForward:
    """The state of the windows [N, W] between two layers of a model, whose weights are float32 and not quantised.

    residuals, inputs: of each step's windows, see `Decoder.inputs`. lent: caches of layers that later ones attend to.
    devices: how many share the windows of a step, equally. keep_queries: a layer's cache has its queries behind keys
    and values, see `advance`.
    """

    model: AbstractModel
    windows: np.ndarray
    devices: int = 1
    keep_queries: bool = False
    residuals: list[Residual] = field(default_factory=list)
    inputs: list[np.ndarray | None] = field(default_factory=list)
    lent: dict[int, list[Any]] = field(default_factory=dict)

    def __post_init__(self):
        count, width = self.windows.shape
        rows = max(1, min(count // self.devices, _STEP_TOKENS // width))  # of a device
        while count % (rows * self.devices):
            rows -= 1
        self._steps = np.split(self.windows, count // (rows * self.devices))
        self._mesh = Mesh(np.array(jax.devices()[: self.devices]), (_WINDOWS,)) if self.devices > 1 else None
        pool = PoolSize(1 << (width - 1).bit_length(), queries=width if self.keep_queries else 0)
        self._plan: CachePlan = plan_cache(
            self.model, rows=rows, max_len=width, chunk=width, dtype=self.model.dtype, pool=pool
        )
        structs: list[Any] = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in self.model.specs]
        self._decoder = self.model.merge(structs)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def begin(self, weights: Weights, observed: Sequence[str] = ()) -> Recorded:
        """Compute the residual before the first layer. observed: parts whose inputs are recorded."""
        static, recorded = self._static(), {}
        for tokens in self._steps:
            (x, inputs), sums = _begin(self.model, self._outside(weights, observed), tokens, static)
            recorded = _added(recorded, self._here(sums))
            self.residuals.append(jax.device_get(Residual(x)))
            self.inputs.append(None if inputs is None else np.asarray(inputs))
        return recorded

    def record(self, layer: int, weights: Weights, observed: Sequence[str]) -> Recorded:
        """The sums over the inputs of a layer's parts. The residual stays as it is."""
        recorded: Recorded = {}
        for step in range(len(self._steps)):
            recorded = _added(recorded, self._here(self._run(layer, weights, observed, step)[1]))
        return recorded

    def advance(
        self, layer: int, weights: Weights, read: Callable[[tuple[jax.Array, ...]], None] | None = None
    ) -> None:
        """Compute the residual after a layer. read: called with its cache of the windows of each step: keys [N, K, S,
        h] first, and last, if they are kept, the queries of all positions, [N, K, W, G * h]."""
        for step in range(len(self._steps)):
            (residual, arrays), _ = self._run(layer, weights, (), step, keep=read is not None)
            self.residuals[step] = jax.device_get(residual)
            if read is not None:
                read(arrays)
            if self._lends(layer):
                self.lent.setdefault(layer, []).append(jax.device_get(arrays))

    def end(self, weights: Weights, observed: Sequence[str]) -> Recorded:
        """The sums over the inputs of the head."""
        static, recorded = self._static(), {}
        for tokens, residual in zip(self._steps, self.residuals, strict=True):
            sums = _end(self.model, self._outside(weights, observed), residual, tokens, static)[1]
            recorded = _added(recorded, self._here(sums))
        return recorded

    def logits(self, weights: Weights) -> np.ndarray:
        """[N, W, V] float32 of the windows after the last layer."""
        static, logits = self._static(), []
        for tokens, residual in zip(self._steps, self.residuals, strict=True):
            logits.append(np.asarray(_end(self.model, self._outside(weights, ()), residual, tokens, static)[0]))
        return np.concatenate(logits).reshape(*self.windows.shape, -1)

    def _lends(self, layer: int) -> bool:
        """Whether later layers attend to a layer's cache."""
        return any(spec.attention.cache_of == layer for spec in self.config.layers)

    def _run(self, layer: int, weights: Weights, observed: Sequence[str], step: int, *, keep: bool = False):
        block, owner = self._decoder.blocks[layer], self.config.layers[layer].attention.cache_of
        graph, state = nnx.split(block)
        state = nnx.map_state(lambda path, p: p.replace(_watched(_part(path), weights, observed)), state)
        cache = self._plan.blocks[layer if owner is None else block_of(self.model.segments, owner)[0]]
        static = self._static(cache, keep or self._lends(layer))
        inputs, borrowed = self.inputs[step], None if owner is None else self.lent[owner][step]
        of_layer = None if inputs is None else inputs[:, layer]
        dealt = self.residuals[step], of_layer, borrowed, self._steps[step]
        return _layer(graph, self._everywhere(state), dealt, static)

    def _outside(self, weights: Weights, observed: Sequence[str]) -> dict[str, Any]:
        return self._everywhere({part: _watched(part, weights, observed) for part in weights})

    def _static(self, cache: BlockCache | BlockState | None = None, lends: bool = False) -> _Static:
        return _Static(self.config, self.windows.shape[1], self._mesh, cache, lends)

    def _here(self, sums: Recorded) -> Recorded:
        """Sums on the first device."""
        return sums if self._mesh is None else jax.device_put(sums, jax.devices()[0])

    def _everywhere(self, weights: Any) -> Any:
        """Weights on all devices."""
        return weights if self._mesh is None else jax.device_put(weights, NamedSharding(self._mesh, PartitionSpec()))


def _part(path: tuple) -> str:
    return ".".join(str(name) for name in path).removesuffix(".weight")


def _watched(part: str, weights: Weights, observed: Sequence[str]) -> jax.Array | ObservedWeight:
    return ObservedWeight(weights[part], part) if part in observed else weights[part]


def _added(recorded: Recorded, sums: Recorded) -> Recorded:
    return {names: recorded[names].plus(new) if names in recorded else new for names, new in sums.items()}


def devices_for(windows: int) -> int:
    """How many devices can share the windows equally; one on CPUs, whose devices are the same cores."""
    if jax.default_backend() == "cpu":
        return 1
    return max(n for n in range(1, jax.device_count() + 1) if windows % n == 0)


def _shared(local: Callable[..., Any], weights: Any, dealt: Any, static: _Static) -> Any:
    """local(weights, dealt): results by windows, and sums over all windows; on a mesh, each device with its windows."""
    if static.mesh is None:
        return local(weights, dealt)

    def added(weights: Any, dealt: Any) -> Any:
        results, sums = local(weights, dealt)
        return results, {names: of.over(_WINDOWS) for names, of in sums.items()}

    one, all_of = PartitionSpec(_WINDOWS), PartitionSpec()
    return jax.shard_map(added, mesh=static.mesh, in_specs=(all_of, one), out_specs=(one, all_of), check_vma=False)(
        weights, dealt
    )


def _context(tokens: jax.Array, static: _Static) -> StepContext:
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return StepContext(StepBatch.of_chunks(tokens, rows, jnp.zeros_like(rows)), static.config, static.width)


@compiled(static_argnames=("model", "static"))
def _begin(model: AbstractModel, weights: dict[str, Any], tokens: jax.Array, static: _Static):
    """The residual before the first layer and inputs of layers, and the sums over the inputs of observed weights."""

    def local(weights: dict[str, Any], tokens: jax.Array):
        with observing() as observer:
            made = _decoder(model, weights).inputs(_context(tokens, static))
            return made, observer.sums()

    return _shared(local, weights, tokens, static)


@compiled(static_argnames=("model", "static"))
def _end(model: AbstractModel, weights: dict[str, Any], residual: Residual, tokens: jax.Array, static: _Static):
    """The logits, and the sums over the inputs of observed weights."""

    def local(weights: dict[str, Any], dealt: tuple[Residual, jax.Array]):
        residual, tokens = dealt
        with observing() as observer:
            decoder, ctx = _decoder(model, weights), _context(tokens, static)
            logits = decoder.logits(decoder.outputs(residual, ctx), Shards(), "xla")
            return logits, observer.sums()

    return _shared(local, weights, (residual, tokens), static)


def _decoder(model: AbstractModel, weights: dict[str, Any]):
    """The decoder with the weights outside its layers; the layers are not there to run."""
    arrays: list[Any] = []
    for weight in model.weights:
        value = weights.get(weight.part) if weight.block is None else None
        arrays.append(jax.ShapeDtypeStruct(weight.shape, weight.dtype) if value is None else value)
    return model.merge(arrays)


@compiled(static_argnames=("graph", "static"))
def _layer(graph: nnx.GraphDef, state, dealt: Any, static: _Static):
    """The residual after a layer and its cache if it lends it, and the sums over the inputs of observed weights.

    dealt: the residual before it, the layer's inputs, the cache that it borrows, and the tokens.
    """
    cache = static.cache
    assert cache is not None

    def local(state, dealt: Any):
        residual, inputs, arrays, tokens = dealt
        if arrays is None:
            arrays = tuple(jnp.zeros(array.shape, array.dtype) for array in cache.owned)
        ctx = _context(tokens, static)
        _ = ctx.positions, ctx.rows, ctx.written, ctx.rope
        with observing() as observer:
            cells, queries = (arrays, ()) if cache.queries is None else (arrays[:-1], arrays[-1:])
            of_layer = LayerCache(cells, cache.ring, queries=queries[0] if queries else None)
            residual, of_layer, _ = nnx.merge(graph, state)(residual, ctx, of_layer, token_inputs=inputs)
            beside = () if of_layer.queries is None else (of_layer.queries,)
            return (residual, (*of_layer.arrays, *beside) if static.lends else ()), observer.sums()

    return _shared(local, state, dealt, static)
