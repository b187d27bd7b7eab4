"""Everything that `inferlib doctor` looks at, in order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax

from inferlib.doctor import installation, kernels, rates, steps
from inferlib.doctor.findings import DoctorReport, Finding, public
from inferlib.nki_kernels import verify
from inferlib.option_checks import ConfigurationError
from inferlib.platforms import prepare_jax

AREAS = ("installation", "rate", "kernel", "step")


def examine(
    only: Collection[str] = AREAS,
    *,
    cases: str | None = None,
    started: Callable[[str], None] = lambda name: None,
    done: Callable[[Finding], None] = lambda finding: None,
) -> DoctorReport:
    """Look at this machine's installation, and at its default device's rates, kernels and step times.

    only: areas of `AREAS`. cases: only kernels whose name or case has this text. started, done: called before and after
    each part. Raises ConfigurationError for an unknown area, or if no case has the text.
    """
    if unknown := [area for area in only if area not in AREAS]:
        raise ConfigurationError(f"no area {unknown[0]!r}; there are {', '.join(AREAS)}")
    prepare_jax()
    findings: list[Finding] = []
    for finding in _findings(only, cases, started):
        findings.append(finding)
        done(finding)
    return DoctorReport(tuple(findings))


def _findings(only: Collection[str], cases: str | None, started: Callable[[str], None]) -> Iterator[Finding]:
    if "installation" in only:
        started("versions and devices")
        yield from installation.versions()
        seen = list(installation.devices())
        yield from seen
        if seen[0].status == "wrong":  # nothing can run
            return
    device = jax.devices()[0]
    chip = installation.chip_of(device)
    if "rate" in only:
        started("copies and products")
        yield from _safely("rate", lambda: rates.measured(device.platform, chip))
    if "kernel" in only:
        yield from _kernels(device, cases, started)
    if "step" in only and device.platform in steps.PLATFORMS:
        started("decode steps of a small model")
        yield from _safely("step", lambda: steps.measured(chip))


def _kernels(device: Any, cases: str | None, started: Callable[[str], None]) -> Iterator[Finding]:
    checks = kernels.checks(device.platform, device.device_kind)
    chosen = [check for check in checks if cases is None or cases in f"{check.kernel}, {check.case}"]
    if not chosen and not installation.neuron_devices():
        names = "; ".join(dict.fromkeys(check.kernel for check in checks))
        raise ConfigurationError(f"no kernel's name or case has {cases!r}; kernels are {names}")
    if device.platform == "cpu" and chosen:
        text = "this is a CPU: some small ones are interpreted, which says nothing of a chip"
        yield Finding(kernels.AREA, "kernels", "note", text)
    for check in chosen:
        started(f"{check.kernel}, {check.case}")
        yield kernels.run(check)
    if installation.neuron_devices():
        started("kernels for Trainium")
        for result in verify.results():
            good = result.error <= 1
            detail = result.problem or f"{result.error:.2f} of the tolerance"
            name = f"{result.name} (NKI, {result.where})"
            yield Finding(kernels.AREA, name, "ok" if good else "wrong", public(detail), {"error": result.error})


def _safely(area: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings, and one more if an exception ends them."""
    try:
        yield from look()
    except Exception as problem:  # the report tells what failed
        yield Finding(area, "run", "wrong", public(f"{type(problem).__name__}: {problem}"))
