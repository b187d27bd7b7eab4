"""The abstract model: names, shapes, dtypes and logical axes of every weight, without allocating any.

Loading, random initialisation, budgets and compilation all derive from it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.experimental.layout import Format
from jax.sharding import NamedSharding

from inferlib.models.adapters import Adaptable, AdapterSlots
from inferlib.models.config import ConfigError, Mixer, ModelConfig, MoeSpec
from inferlib.models.decoder import Decoder
from inferlib.models.lane_decoder import LaneDecoder
from inferlib.models.lanes import must_multiply
from inferlib.models.layers.param import random_leaf
from inferlib.models.layout import Layout
from inferlib.models.looped import EACH_STEP
from inferlib.models.part_names import first_of_no_part, is_named
from inferlib.models.quantization import Quantization
from inferlib.models.segments import Segment, segments_of
from inferlib.ops.adapted_matmul import AdaptedWeight
from inferlib.ops.backend import Backend
from inferlib.ops.choice import Choice
from inferlib.ops.low_rank import LowRankWeight, factor_arrays
from inferlib.ops.packed import PackedTensor, Packing, choose, choose_packings
from inferlib.ops.quantized import QuantizedTensor, Scheme, nbytes, quantize
from inferlib.ops.separate_gate_up import SeparateGateUp
from inferlib.sharding import axes
from inferlib.sharding.mesh import ShardingError
from inferlib.sharding.shards import Shards

AbstractWeight = jax.ShapeDtypeStruct | QuantizedTensor | PackedTensor | SeparateGateUp | LowRankWeight  # with shapes


@dataclass(frozen=True)
class WeightSpec:
    """One weight, as layers see it.

    block: index of its block in `Decoder.blocks`; None outside the layers. part: its name in the block. contracting:
    the dimensions that products sum over. scheme: how it is quantised; None if it is not. packed: it is stored in the
    layout that a kernel reads; float4: see `Packing`. separate: it is stored as a `SeparateGateUp`. rank: of the branch
    beside it, see `low_rank`; 0: there is none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str, ...]
    init: str
    block: int | None
    part: str
    contracting: tuple[int, ...] = ()
    scheme: Scheme | None = None
    packed: bool = False
    float4: bool = False
    separate: bool = False
    rank: int = 0

    @property
    def of_layer(self) -> WeightSpec:
        """One layer of a stacked weight; any other weight itself."""
        if self.axes[0] != axes.LAYERS:
            return self
        contracting = tuple(i - 1 for i in self.contracting)
        return replace(self, shape=self.shape[1:], axes=self.axes[1:], contracting=contracting)

    def stored(self, whole: jax.Array) -> tuple[jax.Array, ...]:
        """The arrays that store the weight, computed from its unquantised values; a branch adds nothing. Traceable."""
        if self.scheme is None:
            return self.packed_arrays(whole.astype(self.dtype))
        factors = (jnp.zeros(shape, dtype) for shape, _, dtype in self._factors.values())
        return self.packed_arrays(*jax.tree.leaves(quantize(whole, self.contracting, self.scheme)), *factors)

    def packed_arrays(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """The arrays that store the weight, computed from its scheme's arrays, which change only if it is packed or
        separate. Traceable."""
        if self.separate:
            places = [spec.axes.index(axes.GATE_UP) for spec in replace(self, separate=False).arrays]
            pairs = list(zip(arrays, places, strict=True))
            return tuple(lax.index_in_dim(x, half, at, keepdims=False) for half in range(2) for x, at in pairs)
        if not self.packed:
            return arrays
        count = len(arrays) - len(self._factors)
        return self.packing.pack(*arrays[:count]) + arrays[count:]

    @property
    def _factors(self) -> dict:
        """The arrays of the branch, as `factor_arrays` describes them."""
        return factor_arrays(self.rank, self.shape, self.axes, self.contracting) if self.rank else {}

    @property
    def can_be_separate(self) -> bool:
        """True if it is gate and up of a dense layer, without a branch, and no kernel reads both as one."""
        if axes.GATE_UP not in self.axes or axes.EXPERTS in self.axes or self.packed or self.rank:
            return False
        return bool(self.contracting) and self.shape[self.axes.index(axes.GATE_UP)] == 2

    @property
    def halves(self) -> tuple[WeightSpec, WeightSpec]:
        """Gate and up of a separate weight."""
        at = self.axes.index(axes.GATE_UP)
        shape, names = self.shape[:at] + self.shape[at + 1 :], self.axes[:at] + self.axes[at + 1 :]
        half = partial(replace, self, shape=shape, axes=names, separate=False)
        gate, up = (half(name=f"{self.name}.{x}", part=f"{self.part}.{x}") for x in ("gate", "up"))
        return gate, up

    @property
    def value(self) -> AbstractWeight:
        """The weight as layers see it, with shapes for arrays."""
        return self.local(Shards())

    def local(self, shards: Shards) -> AbstractWeight:
        """A device's shard of `value`."""
        if self.separate:
            gate, up = (cast(jax.Array | QuantizedTensor, half.local(shards)) for half in self.halves)
            return SeparateGateUp(gate, up)
        arrays = ((shards.local_shape(array.axes, array.shape), array.dtype) for array in self.arrays)
        structs: list[Any] = [jax.ShapeDtypeStruct(*array) for array in arrays]
        if self.rank:
            base: Any = replace(self, rank=0).local(shards)
            return LowRankWeight(base, *structs[-2:])
        if self.packed:
            return self.packing.tensor(*structs)
        return structs[0] if self.scheme is None else self.scheme.tensor(*structs)

    @property
    def in_groups(self) -> bool:
        """True if groups of inputs share a scale, or if the weight has zero points."""
        return self.scheme is not None and (self.scheme.group is not None or self.scheme.zeros)

    def pack_choice(self, dtype, shards: Shards) -> Choice:
        """Whether a kernel reads the weight packed, for activations of a dtype; see `packed.choose`."""
        return choose(self.packing, dtype, shards) if self.contracting else Choice("xla")

    @property
    def packing(self) -> Packing:
        return Packing(self.scheme, self.shape, self.axes, self.contracting, self.dtype, self.float4)

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """The arrays that store the weight."""
        if self.separate:
            return tuple(array for half in self.halves for array in half.arrays)
        if self.packed:
            arrays = self.packing.arrays()
        elif self.scheme is not None:
            arrays = self.scheme.arrays(self.shape, self.axes, self.contracting)
        else:
            return (ArraySpec(self.name, self.part, self.shape, self.dtype, self.axes),)
        arrays |= self._factors
        suffixes = {name: "" if name == "values" else f".{name}" for name in arrays}
        return tuple(
            ArraySpec(self.name + suffixes[name], self.part + suffixes[name], shape, dtype, names)
            for name, (shape, names, dtype) in arrays.items()
        )


@dataclass(frozen=True)
class ArraySpec:
    """One array that programs take: a weight, or the values, scales ("... .scales"), zero points ("... .zeros") or
    factors of the branch ("... .factor_a", "... .factor_b") of a quantised one."""

    name: str
    part: str
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]

    @property
    def nbytes(self) -> int:
        return nbytes(self.shape, self.dtype)


