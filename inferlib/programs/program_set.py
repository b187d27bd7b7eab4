"""All programs of an engine: which exist, compiling them ahead of time, and finding one at run time."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from inferlib.cache.plan import CachePlan, plan_cache
from inferlib.config import EngineConfig
from inferlib.models.abstract import AbstractModel, ArraySpec
from inferlib.models.config import AttentionSpec
from inferlib.ops.by_platform import DEFAULT, platform_of, traced_for
from inferlib.ops.eight_bits import gpu_order
from inferlib.option_checks import ConfigurationError
from inferlib.programs.adapter_factors import AdapterFactors
from inferlib.programs.arguments import CHUNK_COLUMNS, LEAST_SHARING, ChunkInput, Logits, Masks, prefix_shape
from inferlib.programs.arrivals import check_arrivals
from inferlib.programs.choices import Choices
from inferlib.programs.compaction import Compaction, Keys, compact_rows
from inferlib.programs.compiler_options import compiler_options
from inferlib.programs.keys import DEVICE_MODES, MODES, Mode, ProgramKey
from inferlib.programs.memory import Demand, explained
from inferlib.programs.partition import config_axes
from inferlib.programs.program import build, settles_states
from inferlib.programs.row_changes import (
    Adapt,
    Change,
    Changes,
    Compact,
    Copy,
    Count,
    Deepen,
    Exit,
    Grant,
    Move,
    Past,
    Restore,
    Save,
    arguments,
    copy_pages,
    give_pages,
    move_rows,
    packed,
    set_counts,
    set_history,
    set_numbers,
)
from inferlib.programs.row_snapshots import restore_rows, save_rows
from inferlib.programs.row_state import NUMBERS, RowState, map_state
from inferlib.programs.start_functions import prepared, run
from inferlib.programs.unsettled import sharding_of
from inferlib.sampling.sampler import mask_words
from inferlib.sharding import axes
from inferlib.sharding.mesh import alone
from inferlib.speculation.drafter import ModelDrafter
from inferlib.speculation.drafting import Drafting, drafter_of, model_of

log = logging.getLogger(__name__)

_MOST_THREADS = 16
# What sets a field of one number of each row, for sequences that get the row.
_NUMBER_CHANGES: dict[str, type[Adapt | Deepen | Exit]] = {"adapter": Adapt, "depth": Deepen, "threshold": Exit}


class UnplannedProgramError(RuntimeError):
    """A program outside the buckets, or one not compiled in strict mode, was asked for."""


class ProgramSet:
    """Programs by key, compiled at first use or by `compile_all`; in strict mode never at run time.

    layouts: of the weights in memory, one for each. None: the target's usual ones, or, if `config.free_layouts`, those
    that the compiler finds best for decoding (see `choose_layouts`). drafter: a model that drafts.
    """

    def __init__(
        self,
        model: AbstractModel,
        plan: CachePlan,
        config: EngineConfig,
        layouts: Sequence[Layout] | None = None,
        choices: Choices | None = None,
        drafter: ModelDrafter | None = None,
    ):
        self.model, self.plan, self.config, self.drafter = model, plan, config, drafter
        self.choices = choices or Choices.of(config, model, plan)
        self.layouts = layouts and tuple(layouts)
        self.strict = False
        self.misses = 0
        self._compiled: dict[ProgramKey, Any] = {}  # `jax.stages.Compiled`
        self._planned = {mode: frozenset(planned_keys(config, [mode])) for mode in MODES}
        self._unsettled_of: dict[ProgramKey, Any] = {}
        self._lock, self._tracing = threading.Lock(), threading.Lock()

    @staticmethod
    def make(
        model: AbstractModel,
        config: EngineConfig,
        layouts: Sequence[Layout] | None = None,
        drafting: Drafting | None = None,
    ) -> ProgramSet:
        """The programs and the cache of an engine. Raises ConfigurationError for arrays that programs cannot take.

        Warns of kernels of `config.backend` that cannot run their part of the model, in place of which XLA's form runs.
        drafting: what drafts, if `config.speculation` has a model, head or layer for it.
        """
        of_drafts = None if drafting is None else model_of(drafting)
        for one in (model, of_drafts):
            if one is not None:
                check_packed(one, config, on_devices=config.shards.mesh is not None or layouts is not None)
        plan = plan_cache(
            model,
            rows=config.max_batch,
            max_len=config.max_len,
            chunk=config.row_tokens,
            dtype=config.kv_cache_dtype or model.dtype,
            platform=config.platform,
            pool=config.pool,
            drafting=of_drafts,
        )
        drafter = None if drafting is None else _drafter(drafting, config, plan)
        choices = Choices.of(config, model, plan)
        choices.warn(config.backend, model)
        if choices.fallbacks:
            config = replace(config, backend=choices.runnable(config.backend))
        return ProgramSet(model, plan, config, layouts, choices, drafter)

    @property
    def specs(self) -> tuple[ArraySpec, ...]:
        """The arrays of all weights, in the order in which programs take them."""
        return tuple(spec for model in self.models for spec in model.specs)

    @property
    def models(self) -> tuple[AbstractModel, ...]:
        """The model, and one that drafts."""
        return (self.model,) if self.drafter is None else (self.model, self.drafter.model)

    @property
    def compiled(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    def require(self, mode: Mode) -> None:
        """In strict mode, raise UnplannedProgramError unless all programs of a mode are compiled."""
        if self.strict and not self._compiled.keys() >= self._planned[mode]:
            others = ", or to --modes of inferlib compile" if mode != "processed" else "; artifacts never have it"
            raise UnplannedProgramError(
                f"mode {mode!r} was not compiled ahead of time; add it to warmup(modes=...){others}"
            )

    def ready(self, key: ProgramKey) -> Callable | None:
        """The program of a key, if it is compiled."""
        return self._compiled.get(key)

    def get(self, key: ProgramKey) -> Callable:
        """The compiled program of a key."""
        if (program := self.ready(key)) is not None:
            return program
        if not any(key in planned for planned in self._planned.values()):
            raise UnplannedProgramError(f"no bucket holds '{key}'; buckets are {self.config.buckets}")
        if self.strict:
            raise UnplannedProgramError(f"'{key}' was not compiled ahead of time")
        self.misses += 1
        return self._compile(key)

    def adopt(self, programs: Mapping[ProgramKey, Callable]) -> None:
        """Use programs that were compiled earlier, and from now on no others."""
        self._compiled.update(programs)
        self.strict = True

    @property
    def decisive(self) -> ProgramKey:
        """The program that decides the layouts of the weights: a decode step of all rows."""
        config = self.config
        steps = 1 if config.rows in config.one_step_buckets else config.decode_steps
        return ProgramKey("greedy", config.rows, config.limits[-1], steps)

    def choose_layouts(self) -> None:
        """Compile the decisive program with free layouts of the weights, and hold all others to what it chose.

        The weights must be in `formats` before anything runs.
        """
        if self._free:
            program = self._compile(self.decisive)
            self.layouts = tuple(f.layout for f in program.input_formats[0][0])

    def compile_all(
        self, keys: Iterable[ProgramKey], done: Callable[[ProgramKey], None], threads: int | None = None
    ) -> None:
        """Compile the keys that are missing, side by side; `done` is called after each.

        threads: by default one for each core, at most 16, because XLA's autotuner needs memory of the device for each.
        """
        missing = compile_order(key for key in keys if key not in self._compiled)
        with ThreadPoolExecutor(threads or min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
            futures = {pool.submit(self._compile, key): key for key in missing}
            try:
                for future in as_completed(futures):
                    future.result()
                    done(futures[future])
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _compile(self, key: ProgramKey) -> Callable:
        start = time.perf_counter()
        with explained(f"compiling '{key}'", self.demand):
            with self._tracing:  # Python traces one at a time: side by side, all would start to compile late
                lowered = self.lower(key)
            program = lowered.compile(self.options(key))
        if self.choices.weights["fetch_ahead"] and self._platform == "tpu":
            check_arrivals(program.as_text() or "")
        log.info("compiled '%s' in %.1f s", key, time.perf_counter() - start)
        with self._lock:
            return self._compiled.setdefault(key, program)

    def options(self, key: ProgramKey) -> dict[str, str | bool] | None:
        """Compiler options of the program of a key."""
        in_loops = any(choice.name != "xla" for choice in self.choices.layers["loop_weights"].values())
        on_chip = in_loops or bool(self.choices.weights["fetch_ahead"])
        rehearsed = isinstance(self.config.shards.mesh, Mesh) and self._platform == "cpu"  # what TPUs run, on CPUs
        platform = "cpu" if rehearsed else self.config.platform
        return compiler_options(self.model, platform, key.tokens, on_chip=on_chip) or None

    def demand(self) -> Demand:
        """What an engine with these programs takes of a device's memory, as far as they are compiled."""
        stats = [program.memory_analysis() for program in list(self._compiled.values())]
        most = max((s.temp_size_in_bytes for s in stats if s is not None), default=0)
        drafting = None if self.drafter is None else self.drafter.model
        return Demand.of(self.model, self.plan, self.config, most, drafting)

    def lower(self, key: ProgramKey, platform: str | None = None) -> jax.stages.Lowered:
        """Trace a key's program from shapes alone; cache and row state are donated.

        platform: to lower for, if that is not the devices' own: JAX needs no plugin for it.
        """
        inputs = self.inputs(key)
        takes_weights, free = key.part != "choose" or settles_states(self.model, key), {}
        donated = (1, 2) if takes_weights else (0,)
        if self._free and takes_weights:
            # Free layouts cannot be part of a ShapeDtypeStruct.
            free["in_shardings"] = (self.formats, *[None] * (len(inputs) - 1))
        # All take all weights, in their layouts: to embed, the head is not used, nor that of a model that follows.
        whole = takes_weights and (key.mode == "embed" or self.drafter is not None)
        built = build(self.model, self.plan, self.config, key, self.drafter)
        function = jax.jit(built, donate_argnums=donated, keep_unused=whole, **free)
        with self._known_device(), traced_for(platform or self._platform):
            return function.trace(*inputs).lower(lowering_platforms=(platform,) if platform else None)

    def _known_device(self) -> AbstractContextManager:
        """A context for a trace without a mesh: it names the device, on which blocks of TPU kernels depend."""
        if self.config.platform != "tpu" or self.config.shards.mesh is not None:
            return nullcontext()
        return jax.sharding.use_abstract_mesh(alone(jax.devices()[0]))

    @property
    def _platform(self) -> str | None:
        """The platform of the devices."""
        mesh = self.config.shards.mesh
        return platform_of(mesh.devices.flat[0] if isinstance(mesh, Mesh) else jax.devices()[0])

    @property
    def _free(self) -> bool:
        return self.config.free_layouts and self.layouts is None

    def random_weights(self, seed: int = 0) -> tuple[jax.Array, ...]:
        """Random weights of the model, as its programs take them."""
        return self.model.random_weights(seed, self.config.shards, self.formats[: len(self.model.specs)])

    @property
    def formats(self) -> tuple[Format | NamedSharding | None, ...]:
        """The sharding of each weight, with its layout if that is not the usual one."""
        shardings = [self.config.shards.sharding(spec.axes) for spec in self.specs]
        usual = Layout.AUTO if self._free else None
        layouts = self.layouts or [
            required.get(spec.name, usual)
            for model, required in zip(self.models, self._required_layouts(), strict=True)
            for spec in model.specs
        ]
        return tuple(
            sharding if layout is None else Format(layout, sharding or SingleDeviceSharding(jax.devices()[0]))
            for layout, sharding in zip(layouts, shardings, strict=True)
        )

    def _required_layouts(self) -> list[dict[str, Layout]]:
        """Layouts of weights, by name, for each of `models`: of those that a prefill on TPUs fuses with its collective,
        and of those that GPUs multiply by inputs of eight bits."""
        if self.config.platform == "gpu":
            return [_layouts_of_eight_bits(model) for model in self.models]
        return [self._fused_layouts() if self._free else {}, *({} for _ in self.models[1:])]

    def _fused_layouts(self) -> dict[str, Layout]:
        """Layouts of the weights whose product a prefill fuses with its collective: in any other layout each step would
        copy them. The parts of a layer's weight (heads, gate and up) are apart, and in each part the rows that are
        summed over come first."""
        fused, required = self.choices.weights["collective_matmul"], {}
        for weight in self.model.weights:
            if weight.name in fused and fused[weight.name].name != "xla":
                one = weight.of_layer
                dims, stack = list(range(len(one.shape))), len(weight.shape) - len(one.shape)
                order = dims if one.axes[-1] == axes.EMBED else [*dims[1:-1], 0, dims[-1]]
                required[weight.name] = Layout((*range(stack), *(stack + dim for dim in order)))
        return required

    def allocate_state(self) -> RowState:
        """The state of rows that are all free."""
        place = map_state(self.config.shards.sharding, self.state_axes)
        return run(RowState.zeros, self._state_sizes, place=place)

    @property
    def _state_sizes(self) -> tuple[Any, ...]:
        config, drafter, features = self.config, self.drafter, None
        history = 0 if config.speculation is None else self.plan.max_len
        if config.speculation is not None and drafter is not None and drafter.feature_layers:
            features = 1 + config.speculation.tokens, drafter.model.config.dim, drafter.model.dtype.name
        sizes = config.max_batch, self.model.layout.vocab, sum(self.plan.level_columns)
        numbers = tuple(name for name in NUMBERS if getattr(self.state_axes, name) is not None)
        core = (self.model.config.dim, self.model.dtype.name) if self.state_axes.core is not None else None
        return (*sizes, history, features, numbers, core, len(self.plan.level_columns) - 1)

    @property
    def state_axes(self) -> Any:
        """The logical axes of the state's fields."""
        return config_axes(self.model, self.config, self.drafter)

    @property
    def state(self) -> RowState:
        """The state as shapes."""
        state = jax.eval_shape(partial(RowState.zeros, *self._state_sizes))
        return map_state(lambda names, x: self._struct(x.shape, x.dtype, names), self.state_axes, state)

    def _struct(self, shape: tuple[int, ...], dtype, names: tuple[str | None, ...]) -> Any:
        """A ShapeDtypeStruct in an array's place."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.config.shards.sharding(names))

    # ---- what changes between programs

    @cached_property
    def _give_pages(self) -> Callable:
        shards, table = self.config.shards, self.state.pages
        place = shards.sharding(self.state_axes.pages)
        return prepared(give_pages, (shards,), table, self._changes(Grant), place=place)

    @cached_property
    def _set_counts(self) -> Callable:
        shards, counts = self.config.shards, self.state.counts
        place = shards.sharding(self.state_axes.counts)
        return prepared(set_counts, (shards,), counts, self._changes(Count), place=place)

    @cached_property
    def _set_history(self) -> Callable:
        shards, history = self.config.shards, self.state.history
        place = shards.sharding(self.state_axes.history)
        return prepared(set_history, (shards,), history, self._changes(Past), place=place)

    @cached_property
    def _set_numbers(self) -> dict[str, Callable]:
        """The functions that set those fields of `_NUMBER_CHANGES` that the state has, by the fields' names."""
        shards, there = self.config.shards, [name for name in _NUMBER_CHANGES if getattr(self.state, name) is not None]
        return {
            name: prepared(
                set_numbers,
                (shards,),
                getattr(self.state, name),
                self._changes(_NUMBER_CHANGES[name]),
                place=shards.sharding(getattr(self.state_axes, name)),
            )
            for name in there
        }

    @cached_property
    def _copy_pages(self) -> Callable:
        shards, (names, taken) = self.config.shards, self._arrays(of_rows=False)
        place = None if shards.mesh is None else tuple(map(shards.sharding, names))
        return prepared(copy_pages, (shards, names), taken, self._changes(Copy), place=place)

    @cached_property
    def _move_rows(self) -> Callable:
        shards, (names, taken) = self.config.shards, self._arrays(of_rows=True)
        place = None
        if shards.mesh is not None:
            place = tuple(map(shards.sharding, names)), map_state(shards.sharding, self.state_axes)
        return prepared(move_rows, (shards, names), (taken, self.state), self._changes(Move), place=place)

    @cached_property
    def _compact_rows(self) -> Callable:
        shards, (names, taken) = self.config.shards, self._arrays(of_rows=False)
        of_queries, queries = self._arrays(of_rows=True)
        policy = self.config.compacted
        assert policy is not None
        mixers = [self.model.config.layers[layers[0]].attention for layers in self.model.blocks()]
        pairs = zip(self.plan.blocks, mixers, strict=True)
        owners = ((block.owned, mixer) for block, mixer in pairs if block.owned and isinstance(mixer, AttentionSpec))
        beside = policy.counts_mass + (policy.queries > 0)
        keys = tuple(Keys.of(mixer, len(arrays) - beside) for arrays, mixer in owners)
        entries, place = self._changes(Compact), None
        together = Compaction.rows_together(self.config.platform, entries.shape[0] // shards.replicas)
        fast = Compaction.gathers_fast(self.config.platform)
        how = Compaction(policy, keys, of_queries, together, self.plan.level_columns, fast)
        if shards.mesh is not None:
            place = tuple(map(shards.sharding, names)), map_state(shards.sharding, self.state_axes)
        return prepared(compact_rows, (shards, names, how), (taken, self.state), queries, entries, place=place)

    @cached_property
    def _save_rows(self) -> Callable:
        shards, (names, taken) = self.config.shards, self._arrays(of_rows=True)
        place = None if shards.mesh is None else tuple(map(shards.sharding, names))
        return prepared(save_rows, (shards, names), self._snapshots, taken, self._changes(Save), place=place)

    @cached_property
    def _restore_rows(self) -> Callable:
        shards, (names, taken) = self.config.shards, self._arrays(of_rows=True)
        place = None if shards.mesh is None else tuple(map(shards.sharding, names))
        return prepared(restore_rows, (shards, names), taken, self._snapshots, self._changes(Restore), place=place)

    @property
    def _snapshots(self) -> tuple[Any, ...]:
        return tuple(self._struct(x.shape, x.dtype, x.axes) for x in self.plan.snapshot_arrays)

    def _arrays(self, *, of_rows: bool) -> tuple[tuple[tuple[str | None, ...], ...], tuple[Any, ...]]:
        """The logical axes and the shapes of the cache's arrays of rows, or of those of pages."""
        arrays = self.plan.part(self.plan.arrays, of_rows=of_rows)
        return tuple(x.axes for x in arrays), tuple(self._struct(x.shape, x.dtype, x.axes) for x in arrays)

    def _changes(self, kind: type[Change]) -> Any:
        return self._struct(arguments(kind, self.config.shards), jnp.int32, (axes.ROWS, None))

    def prepare_changes(self) -> None:
        """Compile what changes rows and pages between programs, unless that is done."""
        _ = self._give_pages, self._move_rows
        if self.plan.no_prefix_caching(self.config) is None:
            _ = self._copy_pages, self._set_counts
            if self.plan.snapshots:
                _ = self._save_rows, self._restore_rows
            _ = self.config.speculation and self._set_history
        if self.config.compacted is not None:
            _ = self._compact_rows
        if self.config.adapters is not None:
            _ = self.factors.write
        _ = self._set_numbers

    def change_rows(
        self, cache: tuple[jax.Array, ...], state: RowState, changes: Changes
    ) -> tuple[tuple[jax.Array, ...], RowState]:
        """Cache and state, which are donated, after these changes."""
        for entries in self._calls(changes.moves):
            of_rows, state = self._move_rows((self.plan.part(cache, of_rows=True), state), entries)
            cache = self.plan.with_part(cache, of_rows, of_rows=True)
        for entries in self._calls([Compact(row, cells) for row, cells in changes.compacted.items()]):
            queries = self.plan.part(cache, of_rows=True)
            pages, state = self._compact_rows((self.plan.part(cache, of_rows=False), state), queries, entries)
            cache = self.plan.with_part(cache, pages, of_rows=False)
        copies = [Copy(source, target) for target, source in changes.copies.items()]
        for entries in self._calls(copies, self.plan.pages // self.config.shards.replicas):
            pages = self._copy_pages(self.plan.part(cache, of_rows=False), entries)
            cache = self.plan.with_part(cache, pages, of_rows=False)
        for entries in self._calls(changes.grants):
            state = state._replace(pages=self._give_pages(state.pages, entries))
        for entries in self._calls(changes.counts):
            state = state._replace(counts=self._set_counts(state.counts, entries))
        for entries in self._calls(changes.past):
            state = state._replace(history=self._set_history(state.history, entries))
        by_name = {"adapter": changes.adapters, "depth": changes.depths, "threshold": changes.thresholds}
        for name, set_number in self._set_numbers.items():
            kind = _NUMBER_CHANGES[name]
            for entries in self._calls([kind(row, number) for row, number in by_name[name].items()]):
                state = state._replace(**{name: set_number(getattr(state, name), entries)})
        return cache, state

    @cached_property
    def factors(self) -> AdapterFactors:
        """What writes the factors of adapters."""
        return AdapterFactors(self.model, self.config.shards, self.formats)

    def change_snapshots(
        self, cache: tuple[jax.Array, ...], snapshots: tuple[jax.Array, ...], changes: Changes
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Cache and snapshots, which are donated as far as they change, after those of these changes. It follows
        `change_rows`."""
        for kind, group in itertools.groupby(changes.snapshots, type):
            for entries in self._calls(list(group)):
                of_rows = self.plan.part(cache, of_rows=True)
                if kind is Save:
                    snapshots = self._save_rows(snapshots, of_rows, entries)
                else:
                    cache = self.plan.with_part(cache, self._restore_rows(of_rows, snapshots, entries), of_rows=True)
        return cache, snapshots

    def _calls(self, changes: Sequence[Change], each: int | None = None) -> Iterable[Any]:
        """The changes as `packed` has them. each: rows or pages of a replica; by default its rows."""
        shards = self.config.shards
        calls = packed(changes, shards.replicas, each or self.config.rows) if changes else ()
        return (shards.place(entries, (axes.ROWS, None)) if shards.several_processes else entries for entries in calls)

    def inputs(self, key: ProgramKey) -> tuple:
        """Abstract arguments of a key's program."""
        config, shards, struct, state = self.config, self.config.shards, self._struct, self.state
        chunk = (self._chunk(key),) if key.chunks else ()
        if key.part == "choose":
            logits = Logits(self._logits(key.chunks), self._logits(key.rows, key.drafts))
            masks = Masks(self._mask(key.chunks), self._mask(key.rows, key.drafts), self._drafts(key))
            if settles_states(self.model, key):
                return *self._weights_and_cache, state, logits, masks, self._unsettled(key)
            return state, logits, masks, *chunk
        weights, cache = self._weights_and_cache
        control = struct((shards.replicas, config.rows + 1), jnp.int32, (axes.ROWS, None))
        if key.cascade:
            tiles, width = prefix_shape(key.rows, self.config.platform)
            prefixes = struct((shards.replicas * tiles, width), jnp.int32, (axes.ROWS, None))
            return weights, cache, state, control, prefixes
        if key.part and key.drafts:
            return weights, cache, state, control, self._drafts(key)
        return weights, cache, state, control, *chunk

    @property
    def _weights_and_cache(self) -> tuple[tuple, tuple]:
        """These as shapes."""
        weights = tuple(
            jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=None if self._free else format)
            for spec, format in zip(self.specs, self.formats, strict=True)
        )
        return weights, tuple(self._struct(x.shape, x.dtype, x.axes) for x in self.plan.arrays)

    def _unsettled(self, key: ProgramKey) -> Any:
        """What the first program of a step leaves its second one of states, as shapes."""
        first = replace(key, mode="processed", limit=self.config.limits[0], part="forward")
        if (known := self._unsettled_of.get(first)) is not None:  # a trace of the first program, for each mode
            return known
        with self._known_device(), traced_for(DEFAULT):
            built = build(self.model, self.plan, self.config, first, self.drafter)
            *_, output = jax.eval_shape(built, *self.inputs(first))
        place = sharding_of(self.config.shards)
        inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), output.inputs)
        return self._unsettled_of.setdefault(first, inputs)

    def _logits(self, rows: int, drafts: int = 0) -> Any:
        """The shape of logits of `rows` rows of each replica; None if there are no rows."""
        return self._of_rows(rows, drafts, self.state.counts.shape[1], jnp.float32, axes.VOCAB)

    def _mask(self, rows: int, drafts: int = 0) -> Any:
        """The shape of masks of `rows` rows of each replica; None if there are no rows."""
        return self._of_rows(rows, drafts, mask_words(self.state.counts.shape[1]), jnp.int32, None)

    def _of_rows(self, rows: int, drafts: int, width: int, dtype: Any, axis: str | None) -> Any:
        """An array of a step of two programs: [rows, width], or with drafts [rows, C, width]."""
        positions = (1 + drafts,) if drafts else ()
        shape = rows * self.config.shards.replicas, *positions, width
        return self._struct(shape, dtype, (axes.ROWS, *[None] * len(positions), axis)) if rows else None

    def _drafts(self, key: ProgramKey) -> Any:
        """The drafts that the host gives as a shape; None of none."""
        shape = key.rows * self.config.shards.replicas, key.drafts
        return self._struct(shape, jnp.int32, (axes.ROWS, None)) if key.drafts else None

    def _chunk(self, key: ProgramKey) -> ChunkInput:
        """The chunks of a key as shapes."""
        state, struct, by_row = self.state, self._struct, (axes.ROWS, None)
        p = key.chunks * self.config.shards.replicas
        return ChunkInput(
            tokens=struct((p, key.chunk), jnp.int32, by_row),
            table=struct((p, len(CHUNK_COLUMNS)), jnp.int32, by_row),
            ints=struct((p, state.ints.shape[1]), jnp.int32, by_row),
            floats=struct((p, state.floats.shape[1]), jnp.float32, by_row),
        )


