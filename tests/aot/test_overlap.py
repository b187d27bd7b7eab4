"""Weights that are fetched while collectives run, read from the texts of scheduled modules. Under 1 s."""

from __future__ import annotations

import textwrap

import pytest

from inferlib.inspection.hlo import Module
from inferlib.inspection.overlap import Overlap, overlaps
from inferlib.programs.arrivals import check_arrivals

W, X = "bf16[256,128]{1,0:T(8,128)(2,1)", "bf16[8,128]{1,0:T(8,128)(2,1)S(1)}"
WEIGHT, ACTIVATION = 256 * 128 * 2, 8 * 128 * 2
# Arguments 0 and 1 are weights, 2 is a cache, 3 an activation.
ENTRY = f"""\
    HloModule test, is_scheduled=true

    ENTRY %main (a0: bf16[256,128], a1: bf16[256,128], a2: bf16[256,128], a3: bf16[8,128]) -> bf16[8,128] {{
      %a0 = {W}}} parameter(0)
      %a1 = {W}}} parameter(1)
      %a2 = {W}}} parameter(2)
      %a3 = {X} parameter(3)
      LINES
      ROOT %out = {X} add(%a3, %a3)
    }}
    """
REDUCE = f"%sum = {X} all-reduce(%a3), replica_groups={{{{0,1}}}}, to_apply=%add"


def copied(name: str, source: str, space: int = 1) -> tuple[str, str]:
    """The start and the end of a copy of a whole argument."""
    target = f"{W}S({space})}}" if space else f"{W}}}"
    start = f"%{name} = ({target}, {W}}}, u32[]{{:S(2)}}) copy-start(%{source})"
    return start, f"%{name}.done = {target} copy-done(%{name})"


def counted(*lines: str) -> tuple[Overlap, ...]:
    text = textwrap.dedent(ENTRY.replace("LINES", "\n      ".join(lines)))
    return overlaps(Module(text), weights=2)


def reduced(ahead: int) -> tuple[Overlap, ...]:
    return (Overlap("all-reduce", ACTIVATION, ahead, 1),)


def test_copies_count_if_they_start_before_and_are_waited_for_behind():
    first, done = copied("c", "a0")
    assert counted(first, REDUCE, done) == reduced(WEIGHT)
    assert counted(first, done, REDUCE) == reduced(0)
    assert counted(REDUCE, first, done) == reduced(0)


def test_only_weights_that_go_to_on_chip_memory_count():
    cache, cache_done = copied("c", "a2")
    inside, inside_done = copied("h", "a1", space=0)
    assert counted(cache, inside, REDUCE, cache_done, inside_done) == reduced(0)