@dataclass(frozen=True)
class AbstractModel:
    """A model's structure. Programs take the arrays of its weights as a flat tuple in the order of `specs`.

    dtype: the type of activations, and of weights that are not quantised. adapters: how many adapters may change the
    weights; None: none. factors: arrays of theirs, the A and the B of each weight of `adapted`.
    """

    layout: Layout
    dtype: np.dtype
    segments: tuple[Segment, ...]
    weights: tuple[WeightSpec, ...]
    adapters: AdapterSlots | None
    factors: tuple[WeightSpec, ...]
    _graph: nnx.GraphDef
    _tree: Any

    @property
    def config(self) -> ModelConfig:
        return self.layout.config

    @cached_property
    def specs(self) -> tuple[ArraySpec, ...]:
        """The specs of all arrays that programs take: those of the weights, then the factors of adapters."""
        return self.base_specs + tuple(array for factor in self.factors for array in factor.arrays)

    @cached_property
    def base_specs(self) -> tuple[ArraySpec, ...]:
        """The specs of the weights' arrays."""
        return tuple(array for weight in self.weights for array in weight.arrays)

    @cached_property
    def adapted(self) -> tuple[tuple[WeightSpec, Adaptable], ...]:
        """The weights that adapters may change, and how."""
        if self.adapters is None:
            return ()
        return tuple(x for x in self.adaptable if is_named(x[0].of_layer.part, self.adapters.parts))

    @property
    def adaptable(self) -> tuple[tuple[WeightSpec, Adaptable], ...]:
        """The weights that adapters could change, and how."""
        pairs = ((weight, _adaptable(weight, self.mixer_of(weight))) for weight in self.weights)
        return tuple((weight, how) for weight, how in pairs if how is not None)

    def mixer_of(self, weight: WeightSpec) -> Mixer | None:
        """The mixer of a weight's layer; None outside the layers."""
        return None if weight.block is None else self.config.layers[self.layers_of(weight.block)[0]].attention

    def merge(self, weights: Sequence[jax.Array]) -> Decoder:
        """The decoder over these weights; call it inside a traced function."""
        return self.module(weights)

    def module(self, weights: Sequence[jax.Array]) -> Any:
        """The module over these weights, of the class that the structure was made of."""
        arrays = weights
        if self.factors:
            factors, arrays, at = iter(weights[len(self.base_specs) :]), [], 0
            adapted = {weight.name for weight, _ in self.adapted}
            for weight in self.weights:
                end = at + len(weight.arrays)
                arrays += weights[at:end]
                arrays += [next(factors), next(factors)] if weight.name in adapted else []
                at = end
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, arrays))

    def blocks(self) -> tuple[range, ...]:
        """The indices of the layers whose weights are in each of `Decoder.blocks`."""
        return tuple(s.layers(offset) for s in self.segments for offset in range(len(s.pattern)))

    def layers_of(self, block: int | None) -> range:
        """The indices of the layers in a block. Raises IndexError for None, which is outside the layers."""
        if block is None:
            raise IndexError("weights outside the layers belong to no layer")
        return self.blocks()[block]

    def mixture_of(self, weight: WeightSpec) -> MoeSpec | None:
        """The mixture whose experts a weight belongs to; None for other weights."""
        spec = self.config.layers[self.layers_of(weight.block)[0]].mlp if axes.EXPERTS in weight.axes else None
        return spec if isinstance(spec, MoeSpec) else None

    def looks_up(self, name: str) -> bool:
        """True if a weight is a table, from which a step reads only the rows of its tokens."""
        if name in ("positions", "per_layer.table") or name.endswith("value_embedding.table"):
            return True
        return name == "embed" and not self.config.tied

    def passes(self, weight: WeightSpec) -> int:
        """How often a step multiplies by a weight: in a loop as often as that runs."""
        if weight.block is not None:
            return self.config.runs(self.layers_of(weight.block)[0])
        loop = self.config.loop
        return loop.steps if loop is not None and weight.name.startswith(EACH_STEP) else 1

    @property
    def parameters(self) -> int:
        return sum(math.prod(weight.shape) for weight in self.weights)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses; of the experts, only those it chooses count."""
        total = 0.0
        for spec in self.weights:
            mixture = self.mixture_of(spec)
            total += math.prod(spec.shape) * (mixture.router.chosen / mixture.experts if mixture else 1.0)
        return round(total)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    def random_weights(
        self,
        seed: int = 0,
        shards: Shards = Shards(),  # noqa: B008
        formats: Sequence[Format | NamedSharding | None] = (),
    ) -> tuple[jax.Array, ...]:
        """Random weights, drawn on their devices one by one; equal shapes share a compilation. formats: of `specs`, see
        `ProgramSet.formats`; by default the usual layouts."""
        keys, weights = jax.random.split(jax.random.key(seed), len(self.weights)), []
        in_order = iter(formats or [shards.sharding(array.axes) for array in self.specs])
        for key, weight in zip(keys, self.weights, strict=True):
            places = tuple(itertools.islice(in_order, len(weight.arrays)))
            # Names are left out: with them, equal compilations would differ.
            weights += _jit_random(places)(key, replace(weight, name="", part="", block=None))
        for factor in self.factors:
            place = shards.sharding(factor.axes)
            weights.append(jax.jit(partial(jnp.zeros, factor.shape, factor.dtype), out_shardings=place)())
        return tuple(weights)


@cache
def _jit_random(places: tuple[Format | NamedSharding | None, ...]):
    def draw(key: jax.Array, weight: WeightSpec) -> tuple[jax.Array, ...]:
        return weight.stored(random_leaf(key, weight.shape, weight.dtype, weight.init))

    return jax.jit(draw, static_argnums=1, out_shardings=places)


def abstract_model(
    config: ModelConfig,
    dtype,
    *,
    quantization: Quantization | None = None,
    backend: Backend = Backend(),  # noqa: B008
    scan: bool = False,
    shards: Shards = Shards(),  # noqa: B008
    expert_slots: int | None = None,
    adapters: AdapterSlots | None = None,
) -> AbstractModel:
    """The structure of `config` with weights of `dtype`, or quantised.

    backend: weights are packed for its kernels where `packed.choose` says so, and gate and up are separate if it says
    so, but not with adapters or a branch of low rank. scan: stack repeating layers (see `segments_of`). shards: the
    mesh; heads, feed-forward and vocabulary are padded or copied to divide over it. expert_slots: see `Layout`.
    adapters: how many may change the weights. Raises ShardingError if the mesh would cut a group of elements that share
    a scale.
    """
    layout = Layout(config, shards, expert_slots)
    must_multiply(layout, quantization, adapted=adapters is not None)
    segments = segments_of(config.layers, scan=scan, loop=config.loop)
    kind = Decoder if config.lanes is None else LaneDecoder
    build = lambda: kind(layout, segments, jnp.dtype(dtype))  # noqa: E731
    options: dict[str, Any] = dict(quantization=quantization, backend=backend, adapters=adapters)
    return abstract_module(build, layout, segments, dtype, **options)


def abstract_module(
    build: Callable[[], nnx.Module],
    layout: Layout,
    segments: tuple[Segment, ...],
    dtype,
    *,
    quantization: Quantization | None = None,
    backend: Backend = Backend(),  # noqa: B008
    adapters: AdapterSlots | None = None,
) -> AbstractModel:
    """The structure of the module that `build` makes, whose layers are in a list `blocks` as the segments say; see
    `abstract_model`."""
    shards = layout.shards
    graph, state = nnx.split(nnx.eval_shape(build))
    params, tree = jax.tree.flatten(state, is_leaf=lambda p: isinstance(p, nnx.Param))
    paths = [path for path, _ in nnx.to_flat_state(state)]
    if [p.shape for p in params] != [leaf.shape for leaf in jax.tree.leaves(state)] or len(paths) != len(params):
        raise AssertionError("flax changed the order of a flattened state")
    weights = tuple(_weight_spec(path, p, quantization) for path, p in zip(paths, params, strict=True))
    for weight in weights:
        _must_keep_groups(weight, quantization, shards)
        _must_keep_rotations(weight, shards)
    weights = _packed(weights, dtype, backend, shards)
    if backend.gate_up == "separate" and adapters is None:
        weights = tuple(replace(weight, separate=weight.can_be_separate) for weight in weights)
    stored = jax.tree.unflatten(tree, [_stored(p, w) for p, w in zip(params, weights, strict=True)])
    model = AbstractModel(layout, np.dtype(dtype), segments, weights, adapters, (), graph, jax.tree.structure(stored))
    return model if adapters is None else _with_adapters(model, adapters, params, tree)


def _with_adapters(model: AbstractModel, adapters: AdapterSlots, params: list, tree: Any) -> AbstractModel:
    """The model whose products take the factors of adapters. params: of its weights; tree: what they are leaves of.

    Raises ConfigError for a name of parts that adapters do not change.
    """
    parts = sorted({weight.part for weight, _ in model.adaptable})
    if (name := first_of_no_part(adapters.parts, parts)) is not None:
        raise ConfigError(
            f"adapter_parts has {name!r:.100}, which names no weight that adapters change; those are {', '.join(parts)}"
        )
    factors = {weight.name: _factor_specs(weight, how, adapters) for weight, how in model.adapted}

    def stored(p: nnx.Param, weight: WeightSpec) -> nnx.Variable:
        if (pair := factors.get(weight.name)) is None:
            return _stored(p, weight)
        factor_a, factor_b = pair
        a: Any = factor_a.value
        b: Any = factor_b.value
        return p.replace(AdaptedWeight(weight.value, a, b, axes.GATE_UP in weight.axes))

    values = jax.tree.unflatten(tree, [stored(p, w) for p, w in zip(params, model.weights, strict=True)])
    pairs = tuple(factor for pair in factors.values() for factor in pair)
    return replace(model, factors=pairs, _tree=jax.tree.structure(values))


def _adaptable(weight: WeightSpec, mixer: Mixer | None) -> Adaptable | None:
    one = weight.of_layer
    return None if mixer is None else Adaptable.of(one.part, one.axes, one.contracting, mixer)


def _factor_specs(weight: WeightSpec, how: Adaptable, adapters: AdapterSlots) -> tuple[WeightSpec, WeightSpec]:
    """The factors A and B of a weight, stacked as it is."""
    one = weight.of_layer
    lead = len(weight.shape) - len(one.shape)

    def spec(name: str, shape: tuple[int, ...], names: tuple) -> WeightSpec:
        shape, names = (*weight.shape[:lead], *shape), (*weight.axes[:lead], *names)
        full, part = f"{weight.name}.{name}", f"{weight.part}.{name}"
        return WeightSpec(full, shape, weight.dtype, names, "zeros", weight.block, part)

    a, b = how.factors(adapters, one.shape, one.axes)
    return spec("adapter_a", *a), spec("adapter_b", *b)


def _packed(weights: tuple[WeightSpec, ...], dtype, backend: Backend, shards: Shards) -> tuple[WeightSpec, ...]:
    """The weights, packed where the backend's kernels read them packed."""
    multiplied = [w for w in weights if w.contracting]
    chosen = choose_packings([w.packing for w in multiplied], dtype, backend, shards)
    pairs = zip(multiplied, chosen, strict=True)
    forms = {w.name: replace(w, packed=packed, float4=packing.float4) for w, (packing, packed) in pairs}
    return tuple(forms.get(w.name, w) for w in weights)