def _layouts_of_eight_bits(model: AbstractModel) -> dict[str, Layout]:
    """The layouts on GPUs, by name, of weights whose inputs are rounded by token."""
    rounding = [w for w in model.weights if w.scheme is not None and w.scheme.rounds_tokens]
    return {w.name: Layout(gpu_order(len(w.shape), w.contracting)) for w in rounding}


def _drafter(drafting: Drafting, config: EngineConfig, plan: CachePlan) -> ModelDrafter:
    """What drafts by it, with the kernels that can run it."""
    model = model_of(drafting)
    choices = Choices.of(config, model, plan.of_drafts)
    choices.warn(config.backend, model)
    return drafter_of(drafting, choices.runnable(config.backend))


def compile_order(keys: Iterable[ProgramKey]) -> list[ProgramKey]:
    """Keys in the order to compile them in. One of each shape comes first, so that XLA's autotuner knows the products
    when the others come. Within these, the largest come first, since they take longest."""
    shapes, order = Counter(), []
    for key in sorted(keys, key=lambda key: (key.chunks * key.chunk, key.rows), reverse=True):
        shape = (key.chunks, key.chunk, key.rows)
        order.append((shapes[shape], key))
        shapes[shape] += 1
    return [key for _, key in sorted(order, key=lambda pair: pair[0])]


