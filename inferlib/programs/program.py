"""The function of each program: a step over prefill chunks and decode rows, or several decode steps.

A program is a pure function of flat tuples (weights, cache), the row state and a few small host arrays. Cache and state
are donated. Sampling is inside; only tokens and asked-for log-probabilities come back.

Where the host has a part in the choice of tokens, a step is two programs: `forward`, of the mode "processed", returns
the logits, and `choose`, of another mode, samples from logits that the host may have changed, among the tokens that its
masks leave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from inferlib.cache.plan import CachePlan
from inferlib.config import EngineConfig
from inferlib.models.abstract import AbstractModel
from inferlib.programs.arguments import ChunkInput
from inferlib.programs.context import ProgramContext
from inferlib.programs.decode import Decode
from inferlib.programs.keys import ProgramKey
from inferlib.programs.partition import config_axes, gather_output, logits_specs, masks_specs, output_specs
from inferlib.programs.prefill import Prefill
from inferlib.programs.row_state import map_state
from inferlib.programs.unsettled import has_states, spec_of
from inferlib.sharding import axes
from inferlib.speculation.drafter import ModelDrafter


def settles_states(model: AbstractModel, key: ProgramKey) -> bool:
    """True if the second program of a step advances states, by what the first one read: it then takes the weights and
    the cache too."""
    return bool(key.part and key.drafts) and has_states(model.config)


def build(
    model: AbstractModel,
    plan: CachePlan,
    config: EngineConfig,
    key: ProgramKey,
    drafter: ModelDrafter | None = None,
) -> Callable:
    """The function `(weights, cache, state, control[, chunk, prefixes or drafts]) -> (cache, state, StepOutput)` of a
    key; of one that chooses tokens, `(state, logits, masks[, chunk]) -> (state, StepOutput)`, or if it settles states,
    `(weights, cache, state, logits, masks, inputs) -> (cache, state, StepOutput)`.

    prefixes: see `unpack_prefixes`, of a program with `cascade`. drafts [B, C - 1]: of the first of two programs.
    drafter: a model that drafts, whose weights and cache lie behind the model's.

    On a mesh it takes whole arrays and runs one device's part of it on each.
    """
    program = ProgramContext(model, plan, config, key, drafter)
    function = _function(program)
    if config.shards.mesh is None or config.shards.rules is None:
        return function
    taken, returned, output = _specs(program, config.shards.rules.spec)
    if config.shards.several_processes:
        function, output = gather_output(function, output, config.shards.mesh), PartitionSpec()
    return jax.shard_map(
        function,
        mesh=config.shards.mesh,
        in_specs=taken,
        out_specs=(*returned, output),
        check_vma=False,
    )


def _function(program: ProgramContext) -> Callable:
    """One device's part of a program."""
    key, prefill = program.key, Prefill(program)
    if key.part == "forward":
        return prefill.forward_drafts if key.drafts else prefill.forward
    if key.part == "choose":
        return prefill.choose_settling if settles_states(program.model, key) else prefill.choose
    if key.mode == "embed":
        return prefill.forward
    return prefill.step if key.chunks else Decode(program).decode


def _specs(program: ProgramContext, spec: Callable) -> tuple[tuple, tuple, Any]:
    """How what a program takes, what it returns but the output, and the output are split over a mesh."""
    model, config, key, drafter = program.model, program.config, program.key, program.drafter
    state = map_state(spec, config_axes(model, config, drafter))
    more = (ChunkInput._make(spec((axes.ROWS, None)) for _ in ChunkInput._fields),) if key.chunks else ()
    more = (spec((axes.ROWS, None)),) if key.cascade or (key.drafts and key.part == "forward") else more
    tally = config.speculation is not None and not key.chunks and not key.part
    output = output_specs(spec, key, load=config.expert_load, tally=tally, core=model.config.exits_early)
    returned = (tuple(spec(array.axes) for array in program.plan.arrays), state)
    weights = model.specs + (() if drafter is None else drafter.model.specs)
    taken = (tuple(spec(w.axes) for w in weights), *returned, spec((axes.ROWS, None)))
    settles = settles_states(model, key)
    if key.part == "choose":
        to_choose = logits_specs(spec, key), masks_specs(spec, key)
        taken, returned = ((state, *to_choose), (state,)) if not settles else ((*taken[:3], *to_choose), returned)
    if settles:
        inputs = spec_of(config.shards)
        taken, output = (*taken, inputs) if key.part == "choose" else taken, output._replace(inputs=inputs)
    return (*taken, *more), returned, output
