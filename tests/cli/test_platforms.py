"""Platforms that are left alone. A few seconds."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from inferlib import platforms
from tests.helpers.cli_model import make_model

RUN = """
import sys
from inferlib import LLM, SamplingParams

llm = LLM(sys.argv[1], max_batch=1, max_len=32, progress=False)
llm.generate("to be", SamplingParams(max_tokens=2))
print("libtpu" in open("/proc/self/maps").read())
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='needs pip install "jax[tpu]"')
@pytest.mark.skipif(platforms.has_tpu(), reason="there are TPUs")
def test_running_on_a_laptop_does_not_load_the_library_of_tpus(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", RUN, str(make_model(tmp_path, layers=1))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize(
    ("installed", "chips", "chosen", "expected"),
    [
        ({"libtpu"}, False, None, "cpu"),
        ({"libtpu"}, True, None, None),
        ({"libtpu", "jax_cuda13_plugin"}, False, None, None),
        ({"libtpu"}, False, "tpu", "tpu"),
        (set(), False, None, None),
    ],
)
def test_only_an_absent_tpu_is_left_out(installed, chips, chosen, expected, monkeypatch):
    config = SimpleNamespace(jax_platforms=chosen, update=lambda name, value: setattr(config, name, value))
    monkeypatch.setattr(platforms, "jax", SimpleNamespace(config=config))
    monkeypatch.setattr(platforms.importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(platforms, "has_tpu", lambda: chips)
    platforms.leave_out_absent_tpu()
    assert config.jax_platforms == expected


@pytest.mark.parametrize(
    ("module", "function", "arguments"),
    [
        ("calibration.calibrate", "calibrate", ["model", "out"]),
        ("calibration.measured", "calibration.key_bases.measure_key_bases", ["model"]),
        ("calibration.measured", "calibration.key_turns.calibrate_cache", ["model"]),
        ("calibration.measured", "calibration.layer_preferences.measure_layer_preferences", ["model"]),
        ("calibration.fuse", "fuse_feed_forwards", ["model", "out"]),
        ("conversion", "convert", ["model", "out"]),
        ("exporting", "export", ["model", "out"]),
    ],
)
def test_functions_that_compute_prepare_jax(module, function, arguments, monkeypatch):
    """Before anything else, so that libtpu, which is there to compile with, does not start."""

    class Prepared(Exception):
        pass

    def prepared():
        raise Prepared

    monkeypatch.setattr(f"inferlib.{module}.prepare_jax", prepared)
    place, _, name = f"{'' if '.' in function else module + '.'}{function}".rpartition(".")
    run = getattr(importlib.import_module(f"inferlib.{place}"), name)
    with pytest.raises(Prepared):
        run(*arguments, **{} if module in ("conversion", "exporting") else {"data": ["text"]})


@pytest.mark.parametrize(
    ("installed", "chosen", "expected"),
    [({"jax_cuda13_plugin"}, None, "0.9"), ({"jax_cuda13_plugin"}, "0.3", "0.3"), (set(), None, None)],
)
def test_most_of_a_gpu_is_for_the_cache(installed, chosen, expected, monkeypatch):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.setenv(name, chosen or "")  # so that it is restored
    if chosen is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(platforms.importlib.util, "find_spec", lambda name: name if name in installed else None)
    platforms.take_gpu_memory()
    assert os.environ.get(name) == expected
