"""The cost model against hand calculation, `explain`, and published and own measurements. About 5 s."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from inferlib.aot.compile import CompileError
from inferlib.aot.verify import candidates
from inferlib.cache.plan import plan_cache
from inferlib.checkpoint.load import described_quantization
from inferlib.config import DeviceKind, EngineConfig
from inferlib.configs import load, measurements, plan_names
from inferlib.models.abstract import abstract_model
from inferlib.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, RopeSpec
from inferlib.models.families import config_from_hf
from inferlib.models.quantization import Quantization
from inferlib.planning.collective_purposes import PURPOSES
from inferlib.planning.collectives import Collective
from inferlib.planning.costs import Deployed, step_time
from inferlib.planning.drafts import Drafts
from inferlib.planning.estimate import estimate
from inferlib.planning.explain import explain
from inferlib.planning.network import ATTAINED, IDEAL, Span, place
from inferlib.planning.planner import PlanError, Workload, formats, rank
from inferlib.planning.plans import load_plan
from inferlib.planning.recorder import record
from inferlib.programs.keys import ProgramKey
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import planned_shards
from inferlib.speculation.settings import Speculation
from inferlib.targets import TargetError, parse_target
from tests.helpers.pope_layouts import weight_gathered, weight_stationary_2d


def deployed(name: str, target: str, parallel: str, quantization=None) -> Deployed:
    return Deployed(
        config_from_hf(load(name)),
        parse_target(target),
        Parallelism.parse(parallel),
        quantization and Quantization.named(quantization),
    )


def test_products_of_eight_bits_on_both_sides():
    """Rows compute at the rate of their numbers, where the chip has one: any on GPUs, elsewhere many."""

    def flops(target: str, quantization: str, chunk: int) -> float:
        return deployed("llama3-8b", target, "tp=1", quantization).prefill(chunk, 0).flops

    for target, name, faster in [
        ("cuda:h200", "fp8_a8", 1979 / 989),
        ("v5e-1", "int8_a8", 393 / 197),
        ("v5e-1", "fp8_a8", 1),
    ]:
        gpu = target.startswith("cuda")
        weights_alone, attention = flops(target, name.removesuffix("_a8"), 512), 32 * 2 * 512 * 32 * 256 * 256
        head = 0 if gpu else 2 * 4096 * 128256  # of one row
        products = weights_alone - attention - head
        assert flops(target, name, 512) == pytest.approx(products / faster + attention + head)
        assert (flops(target, name, 128) == flops(target, name.removesuffix("_a8"), 128)) == (not gpu)
    fast, slow = (
        step_time(it.prefill(2048, 0), it.network).compute
        for it in (deployed("llama3-8b", "cuda:h200", "tp=1", name) for name in ("fp8_a8", "fp8"))
    )
    assert fast < 0.7 * slow


def test_rotations_of_inputs_are_operations_and_launches():
    """128 inputs at a time: 2 * 128 operations for each of the 14336 inputs of 32 layers, on each device its part."""
    alone = deployed("llama3-8b", "cuda:h200", "tp=1", "int4")
    for parallel, devices in (("tp=1", 1), ("tp=4", 4)):
        alone = replace(alone, target=parse_target(f"cuda:h200-{devices}"), parallel=Parallelism.parse(parallel))
        assert alone.quantization is not None
        turned = replace(alone, quantization=replace(alone.quantization, rotation=128))
        both = [it.decode(8, 512.0) for it in (turned, alone)]
        assert both[0].flops - both[1].flops == pytest.approx(8 * 2 * 128 * 14336 * 32 / devices)
        assert both[0].nbytes == both[1].nbytes
        slow, fast = (step_time(work, alone.network).seconds for work in both)
        assert slow - fast == pytest.approx(32 * 1.8e-6, rel=0.05)
        assert slow < 1.06 * fast or devices > 1


def test_branches_of_low_rank_are_bytes_operations_and_launches():
    """Of rank 16: 2 * 16 operations, and two bytes each, for every input and output of a matrix, the head's too."""
    alone = deployed("llama3-8b", "cuda:h200", "tp=1", "int4")
    assert alone.quantization is not None
    both = [it.decode(8, 512.0) for it in (replace(alone, quantization=replace(alone.quantization, rank=16)), alone)]
    sides = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]
    factors = 16 * (32 * sum(inputs + outputs for inputs, outputs in sides) + 4096 + 128256)
    assert both[0].weight_bytes - both[1].weight_bytes == 2 * factors
    assert both[0].flops - both[1].flops == pytest.approx(8 * 2 * factors)
    launches = [sum(part.launches for part in work.parts) for work in both]
    assert launches[0] - launches[1] == 4 * 32 + 1