def check_packed(model: AbstractModel, config: EngineConfig, *, on_devices: bool) -> None:
    """Raise ConfigurationError for weights of less than a byte, if a CPU's programs would refuse them. jax misreports
    the layout of such arrays if they are `on_devices`: on particular devices."""
    packed = next((spec.dtype.name for spec in model.specs if jax.dtypes.itemsize_bits(spec.dtype) < 8), None)
    if packed and on_devices and config.platform == "cpu":
        raise ConfigurationError(
            f"{packed} weights work on a single CPU, in the process that compiles its programs: use int8, fp8 or mxfp8"
        )


def planned_keys(config: EngineConfig, modes: Sequence[Mode] = DEVICE_MODES) -> list[ProgramKey]:
    """Every program the buckets allow, for these modes.

    A prompt's log-probabilities come with the mode "logprobs", its logits with "greedy".
    """
    known = isinstance(modes, Sequence) and not isinstance(modes, str) and all(mode in MODES for mode in modes)
    if not known:
        raise ConfigurationError(f"modes are a list of {', '.join(map(repr, MODES))}, got {modes!r}")
    keys = [key for mode in modes for key in _keys_of_mode(config, mode)]
    return list(dict.fromkeys(keys))


def _keys_of_mode(config: EngineConfig, mode: Mode) -> list[ProgramKey]:
    keys: list[ProgramKey] = []
    if mode == "embed":
        sizes = itertools.product(config.limits, config.prefill_shapes())
        return [ProgramKey(mode, 0, limit, chunks=p, chunk=c, detail=mode) for limit, (p, c) in sizes]
    details: dict[Mode, Literal["logits", "logprobs"]] = {"greedy": "logits"}
    details |= {"logprobs": "logprobs", "processed": "logprobs"}
    for limit in config.limits:
        for rows in config.row_buckets:
            if mode not in DEVICE_MODES or rows in config.one_step_buckets:
                keys.append(ProgramKey(mode, rows, limit))
            if mode in DEVICE_MODES:
                keys.append(ProgramKey(mode, rows, limit, config.decode_steps))
            if config.speculation is not None and mode in DEVICE_MODES:
                steps = {config.decode_steps, *([1] if rows in config.one_step_buckets else [])}
                sizes = itertools.product(sorted(steps), config.speculation.counts)
                keys += [ProgramKey(mode, rows, limit, k, drafts=count) for k, count in sizes]
            if config.speculation is not None and mode == "processed":
                keys += [ProgramKey(mode, rows, limit, drafts=count) for count in config.speculation.counts]
            if config.cascade and rows >= LEAST_SHARING and mode in DEVICE_MODES:
                keys.append(ProgramKey(mode, rows, limit, config.decode_steps, cascade=True))
        for chunks, chunk in config.prefill_shapes():
            keys += [ProgramKey(mode, rows, limit, chunks=chunks, chunk=chunk) for rows in (0, config.rows)]
        if config.propagation is None and (detail := details.get(mode)):
            keys += [ProgramKey(mode, 0, limit, chunks=p, chunk=c, detail=detail) for p, c in config.detail_shapes()]
    if mode in DEVICE_MODES:
        return keys
    parts = [(replace(key, part="forward"), *map(key.choosing, DEVICE_MODES)) for key in keys]
    return [part for both in parts for part in both]
