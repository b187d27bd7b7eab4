"""The engine keeps the device busy and hands out tokens as they arrive."""

from __future__ import annotations

import operator
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Layout

from inferlib.config import EngineConfig
from inferlib.distributed import Channel
from inferlib.engine.adapters import AdapterPool
from inferlib.engine.calls import CALL, SLEEP, TIMES, WAKE, WARMUP, Call, modes_message
from inferlib.engine.cascade import Cascade
from inferlib.engine.clock import Clock
from inferlib.engine.deadlines import Deadlines
from inferlib.engine.host_pages import HostPages, check_host_pages
from inferlib.engine.host_weights import HostArray, to_host
from inferlib.engine.masks import masks_of
from inferlib.engine.page_source import PageSource
from inferlib.engine.processors import processed
from inferlib.engine.scheduler import Dispatch, Scheduler
from inferlib.engine.sequence import Sequence, Status, TokenLogprobs
from inferlib.engine.step_times import Rehearsal, step_keys
from inferlib.engine.tiers import Tiers, check_tiers
from inferlib.messages import Message
from inferlib.models.abstract import AbstractModel
from inferlib.models.depth import depth_of
from inferlib.outputs import FinishReason
from inferlib.programs.arguments import CHUNK_COLUMNS, ChunkInput, StepOutput
from inferlib.programs.counter import compilations
from inferlib.programs.keys import DEVICE_MODES, Mode, ProgramKey
from inferlib.programs.memory import explained, explanation
from inferlib.programs.program_set import ProgramSet, planned_keys
from inferlib.programs.row_changes import Changes
from inferlib.sampling.sampler import pack
from inferlib.sharding import axes

_PATIENCE = 0.05  # seconds that the engine waits for what all sequences fetch, before others have their turn


@dataclass
class EngineStats:
    """Counts and seconds since the start.

    program_misses: programs that were not compiled yet when they were needed.
    compilations: XLA compilations in this process since the engine was built, whoever asked for them.
    compile_seconds: time spent on programs that were not ready, compilation included.
    enqueue_seconds: time spent in the runtime, starting programs and copies of their results.
    wait_seconds: time spent waiting for results.
    host_seconds: the rest of the time: scheduling and bookkeeping.
    cached_tokens: tokens of prompts and of preempted sequences that were not computed, as the cache had their cells.
    cached_pages: pages that prompts can share now. evicted_pages: pages that made room for others.
    host_tokens, disk_tokens: the part of `cached_tokens` that came from a tier. handed_tokens: tokens that came from
        devices that prefill. host_pages, host_bytes, disk_pages, disk_bytes: what the tiers have now.
        host_evicted_pages, disk_evicted_pages: pages that made room in a tier. dropped_pages: evicted pages that no
        tier has, as the disk did not keep up.
    sent_pages, brought_pages: pages of rows that decode, which went to the host's memory and came back. wanted_reads:
        how often steps would have read a page (of each layer and KV head) if all were there, but for the first and the
        newest; absent_reads: how often such a page was in the host's memory.
    saved_snapshots, evicted_snapshots: snapshots that were saved, and that made room (see `Snapshots`).
    drafts: drafted tokens that were verified, as all before them in their step stood. accepted_drafts: the part of them
        that stood; each saved a step of its row.
    adapter_loads: adapters that were written to the devices. adapter_evictions: adapters that made room for others.
    core_passes: passes of models whose tokens may leave a loop's core (`early_exit`). core_runs: how often the core ran
        in them; with `depthwise_batching`, trips and passes of the rest of the model. core_tokens: tokens that were
        computed. core_steps: how many steps they took together.
    """

    dispatches: int = 0
    generated_tokens: int = 0
    program_misses: int = 0
    compilations: int = 0
    compile_seconds: float = 0.0
    enqueue_seconds: float = 0.0
    wait_seconds: float = 0.0
    host_seconds: float = 0.0
    cached_tokens: int = 0
    cached_pages: int = 0
    evicted_pages: int = 0
    host_tokens: int = 0
    host_pages: int = 0
    host_bytes: int = 0
    host_evicted_pages: int = 0
    disk_tokens: int = 0
    disk_pages: int = 0
    disk_bytes: int = 0
    disk_evicted_pages: int = 0
    dropped_pages: int = 0
    handed_tokens: int = 0
    sent_pages: int = 0
    brought_pages: int = 0
    wanted_reads: int = 0
    absent_reads: int = 0
    saved_snapshots: int = 0
    evicted_snapshots: int = 0
    drafts: int = 0
    accepted_drafts: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0
    core_passes: int = 0
    core_runs: int = 0
    core_tokens: int = 0
    core_steps: int = 0

    @property
    def other_seconds(self) -> float:
        """All seconds but the host's."""
        return self.compile_seconds + self.enqueue_seconds + self.wait_seconds