# ---- collectives


def gather(target: str, mesh: tuple, axis: str, nbytes: int, kind="all-gather", efficiency=IDEAL) -> float:
    return place(parse_target(target), mesh).seconds(Collective(kind, "", axis, nbytes), efficiency)


def test_the_scaling_books_all_gather():
    """bf16[2048, 8192] over an axis of 4 without wrap-around: three hops of a quarter over one link; a small one waits
    for its hops, 8 us when measured."""
    nbytes, mesh = 2048 * 8192 * 2, (("x", 8), ("y", 4))
    assert gather("v5e:4x8", mesh, "y", nbytes) == pytest.approx(3 * nbytes / 4 / 50e9 + 3e-6)
    small = gather("v5e:4x8", mesh, "y", 256 * 256 * 2, efficiency=ATTAINED)
    assert small == pytest.approx(8e-6, rel=0.4)


def test_rings_and_axes_add_bandwidth():
    nbytes, mesh = 64 * 10**6, (("x", 64),)
    # A full cube: three rings, both ways; 2 + 2 + 2 hops. A large all-reduce has two phases, each one way around.
    scatter = nbytes * 63 / 64 / (6 * 100e9) + 6e-6
    expected = 2 * (scatter + 3e-6)
    assert gather("v5p:4x4x4", mesh, "x", nbytes, "all-reduce") == pytest.approx(expected)
    assert gather("v5p:4x4x4", mesh, "x", nbytes, "reduce-scatter") == pytest.approx(scatter)
    # Joined axes are one.
    joined = gather("v5p:4x4x4", (("a", 4), ("b", 16)), "a+b", nbytes, "all-reduce")
    assert joined == pytest.approx(expected)
    # A switch: one hop whatever the number.
    assert gather("cuda:h200-4", (("x", 4),), "x", nbytes) == pytest.approx(nbytes * 3 / 4 / 450e9 + 2.8e-6)
    # The two devices of a chip exchange over the chip alone.
    assert gather("v7x-2", (("x", 2),), "x", nbytes) == pytest.approx(nbytes / 2 / 600e9 + 1e-6)


def test_all_reduces_have_their_compilers_algorithms():
    """What libtpu 0.0.42 makes of an all-reduce of so many KiB. By its listing for v5e:2x4 a device sends 256 KiB 1.75
    times, in 8 steps: around a ring of all 8, which the two rows are. On v5e:4x4 it sends 128 KiB 6 times: an exchange
    with 3 others in each of two dimensions, over 3 + 3 hops."""
    compiled = {
        "v5e:2x4": {32: "exchange", 128: "scatter and gather", 256: "scatter and gather", 1024: "one way"},
        "v5e:4x4": {32: "exchange", 128: "exchange", 1024: "scatter and gather", 8192: "one way"},
        "v5e:2x2": {32: "exchange", 256: "scatter and gather", 1024: "one way"},
        "v5p:2x2x2": {32: "exchange", 128: "exchange", 8192: "one way"},
    }
    for name, choices in compiled.items():
        target = parse_target(name)
        network = place(target, (("x", target.devices),))
        assert {kib: network.algorithm("x", kib << 10) for kib in choices} == choices
    ring = 8e-6 + 2 * 7 / 8 * 2**18 / 100e9
    assert gather("v5e:2x4", (("x", 8),), "x", 2**18, "all-reduce") == pytest.approx(ring)
    exchange = 6e-6 + 2 * 3 * 2**16 / 50e9
    assert gather("v5e:4x4", (("x", 16),), "x", 2**17, "all-reduce") == pytest.approx(exchange)


def test_other_collectives():
    nbytes, mesh = 10**7, (("x", 16), ("y", 16))
    # Half of all bytes cross the middle of a ring, by two links of each direction.
    assert gather("v5e-256", mesh, "y", nbytes, "all-to-all") == pytest.approx(nbytes * 16 / 8 / 50e9 + 8e-6)
    assert gather("v5e-256", mesh, "y", nbytes, "collective-permute") == pytest.approx(nbytes / 50e9 + 1e-6)


