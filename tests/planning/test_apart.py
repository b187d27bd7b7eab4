"""Two slices without a device: alike, or one that prefills for the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inferlib.buckets import Buckets
from inferlib.config import EngineConfig
from inferlib.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig
from inferlib.planning.apart import SPLITS, simulate_splits
from inferlib.planning.costs import Deployed
from inferlib.planning.planner import PlanError
from inferlib.planning.simulator import simulate
from inferlib.planning.trace import Offer
from inferlib.sharding.mesh import Parallelism
from inferlib.targets import parse_target

CONFIG = EngineConfig(4, 36, Buckets(prefill=(8,), batch=(2, 4), cache=(36,), tile=4), decode_steps=4, page_size=4)


def tiny(window: int | None = None) -> ModelConfig:
    attention = AttentionSpec(heads=1, kv_heads=1, head_dim=8, scale=1.0, rope=None, window=window)
    return ModelConfig("none", vocab=64, dim=8, layers=(LayerSpec(attention, MlpSpec(hidden=8)),), context=64)


def deployed(parallel: str = "tp=1", target: str = "v5e-1", window: int | None = None) -> Deployed:
    return Deployed(tiny(window), parse_target(target), Parallelism.parse(parallel))


def turns(count: int) -> list[Offer]:
    """Chats of three turns, each of which begins as the one before, and long after it."""
    offers = []
    for chat in range(count):
        prompt = tuple((7 * i + 13 * chat) % 64 for i in range(26))
        offers += [Offer(size, 5, 0.001 * chat + turn, prompt[:size]) for turn, size in enumerate((10, 18, 26))]
    return sorted(offers, key=lambda offer: offer.arrival)


def test_every_token_comes_and_prompts_are_handed_over():
    offers = turns(3)
    both, apart, beside = simulate_splits(deployed(), CONFIG, offers)
    assert [split.name for split in (both, apart, beside)] == list(SPLITS)
    for split in (both, apart, beside):
        assert split.service.output_tokens == 5 * len(offers)
        assert min(split.service.ttft) > 0
    assert both.handed == 0
    assert apart.handed == 3 * (8 + 8 + 8)  # of each turn the whole pages that no turn before it had
    assert beside.handed == 3 * (8 + 8)  # of third turns, more than half is cached


def test_a_prompt_alone_takes_a_step_on_each_slice():
    """And what its pages take over a link, which is as good as nothing here."""
    offer = [Offer(9, 1)]
    both, apart, _ = simulate_splits(deployed(), CONFIG, offer)
    one = (
        simulate(deployed(), CONFIG, [Offer(8, 1)]).service.seconds
        + simulate(deployed(), CONFIG, [Offer(1, 1)]).service.seconds
    )
    assert both.service.seconds == simulate(deployed(), CONFIG, offer).service.seconds
    assert apart.service.seconds == pytest.approx(one, rel=0.02)


def test_what_is_refused():
    with pytest.raises(PlanError, match="leave dp and ep out of --parallel"):
        simulate_splits(deployed("dp=4", "v5e-4"), replace(CONFIG, shards=deployed("dp=4", "v5e-4").shards), turns(1))
    with pytest.raises(PlanError, match="layers have a ring or a state"):
        simulate_splits(deployed(window=4), CONFIG, turns(1))
