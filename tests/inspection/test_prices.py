"""Prices of a compiled program's operations: by listings, by estimates where there are none, and the schedule. Under a
second; half a minute with the slow test, which is skipped without libtpu."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from inferlib import Buckets, configs
from inferlib.aot.compile import compile_programs
from inferlib.inspection.bundles import CLOCKS, Listing
from inferlib.inspection.collective_prices import CollectivePrices, axes_of
from inferlib.inspection.hlo import Module, Shape
from inferlib.inspection.kernel_scalars import scalars_of
from inferlib.inspection.outcome import Outcome
from inferlib.inspection.prices import Price, Prices
from inferlib.inspection.report import ProgramReport, Report, StepEstimate
from inferlib.inspection.report_text import assumptions
from inferlib.inspection.schedule import Played, play
from inferlib.planning.collectives import Collective
from inferlib.planning.network import ATTAINED, place
from inferlib.planning.rates import RATIOS
from inferlib.programs.deployment import Deployment
from inferlib.programs.keys import ProgramKey
from inferlib.sharding.mesh import Parallelism
from inferlib.targets import parse_target

TARGET = parse_target("v5e:2x4")
KEY = ProgramKey("greedy", 8, 1024, steps=8)
CLOCK = CLOCKS["v5e"]

# An operation of 100 bundles, as the compiler lists one: without loops, and without copies.
BUNDLES = "\n".join(f"  {hex(at)}   :  {{ %v{at}_v0 = vadd.f32 %v{at}_v1, %v{at}_v2 }}" for at in range(100))
# A copy of 32 KiB from HBM and a wait for it, in six bundles.
COPYING = """
     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: bf16[8,2048], index: 0, kind: input, shape index: {}] }
   0x1   :  { %2 = dma.hbm_to_vmem [thread:$0]  %s1_s0, 1024, [#allocation1], [#allocation2] }
   0x2   :  { %3 = dma.done.wait [#allocation2], 1024 }
   0x3   :  {}
   0x4   :  {}
   0x5   :  {}
"""

# Two additions that are alike but for their names, and one of another shape; a kernel, and a weight that is fetched
# while an all-reduce runs.
SHAPE, VMEM = "bf16[8,2048]{1,0:T(8,128)(2,1)}", "bf16[8,2048]{1,0:T(8,128)(2,1)S(1)}"
COST = '"cost_estimate":{"flops":"0","transcendentals":"0","bytes_accessed":"8190000","remote_bytes_transferred":"0"}'
TEXT = f"""\
HloModule test, is_scheduled=true

%condition (c: (s32[], {VMEM})) -> pred[] {{
  %c = (s32[]{{:T(128)}}, {VMEM}) parameter(0)
  %count = s32[]{{:T(128)}} get-tuple-element(%c), index=0
  %ten = s32[]{{:T(128)}} constant(10)
  ROOT %less = pred[]{{:T(512)}} compare(%count, %ten), direction=LT
}}

%body (b: (s32[], {VMEM})) -> (s32[], {VMEM}) {{
  %b = (s32[]{{:T(128)}}, {VMEM}) parameter(0)
  %at = s32[]{{:T(128)}} get-tuple-element(%b), index=0
  %x = {VMEM} get-tuple-element(%b), index=1
  %add.1 = {VMEM} add(%x, %x), metadata={{op_name="one"}}, backend_config={{"estimated_cycles":"9000"}}
  %add.2 = {VMEM} add(%add.1, %x), metadata={{op_name="other"}}, backend_config={{"estimated_cycles":"9000"}}
  ROOT %out = (s32[], {VMEM}) tuple(%at, %add.2)
}}

ENTRY %main (a: {SHAPE}, w: bf16[4096,4096]) -> bf16[4,2048] {{
  %a = {SHAPE} parameter(0)
  %w = bf16[4096,4096]{{1,0:T(8,128)(2,1)}} parameter(1)
  %copied = {VMEM} copy(%a), backend_config={{"estimated_cycles":"9000"}}
  %fetch = (bf16[4096,4096]{{1,0:T(8,128)(2,1)S(1)}}, bf16[4096,4096]{{1,0:T(8,128)(2,1)}}, u32[]) copy-start(%w)
  %zero = s32[]{{:T(128)}} constant(0)
  %init = (s32[]{{:T(128)}}, {VMEM}) tuple(%zero, %copied)
  %loop = (s32[]{{:T(128)}}, {VMEM}) while(%init), condition=%condition, body=%body
  %y = {VMEM} get-tuple-element(%loop), index=1
  %sum = {VMEM} all-reduce(%y), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, to_apply=%region
  %fetched = bf16[4096,4096]{{1,0:T(8,128)(2,1)S(1)}} copy-done(%fetch)
  %mx_matmul.3 = {VMEM} custom-call(%zero, %sum, %fetched), custom_call_target="tpu_custom_call", \
backend_config={{"custom_call_config":{{{COST}}}}}
  %half = bf16[4,2048]{{1,0:T(4,128)(2,1)S(1)}} slice(%mx_matmul.3), slice={{[0:4], [0:2048]}}
  ROOT %add.4 = bf16[4,2048]{{1,0:T(4,128)(2,1)S(1)}} add(%half, %half), backend_config={{"estimated_cycles":"3000"}}
}}
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "17-add.1-01-packed-bundles-post-ra.txt").write_text(BUNDLES)
    (tmp_path / "17-add.1-00-schedule-analysis_packed-bundles-post-ra.txt").write_text("no listing")
    (tmp_path / "18-copied-01-packed-bundles-post-ra.txt").write_text(COPYING)
    return tmp_path


def priced(module: Module, folder: Path) -> dict[str, Price | None]:
    prices = Prices(module, folder, KEY, TARGET)
    return {
        i.name: prices.price(computation, i)
        for computation in module.computations.values()
        for i in computation.instructions.values()
        if i.op in ("add", "copy", "custom-call", "slice", "compare")
    }


def test_an_operation_is_priced_by_its_listing_and_so_are_its_equals(folder):
    prices = priced(Module(TEXT), folder)
    assert prices["add.1"] == prices["add.2"] == Price("add", "listing", pytest.approx(100 / CLOCK), 0)
    waited = 32768 / TARGET.hbm_bandwidth + 0.5e-6  # the bandwidth, then the latency
    copied = prices["copied"]
    assert (copied.how, copied.nbytes) == ("listing", 32768)
    assert waited < copied.seconds < waited + 7 / CLOCK


def test_without_a_listing_the_price_says_so(folder):
    prices = priced(Module(TEXT), folder)
    assert prices["add.4"] == Price("add", "estimate", pytest.approx(3000 / CLOCK), 0.0)
    assert prices["mx_matmul.3"] == Price("mx_matmul", "bytes", 0.0, 0)  # all that it reads is on chip
    assert prices["half"] is None  # it reads and writes on-chip memory alone
    assert prices["less"] is None


def test_a_listing_that_is_not_understood_counts_as_none(folder):
    broken = BUNDLES.replace("%v7_v0 = vadd.f32 %v7_v1, %v7_v2", "%s7_s0 = sfancy.s32 3")
    (folder / "17-add.1-01-packed-bundles-post-ra.txt").write_text(broken)
    assert priced(Module(TEXT), folder)["add.2"] == Price("add", "estimate", pytest.approx(9000 / CLOCK), 0.0)
    endless = "  0x0   :  { %1 = sbr.rel target bundleno = 0 (0x0), region = 1 }\n" + "  0x1   :  {}\n" * 6
    with pytest.raises(RuntimeError, match="not ended after 1000 cycles"):
        Listing(endless, 4).run({}, bandwidth=1.0, latency=0.0, most=1000)


def test_kernels_without_a_listing_take_their_bytes_at_r(folder):
    text = TEXT.replace("8190000", "108190000")
    price = priced(Module(text), folder)["mx_matmul.3"]
    nbytes = 108190000 - 2 * 32768 - 4096 * 4096 * 2
    assert price == Price("mx_matmul", "bytes", pytest.approx(RATIOS["mx_matmul"]["v5e"] * nbytes / 819e9), nbytes)


def test_a_schedule_is_played_with_what_runs_in_the_background():
    """The weight of 32 MiB is fetched during the loop and the all-reduce, and is waited for."""
    one = Price("add", "listing", 1e-6, 0)
    half_of_hbm = Price("copy", "listing", 1e-6, 819e9 * 0.5e-6)
    pricing = lambda _, i: {"add": one, "copy": half_of_hbm}.get(i.op)  # noqa: E731
    reduced = Price("all-reduce", "model", 5e-6, 0)
    played = play(Module(TEXT), pricing, lambda *_: reduced, 819e9)
    assert played.prices == {one: 10 * 2 + 1, half_of_hbm: 1}
    assert played.collectives == {reduced: 1}
    ((start, end, needed),) = played.spans
    assert (start, end - start) == (needed, pytest.approx(5e-6))
    assert played.exposed == pytest.approx(0.0, abs=1e-12)
    # The copy runs before the weight's start; the loop's trips behind the second fetch what the second does.
    assert played.fetching == pytest.approx(5e-6)
    assert played.waits == pytest.approx((2 << 24) / 819e9 - 5e-6 - 4e-6)
    step = StepEstimate.of(played.facts())
    assert step.seconds == pytest.approx(22e-6 + played.waits + 5e-6)
    assert step.operations == pytest.approx({"listing": 22e-6, "estimate": 0.0, "bytes": 0.0})
    assert step.attained(819e9 / 4) == pytest.approx(step.seconds + 1e-6)  # the copy takes twice as long


def test_copies_that_a_kernel_starts_run_in_the_background():
    """Of two weights, each is waited for by a kernel of its own, and those that started first arrive first."""
    big, small = (f"bf16[{rows},4096]{{1,0:T(8,128)(2,1)S(1)}}" for rows in (4096, 1024))
    started = f"%start_fetch.1 = ({big}, {small}, s32[1]{{0:S(2)}}, s32[1]{{0:S(2)}}) custom-call(%zero, %w)"
    lines = [line for line in TEXT.splitlines() if "%fetch" not in line and "%mx_matmul" not in line]
    at = next(n for n, line in enumerate(lines) if "%zero" in line) + 1
    lines.insert(at, f"  {started}")
    at = next(n for n, line in enumerate(lines) if "%half" in line)
    lines[at] = lines[at].replace("%mx_matmul.3", "%sum")
    waits = [(f"%finish_fetch.{n} = {shape} custom-call(%start_fetch.1)") for n, shape in ((2, small), (1, big))]
    lines[at:at] = [f"  {wait}" for wait in waits]
    one, reduced = Price("add", "listing", 1e-6, 0), Price("all-reduce", "model", 5e-6, 0)
    played = play(Module("\n".join(lines)), lambda _, i: one if i.op == "add" else None, lambda *_: reduced, 819e9)
    assert (played.prices[one], played.collectives) == (21, {reduced: 1})
    # Beside the loop's second trip, which stands for the others, and the all-reduce.
    assert played.fetching == pytest.approx(5e-6)
    assert played.waits == pytest.approx((5 << 23) / 819e9 - 5e-6 - 4e-6)


def test_an_asynchronous_collective_hides_behind_operations():
    asynchronous = TEXT.replace("%sum = ", "%begun = ").replace(" all-reduce(", " all-reduce-start(")
    asynchronous = asynchronous.replace(
        "  %half = ", f"  %later = {VMEM} add(%y, %y)\n  %sum = {VMEM} all-reduce-done(%begun)\n  %half = "
    )
    pricing = lambda _, i: Price("add", "listing", 3e-6, 0) if i.name == "later" else None  # noqa: E731
    reduced = Price("all-reduce", "model", 100e-6, 0)
    played = play(Module(asynchronous), pricing, lambda *_: reduced, 819e9)
    waits = (2 << 24) / 819e9
    assert (played.collectives, played.waits) == ({reduced: 1}, pytest.approx(waits))
    assert played.exposed + played.fetching == pytest.approx(100e-6 - 3e-6 - waits)
    ((start, end, needed),) = played.spans
    assert (end - start, needed - start) == (pytest.approx(100e-6), pytest.approx(3e-6 + waits))


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("tensor",)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("replica_groups=[2,4]<=[8]", ("tensor",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",)),
        ("replica_groups={}", ("data", "tensor")),
        ("replica_groups=mesh['data'=2,'expert'=1,'tensor'=4] {'tensor'}", ("tensor",)),
        ("replica_groups=mesh['data'=2,'expert'=1,'tensor'=4] {'data','tensor'}", ("data", "tensor")),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", ("tensor",)),
    ],
)
def test_a_collective_runs_along_the_axes_of_its_groups(groups, axes):
    module = Module(TEXT.replace("replica_groups={{0,1,2,3,4,5,6,7}}", groups))
    reduce = module.entry.instructions["sum"]
    assert axes_of(reduce, {"data": 2, "tensor": 4}) == axes
    network = place(TARGET, (("data", 2), ("tensor", 4)))
    price = CollectivePrices(module, network, {"data": 2, "tensor": 4}, lambda *_: None).price(module.entry, reduce)
    moved = Collective("all-reduce", "", "+".join(axes), 8 * 2048 * 2)
    assert price == Price("all-reduce, exchange", "model", network.seconds(moved, ATTAINED), 0.0)


@pytest.mark.parametrize(
    ("strategy", "sent", "algorithm"),
    [
        ("StrategyND", 6.0, "exchange"),
        ("StrategyND", 1.875, "scatter and gather"),
        ("UniDirectionNDRingStrategy", 1.875, "one way"),
        ("StrategyND", None, "exchange"),
    ],
)
def test_an_all_reduce_has_the_algorithm_of_its_program(strategy, sent, algorithm):
    """On v5e:4x4, 128 KiB: by the strategy that the compiler names, and what a device sends by the listing."""
    config = f', backend_config={{"collective_algorithm_config":{{"strategy":"{strategy}"}}}}'
    text = TEXT.replace("bf16[8,2048]", "bf16[32,2048]").replace("to_apply=%region", f"to_apply=%region{config}")
    module = Module(text.replace("{{0,1,2,3,4,5,6,7}}", "{}"))
    target, mesh = parse_target("v5e:4x4"), {"tensor": 16}
    network = place(target, tuple(mesh.items()))
    prices = CollectivePrices(module, network, mesh, lambda *_: sent and int(sent * 131072))
    price = prices.price(module.entry, module.entry.instructions["sum"])
    assert price.name == f"all-reduce, {algorithm}"
    hops = {"exchange": 6, "scatter and gather": 12, "one way": 12}[algorithm]
    links = 2 * 3 * 65536 / 50e9 if algorithm == "exchange" else 2 * 131072 * 15 / 16 / 100e9
    assert price.seconds == pytest.approx(hops * 8e-6 / 3 + links / ATTAINED.link)


def test_the_scalars_of_kernels_are_those_of_full_rows():
    call = Module(TEXT).entry.instructions["mx_matmul.3"]

    def of(kernel: str, *dims: tuple[int, ...], key: ProgramKey = KEY) -> dict[int, list]:
        shapes = [Shape("bf16" if len(d) > 2 else "s32", d) for d in dims]
        return {n: np.asarray(x).tolist() for n, x in scalars_of(kernel, call, shapes, key).items()}

    assert of("mla_decode_attention", (3,), (1,), (12,)) == {0: [1024] * 3}
    prefill = ProgramKey("greedy", 0, 1024, chunks=2, chunk=200)
    assert of("prefill_attention", (2,), (1,), (2, 2), (2, 2), key=prefill) == {
        2: [[824, 924]] * 2,
        3: [[923, 1023]] * 2,
    }
    assert sum(of("grouped_matmul", (1,), (16,), (40, 128))[1]) == 40
    read = of("expert_mlp", (1,), (8,), (2, 8, 4, 64, 4000), (40, 128))[1]  # the declared bytes are half of a layer
    assert sorted(read) == [0] * 4 + [1] * 4
    assert of("mx_matmul", (1,), (8, 128)) == {}


@pytest.mark.parametrize(("groups", "lengths"), [(4, 1024), (2, 100)])
def test_attention_of_rows_together_is_told_how_many_positions_it_reads(groups, lengths):
    """100 of each row, by the declared FLOPs: of two heads, each with 8 queries of 128 numbers."""
    call = Module(TEXT).entry.instructions["mx_matmul.3"]
    flops = 4 * 4 * 2 * 8 * 128 * 100
    rest = f'"cost_estimate":{{"flops":"{flops}","transcendentals":"0","bytes_accessed":"1"}}'
    out = Shape("bf16", (groups, 2 * 4 // groups, 8, 64))  # half of a cell are keys
    operands = [Shape("s32", (4,)), Shape("bf16", (1, 4, 2, 128, 128))]
    call = replace(call, shapes=(out,), rest=rest)
    (read,) = scalars_of("decode_attention", call, operands, KEY).values()
    assert read.tolist() == [lengths] * 4


def test_the_report_says_how_each_part_is_priced():
    prices = {Price("fusion", "listing", 2e-3, 0): 1, Price("scatter", "estimate", 1e-3, 0): 2}
    played = Played(prices=Counter(prices), exposed=3e-3)
    played.collectives[Price("all-reduce, exchange", "model", 2e-3, 0)] = 2
    made = Deployment(
        configs.load("llama3-8b"), "v5e:2x4", "bfloat16", Buckets((512,), (8,), (1024,)), Parallelism(tensor=8)
    )
    report = Report.of(made, [])
    figures = dict.fromkeys(f.name for f in fields(ProgramReport))
    figures |= {"key": KEY, "outcome": Outcome(KEY, "compiled"), "step": StepEstimate.of(played.facts())}
    (line,) = assumptions(replace(report, programs=(ProgramReport(**figures),)))
    assert "2.00 ms by their listings, 2.00 ms as the compiler estimates (scatter)" in line
    assert "4.00 ms, 1.00 ms of it behind weights and operations (2 all-reduce, exchange)" in line


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='needs pip install "jax[tpu]"')
def test_every_operation_of_a_decode_step_has_a_listing(tmp_path):
    """Half of the layers of 8B on v5e:2x4: all operations together take at most a tenth more than the floor. The
    program moves what it must, and no more."""
    sizes = Buckets((512,), (32,), (4096,)), Parallelism(tensor=8), ("greedy",)
    made = Deployment(configs.load("llama3-8b") | {"num_hidden_layers": 16}, "v5e:2x4", "bfloat16", *sizes)
    outcomes, _ = compile_programs(made, made.keys()[:1], tmp_path)
    (program,) = Report.of(made, outcomes).programs
    step = program.step
    assert step.operations["estimate"] == step.operations["bytes"] == 0.0
    assert program.floor < step.computing < 1.1 * program.floor
    assert step.fetching > 0.75 * step.network  # of weights, during collectives
    residual = next(p for p in step.prices if p["count"] == 2 * 16 - 1)
    assert residual["seconds"] < 0.5e-6  # the compiler estimates 2.8 us
    attention = next(p for p in step.prices if p["name"] == "decode_attention")
    assert attention["nbytes"] > 32 * 4096 * 256 * 2  # of full rows
    assert program.copies == []
    assert program.temporaries < 160 << 20
    assert program.moved_bytes <= 1.02 * program.floor_bytes