def test_the_last_axis_takes_the_nearest():
    spans = place(parse_target("v5e-8"), (("data", 2), ("tensor", 4))).spans
    assert spans["tensor"].devices == 4
    assert spans["tensor"].dims == ((4, False),)
    assert spans["data"].dims == ((2, False),)
    # What no axis has is taken from two.
    assert place(parse_target("v5e-16"), (("data", 2), ("tensor", 8))).spans["tensor"].dims == ((2, False), (4, False))
    assert place(parse_target("v7x-8"), (("data", 4), ("tensor", 2))).spans["tensor"] == Span(die=2)
    assert place(parse_target("v5e-256"), (("data", 16), ("tensor", 16))).spans["tensor"].devices == 16
    with pytest.raises(TargetError, match="tensor 4 is not v5e:2x4, which has 8"):
        place(parse_target("v5e-8"), (("tensor", 4),))


# ---- bytes and operations


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        *itertools.product(
            ["smollm2-135m"],
            ["tp=1,dp=8", "tp=2,dp=4", "tp=8", "tp=8,rules=tp_sp", "cp=4,tp=2", "cp=2,tp=4,rules=tp2d"],
        ),
        ("gemma3-4b", "cp=2,tp=4,rules=tp2d"),
        *(pytest.param("llama3-8b", x, marks=pytest.mark.release) for x in ("tp=2,dp=4", "cp=2,tp=4,rules=tp2d")),
        pytest.param("gemma3-4b", "tp=2,dp=4", marks=pytest.mark.release),
        *itertools.product(["qwen3-30b-a3b"], ["ep=8", "tp=2,ep=2,dp=2", "tp=4,ep=2,rules=dp_attention"]),
        ("deepseek-v2-lite", "tp=2,ep=2,dp=2"),
        *(
            pytest.param("deepseek-v2-lite", x, marks=pytest.mark.release)
            for x in ("ep=8", "tp=4,ep=2,rules=dp_attention")
        ),
        ("glm-4.5", "tp=8"),
        ("parcae-370m", "cp=2,tp=4"),
    ],
)
@pytest.mark.fast_cases(4)
def test_weights_cache_and_collectives_are_those_of_explain(name, parallel):
    it, rows, max_len = deployed(name, "v5e-8", parallel), 4, 4096
    shards = planned_shards(it.parallel)
    batch = rows * it.replicas
    model = abstract_model(it.config, "bfloat16", scan=True, shards=shards)
    plan = plan_cache(model, rows=batch, max_len=max_len, chunk=512, dtype="bfloat16", platform="tpu")
    engine = EngineConfig.make(DeviceKind("tpu", generation="v5e"), batch, max_len, shards=shards)
    told = explain(model, plan, engine, [ProgramKey("greedy", rows, max_len, steps=8)])
    memory = it.memory(batch, max_len, 512)
    assert memory.weights == sum(p.nbytes for p in told.weights)
    assert memory.cache == sum(p.nbytes for p in told.cache)
    assert memory.state == sum(p.nbytes for p in told.state)
    assert counted(it.decode(rows, 1000).collectives) == counted(told.steps[0].collectives)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("gemma3n-e4b", "cp=2,tp=2,dp=2"),
        pytest.param("gemma4-26b-a4b", "cp=2,ep=2,tp=2,rules=tp2d", marks=pytest.mark.release),
        ("deepseek-v2-lite", "cp=2,tp=2,ep=2"),
        ("qwen3-next-80b-a3b", "ep=4,tp=2"),
        ("nemotron-h-8b", "tp=8"),
        ("huginn-3.5b", "tp=4,dp=2"),
    ],
)
def test_estimated_collectives_of_a_prompt_are_those_recorded(name, parallel):
    config, shards = config_from_hf(load(name)), planned_shards(Parallelism.parse(parallel))
    engine = EngineConfig.make("tpu", 16, 2048, shards=shards)
    model = abstract_model(config, "bfloat16", scan=True, shards=shards)
    plan = plan_cache(model, rows=16, max_len=2048, chunk=512, dtype="bfloat16", platform="tpu")
    key = ProgramKey("greedy", engine.rows, 2048, chunks=1, chunk=512)
    recorded = record(model, plan, engine, key)
    assert counted(estimate(model, plan, shards, key, engine.backend)) == counted(recorded)
    branches = {"input of attention", "attention", "input of feed-forward", "feed-forward", "routes", "how many tokens"}
    assert {c.purpose for c in recorded} <= {*PURPOSES.values(), *branches}