class Engine:
    """Runs sequences over a model's weights.

    Up to `config.in_flight` dispatches are sent ahead of their results, since the device has everything that a row
    needs to continue. A row that ends meanwhile is inactive there and generates nothing.

    Calls come from one thread at a time (see `EngineThread`).

    channel: to the other processes whose devices are in the mesh. Sequences run on process 0; the others `follow`.
    weights: of the model, and of one that drafts behind them. programs: of this model and config; by default a new,
    empty set. source: where sequences fetch pages; by default the tiers of the cache, if `config` has some.
    """

    def __init__(
        self,
        model: AbstractModel,
        weights: tuple[jax.Array, ...],
        config: EngineConfig,
        *,
        channel: Channel | None = None,
        programs: ProgramSet | None = None,
        source: PageSource | None = None,
    ):
        self.model, self.weights, self.config, self.channel = model, weights, config, channel
        self.programs = programs or ProgramSet.make(model, config, _layouts(weights) if config.free_layouts else None)
        self.plan = self.programs.plan
        check_tiers(self.plan, config)
        check_host_pages(self.plan, config)
        if source is None and config.has_tiers:
            source = Tiers(self.programs.models, weights, self.plan, config)
        elif source is None and config.resident is not None:
            source = HostPages(self.plan, config)
        self.source = source
        self.stats, self.clock = EngineStats(), Clock()
        cascade = Cascade.of(config, self.plan, model.config.depth)
        self.adapters = None if config.adapters is None else AdapterPool(self.programs.factors)
        self.scheduler = Scheduler(config, self.plan, cascade, self.source, self.adapters)
        self._deadlines = Deadlines()
        self.expert_load: np.ndarray | int = 0  # int64 [L, E] if it is counted
        self.cache, self.snapshots = self._empty_cache()
        self.state = self.programs.allocate_state()
        self._compiled_before = compilations()
        self._in_flight: deque[tuple[Dispatch, StepOutput, float]] = deque()  # with the time when it was sent
        self._ended: list[Sequence] = []  # on the host, before tokens of theirs were chosen
        self._done, self._compiled = 0.0, 0  # when the last results came, and what was compiled until then
        self._have_run: set[ProgramKey] = set()  # programs whose time is known to be their usual one
        self._controls: dict[bool, jax.Array] = {}
        self._last_prefixes: tuple[np.ndarray, jax.Array] | None = None
        self._asleep: tuple[HostArray, ...] | None = None  # the weights, while it sleeps
        if self.programs.strict:
            self.programs.prepare_changes()
        if self.source is not None:
            self.cache = self.source.prepare(self.cache)
            if self.adapters is not None:
                self.source.share(self.adapters)

    def warmup(self, modes: Iterable[Mode], done: Callable = lambda key: None) -> int:
        """Compile every planned program of these sampling modes; a program that is missing later is an error.

        Returns the number of programs. done: called with the key of each compiled program.
        """
        modes = tuple(modes)
        keys = planned_keys(self.config, modes)
        if self.channel is not None and self.channel.leads:
            self.channel.order(modes_message(WARMUP, modes))
        self.programs.compile_all(keys, done)
        self.programs.prepare_changes()
        self.programs.strict = True
        return len(keys)

    def time_steps(self, modes: Iterable[Mode] = ("greedy",)) -> None:
        """Time the steps of these sampling modes for `config.itl`, if that is set, while nothing runs; their programs
        are compiled if they are not, but for artifacts, which have what they have.

        Raises ConfigurationError if the target is less than a decode step takes.
        """
        if self.config.itl is None:
            return
        if self.asleep or not self.scheduler.idle:
            raise RuntimeError(
                "steps are timed for itl while nothing runs: finish all requests and streams, or wake up"
            )
        while self._in_flight:  # of rows that were left
            self._receive()
        self._forget_pages()
        modes = tuple(mode for mode in modes if mode in DEVICE_MODES)
        if self.channel is not None and self.channel.leads:
            self.channel.order(modes_message(TIMES, modes))
        for mode in modes:
            decode, mixed = step_keys(self.config, mode)
            keys = [decode, *mixed.values()]
            if not self.programs.strict:
                self.programs.compile_all(keys, lambda key: None)
            if not all(self.programs.ready(key) for key in keys):
                continue
            state: Any = self.state
            self.cache, self.state, times = Rehearsal(self.programs).times(mode, self.weights, self.cache, state)
            if self.channel is None or self.channel.leads:
                self.scheduler.itl.learn(mode, times)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, whose prompt and max_tokens together must be at most max_len. Raises ValueError for a depth
        that the model does not have."""
        if self.channel is not None and not self.channel.leads:
            raise RuntimeError("requests enter on process 0; on the others call LLM.follow()")
        if self._asleep is not None:
            raise RuntimeError("the model sleeps: call wake() first")
        if sequence.params.structured_outputs is not None and sequence.constraint is None:
            raise RuntimeError("a sequence with structured_outputs needs a constraint: see `Grammars`")
        params = sequence.params
        sequence.depth = depth_of(params.depth, params.exit_threshold, self.model.config)
        sequence.depths = [] if self.model.config.exits_early else None
        self.scheduler.add(sequence)
        self._deadlines.add(sequence)

    def cancel(self, sequence: Sequence, reason: FinishReason = "stop") -> None:
        """Drop a sequence that waits, or that the host is done with (a stop string, an abandoned stream)."""
        self.scheduler.cancel(sequence)
        if sequence.status is not Status.FINISHED:
            sequence.finish(reason)

    def forget_prefixes(self) -> None:
        """Free all pages that no sequence needs now, and those of the tiers: prompts to come find nothing in them."""
        self._forget_pages()
        if self.source is not None:
            for s in self.scheduler.waiting:
                s.fetch = None
            self.source.clear()
            self.count_pages()

    def _forget_pages(self) -> None:
        for pages in self.scheduler.pages:
            pages.forget()
        self.count_pages()

    def advance(self, *, max_steps: int | None = None) -> list[Sequence]:
        """Send dispatches, wait for the oldest results and return the sequences that they advanced, or whose deadline
        has passed.

        max_steps: most tokens per row between results; 1 streams token by token. If the list is empty and `busy` is
        false, nothing is left to run.
        """
        if late := self._deadlines.passed():
            for s in late:
                self.cancel(s, "deadline")
            return late
        stats = self.stats
        start, others = time.perf_counter(), stats.other_seconds
        try:
            self._choose()
            while len(self._in_flight) < self.config.in_flight and not self._waits_for_tokens:
                dispatch = self.scheduler.plan(max_steps or self.config.decode_steps)
                if dispatch is None:
                    break
                self._send(dispatch)
                self._choose()
            if self.source is not None and not self._in_flight:
                self.source.wait(_PATIENCE)
            advanced = self._receive() if self._in_flight else []
        except BaseException as raw:
            error = explanation(raw, "running", lambda: self.programs.demand()) or raw
            self._lose(error)
            raise error from (None if error is raw else raw)
        stats.host_seconds += time.perf_counter() - start - (stats.other_seconds - others)
        return advanced

    def _lose(self, error: BaseException) -> None:
        """End every sequence that has a row, or had one in a dispatch in flight: part of its results is lost, and the
        arrays may be donated to a program that failed. Sequences that wait can still run."""
        for s in self.scheduler.lose():
            s.fail(error)
        self._in_flight.clear()
        self._ended.clear()
        if self.channel is None:  # else the processes are out of step, and none continues
            if self.adapters is not None:
                self.weights = self.adapters.renewed(self.weights)
            self.cache = self.snapshots = self.state = ()  # type: ignore[assignment]
            (self.cache, self.snapshots), self.state = self._empty_cache(), self.programs.allocate_state()

    def _empty_cache(self) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """The cache, and snapshots of its rings and states, if there are any."""
        shards, without = self.config.shards, self.plan.no_prefix_caching(self.config)
        return self.plan.allocate(shards), () if without else self.plan.allocate_snapshots(shards)

    @property
    def asleep(self) -> bool:
        return self._asleep is not None

    def sleep(self) -> None:
        """Copy the weights to host memory and free them, the cache and the rows' state on the devices. Programs stay,
        and what the cache has of prompts goes to its tiers.

        Raises RuntimeError if requests wait or run.
        """
        if self.asleep:
            return
        if count := len(self.scheduler.waiting) + len(self.scheduler.running):
            raise RuntimeError(f"{count} sequences wait or run: sleep once their requests have ended")
        self._order(SLEEP)
        while self._in_flight:  # of rows that were left
            self._receive()
        if self.source is not None:
            for pages in self.scheduler.pages:
                pages.evict(pages.cached)
            self.source.save(self.cache, self.snapshots)
            self.source.settle()
            self.source.sleep()
        with explained("falling asleep", self.programs.demand):
            self._asleep = to_host(self.weights, self.programs.formats)
        self.scheduler.lose()  # and with it what is to happen before the next dispatch
        self._controls.clear()
        self._last_prefixes = None
        self.weights, self.cache, self.snapshots, self.state = (), (), (), None

    def wake(self) -> None:
        """Bring the weights back, and an empty cache."""
        if self._asleep is None:
            return
        self._order(WAKE)
        with explained("waking up", self.programs.demand):
            self.weights = tuple(x.to_devices() for x in self._asleep)
            (self.cache, self.snapshots), self.state = self._empty_cache(), self.programs.allocate_state()
        if self.source is not None:
            self.source.wake()
        self._asleep = None

    def _order(self, kind: str) -> None:
        if self.channel is not None and self.channel.leads:
            self.channel.order(Message(kind, {}))

    def follow(self) -> None:
        """Run what process 0 runs, until it is done."""
        if self.channel is None:
            raise RuntimeError("there is no other process to follow")
        for order in self.channel.orders():
            if order.kind == CALL:
                self._start(Call.from_message(order))
            elif order.kind == SLEEP:
                self.sleep()
            elif order.kind == WAKE:
                self.wake()
            elif order.kind == TIMES:
                self.time_steps(order.fields["modes"])
            else:
                self.warmup(order.fields["modes"])
        jax.block_until_ready(self.state)

    @property
    def busy(self) -> bool:
        return bool(self._in_flight) or not self.scheduler.idle

    def _send(self, dispatch: Dispatch) -> None:
        chunk, scheduler = self._chunk_input(dispatch) if dispatch.chunks else None, self.scheduler
        call = Call(dispatch.key, tuple(scheduler.cancelled), bool(scheduler.waiting), chunk)
        if dispatch.prefixes is not None:
            call = call._replace(prefixes=dispatch.prefixes)
        elif dispatch.drafts is not None:
            call = call._replace(drafts=dispatch.drafts)
        if scheduler.cancelled:
            scheduler.cancelled = set()
        if scheduler.changes:
            call = call._replace(changes=scheduler.changes)
            scheduler.changes = Changes()
        if self.channel is None:
            output = self._start(call)
        else:
            with self.channel.together(call.to_message()):
                output = self._start(call)
        self.stats.dispatches += 1
        self._in_flight.append((dispatch, output, time.perf_counter()))
        if dispatch.takes_logits:
            for leaf in jax.tree.leaves(output.logits):
                leaf.copy_to_host_async()
        if dispatch.chunks:
            self.count_pages()

    def count_pages(self) -> None:
        """Bring what `stats` say of the cache up to date."""
        pages, stats = self.scheduler.pages, self.stats
        stats.cached_tokens = sum(x.hit_tokens for x in pages)
        stats.cached_pages, stats.evicted_pages = sum(x.cached for x in pages), sum(x.evictions for x in pages)
        if self.plan.snapshots:
            snapshots = [x.snapshots for x in pages if x.snapshots is not None]
            stats.saved_snapshots = sum(x.saved for x in snapshots)
            stats.evicted_snapshots = sum(x.evictions for x in snapshots)
        if self.source is not None:
            for name, count in self.source.counts().items():
                setattr(stats, name, count)

    @property
    def _waits_for_tokens(self) -> bool:
        """True if the tokens of the last dispatch are still to be chosen, before which no other is sent."""
        return bool(self._in_flight) and self._in_flight[-1][1].logits is not None

    def _program(self, key: ProgramKey) -> Callable:
        program = self.programs.ready(key)
        if program is None:
            start = time.perf_counter()
            with self.clock.stopped():
                program = self.programs.get(key)
            self.stats.compile_seconds += time.perf_counter() - start
        self.stats.program_misses = self.programs.misses
        self.stats.compilations = compilations() - self._compiled_before
        return program

    def _start(self, call: Call) -> StepOutput:
        program = self._program(call.key)
        inputs = [self._control(call)]
        if call.chunk is not None:
            inputs.append(jax.tree.map(self._input, call.chunk))
        elif call.prefixes is not None:
            inputs.append(self._prefixes(call.prefixes))
        elif call.drafts is not None:
            inputs.append(call.drafts)
        start = time.perf_counter()
        if self.source is not None:
            self.source.save(self.cache, self.snapshots)
        if self.adapters is not None and self.adapters.waits:
            self.weights = self.adapters.write(self.weights)
            self.stats.adapter_loads, self.stats.adapter_evictions = self.adapters.loads, self.adapters.evictions
        if call.changes:
            self._change(call.changes)
        if self.source is not None:
            self.cache = self.source.write(self.cache)
        self.cache, self.state, output = program(self.weights, self.cache, self.state, *inputs)
        if self.channel is None or self.channel.leads:
            for leaf in jax.tree.leaves(output._replace(logits=None, inputs=None)):
                leaf.copy_to_host_async()
        self.stats.enqueue_seconds += time.perf_counter() - start
        return output

    def _change(self, changes: Changes) -> None:
        state: Any = self.state
        self.cache, self.state = self.programs.change_rows(self.cache, state, changes)
        if changes.snapshots:
            self.cache, self.snapshots = self.programs.change_snapshots(self.cache, self.snapshots, changes)

    def change_rows(self) -> None:
        """Make at once what is to happen before the next dispatch: then all snapshots are saved."""
        self.scheduler.follow_last()
        if self.scheduler.changes:
            self._change(self.scheduler.changes)
            self.scheduler.changes = Changes()

    def _input(self, x: np.ndarray) -> jax.Array | np.ndarray:
        shards = self.config.shards
        return shards.place(x, (axes.ROWS, None)) if shards.several_processes else x

    def _control(self, call: Call) -> jax.Array | np.ndarray:
        if not call.cancel and call.yield_early in self._controls:
            return self._controls[call.yield_early]
        shards, rows = self.config.shards, self.config.rows
        control = np.zeros((shards.replicas, rows + 1), np.int32)
        control[:, -1] = call.yield_early
        for row in call.cancel:
            control[divmod(row, rows)] = 1
        if call.cancel:
            return self._input(control)
        return self._controls.setdefault(call.yield_early, shards.place(control, (axes.ROWS, None)))

    def _prefixes(self, packed: np.ndarray) -> jax.Array:
        """On the device; they are mostly those of the dispatch before."""
        if self._last_prefixes is None or not np.array_equal(self._last_prefixes[0], packed):
            self._last_prefixes = packed, self.config.shards.place(packed, (axes.ROWS, None))
        return self._last_prefixes[1]

    def _chunk_input(self, dispatch: Dispatch) -> ChunkInput:
        key, rows = dispatch.key, self.config.rows
        count = key.chunks * self.config.shards.replicas
        tokens = np.zeros((count, key.chunk), np.int32)
        table = np.zeros((count, len(CHUNK_COLUMNS)), np.int32)
        # An absent chunk has a row beyond the last, which the scatter drops. The rows differ: indices must be unique.
        table[:, 0] = rows + np.arange(count) % key.chunks
        table[:, CHUNK_COLUMNS.index("next")] = -1
        # A prompt's chunks have the same parameters, which take long to pack; the first entry is an absent chunk's.
        entries: list[tuple | None] = [None]
        entry_of = np.zeros(count, np.int32)
        last = None
        for i, chunk in zip(self._chunk_indices(dispatch), dispatch.chunks, strict=True):
            s, end = chunk.sequence, chunk.start + chunk.length
            tokens[i, : chunk.length] = s.context[chunk.start : end]
            following = s.context[end] if end < len(s.context) else -1
            row, budget, first = chunk.row % rows, s.max_tokens - len(s.context) + len(s.prompt), chunk.start == 0
            cell, generated = (position - chunk.dropped for position in (chunk.start, len(s.prompt)))
            table[i] = row, cell, chunk.length, first, chunk.last, budget, following, generated
            if s is not last:
                entries.append((s.params, s.seed, s.eos_ids, s.tokens))
                last = s
            entry_of[i] = len(entries) - 1
        arrays: Any = (tokens, table, *(packed[entry_of] for packed in pack(entries)))
        return ChunkInput(*arrays)

    def _chunk_indices(self, dispatch: Dispatch) -> list[int]:
        """The index of each chunk in the chunk table, which lists the chunks of one replica after the other."""
        count, indices = Counter(), []
        for chunk in dispatch.chunks:
            replica = chunk.row // self.config.rows
            indices.append(replica * dispatch.key.chunks + count[replica])
            count[replica] += 1
        return indices

    def _oldest(self) -> tuple[Dispatch, Any, float | None]:
        """Wait for the oldest dispatch in flight. Its output is on the host. Also the seconds since the device could
        begin it; None if something was compiled since the dispatch before, as the device may have ended long before the
        host came to look, or if the program ran for the first time, as that can take several times as long."""
        dispatch, on_device, sent = self._in_flight.popleft()
        start = time.perf_counter()
        output = jax.device_get(on_device)
        del on_device  # freeing it takes the runtime 30 us, which are not the host's
        begun, self._done = max(sent, self._done), time.perf_counter()
        self.stats.wait_seconds += self._done - start
        before, self._compiled = self._compiled, compilations()
        is_usual = before == self._compiled and dispatch.key in self._have_run
        seconds = self._done - begun if is_usual else None
        self._have_run.add(dispatch.key)
        if self.source is not None and dispatch.chunks and seconds is not None:
            self.source.learn(sum(chunk.length for chunk in dispatch.chunks), seconds)
        return dispatch, output, seconds

    def _choose(self) -> None:
        """Start the second program of the oldest dispatch, if it has one: every earlier token is known. Masks are made
        while the first one runs, and its logits stay on the device unless a function of a user takes them."""
        if not self._in_flight or (logits := self._in_flight[0][1].logits) is None:
            return
        dispatch, output, sent = self._in_flight[0]
        places = dispatch.places(self._chunk_indices(dispatch))
        masks, ended = masks_of(places, logits, dispatch.drafts)
        if dispatch.takes_logits:
            start = time.perf_counter()
            logits: Any = jax.device_get(logits)
            self.stats.wait_seconds += time.perf_counter() - start
            logits, failed = processed(places, logits, self.model.config.vocab)
            ended += failed
        for s in ended:
            self.scheduler.cancel(s)
        self._ended += ended
        chunk = (self._chunk_input(dispatch),) if dispatch.chunks else ()
        program = self._program(dispatch.following)
        start = time.perf_counter()
        if output.inputs is None:
            self.state, chosen = program(self.state, logits, masks, *chunk)
        else:
            settled = program(self.weights, self.cache, self.state, logits, masks, output.inputs)
            self.cache, self.state, chosen = settled
        for leaf in jax.tree.leaves(chosen):
            leaf.copy_to_host_async()
        self.stats.enqueue_seconds += time.perf_counter() - start
        self._in_flight[0] = dispatch, chosen.with_forward(output), sent

    def _accept(self, s: Sequence, tokens: list[int]) -> int:
        """Give a sequence its tokens, as many as are returned; it may fail by its grammar."""
        taken = s.accept(tokens)
        if s.error is not None:
            self.scheduler.cancel(s)
            self._ended.append(s)
        return taken

    def _learn(self, dispatch: Dispatch, output: Any, seconds: float | None) -> None:
        """Learn from what became of drafts in a dispatch, and from its time if that is known. A row that goes on got a
        token of each step, and one more for each draft that stood."""
        key, profit = dispatch.key, self.scheduler.profit
        assert profit is not None
        tried, stood = (x.tolist() for x in output.tally)
        counts, steps = (output.tokens >= 0).sum(axis=0).tolist(), 0
        for s, column in zip(dispatch.rows, dispatch.columns, strict=True):
            profit.learn(s, tried[column], stood[column])
            if s.status is not Status.FINISHED:
                steps = max(steps, counts[column] - (stood[column] if key.drafts else 0))
        if steps and seconds is not None:
            profit.learn_time(key, seconds / steps)
        if key.drafts:
            self.stats.drafts += sum(tried)
            self.stats.accepted_drafts += sum(stood)

    def _count_drafts(self, s: Sequence, count: int, stood: int) -> None:
        """Count the host's drafts of a sequence. stood: how many of `count` stood; the next one failed, unless the
        sequence ended."""
        self.stats.drafts += stood if s.status is Status.FINISHED else min(stood + 1, count)
        self.stats.accepted_drafts += stood

    def _count_core(self, counts: np.ndarray) -> None:
        """counts: see `StepOutput.core`."""
        names = ("core_passes", "core_runs", "core_tokens", "core_steps")
        for name, count in zip(names, counts.sum(axis=(0, 1)).tolist(), strict=True):
            setattr(self.stats, name, getattr(self.stats, name) + count)

    def _receive(self) -> list[Sequence]:
        """Wait for the oldest dispatch and account for its tokens."""
        self._choose()
        dispatch, output, seconds = self._oldest()
        self.scheduler.received()
        if output.load is not None:
            self.expert_load += output.load.sum(axis=(0, 1), dtype=np.int64)
        if output.core is not None:
            self._count_core(output.core)
        advanced, generated, key = [], 0, dispatch.key
        columns = output.tokens.T.tolist()  # reading numbers out of an array one by one takes far longer
        depths = None if output.depths is None else output.depths.T.tolist()
        for s, column in zip(dispatch.rows, dispatch.columns, strict=True):
            taken = self._accept(s, columns[column]) if s.status is not Status.FINISHED else 0
            if dispatch.drafts is not None:
                self._count_drafts(s, int((dispatch.drafts[column] >= 0).sum()), max(taken - 1, 0))
            if taken:
                advanced.append(s)
                generated += taken
                if depths is not None and s.depths is not None:
                    s.depths += depths[column][:taken]
                if s.params.logprobs is not None:
                    _add_logprobs(s, output.sampled, [(i, column) for i in range(taken)])
            if taken != key.steps or key.drafts:
                self.scheduler.settle(s, key, taken)
            if output.wanted is not None and s.status is Status.DECODE and isinstance(self.source, HostPages):
                self.source.learn_wanted(s, output.wanted[column])
        if output.tally is not None:
            self._learn(dispatch, output, seconds)
        for i, chunk in zip(self._chunk_indices(dispatch), dispatch.chunks, strict=True) if dispatch.chunks else ():
            s = chunk.sequence
            if s.detail and s.status is not Status.FINISHED:
                cut = partial(_first_positions, i, chunk.length) if s.detail != "embed" else operator.itemgetter(i)
                s.add_detail(jax.tree.map(cut, output.detail))
            if chunk.last and s.status is not Status.FINISHED:
                if not s.max_tokens:
                    s.finish("length")
                elif self._accept(s, [int(output.chunk_tokens[i])]):
                    generated += 1
                    if s.depths is not None:
                        s.depths.append(int(output.chunk_depths[i]))
                    if s.params.logprobs is not None:
                        _add_logprobs(s, output.chunk_sampled, [i])
                else:
                    continue
                advanced.append(s)
        self.stats.generated_tokens += generated
        advanced += self._ended
        self._ended = []
        finished = [s for s in advanced if s.status is Status.FINISHED]
        for s in finished:
            self.scheduler.release(s)
        if finished:
            self.count_pages()
        return advanced


def _add_logprobs(s: Sequence, sampled: Any, indices: list) -> None:
    """Store the log-probabilities of the sequence's last tokens. indices: of these tokens in `sampled`, a `Sampled`."""
    for token, i in zip(s.tokens[-len(indices) :], indices, strict=True):
        logprob, rank = float(sampled.logprob[i]), int(sampled.rank[i])
        s.logprobs.append(TokenLogprobs(token, logprob, rank, sampled.top_ids[i], sampled.top_logprobs[i]))


