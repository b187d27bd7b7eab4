"""Where a model's arrays are placed on a mesh, and what its programs send over it: predicted, not measured.

Arrays follow from the abstract model and the rules, collectives from a trace of the program; no device is needed. On
several hosts a program also gathers its output, a few numbers for each row, on every device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from inferlib.cache.plan import BlockCache, BlockState, CachePlan
from inferlib.config import EngineConfig
from inferlib.models.abstract import AbstractModel
from inferlib.ops.quantized import nbytes
from inferlib.planning import explain_text
from inferlib.planning.collectives import Collective, Placement, Step
from inferlib.planning.experts import expert_bytes
from inferlib.planning.recorder import record
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program_set import ProgramSet
from inferlib.programs.row_state import RowState
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards
from inferlib.speculation.drafter import ModelDrafter
from inferlib.tables import Part, Tables

__all__ = ["Collective", "Explanation", "Placement", "Step", "explain"]


@dataclass(frozen=True, repr=False)
class Explanation(Tables):
    """A model on a mesh; `print` it. waste: see `Layout.waste`."""

    shards: Shards
    weights: tuple[Placement, ...]
    cache: tuple[Placement, ...]
    state: tuple[Placement, ...]
    waste: dict[str, float]
    steps: tuple[Step, ...]

    @property
    def arrays(self) -> Mapping[str, tuple[Placement, ...]]:
        return {"weights": self.weights, "cache": self.cache, "state": self.state}

    def facts(self) -> dict[str, Any]:
        """The explanation as JSON values."""
        arrays = {name: [asdict(p) for p in placements] for name, placements in self.arrays.items()}
        steps = [
            {
                "program": str(s.key),
                "tokens": s.tokens,
                "expert_bytes": s.expert_bytes,
                "collectives": [asdict(c) for c in s.collectives],
            }
            for s in self.steps
        ]
        mesh = dict(self.shards.mesh.shape) if self.shards.mesh is not None else {}
        return {"mesh": mesh, **arrays, "waste": self.waste, "steps": steps}

    def parts(self) -> Sequence[Part]:
        placements = explain_text.placements(self.shards, self.arrays)
        return [placements, *explain_text.waste(self.waste), *explain_text.steps(self.steps)]


def explain(
    model: AbstractModel,
    plan: CachePlan,
    config: EngineConfig,
    keys: Sequence[ProgramKey],
    drafter: ModelDrafter | None = None,
) -> Explanation:
    """Explain a model under `config.shards`, whose mesh may be abstract, and a step of each of these programs, in which
    a model that drafts may have a part."""
    place = partial(_place, config.shards)
    programs = ProgramSet(model, plan, config, drafter=drafter)
    fields = zip(RowState._fields, programs.state_axes, programs.state, strict=True)
    return Explanation(
        config.shards,
        weights=_grouped(place(w.part, w.axes, w.shape, w.dtype) for w in model.specs),
        cache=_grouped(
            place(_array_name(b, i), x.axes, x.shape, x.dtype) for b in plan.blocks for i, x in enumerate(b.owned)
        ),
        state=_grouped(place(name, names, x.shape, x.dtype) for name, names, x in fields if x is not None),
        waste=model.layout.waste(),
        steps=tuple(_step(model, plan, config, key, drafter) for key in keys),
    )


def _step(
    model: AbstractModel, plan: CachePlan, config: EngineConfig, key: ProgramKey, drafter: ModelDrafter | None
) -> Step:
    prompt = key.chunks * key.chunk
    tokens = prompt // config.shards.size(axes.TOKENS) + key.rows
    collectives = record(model, plan, config, key, drafter)
    return Step(key, prompt + key.rows, collectives, expert_bytes(model, config.shards, tokens))


def _place(shards: Shards, name: str, names: tuple[str | None, ...], shape: tuple[int, ...], dtype) -> Placement:
    """A stacked weight or cache counts as one array for each of its layers."""
    count = 1
    if names[0] == axes.LAYERS:
        count, names, shape = shape[0], names[1:], shape[1:]
    mesh_axes = tuple("+".join(shards.mesh_axes(n)) or None for n in names)
    local = shards.local_shape(names, shape)
    return Placement(name, names, mesh_axes, shape, local, count * nbytes(local, dtype), count)


def _grouped(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """One entry for placements that differ only in count, in order of appearance."""
    groups: dict[tuple, Placement] = {}
    for p in placements:
        key = (p.name, p.axes, p.shape)
        old = groups.get(key)
        groups[key] = p if old is None else replace(old, count=old.count + p.count, nbytes=old.nbytes + p.nbytes)
    return tuple(groups.values())


def _array_name(block: BlockCache | BlockState, number: int) -> str:
    """The name of one of the arrays that a block owns."""
    if isinstance(block, BlockState):
        return block.names[number]
    what = " summaries" if block.arrays[number] in block.summaries else " scales" * (number >= len(block.shapes))
    return ("ring" if block.ring else "cache") + what