@pytest.mark.slow
@pytest.mark.parametrize("rule", [pytest.param("change", marks=pytest.mark.release), "kl"])
def test_collectives_of_a_loop_that_tokens_leave_are_those_recorded(rule):
    """As if none left it."""
    config, shards = config_from_hf(load("parcae-370m")), planned_shards(Parallelism.parse("cp=2,tp=2,dp=2"))
    assert config.loop is not None
    config = replace(config, loop=replace(config.loop, early_exit=rule))
    engine = EngineConfig.make("tpu", 16, 2048, shards=shards)
    model = abstract_model(config, "bfloat16", scan=True, shards=shards)
    plan = plan_cache(model, rows=16, max_len=2048, chunk=512, dtype="bfloat16", platform="tpu")
    for key in (ProgramKey("greedy", engine.rows, 2048), ProgramKey("greedy", 0, 2048, chunks=1, chunk=512)):
        recorded = record(model, plan, engine, key)
        assert counted(estimate(model, plan, shards, key, engine.backend)) == counted(recorded)
        assert {"whether to go on", "how many steps of the core"} <= {c.purpose for c in recorded}
        assert ("next-token distributions" in {c.purpose for c in recorded}) == (rule == "kl")


def test_steps_of_a_loop_read_the_head_where_tokens_leave_by_it():
    it = deployed("parcae-370m", "v5e-1", "tp=1")
    loop = it.config.loop
    assert loop is not None
    by_rule = {
        rule: replace(it, config=replace(it.config, loop=replace(loop, early_exit=rule))) for rule in ("change", "kl")
    }
    change, kl = (one.decode(rows=4, live=100) for one in by_rule.values())
    head = it.config.vocab * it.config.dim
    assert kl.weight_bytes - change.weight_bytes == loop.steps * 2 * head
    assert kl.flops - change.flops == loop.steps * 2 * 2 * 4 * head


def counted(collectives: Iterable[Collective]) -> Counter[Collective]:
    """How often each collective takes place, whatever it is for."""
    counts = Counter()
    for c in collectives:
        counts[replace(c, purpose="", count=1)] += c.count
    return counts


def test_a_decode_step_by_hand():
    it = deployed("llama3-8b", "v5e-1", "tp=1")
    work = it.decode(rows=4, live=1000)
    embedding = 128256 * 4096
    norms = (2 * 32 + 1) * 4096
    matrices = 8_030_261_248 - embedding - norms
    assert work.flops == 2 * 4 * matrices + 4 * 32 * 4 * 4096 * 1000
    assert work.weight_bytes == 2 * (matrices + norms)
    assert work.cache_bytes == 2 * 32 * 8 * 128 * 2 * (4 * 1000 + 4)
    assert work.collectives == ()
    quantized = deployed("llama3-8b", "v5e-1", "tp=1", "int8").decode(rows=4, live=1000)
    assert 0.5 < quantized.weight_bytes / work.weight_bytes < 0.502  # and the scales
    assert quantized.flops == work.flops


@pytest.mark.parametrize(("target", "rows", "on_chip"), [("v6e-1", 4, False), ("v5e-1", 4, True), ("v5e-1", 65, False)])
def test_the_core_of_a_loop_is_stored_once_and_read_at_every_step_unless_it_stays_on_chip(target, rows, on_chip):
    """v5e has room for its 100.7 MB in bfloat16, and v6e, whose compiler sets more aside, for 96.5 MB."""
    config, parallel = config_from_hf(load("parcae-370m")), Parallelism.parse("tp=1")
    loop = config.loop
    assert loop is not None
    eight, one = (
        Deployed(replace(config, loop=replace(loop, steps=n)), parse_target(target), parallel) for n in (8, 1)
    )
    products, gates = 4 * 12 * 1024**2, 2 * 32 * 8  # of value embeddings
    others = 4 * 2 * 1024 + 2 * 1024  # norms, and vectors of the injection, whose matrix is read once
    assert eight.memory(4, 2048, 512).weights == one.memory(4, 2048, 512).weights
    read = (it.decode(rows=rows, live=1000) for it in (eight, one))
    more, less = (work.weight_bytes for work in read)
    assert more - less == 7 * 2 * (others + gates + (0 if on_chip else products))
    if target == "v6e-1":
        assert "100.7 MB, 4.2 MB more than fit in on-chip memory of v6e" in eight.loop_weights.reason
    options = rank(config, parse_target(target), Workload(512, 128, rows)).options
    unquantised = [option for option in options if option.deployed.quantization is None and option.batch >= rows]
    assert {option.core for option in unquantised} == {"on chip" if on_chip else "in memory"}
    cells = [it.decode(rows=4, live=1000).cache_bytes for it in (eight, one)]
    assert cells[0] / cells[1] == (8 + 4 * 8) / 12