def _first_positions(chunk: int, length: int, x: np.ndarray) -> np.ndarray:
    """The first `length` positions of one chunk of x [P, C / n, n, ...], for n devices that share a chunk's tokens."""
    return x[chunk].reshape(-1, *x.shape[3:])[:length]


def _layouts(weights: Iterable[Any]) -> list[Layout]:
    return [weight.format.layout for weight in weights]


def sequence_error(
    prompt: list[int], max_tokens: int | None, vocab: int, max_len: int, pages: int | None = None
) -> str | None:
    """Why this prompt cannot be run, or None: empty, ids out of range, or too long for `max_len` or for the device.

    max_tokens: None means as many as fit, at least one. pages: how many tokens the cache on the device holds, in which
    a prompt is prefilled.
    """
    if not prompt:
        return "the prompt is empty: give at least one token"
    bad = next((t for t in prompt if not 0 <= t < vocab), None)
    if bad is not None:
        return f"token id {bad} is outside the vocabulary of {vocab}"
    wanted = 1 if max_tokens is None else max_tokens
    if len(prompt) + wanted > max_len:
        return (
            f"a prompt of {len(prompt)} tokens plus max_tokens {wanted} exceeds max_len {max_len}: "
            "shorten the prompt, lower max_tokens, or build LLM with a larger max_len"
        )
    if pages is not None and len(prompt) > pages:
        return (
            f"a prompt of {len(prompt)} tokens is prefilled with all its pages on the device, which hold {pages} "
            "tokens: shorten the prompt, or raise cache_memory"
        )
    return None
