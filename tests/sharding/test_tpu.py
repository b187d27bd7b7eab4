"""The collectives in what the TPU compiler makes of decode steps, against what `explain` promises. No TPU is needed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from inferlib.aot.compile import environment
from inferlib.targets import parse_target

ROOT = Path(__file__).parents[2]
TOPOLOGY, PRESETS = "v6e:2x4", ["tp=4,dp=2", "cp=2,tp=4", "cp=4,tp=2,rules=helix", "cp=2,tp=4,rules=tp2d"]
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.release
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'jax[tpu]'")
def test_tpu_compiled_collectives_are_those_promised():
    """The compiler lives in a process of its own: it may abort, and takes the accelerator for itself where there is
    one."""
    child = subprocess.run(
        [sys.executable, __file__, TOPOLOGY, *PRESETS],
        env=environment(parse_target(TOPOLOGY)) | {"PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    assert child.stdout.split() == PRESETS


def compile_and_compare(topology: str, presets: list[str]) -> None:
    """Prints each preset whose program kept its promise. Layers are unrolled: loops do not say how often they run."""
    from collections import Counter

    from jax.experimental import topologies

    from inferlib.buckets import Buckets
    from inferlib.cache.plan import plan_cache
    from inferlib.config import EngineConfig
    from inferlib.models.abstract import abstract_model
    from inferlib.models.families import config_from_hf
    from inferlib.programs.keys import ProgramKey
    from inferlib.programs.program_set import ProgramSet
    from inferlib.sharding.mesh import Parallelism
    from inferlib.sharding.shards import make_shards
    from tests.helpers.hlo import assert_collectives_equal

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    for parallel in presets:
        shards = make_shards(Parallelism.parse(parallel), devices)
        model = abstract_model(config_from_hf(MODEL), "float32", shards=shards)
        config = EngineConfig(8, 2048, Buckets((512,), (8,), (2048,)), platform="tpu", shards=shards)
        plan = plan_cache(model, rows=8, max_len=2048, chunk=512, dtype="float32")
        # Two hosts: each takes the tokens of all rows. The compiler makes an all-reduce of that all-gather.
        output = Counter({("all-reduce", "data", 4 * config.max_batch): 1} if shards.replicas > 1 else {})
        assert_collectives_equal(ProgramSet(model, plan, config), ProgramKey("greedy", config.rows, 2048), output)
        print(parallel, flush=True)


if __name__ == "__main__":
    compile_and_compare(sys.argv[1], sys.argv[2:])