def test_a_pass_of_fewer_steps_takes_their_time_and_the_memory_of_all():
    config, target, parallel = config_from_hf(load("parcae-370m")), parse_target("v5e-1"), Parallelism.parse("tp=1")
    assert config.loop is not None
    shallow, whole = Deployed(config, target, parallel, depth=2), Deployed(config, target, parallel)
    two = Deployed(replace(config, loop=replace(config.loop, steps=2)), target, parallel)
    assert shallow.memory(4, 2048, 512) == whole.memory(4, 2048, 512) != two.memory(4, 2048, 512)
    assert shallow.decode(rows=4, live=1000) == two.decode(rows=4, live=1000)
    assert shallow.prefill(512, 0) == two.prefill(512, 0)
    short, long = (rank(config, target, Workload(512, 128, 8, depth=depth)).best for depth in (2, None))
    assert short.itl < long.itl
    with pytest.raises(CompileError, match="plans with a depth are not verified"):
        candidates(rank(config, target, Workload(512, 128, 8, depth=2)), 1)
    for name, slice_, depth, message in (
        ("parcae-370m", "v5e-1", 9, "depth must be 1 to 8, the model's loop_steps, got 9"),
        ("parcae-370m", "cuda:h100", 2, "on GPUs a pass runs all steps of the core, but with early_exit: leave depth"),
        ("llama3-8b", "v5e-8", 2, "depth is for models that repeat layers, and llama does not"),
    ):
        with pytest.raises(PlanError, match=message):
            rank(config_from_hf(load(name)), parse_target(slice_), Workload(512, 128, 8, depth=depth))
    with pytest.raises(PlanError, match="depth must be at least 1, got 0"):
        Workload(depth=0)


def test_sampling_passes_over_the_logits_of_rows_and_chunks():
    """Greedy: the head writes, and argmax reads twice. Sampled: 8 digits of two thresholds, and 13 passes more."""
    it, vocab = deployed("llama3-8b", "cuda:h200-2", "tp=2"), 128256 // 2
    greedy, sampled = (it.decode(512, 300, mode, longest=1024).activation_bytes for mode in ("greedy", "sample"))
    assert sampled - greedy == (13 + 8 * 3 - 3) * 512 * vocab * 4
    assert greedy - it.decode(512, 300, longest=1024).activation_bytes == 0
    chunks = [(0.0, 32)] * 256
    keys = [ProgramKey(mode, 512, 1024, chunks=256, chunk=32) for mode in ("greedy", "sample")]
    greedy, sampled = (it.mixed(key, 300, chunks).activation_bytes for key in keys)
    assert sampled - greedy == (13 + 8 * 3 - 3) * (512 + 256) * vocab * 4


def test_long_rows_are_shares_that_are_merged():
    """Of 2,048 positions and more, two shares of each row, written and read in float32."""
    it = deployed("llama3-8b", "cuda:h200", "tp=1")
    one, two = (it.decode(512, 300, longest=longest).activation_bytes for longest in (2048, 2304))
    assert two - one == 2 * 2 * 32 * 512 * 32 * (128 + 1) * 4


@pytest.mark.parametrize("parallel", ["cp=2,tp=4", "cp=8", "cp=4,tp=2,rules=helix", "cp=2,tp=4,rules=tp2d"])
def test_a_sequence_axis_splits_what_a_tensor_axis_does(parallel):
    """Of llama3-8b on 8 devices: 8 KV heads, so that "tp" splits everything."""
    it, tp = deployed("llama3-8b", "v5e-8", parallel), deployed("llama3-8b", "v5e-8", "tp=8")
    # "helix" splits queries, keys and values over two devices alone, "cp" no weights.
    again = (1 / 2 - 1 / 8) * 32 * 4096 * (32 + 2 * 8) * 128 if "helix" in parallel else 0
    copies = it.parallel.sequence if it.parallel.rules == "cp" else 1
    more = it.prefill(1024, 2048).flops - tp.prefill(1024, 2048).flops
    assert more == pytest.approx(2 * 1024 * again, rel=0.01, abs=1e10)
    assert it.memory(4, 4096, 1024).cache == tp.memory(4, 4096, 1024).cache
    decode = it.decode(4, 1000)
    assert decode.cache_bytes == tp.decode(4, 1000).cache_bytes
    assert decode.weight_bytes == pytest.approx(copies * tp.decode(4, 1000).weight_bytes + 2 * again, rel=0.01)
    assert decode.collectives


