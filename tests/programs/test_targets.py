"""Targets: their names, figures and errors; the TPU compiler knows their topologies. About 10 s."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from inferlib.cli import app
from inferlib.planning.network import place
from inferlib.targets import CHIPS, TargetError, parse_target, target_names


@pytest.mark.parametrize(
    ("text", "name", "devices", "accelerator"),
    [
        ("cpu", "cpu", 1, ""),
        ("cuda-4", "cuda-4", 4, ""),
        ("cuda:h200", "cuda:h200", 1, ""),
        ("cuda:H200-4", "cuda:h200-4", 4, ""),
        ("tpu:v5e-8", "v5e:2x4", 8, "v5litepod-8"),
        (" v5e:2x4", "v5e:2x4", 8, "v5litepod-8"),
        ("v5litepod-16", "v5e:4x4", 16, "v5litepod-16"),
        ("v6e-64", "v6e:8x8", 64, "v6e-64"),
        ("v5p-8", "v5p:2x2x1", 4, "v5p-8"),
        ("v5p:4x4x4", "v5p:4x4x4", 64, "v5p-128"),
        ("v5p-384", "v5p:4x4x12", 192, "v5p-384"),
        ("v7x-8", "v7x:2x2x1", 8, "tpu7x-8"),
        ("tpu7x:2x2x1", "v7x:2x2x1", 8, "tpu7x-8"),
        ("v4-128", "v4:4x4x4", 64, "v4-128"),
        ("trn2", "trn2", 4, ""),
        ("trn2-16", "trn2-16", 64, ""),
        ("trn3", "trn3", 4, ""),
    ],
)
def test_spellings(text, name, devices, accelerator):
    target = parse_target(text)
    assert (target.name, target.devices, target.accelerator_type) == (name, devices, accelerator)


@pytest.mark.parametrize("name", target_names())
def test_every_name_is_read_back(name):
    target = parse_target(name)
    assert parse_target(target.name) == target
    assert pickle.loads(pickle.dumps(target)) == target
    assert target.hbm_bytes * target.devices <= target.chip.hbm_bytes * target.chips


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v6-8", "did you mean v6e-8"),
        ("tpu:h200", "did you mean cuda:h200"),
        ("banana", "v5p:4x4x4"),
        ("", "no target is called ''"),
        ("v5e", "needs a size: v5e comes as v5e-1, v5e-4, v5e-8"),
        ("v5e-3", "v5e-4, v5e-8"),
        ("v5e:4x2", "2x2, 2x4, 4x4"),
        ("v5p-6", "TensorCores, two a chip"),
        ("v5p:4x4x6", "4x4x8"),
        ("cuda:h200-3", "cuda:h200-4"),
        ("trn2-8", "trn2-16"),
        ("cpu-0", "cpu-2"),
    ],
)
def test_errors_name_what_there_is(text, message):
    with pytest.raises(TargetError) as error:
        parse_target(text)
    assert message in str(error.value)


def test_figures_are_plausible():
    for chip in CHIPS.values():
        assert chip.source
        if chip.hbm_bytes:
            # A machine balance in FLOPs per byte, and a link that is slower than the memory.
            assert 100 < chip.flops["bfloat16"] / chip.hbm_bandwidth < 1000
            assert chip.link_bandwidth < chip.hbm_bandwidth
            assert chip.rate("int8") >= chip.rate("bfloat16") == chip.rate("int3")
        if chip.torus:
            assert chip.links == 2 * chip.torus


def test_command():
    everything = json.loads(CliRunner().invoke(app, ["targets", "--json"]).output)
    assert {chip["name"] for chip in everything["chips"]} == set(CHIPS)
    one = json.loads(CliRunner().invoke(app, ["targets", "v5p-8", "--json"]).output)
    assert (one["devices"], one["chip"]["hbm_bandwidth"]) == (4, 2765e9)
    table = CliRunner().invoke(app, ["targets"])
    assert table.exit_code == 0
    assert all(name in table.output for name in target_names())
    wrong = CliRunner().invoke(app, ["targets", "v6-8"])
    assert wrong.exit_code == 2
    assert "v6e-8" in wrong.output


# ---- the TPU compiler's own topologies, asked for in a process of its own

with_compiler = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install 'inferlib[tpu]'")


def ask_compiler(code: str, argument) -> dict:
    """What `code`, given `devices(name, options)` and `argument`, leaves in `answer`."""
    code = f"""
import json, sys
from jax.experimental import topologies
def devices(name, options):
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
argument = json.loads(sys.argv[1])
{code}
print(json.dumps(answer))
"""
    env = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}
    env |= {"TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_LOG_DIR": "disabled"}
    command = [sys.executable, "-c", code, json.dumps(argument)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
@with_compiler
def test_the_compiler_has_these_slices():
    targets = [parse_target(name) for name in target_names()]
    targets = [t for t in targets if t.platform == "tpu" and t.devices <= 512]
    code = "answer = {name: len(devices(name, options)) for name, options in argument}"
    counts = ask_compiler(code, [(t.topology_name, dict(t.topology_options)) for t in targets])
    assert counts == {t.topology_name: t.devices for t in targets}


@pytest.mark.slow
@with_compiler
def test_meshes_lie_where_jax_lays_them():
    """The chips along each axis of the network, and the devices of a chip, that a row of the tensor axis spans."""
    code = """
import jax
answer = []
for name, options, data, tensor in argument:
    row = jax.make_mesh((data, tensor), ("data", "tensor"), devices=devices(name, options)).devices[0]
    spans = [len({d.coords[i] for d in row}) for i in range(3)]
    answer.append([sorted(n for n in spans if n > 1), len({d.core_on_chip for d in row})])
"""
    meshes = []
    for name in ("v5e-8", "v5e-16", "v5e-256", "v6e-8", "v5p-8", "v5p-64", "v7x-8", "v7x-16", "v4-128"):
        target = parse_target(name)
        meshes += [(target, target.devices // n, n) for n in (2, 4, 8, 16, 32) if target.devices % n == 0]
    # JAX orders the eight chips of one host its own way, and v4's cube it does not split.
    meshes = [
        (t, d, n) for t, d, n in meshes if (t.topology, n) != ((2, 4), 4) and (t.chip.name != "v4" or n in (4, 16))
    ]
    ours = []
    for target, data, tensor in meshes:
        span = place(target, (("data", data), ("tensor", tensor))).spans["tensor"]
        ours.append([sorted(size for size, _ in span.dims), span.die])
    assert ours == ask_compiler(code, [(t.topology_name, dict(t.topology_options), d, n) for t, d, n in meshes])
