"""How the arguments and the outputs of programs are split over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from inferlib.config import EngineConfig
from inferlib.models.abstract import AbstractModel
from inferlib.programs.arguments import Logits, Masks, StepOutput
from inferlib.programs.keys import ProgramKey
from inferlib.programs.row_state import of_loop, state_axes
from inferlib.programs.verification import Tally
from inferlib.sampling.sampler import Sampled
from inferlib.sharding import axes
from inferlib.speculation.drafter import ModelDrafter


def config_axes(model: AbstractModel, config: EngineConfig, drafter: ModelDrafter | None = None) -> Any:
    """The logical axes of the rows' state that programs of a model and a config take."""
    return state_axes(
        history=config.speculation is not None,
        adapter=config.adapters is not None,
        features=drafter is not None and bool(drafter.feature_layers),
        first=drafter is not None and drafter.defers,
        dropped=config.compacted is not None,
        ahead=len(config.bounds) > 1,
        skipped=config.propagation is not None,
        **of_loop(model.config.loop),
        **dict.fromkeys(("taken", "core"), bool(config.depthwise_batching)),
    )


def gather_output(function: Callable, specs: StepOutput, mesh: Mesh | AbstractMesh) -> Callable:
    """A program whose output is whole on every device, as process 0 can read only its own devices."""

    def gather(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        for dim, over in enumerate(spec):
            split = [axis for axis in ((over,) if isinstance(over, str) else over or ()) if mesh.shape[axis] > 1]
            if split and x.size:
                x = lax.all_gather(x, tuple(split), axis=dim, tiled=True)
        return x

    def gathered(*inputs):
        cache, state, output = function(*inputs)
        return cache, state, jax.tree.map(gather, output, specs)

    return gathered


def output_specs(spec: Callable, key: ProgramKey, *, load: bool, tally: bool, core: bool) -> StepOutput:
    """How a program's output is put together from the devices' parts."""
    chosen, scored = key.part != "forward", key.mode == "logprobs"
    dealt = (axes.ROWS, None, axes.TOKENS)
    return StepOutput(
        tokens=spec((None, axes.ROWS)),
        sampled=Sampled(*[spec((None, axes.ROWS))] * 5) if scored and key.rows else None,
        chunk_tokens=spec((axes.ROWS,)) if chosen and key.chunks and key.mode != "embed" else None,
        chunk_sampled=Sampled(*[spec((axes.ROWS,))] * 5) if scored and key.chunks else None,
        detail={
            "logprobs": Sampled(*[spec(dealt)] * 5),
            "logits": spec((*dealt, axes.VOCAB)),
            "embed": spec((axes.ROWS, None, axes.EMBED)),
        }.get(key.detail),
        load=spec((axes.ROWS, axes.TOKENS)) if load and key.part != "choose" else None,
        logits=logits_specs(spec, key) if key.part == "forward" else None,
        tally=Tally(*[spec((axes.ROWS,))] * 2) if tally else None,
        core=spec((axes.ROWS, axes.TOKENS)) if core and key.part != "choose" else None,
        depths=spec((None, axes.ROWS)) if core and key.rows and key.part != "choose" else None,
        chunk_depths=spec((axes.ROWS,))
        if core and key.chunks and key.part != "choose" and key.mode != "embed"
        else None,
    )


def logits_specs(spec: Callable, key: ProgramKey) -> Logits:
    one = spec((axes.ROWS, axes.VOCAB))
    return Logits(
        one if key.chunks else None,
        (spec((axes.ROWS, None, axes.VOCAB)) if key.drafts else one) if key.rows else None,
    )


def masks_specs(spec: Callable, key: ProgramKey) -> Masks:
    one = spec((axes.ROWS, None))
    return Masks(one if key.chunks else None, one if key.rows else None, one if key.drafts else None)