def test_a_ring_passes_the_cache_of_the_prompt():
    it = deployed("llama3-8b", "v5e-8", "cp=4,tp=2")
    ring = [c for c in it.prefill(1024, 3072).collectives if c.kind == "collective-permute"]
    # Keys and values of a quarter of 4096 positions, 4 of 8 heads, three times in each of 32 layers.
    assert [(c.nbytes, c.count) for c in ring] == [(4 * 1024 * 128 * 2, 2 * 3 * 32)]
    # A device reads all of them, and writes its tokens and what it is given.
    position = 2 * 2 * 32 * 4 * 128
    assert it.prefill(1024, 3072).cache_bytes == position * (4096 + 256 + 3 / 4 * 4096)


def test_latent_attention_by_hand():
    """Decoding reads one latent and rotary key per position, for all heads, and works on them; prefill expands them. A
    TPU pads none of the 576 numbers."""
    it = deployed("deepseek-v2-lite", "v5e-1", "tp=1")
    assert it.decode(4, 1000).cache_bytes == 2 * 27 * 576 * (4 * 1000 + 4)
    more = it.decode(4, 2000).flops - it.decode(4, 1000).flops
    assert more == 2 * 27 * 4 * 16 * (512 + 64 + 512) * 1000
    more = it.prefill(512, 2000).flops - it.prefill(512, 1000).flops
    assert more == 2 * 27 * 16 * 1000 * (512 * (128 + 64 + 128) + 512 * (128 + 128))


def test_shared_caches_by_hand():
    """20 of 35 layers hold a cache, 4 of them of all positions; all layers read one. Of the tables, the one that is the
    head is read."""
    it, rows, live = deployed("gemma3n-e4b", "v5e-4", "tp=1,dp=4"), 3, 4000
    position = 2 * 2 * 2 * 256
    work = it.decode(rows, live)
    assert work.cache_bytes == position * rows * (7 * live + 28 * (512 + 1) + 20)
    assert it.memory(4 * rows, 8192, 512).cache == position * rows * (4 * 8192 + 16 * (512 + 512))
    assert work.weight_bytes == it.model.nbytes - 2 * 262400 * 35 * 256


def test_a_decode_step_of_experts_by_hand():
    """8 of 128 experts; of 16 on each of 8 devices, those that any of all rows chose are read."""
    rows, layers, expert = 4, 48, 3 * 2048 * 768
    alone, split = (deployed("qwen3-30b-a3b", target, mesh) for target, mesh in (("v5e-1", "tp=1"), ("v5e-8", "ep=8")))
    others = 30_532_122_624 - layers * 128 * expert - 151936 * 2048
    for it, experts, tokens in ((alone, 128, rows), (split, 16, 8 * rows)):
        work = it.decode(rows, live=1000)
        read = experts * (1 - (120 / 128) ** tokens)
        assert work.weight_bytes == pytest.approx(2 * (others + layers * read * expert))
        assert work.weight_bytes < it.memory(8 * rows, 2048, 512).weights
        norms = layers * (2 * 2048 + 2 * 128) + 2048
        attention = 4 * rows * layers * 32 * 128 * 1000
        assert work.flops == pytest.approx(2 * rows * (others - norms + layers * 8 * expert) + attention)
    # What explain says of a step.
    (step,) = explain(
        split.model,
        split.plan(32, 2048, 1),
        EngineConfig.make("tpu", 32, 2048, shards=split.shards),
        [ProgramKey("greedy", rows, 2048)],
    ).steps
    assert step.expert_bytes == round(2 * layers * read * expert)


