"""`inferlib doctor`: its checks find what is wrong, and its report tells nothing private. About 20 s."""

from __future__ import annotations

import json

import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from inferlib.cli import app
from inferlib.doctor import kernels, rates, steps, trials
from inferlib.doctor.examine import examine
from inferlib.doctor.findings import DoctorReport, Finding, public
from inferlib.doctor.installation import chip_of
from inferlib.doctor.trials import TOLERANCE, Trial
from inferlib.option_checks import ConfigurationError
from inferlib.targets import CHIPS
from inferlib.tuning.kernel_cases.mx_matmul import MxMatmul


def test_the_command_writes_a_report(tmp_path):
    out = tmp_path / "report"
    words = ["doctor", "--only", "installation,kernel", "--case", "int8", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    facts = json.loads(out.with_suffix(".json").read_text())
    assert json.loads(result.stdout) == facts
    assert facts["ok"]
    (case,) = (finding for finding in facts["findings"] if finding["name"].startswith("product"))
    assert case["status"] == "ok"
    assert 0 < case["figures"]["error"] < TOLERANCE
    text = out.with_suffix(".txt").read_text()
    assert "Nothing is wrong" in text
    assert "this is a CPU" in text
    assert str(tmp_path) not in text


@pytest.mark.slow
def test_a_wrong_kernel_is_found(monkeypatch, tmp_path):
    right = trials.product(MxMatmul("int8", 4, 256, 128), "pallas_tpu")
    wrong = Trial(lambda *arrays: right.kernel(*arrays).at[2, 5:].multiply(1.2), right.oracle, right.arrays)
    assert right.error() < TOLERANCE < wrong.error()
    broken = kernels.Check("product", "broken", lambda: wrong)
    fails = kernels.Check("product", "fails", lambda: 1 / 0)
    monkeypatch.setattr(kernels, "checks", lambda *of: [broken, fails])
    result = CliRunner().invoke(app, ["doctor", "--only", "kernel", "--out", str(tmp_path / "report")])
    assert result.exit_code == 1
    assert "2 of 3 are wrong" in result.stdout
    assert "ZeroDivisionError" in result.stdout


def test_nan_is_an_error_unless_both_have_it():
    x = jnp.ones((2, 4))
    spoilt = x.at[1].set(jnp.nan)
    error = lambda got, want: Trial(lambda x: got, lambda x: want, (x,)).error()  # noqa: E731
    assert error(spoilt, spoilt) == 0
    assert error(spoilt, x) == error(x, spoilt) == float("inf")
    assert error(jnp.arange(3), jnp.arange(3)) == 0
    assert error(jnp.arange(3), jnp.arange(1, 4)) == float("inf")


@pytest.mark.parametrize(
    ("name", "text"), [("only", "no area 'speed'"), ("cases", "no kernel's name or case has 'nothing'")]
)
def test_unknown_names(name, text):
    with pytest.raises(ConfigurationError, match=text):
        examine(**{"only": ["kernel"], name: ["speed"] if name == "only" else "nothing"})


def test_a_report_has_no_folders():
    assert public("FileNotFoundError: /home/someone/lib/a b.py: no\nC:\\Users\\me\\x.py") == (
        "FileNotFoundError: a b.py: no x.py"
    )
    assert len(public("x" * 1000)) < 400


class Device:
    def __init__(self, platform: str, kind: str):
        self.platform, self.device_kind = platform, kind


@pytest.mark.parametrize(
    ("platform", "kind", "chip"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", "h100"),
        ("gpu", "NVIDIA H100 PCIe", None),
        ("gpu", "NVIDIA H200", "h200"),
        ("gpu", "NVIDIA A100-SXM4-40GB", None),
        ("tpu", "TPU v6 lite", "v6e"),
        ("cpu", "cpu", None),
    ],
)
def test_data_sheets(platform, kind, chip):
    sheet = chip_of(Device(platform, kind))
    assert (sheet and sheet.name) == chip


def test_rates_are_held_to_the_data_sheet():
    slow = rates._compared("copy", 100e9, 1000e9, rates.LEAST_COPY, "GB/s", 1e9)
    fast = rates._compared("copy", 900e9, 1000e9, rates.LEAST_COPY, "GB/s", 1e9)
    assert (slow.status, fast.status) == ("wrong", "ok")
    assert not DoctorReport((slow, fast)).ok


@pytest.mark.parametrize("name", [name for name, chip in CHIPS.items() if chip.hbm_bytes and chip.platform != "neuron"])
def test_every_chip_has_an_estimate(name):
    from inferlib.configs import load
    from inferlib.models.families import config_from_hf

    seconds = steps.estimate(config_from_hf(load("llama3-1b")), CHIPS[name], 8, 1024)
    assert seconds is None if CHIPS[name].devices > 1 else 1e-4 < seconds < 1e-2


@pytest.mark.slow
def test_rates_and_steps_on_this_device(monkeypatch):
    monkeypatch.setattr(steps, "_ON_CPU", {"num_hidden_layers": 1, "vocab_size": 256})
    monkeypatch.setattr(steps, "_PROMPT", 248)  # of 256 positions, so that rows have some steps, not hundreds
    copy, product = rates.copy_bandwidth, rates.product_rate
    monkeypatch.setattr(rates, "copy_bandwidth", lambda count, loops: copy(count >> 8, loops))
    monkeypatch.setattr(rates, "product_rate", lambda size, *more: product(size >> 3, *more))
    report = examine(["rate", "step"])
    assert report.ok, str(report)
    assert len(report.findings) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", {check.kernel: check for check in kernels.checks("gpu")}.values(), ids=lambda x: x.kernel
)
def test_checks_of_gpus_lower(check):
    """One case of each kernel."""
    import jax

    from tests.helpers.kernels import lowered_for_cuda

    made: list[Trial] = []

    def draw():
        made.append(check.make())
        return made[0].arrays

    arrays = jax.eval_shape(draw)
    assert "xla.gpu.triton" in lowered_for_cuda(made[0].kernel, *arrays)


def test_findings_are_shown_in_one_table():
    report = DoctorReport((Finding("kernel", "a", "ok", "fine"), Finding("kernel", "b [x]", "note", "[y]")))
    assert "b [x]" in str(report)
    assert report._repr_html_().count("<tr>") == 3
