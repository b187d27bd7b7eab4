"""The collectives of a program, recorded from a trace of it.

A program makes every collective by an explicit call (see `inferlib.sharding.shards`), so its jaxpr lists them all, with
their mesh axes, their shapes, and how often a scan repeats them. The mesh may be abstract, and nothing is compiled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from math import prod
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from inferlib.cache.plan import CachePlan
from inferlib.config import EngineConfig
from inferlib.models.abstract import AbstractModel
from inferlib.models.config import MoeSpec
from inferlib.models.layers.exchange import exchange_of
from inferlib.ops.backend import Backend
from inferlib.ops.by_platform import DEFAULT, traced_for
from inferlib.ops.loops import trips_in
from inferlib.planning.collective_purposes import branch_of, purpose_of
from inferlib.planning.collectives import Collective, Kind
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program import build
from inferlib.programs.program_set import ProgramSet
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards
from inferlib.speculation.drafter import ModelDrafter

_KINDS: dict[str, Kind] = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
}
# Kernels that contain a collective, by the name that they are called with.
_KERNELS: dict[str, Kind] = {
    "all_reduce_norm": "fused all-reduce",
    "all_gather_matmul": "fused all-gather",
    "matmul_reduce_scatter": "fused reduce-scatter",
}


def record(
    model: AbstractModel, plan: CachePlan, config: EngineConfig, key: ProgramKey, drafter: ModelDrafter | None = None
) -> tuple[Collective, ...]:
    """The collectives of one step of a program, in the order of their first appearance."""
    shards = config.shards
    if shards.mesh is None:
        return ()
    shards = replace(shards, mesh=getattr(shards.mesh, "abstract_mesh", shards.mesh))
    config = replace(config, shards=shards, backend=_without_kernels(model, config.backend), free_layouts=True)
    key = replace(key, steps=1) if config.counted else key  # a counted loop would repeat each step's collectives
    inputs = ProgramSet(model, plan, config, drafter=drafter).inputs(key)
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    recording = _Recording(model, config, key)
    with traced_for(DEFAULT):
        recording.read(jax.make_jaxpr(build(model, plan, config, key, drafter))(*inputs).jaxpr)
    return recording.collectives


def _without_kernels(model: AbstractModel, backend: Backend) -> Backend:
    """The backend without those kernels that take long to trace and decide nothing about collectives."""
    names = ["add_norm", "decode_attention", "prefill_attention", "qkv_attention"]
    if not any(weight.packed for weight in model.weights):
        names += ["expert_mlp", "matmul"]
        names += ["grouped_matmul"] * (backend.grouped_matmul == "pallas_tpu")
    return replace(backend, **dict.fromkeys(names, "xla"))


def _expected_rows(spec: MoeSpec, row_bytes: int, tokens: int, shards: Shards, backend: Backend) -> dict[int, int]:
    """For a ragged exchange of `tokens` tokens of a device, of `row_bytes` each: rows of the array that it sends from
    -> rows that it is expected to send."""
    devices = shards.size(axes.EXPERTS)
    exchange = exchange_of(spec, tokens, row_bytes, devices, backend)
    if exchange is None or not exchange.ragged:
        return {}
    return {tokens * min(devices, spec.router.chosen): exchange.rows}


class _Recording:
    """Reads the jaxpr of a program, and counts its collectives.

    Equal results get equal numbers, so that equal collectives count once, as in XLA.
    """

    def __init__(self, model: AbstractModel, config: EngineConfig, key: ProgramKey):
        self.shards = shards = config.shards
        self.tokens = key.chunks * key.chunk // shards.size(axes.TOKENS) + key.rows  # on a device
        self.route_widths: set[int] = set()
        self.expected_rows: dict[int, int] = {}
        row_bytes = model.config.dim // shards.size(axes.EMBED) * model.dtype.itemsize
        for spec in {layer.mlp for layer in model.config.layers if isinstance(layer.mlp, MoeSpec)}:
            self.route_widths.add(2 * spec.router.chosen)
            tokens = self.tokens * shards.mlp_row_shards
            self.expected_rows |= _expected_rows(spec, row_bytes, tokens, shards, config.backend)
        self._counts: Counter[Collective] = Counter()
        self._numbers: dict[Hashable, int] = {}
        self._fresh = count()
        self._operations: dict[int, str] = {}

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(replace(collective, count=times) for collective, times in self._counts.items())

    def read(self, jaxpr: Jaxpr, inputs: Sequence[int] = (), times: int = 1, scope: str = "") -> list[int]:
        """Note the collectives of a jaxpr that runs `times` times; returns the numbers of its results. inputs: the
        numbers of its arguments, none if they are not known."""
        values: dict[Var, int] = dict(zip(jaxpr.invars, inputs, strict=True)) if inputs else {}

        def number(x: Var | Literal) -> int:
            if isinstance(x, Literal):
                return self._number("literal", str(x.val), str(x.aval))
            return values[x] if x in values else values.setdefault(x, self._number(next(self._fresh)))

        for eqn in jaxpr.eqns:
            results = self._read_operation(eqn, [number(x) for x in eqn.invars], times, scope)
            values |= zip(eqn.outvars, results, strict=True)
        return [number(x) for x in jaxpr.outvars]

    def _read_operation(self, eqn: JaxprEqn, inputs: list[int], times: int, scope: str) -> list[int]:
        """Note the collectives of one operation; returns the numbers of its results."""
        name, path = eqn.primitive.name, f"{scope}/{eqn.source_info.name_stack}"
        inner = list(_jaxprs(eqn))
        if (kernel := eqn.params.get("name")) in _KERNELS:
            self._note_kernel(eqn, kernel, path, times)
        elif name in ("scan", "while"):
            trips = eqn.params["length"] if name == "scan" else trips_in(path)
            for jaxpr in inner:
                self.read(jaxpr, (), times * trips, path)
        elif name == "cond":
            self.read(inner[-1], (), times, path)  # the default branch
        elif len(inner) == 1 and name != "pallas_call" and len(inner[0].invars) == len(inputs):
            return self.read(inner[0], inputs, times, path)
        elif not inner:
            operation = self._operations.setdefault(id(eqn), f"{name} {eqn.params}")
            known, key = len(self._numbers), (operation, *inputs)
            # A scan's passing on is counted for each layer.
            result = self._number(next(self._fresh)) if name == "ppermute" and times > 1 else self._number(*key)
            if name in _KINDS and len(self._numbers) > known:
                self._note(eqn, path, times)
            return [self._number(result, i) for i in range(len(eqn.outvars))]
        return [self._number(next(self._fresh)) for _ in eqn.outvars]

    def _number(self, *value: Hashable) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def _note(self, eqn: JaxprEqn, path: str, times: int) -> None:
        """Note one collective operation, which may have several operands."""
        name, purpose = eqn.primitive.name, purpose_of(eqn, path)
        over = eqn.params["axes" if name in ("psum", "pmax", "pmin") else "axis_name"]
        for operand, result in zip(eqn.invars, eqn.outvars, strict=False):
            array = _array(result if name == "all_gather" else operand)
            shape = array.shape
            if name == "ragged_all_to_all":
                rows = self.expected_rows.get(shape[0]) or self.expected_rows[_array(result).shape[0]]
                shape = (rows, *shape[1:])
            what = self._sent_to_experts(array) if purpose.startswith("tokens to experts") else ""
            self._add(Collective(_KINDS[name], what or purpose, "", prod(shape) * array.dtype.itemsize), over, times)

    def _sent_to_experts(self, array: Any) -> str:
        """What an array adds to the tokens that are sent; empty for the tokens themselves."""
        if array.dtype == "int32":
            return "how many tokens"
        return "routes" if array.dtype == "float32" and array.shape[-1] in self.route_widths else ""

    def _note_kernel(self, eqn: JaxprEqn, kernel: str, path: str, times: int) -> None:
        """Note the collective that is part of a kernel, over the devices that split the feed-forward."""
        over, branch, kind = self.shards.mesh_axes(axes.MLP), branch_of(path), _KERNELS[kernel]
        if kernel == "all_reduce_norm":
            self._add(Collective(kind, branch, "", _nbytes(eqn.invars[0])), over, times)
            return
        *_, x, w = eqn.invars
        flops = 2 * self.tokens * prod(_array(w).shape[1:])
        gathers = kernel == "all_gather_matmul"
        nbytes = _nbytes(x if gathers else eqn.outvars[0]) * self.shards.size(axes.MLP)
        self._add(Collective(kind, f"input of {branch}" if gathers else branch, "", nbytes, flops=flops), over, times)

    def _add(self, collective: Collective, over: str | tuple[str, ...], times: int) -> None:
        self._counts[replace(collective, axis=over if isinstance(over, str) else "+".join(over))] += times


def _jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(inner, "jaxpr", inner)
            if isinstance(jaxpr, Jaxpr):
                yield jaxpr


def _array(x: Var | Literal) -> Any:
    """The shape and dtype of a variable."""
    return x.aval


def _nbytes(x: Var | Literal) -> int:
    return prod(_array(x).shape) * _array(x).dtype.itemsize