def test_windows_bound_what_is_read():
    it = deployed("gemma3-4b", "v5e-1", "tp=1")
    per_position = 2 * 2 * 4 * 256
    local, whole = 29, 5  # layers
    more = it.decode(1, 30000).cache_bytes - it.decode(1, 20000).cache_bytes
    assert more == per_position * whole * 10000
    assert it.decode(1, 20000).cache_bytes == per_position * (whole * 20001 + local * (1024 + 2))


def test_prefill_is_bound_by_compute_and_decode_by_memory():
    it = deployed("llama3-70b", "v5e-8", "tp=8")
    assert step_time(it.prefill(4096, 0), it.network).bound == "compute"
    assert step_time(it.decode(1, 1000), it.network).bound == "memory"
    # Operations grow with the prompt a little faster than its length: attention sees more.
    ratio = it.prefill(4096, 4096).flops / it.prefill(4096, 0).flops
    assert 1 < ratio < 1.2


# ---- measurements


def palm(parallel: bool = True) -> ModelConfig:
    """PaLM-540B with its 48 heads padded to 64, as the paper ran it."""
    attention = AttentionSpec(heads=64, kv_heads=1, head_dim=256, scale=1 / 16, rope=RopeSpec(256, 1e4))
    layer = LayerSpec(attention, MlpSpec(4 * 18432), parallel=parallel)
    return ModelConfig("palm", 256_000, 18432, (layer,) * 118, context=2048, tied=True)


def test_palm_540b_on_64_tpu_v4():
    """Table 2 of Pope et al. 2022: 64 tokens after 2048 in 1.82 s (int8, batch 64) and 6.0 s (bfloat16, batch 512);
    2048 tokens in 0.29 s (int8, batch 1), and in 85.2 s at batch 512, an MFU of 76 %."""
    v4 = parse_target("v4:4x4x4")
    network = place(v4, (("yz", 16), ("x", 4)))

    def stationary(*sizes, int8=False) -> float:
        return step_time(weight_stationary_2d(palm(), network, *sizes, int8=int8), network).seconds

    live = 2048 + 64 / 2
    assert stationary(64, 1, live, int8=True) == pytest.approx(1.82 / 64, rel=0.25)
    assert stationary(64, 1, live, int8=True) == pytest.approx(0.029, rel=0.25)
    assert stationary(512, 1, live) == pytest.approx(6.0 / 64, rel=0.25)
    assert stationary(1, 2048, 1024, int8=True) == pytest.approx(0.29, rel=0.25)
    prefill = step_time(weight_gathered(palm(), network, 512, 2048, 1024), network).seconds
    assert prefill == pytest.approx(85.2, rel=0.25)
    mfu = 2 * 540e9 * 512 * 2048 / (prefill * 64 * 275e12)
    assert mfu == pytest.approx(0.76, rel=0.25)
    # Gathering weights pays for many tokens only.
    assert prefill < stationary(512, 2048, 1024)
    assert stationary(1, 2048, 1024) < step_time(weight_gathered(palm(), network, 1, 2048, 1024), network).seconds


def test_serial_layers_cost_palm_a_seventh():
    """Section 4.3: a decode step at batch 512 takes 14 % longer where attention and feed-forward follow one another."""
    network = place(parse_target("v4:4x4x4"), (("yz", 16), ("x", 4)))
    serial, parallel = (
        step_time(weight_stationary_2d(palm(kind), network, 512, 1, 2080), network).seconds for kind in (False, True)
    )
    assert serial / parallel == pytest.approx(1.14, rel=0.1)


def test_llama_70b_int8_on_16_v5e():
    """jax-llm-examples: 159 tokens/s of each of 8 sequences. The cache is assumed to hold a thousand tokens each. As in
    ours, XLA multiplies by the weights, and fetches them during collectives."""
    it = deployed("llama3-70b", "v5e-16", "tp=16", "int8")
    ours = it.decode(8, 1000)
    assert ours.ahead_bytes > 0
    step, measured = step_time(replace(ours, small=0.0), it.network), 1 / 159
    assert step.seconds < step_time(replace(ours, ahead_bytes=0.0), it.network).seconds
    assert step.bound == "memory"
    assert 0.85 < step.floor / measured < 1.0
    assert step.seconds == pytest.approx(measured, rel=0.25)


MEASURED = measurements("h200-decode")