def _weight_spec(path: tuple, p: nnx.Param, quantization: Quantization | None) -> WeightSpec:
    block, parts = (path[1], path[2:]) if path[0] == "blocks" else (None, path)
    part = ".".join(str(x) for x in parts).removesuffix(".weight")
    stacked = p.axes[0] == axes.LAYERS
    scheme = quantization.scheme_of(part) if quantization and p.contracting else None
    return WeightSpec(
        name=".".join(str(x) for x in path),
        shape=p.shape,
        dtype=np.dtype(p.dtype),
        axes=p.axes,
        init=p.init,
        block=block,
        part=part,
        contracting=tuple(i + stacked for i in p.contracting),
        scheme=scheme and _scheme(scheme, p),
        rank=quantization.rank_of(part) if quantization and scheme and axes.EXPERTS not in p.axes else 0,
    )


def _scheme(scheme: Scheme, p: nnx.Param) -> Scheme:
    """The scheme of a parameter. Experts do not round their inputs by token: each has few of a step's tokens."""
    return replace(scheme, round_inputs=False) if scheme.rounds_tokens and axes.EXPERTS in p.axes else scheme


def _stored(p: nnx.Param, weight: WeightSpec) -> nnx.Variable:
    """The parameter; of a weight that is quantised, packed or separate, its value is of a type for that."""
    if weight.scheme is None and not weight.packed and not weight.separate:
        return p
    return p.replace(weight.value)


