"""Rows, tiles and buckets that each kind of device gets by default."""

from __future__ import annotations

import pytest

from inferlib import configs
from inferlib.buckets import Buckets
from inferlib.config import DeviceKind, EngineConfig, EngineOptions
from inferlib.models.families import config_from_hf


def resolved(name: str, platform: str) -> EngineConfig:
    return EngineOptions().resolve(DeviceKind(platform), None, config_from_hf(configs.load(name)))


@pytest.mark.parametrize(
    ("name", "rows", "tile"),
    [
        ("llama3-8b", 512, 32),
        ("phi3-mini", 512, 64),  # as many keys as queries
        ("deepseek-v2-lite", 64, None),  # latents: whole cache buckets, no tiles
    ],
)
def test_a_gpu_gets_rows_and_tiles_that_suit_its_kernels(name, rows, tile):
    config = resolved(name, "gpu")
    assert (config.max_batch, config.buckets.tile) == (rows, tile)
    assert config.buckets.batch[-1] == rows


def test_details_have_a_program_even_if_every_bucket_is_large():
    buckets = Buckets(prefill=(2048, 8192), batch=(64,), cache=(2304,), tile=128)
    config = EngineConfig.make("gpu", 64, 2304, buckets)
    assert config.detail_shapes() == ((16, 128),)