@pytest.mark.parametrize("of", MEASURED["steps"], ids=lambda of: f"{of['model']}-{of['weights']}")
def test_decode_steps_measured_on_h200(of):
    """Within 10 % at every number of rows, whichever kernels multiply by the weights then."""
    hf = load(of["model"])
    (quantization,) = formats(described_quantization(hf, config_from_hf(hf)), of["weights"])
    it = Deployed(config_from_hf(hf), parse_target(MEASURED["target"]), Parallelism(), quantization)
    for rows, ms in of["ms"].items():
        step = step_time(it.decode(rows, MEASURED["cache"]), it.network)
        assert step.floor < 1e-3 * ms
        assert 1e3 * step.seconds == pytest.approx(ms, rel=0.1), rows


DRAFTS = measurements("h100-drafts")


@pytest.mark.parametrize("of", DRAFTS["steps"], ids=lambda of: f"{of['model']}-{of['rows']}")
def test_verification_measured_on_h100(of):
    """Within 10 % at every number of drafts."""
    it = Deployed(config_from_hf(load(of["model"])), parse_target(DRAFTS["target"]), Parallelism())
    for tokens, ms in of["ms"].items():
        step = step_time(it.decode(of["rows"], DRAFTS["cache"], drafts=tokens - 1), it.network)
        assert step.floor < 1e-3 * ms
        assert 1e3 * step.seconds == pytest.approx(ms, rel=0.1), tokens


def test_llama_405b_with_drafts_on_trn2():
    """AWS's tutorial for one trn2.48xlarge: 37.9 ms a token in bfloat16, and 8.27 in FP8 with 7 drafts of a 1B model.

    It does not say how many drafts stand. Ours is 0.76 of the first: it has no time of the host and of launches. It
    agrees with the second if about 70 % stand.
    """
    whole, eights = deployed("llama3-405b", "trn2:4x4", "tp=64"), deployed("llama3-405b", "trn2:4x4", "tp=64", "fp8")
    draft = replace(eights, config=config_from_hf(load("llama3-1b")))
    step = lambda it, drafts=0: 1e3 * step_time(it.decode(1, 2048, drafts=drafts), it.network).seconds  # noqa: E731
    assert step(whole) == pytest.approx(28.8, rel=0.02)
    drafted = step(eights, 7) + 7 * step(draft)
    tokens = Drafts(Speculation(tokens=7), 0.7).tokens(7)
    assert drafted / tokens == pytest.approx(8.27, rel=0.05)


@pytest.mark.parametrize(("name", "compiled"), measurements("tpu-compiled")["plans"].items())
def test_steps_compiled_for_tpus(name, compiled):
    """Within 15 % of the TPU compiler's programs of scanned layers."""
    plan = load_plan(name)
    it, limit = plan.deployed, plan.cache[-1]
    decode = {rows: replace(it.decode(rows, limit), ahead_bytes=0.0) for rows in compiled["decode"]}
    steps = {f"decode {rows}": (decode[rows], ms) for rows, ms in compiled["decode"].items()}
    steps |= {f"prefill {n}": (it.prefill(n, limit - n), ms) for n, ms in compiled["prefill"].items()}
    for step, (work, ms) in steps.items():
        assert 1e3 * step_time(work, it.network).seconds == pytest.approx(ms, rel=0.15), step


def test_every_plan_has_been_compiled():
    assert set(measurements("tpu-compiled")["plans"]) == set(plan_names())


def test_unpacking_is_worth_it_for_few_rows_only():
    """MXFP4 decodes one row in half the time of bfloat16, and 64 rows in twice the time."""
    packed, whole = deployed("llama3-8b", "cuda:h200", "tp=1", "mxfp4"), deployed("llama3-8b", "cuda:h200", "tp=1")
    one, many = ([step_time(it.decode(rows, 2048), it.network) for it in (packed, whole)] for rows in (1, 64))
    assert one[0].seconds < 0.6 * one[1].seconds
    assert many[0].seconds > 1.5 * many[1].seconds
    assert (many[0].bound, many[1].bound) == ("compute", "memory")


@pytest.mark.parametrize(("batch", "measured"), [(1, 11.00e-3), (16, 12.10e-3), (64, 16.43e-3)])
def test_own_decode_steps_on_four_h200(batch, measured):
    """docs/benchmarks.md, a cache of 2048 tokens."""
    it = deployed("llama3-70b", "cuda:h200-4", "tp=4")
    step = step_time(it.decode(batch, 2048), it.network)
    assert step.floor < measured
    assert step.seconds == pytest.approx(measured, rel=0.25)
