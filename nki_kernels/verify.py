"""Run every kernel against its oracle: on the chip where NKI is installed, else on the stand-in.

python -m inferlib.nki_kernels.verify
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from inferlib.nki_kernels import cases, simulator
from inferlib.nki_kernels.call import is_gen4, logical_cores


@dataclass(frozen=True)
class Result:
    """A case that ran. where: chip and logical cores. error: as a share of the tolerance, infinite if it did not run;
    problem: why it did not."""

    name: str
    where: str
    error: float
    seconds: float
    problem: str = ""


def main() -> int:
    """Print a line a case; the exit code is 1 if one fails."""
    failed = 0
    if simulator.is_injected():
        print("NKI is not installed: kernels run on the stand-in, on a CPU. This says nothing about a chip's speed.")
    else:
        print("NKI is installed: kernels are compiled and run on this host's NeuronCores.")
    for result in results():
        passed = result.error <= 1
        failed += not passed
        outcome = result.problem or f"{result.error:6.3f} of the tolerance"
        state = "ok    " if passed else "FAILED"
        print(f"{result.where}  {result.name:<44} {state} {outcome}  {result.seconds:5.1f} s", flush=True)
    print("every case is equal to its oracle" if not failed else f"{failed} cases FAILED")
    return int(failed > 0)


def results() -> Iterator[Result]:
    """Run every case, on the chip where there is one."""
    runs = [("trn3" if is_gen4() else "trn2", logical_cores())]
    if simulator.is_injected():
        runs = [(target, lnc) for target in ("trn2", "trn3") for lnc in (1, 2)]
    for target, lnc in runs:
        for case in cases.ALL:
            if not (case.only_gen4 and target == "trn2"):
                yield _run(case, target, lnc)


def _run(case, target: str, lnc: int) -> Result:
    start, problem = time.perf_counter(), ""
    with simulator.session(target) if simulator.is_injected() else contextlib.nullcontext():
        try:
            error = case.run(lnc)
        except Exception as failure:
            # One kernel that does not compile should not hide the others.
            error, problem = float("inf"), f"{type(failure).__name__}: {failure}"
    return Result(case.name, f"{target} lnc{lnc}", error, time.perf_counter() - start, problem)


if __name__ == "__main__":
    sys.exit(main())