def _must_keep_groups(weight: WeightSpec, quantization: Quantization | None, shards: Shards) -> None:
    if quantization is None or weight.scheme is None or weight.scheme.group is None:
        return
    at = weight.contracting[-1]
    name, size = weight.axes[at], weight.shape[at]
    group, count = weight.scheme.group_of(size), shards.size(name)
    if size // group % count:
        able = [n for n in range(1, min(size // group, 256) + 1) if size // group % n == 0]
        whole = f"ep={count} for whole experts, " if axes.EXPERTS in weight.axes else ""
        raise ShardingError(
            f"quantization {quantization.name!r} gives each {group} of the {size} elements of {weight.part} along "
            f"{name!r} a scale, and {count} devices of the {' and '.join(shards.mesh_axes(name))} axis would cut such "
            f"groups: use {whole}int8 or fp8, or one of {able} devices"
        )


def _must_keep_rotations(weight: WeightSpec, shards: Shards) -> None:
    """Raise ShardingError if the mesh would cut inputs that are rotated together."""
    if weight.scheme is None or not weight.scheme.rotation:
        return
    at = weight.contracting[-1]
    name, size, rotation = weight.axes[at], weight.shape[at], weight.scheme.rotation
    if size // (count := shards.size(name)) % rotation:
        able = [n for n in range(1, min(size // rotation, 256) + 1) if size // rotation % n == 0]
        raise ShardingError(
            f"each {rotation} of the {size} inputs of {weight.part} are rotated together, and {count} devices of the "
            f"{' and '.join(shards.mesh_axes(name))} axis would cut them: use one of {able} devices"
        )
