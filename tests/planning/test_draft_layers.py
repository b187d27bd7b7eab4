"""What a layer that drafts takes by the cost model: bytes counted by hand, and plans with them."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest

from inferlib import Speculation, Workload, configs, plan
from inferlib.checkpoint.eagle3 import Eagle3Files
from inferlib.deploy.plan import drafts_option
from inferlib.deploy.source import model_source
from inferlib.models.config import ConfigError
from inferlib.models.families import config_from_hf
from inferlib.option_checks import ConfigurationError
from inferlib.planning.costs import Deployed
from inferlib.planning.draft_layers import DeployedLayer
from inferlib.planning.drafts import Drafts
from inferlib.planning.planner import Option
from inferlib.sharding import axes
from inferlib.sharding.mesh import Parallelism
from inferlib.targets import parse_target
from tests.helpers.eagle3 import make_head


def on(name: str, target: str, parallel: str) -> Deployed:
    return Deployed(config_from_hf(configs.load(name)), parse_target(target), Parallelism.parse(parallel))


def test_the_layer_of_a_model_reads_its_projection_and_the_models_head():
    """Per draft: a layer like the last one, two widths to one, and the head; which is no memory of its own."""
    target = on("deepseek-v3", "v6e-64", "tp=64")
    layer, dim, vocab = DeployedLayer.of(target, None), 7168, 129280
    projection = next(m for m in layer.matrices if m.elements == 2 * dim * dim)
    assert projection.nbytes == 2 * projection.elements
    (head,) = (m for m in layer.matrices if m.use == "sampled")
    assert head.nbytes == 2 * dim * vocab // 64
    weights = sum(m.nbytes for m in layer.matrices) - head.nbytes
    assert layer.memory(8, 1024, 512).weights == weights
    assert layer.decode(1, 1024).weight_bytes < weights
    assert layer.decode(1, 1024).collectives


def test_a_head_reads_itself(tmp_path, checkpoint):
    path = checkpoint("llama", num_hidden_layers=3)
    folder: Path = make_head(tmp_path / "head", path, 20)
    source = model_source(path)
    head = Eagle3Files.open(folder, source.config).config
    target = Deployed(source.config, parse_target("v5e-1"), Parallelism())
    layer = DeployedLayer.of(target, head)
    fused = math.prod((3 * head.target_dim, head.model.dim))
    assert fused in {m.elements for m in layer.matrices}
    assert layer.memory(1, 64, 8).weights == sum(m.nbytes for m in layer.matrices)
    assert drafts_option(f"eagle3:{folder}:3", 0.5, source) == Drafts(Speculation("eagle3", 3, folder), 0.5, head=head)


@cache
def options(drafting: bool) -> list[Option]:
    """Plans of five layers of DeepSeek-V3, two of them of experts, for four requests."""
    drafts = Drafts(Speculation("mtp", 3), 0.8) if drafting else None
    model = configs.load("deepseek-v3") | {"num_hidden_layers": 5}
    return plan(model, "v6e-16", Workload(1024, 256, 4), drafts=drafts).ranking.options


@pytest.mark.slow
def test_plans_draft_where_layers_pay():
    without, drafting = options(False), options(True)
    drafted = next(o for o in drafting if o.drafts)  # the best mesh may split positions
    mesh = drafted.deployed.parallel, drafted.batch, drafted.deployed.weights
    alike = (o for o in without if (o.deployed.parallel, o.batch, o.deployed.weights) == mesh)
    assert 0 < drafted.drafting < drafted.decode.seconds
    assert drafted.throughput > max(o.throughput for o in alike)


@pytest.mark.slow
def test_meshes_that_split_positions_draft_too():
    """On TPUs each query of a row reads the row's cells, as those that they see are no range of a device's."""
    split = [o for o in options(True) if o.deployed.shards.size(axes.POSITIONS) > 1]
    assert split
    assert any(o.drafts for o in split)
    deployed = max(split, key=lambda o: o.drafts).deployed
    four, one = (deployed.decode(2, 4096, drafts=count).cache_bytes for count in (3, 0))
    assert four == pytest.approx(4 * one, rel=0.01)


def test_what_has_no_layer_is_named():
    with pytest.raises(ConfigError, match="llama has no layer for predicting further tokens"):
        plan("llama3-8b", "v6e-8", Workload(512, 128, 4), drafts=Drafts(Speculation("mtp", 3), 0.8))
    with pytest.raises(ConfigurationError, match="need a head"):
        Drafts(Speculation("eagle3", 3, "somewhere"), 0.8)
    with pytest.raises(ConfigurationError, match="have no model"):
        Drafts(Speculation("mtp", 3), 0.8, config_from_hf(configs.load("llama3-1b")))