def test_slices_of_weights_by_other_names_add_up():
    half = "bf16[128,128]{1,0:T(8,128)(2,1)S(1)}"
    lines = [f"%flat = {W}}} bitcast(%a1)"]
    ends = []
    for n, rows in enumerate(("[0:128]", "[128:256]")):
        shapes = f"(({W}}}), {half}, s32[]{{:S(2)}})"
        lines.append(f"%s{n} = {shapes} slice-start(%flat), slice={{{rows}, [0:128]}}")
        ends.append(f"%d{n} = {half} slice-done(%s{n})")
    assert counted(*lines, REDUCE, *ends) == reduced(WEIGHT)
    assert counted(*lines, ends[0], REDUCE, ends[1]) == reduced(WEIGHT // 2)


def test_an_asynchronous_collective_runs_until_it_is_waited_for():
    start, done = copied("c", "a0")
    gather = f"%g = ({X}, {X}) all-gather-start(%a3), dimensions={{0}}"
    end = f"%gd = {X} all-gather-done(%g)"
    gathered = lambda ahead: (Overlap("all-gather", ACTIVATION, ahead, 1),)  # noqa: E731
    assert counted(gather, start, end, done) == gathered(WEIGHT)
    assert counted(start, gather, done, end) == gathered(WEIGHT)
    assert counted(gather, end, start, done) == gathered(0)


LOOP = f"""\
    HloModule test, is_scheduled=true

    %reduce_async (q: bf16[8,128]) -> bf16[8,128] {{
      %q = {X} parameter(0)
      ROOT %sum = {X} all-reduce(%q), replica_groups={{{{0,1}}}}, to_apply=%add
    }}

    %condition (c: (s32[], bf16[256,128], bf16[8,128])) -> pred[] {{
      %c = (s32[], {W}}}, {X}) parameter(0)
      %count = s32[] get-tuple-element(%c), index=0
      %four = s32[] constant(4)
      ROOT %less = pred[] compare(%count, %four), direction=LT
    }}

    %body (b: (s32[], bf16[256,128], bf16[8,128])) -> (s32[], bf16[256,128], bf16[8,128]) {{
      %b = (s32[], {W}}}, {X}) parameter(0)
      %at = s32[] get-tuple-element(%b), index=0
      %w = {W}}} get-tuple-element(%b), index=1
      %x = {X} get-tuple-element(%b), index=2
      %c = ({W}S(1)}}, {W}}}, u32[]{{:S(2)}}) copy-start(%w)
      %start = (({X}), {X}) call-start(%x), to_apply=%reduce_async
      %done = {X} call-done(%start)
      %cd = {W}S(1)}} copy-done(%c)
      ROOT %next = (s32[], {W}}}, {X}) tuple(%at, %w, %done)
    }}

    ENTRY %main (a0: bf16[256,128], a1: bf16[8,128]) -> bf16[8,128] {{
      %a0 = {W}}} parameter(0)
      %a1 = {X} parameter(1)
      %zero = s32[] constant(0)
      %init = (s32[], {W}}}, {X}) tuple(%zero, %a0, %a1)
      %loop = (s32[], {W}}}, {X}) while(%init), condition=%condition, body=%body
      ROOT %out = {X} get-tuple-element(%loop), index=2
    }}
    """


def test_a_loop_counts_each_trip_and_calls_that_are_collectives():
    assert overlaps(Module(textwrap.dedent(LOOP)), weights=1) == (Overlap("all-reduce", ACTIVATION, WEIGHT, 4),)
    assert overlaps(Module(textwrap.dedent(LOOP), counted=4), weights=1)[0].count == 1


FETCH = [
    f"%start_fetch.1 = ({W}S(1)}}, {X}, s32[1]{{0:S(2)}}, s32[1]{{0:S(2)}}) custom-call(%a3, %a0)",
    f"%big = {W}S(1)}} get-tuple-element(%start_fetch.1), index=0",
    f"%small = {X} get-tuple-element(%start_fetch.1), index=1",
    "%first = s32[1]{0:S(2)} get-tuple-element(%start_fetch.1), index=2",
    "%second = s32[1]{0:S(2)} get-tuple-element(%start_fetch.1), index=3",
]
BIG = f"%finish_fetch.1 = {W}S(1)}} custom-call(%big, %first)"
SMALL = f"%finish_fetch.2 = {X} custom-call(%small, %second)"


def test_copies_that_kernels_start_are_waited_for_by_other_kernels():
    assert counted(*FETCH, REDUCE, BIG, SMALL) == reduced(WEIGHT + ACTIVATION)
    assert counted(*FETCH, BIG, REDUCE, SMALL) == reduced(ACTIVATION)
    assert counted(REDUCE, *FETCH, BIG, SMALL) == reduced(0)


def test_nothing_else_may_take_what_is_still_arriving():
    text = lambda *lines: ENTRY.replace("LINES", "\n      ".join(lines))  # noqa: E731
    check_arrivals(text(*FETCH, REDUCE, BIG, SMALL))
    check_arrivals(text(*FETCH, BIG, SMALL, f"%moved.1 = {W}}} copy(%finish_fetch.1)"))
    check_arrivals(text(REDUCE))
    with pytest.raises(RuntimeError, match=r"by moved\.1: leave them in memory with backend='fetch_ahead=xla'"):
        check_arrivals(text(*FETCH, f"%moved.1 = {W}}} copy(%big)", BIG, SMALL))
