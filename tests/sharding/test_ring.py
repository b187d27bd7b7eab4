"""Programs whose products take place with their collective: same logits, what `explain` says, where weights lie. About
20 s."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from inferlib import configs
from inferlib.buckets import Buckets
from inferlib.config import DeviceKind, EngineConfig
from inferlib.engine.engine import Engine
from inferlib.engine.sequence import Sequence
from inferlib.models.abstract import abstract_model
from inferlib.models.families import config_from_hf
from inferlib.ops.backend import Backend
from inferlib.planning.explain import Collective, Step, explain
from inferlib.planning.network import ATTAINED, IDEAL, place
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program_set import ProgramSet
from inferlib.sharding.mesh import Parallelism, ring_of
from inferlib.sharding.shards import make_shards, planned_shards
from inferlib.targets import parse_target
from tests.sharding.conftest import GREEDY, run

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "mlp_bias": True,
    "tie_word_embeddings": False,
}


@pytest.mark.slow
def test_a_model_gives_the_same_logits():
    """Of stacked layers; one product is compared in `tests/kernels`."""
    shards, result = make_shards(Parallelism.parse("tp=2,rules=tp_sp")), []
    config = config_from_hf(SMALL | {"num_hidden_layers": 2})
    model = abstract_model(config, "float32", scan=True, shards=shards)
    weights = model.random_weights(1, shards)
    tokens = np.random.default_rng(0).integers(3, 131, 250).tolist()
    for kernel in ("xla", "pallas_tpu"):
        sizes = 2, 512, Buckets((270,), (2,), (512,))  # 135 tokens a device, padded to 144
        settings = EngineConfig(*sizes, scan=True, shards=shards, backend=Backend(collective_matmul=kernel))
        programs = ProgramSet.make(model, settings)
        key = ProgramKey("greedy", 0, 512, chunks=1, chunk=270, detail="logits")
        assert ("fused all-gather" in kinds(programs, key)) == (kernel == "pallas_tpu")
        engine = Engine(model, weights, settings, programs=programs)
        (s,) = run(engine, [Sequence(tokens, GREEDY, 0, 0, detail="logits")])
        result.append(np.concatenate(s.prompt_details)[:, : config.vocab])
    assert np.std(result[0]) > 0.02
    np.testing.assert_allclose(result[1], result[0], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(*(logits.argmax(-1) for logits in result))


def kinds(programs: ProgramSet, key: ProgramKey) -> dict[str, set[str]]:
    """The purposes of collectives of each kind."""
    step, result = step_of(programs, key), {}
    for c in step.collectives:
        result.setdefault(c.kind, set()).add(c.purpose)
    return result


def step_of(programs: ProgramSet, key: ProgramKey) -> Step:
    return explain(programs.model, programs.plan, programs.config, [key]).steps[0]


def planned(parallel: str = "tp=8,rules=tp_sp", cores: int = 1, name: str = "llama3-8b", **options) -> ProgramSet:
    shards = planned_shards(Parallelism.parse(parallel))
    model = abstract_model(config_from_hf(configs.load(name)), "bfloat16", scan=True, shards=shards, **options)
    buckets = Buckets((512, 2048), (256,), (4096,))
    return ProgramSet.make(model, EngineConfig.make(DeviceKind("tpu", cores), 256, 4096, buckets, shards))


@pytest.mark.parametrize(
    ("chunk", "rows", "fused"), [(2048, 0, True), (2048, 256, True), (512, 0, False), (0, 256, False)]
)
def test_products_of_enough_rows_take_place_with_their_collective(chunk, rows, fused):
    programs = planned()
    result = kinds(programs, ProgramKey("greedy", rows, 4096, chunks=bool(chunk), chunk=chunk))
    gathered, summed = {"input of attention", "input of feed-forward"}, {"attention", "feed-forward"}
    if fused:
        assert (result["fused all-gather"], result["fused reduce-scatter"]) == (gathered, summed)
        assert (result["all-gather"], result["reduce-scatter"]) == ({"head", "best token"}, {"embedding"})
    else:
        assert result["all-gather"] == gathered | {"head", "best token"}
        assert result["reduce-scatter"] == summed | {"embedding"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"cores": 2}, set()),  # XLA multiplies on both
        ({"parallel": "tp=8"}, set()),
        ({"name": "llama3-1b"}, {"fused all-gather", "fused reduce-scatter"}),
    ],
)
def test_where_the_kernels_do_not_run_xla_does(options, expected):
    result = kinds(planned(**options), ProgramKey("greedy", 0, 4096, chunks=1, chunk=2048))
    assert {kind for kind in result if kind.startswith("fused")} == expected
    if options.get("name") == "llama3-1b":  # heads of 64
        assert "input of attention" in result["all-gather"]


def test_what_a_product_does_not_hide_of_its_collective_is_the_networks():
    network = place(parse_target("v5e:2x4"), (("tensor", 8),))
    step = step_of(planned(), ProgramKey("greedy", 0, 4096, chunks=1, chunk=2048))
    small, large = (c for c in step.collectives if c.kind == "fused all-gather")
    assert (small.nbytes, small.count, small.flops) == (2048 * 4096 * 2, 32, 2 * 2048 * 4096 * 768)
    alone = Collective("all-gather", "", "tensor", small.nbytes)
    assert network.seconds(large, ATTAINED) == 0
    exposed = network.seconds(alone, IDEAL) - small.flops / 197e12
    assert network.seconds(small, IDEAL) == pytest.approx(exposed)
    assert exposed > 0


def test_rings_of_neighbours():
    for sizes, cores in itertools.product(((2, 4, 1), (4, 4, 1), (3, 4, 1), (2, 2, 2), (4, 4, 8), (2, 1, 1)), (1, 2)):
        places = [place for place in itertools.product(*map(range, sizes)) for _ in range(cores)]
        order = ring_of([SimpleNamespace(coords=place) for place in places])
        assert sorted(order) == list(range(len(places)))
        around = np.array(places)[[*order, order[0]]]
        assert np.abs(np.diff(around, axis=0)).sum(axis=1).max() == 1, sizes
    line = [SimpleNamespace(coords=(0, y, 0)) for y in (2, 0, 1, 3)]
    assert ring_of(line) == (1, 2, 0, 3)
    assert ring_of([SimpleNamespace(id=1), SimpleNamespace(id=0)]) == (0, 1)
