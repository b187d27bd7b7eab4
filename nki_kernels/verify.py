"""Run every kernel against its oracle: on the chip where NKI is installed, else on the stand-in.

python -m inferlib.nki_kernels.verify
"""

from __future__ import annotations

import contextlib
import sys
import time

from inferlib.nki_kernels import cases, simulator
from inferlib.nki_kernels.call import is_gen4, logical_cores


def main() -> int:
    """Print a line a case; the exit code is 1 if one fails."""
    failed = 0
    if simulator.is_injected():
        print("NKI is not installed: kernels run on the stand-in, on a CPU. This says nothing about a chip's speed.")
        runs = [(target, lnc) for target in ("trn2", "trn3") for lnc in (1, 2)]
    else:
        print("NKI is installed: kernels are compiled and run on this host's NeuronCores.")
        runs = [("trn3" if is_gen4() else "trn2", logical_cores())]
    for target, lnc in runs:
        for case in cases.ALL:
            if case.only_gen4 and target == "trn2":
                continue
            failed += not _passes(case, target, lnc)
    print("every case is equal to its oracle" if not failed else f"{failed} cases FAILED")
    return int(failed > 0)


def _passes(case, target: str, lnc: int) -> bool:
    start = time.perf_counter()
    with simulator.session(target) if simulator.is_injected() else contextlib.nullcontext():
        try:
            error = case.run(lnc)
            outcome = f"{'ok    ' if error <= 1 else 'FAILED'} {error:6.3f} of the tolerance"
        except Exception as problem:
            # One kernel that does not compile should not hide the others.
            error, outcome = float("inf"), f"FAILED {type(problem).__name__}: {problem}"
    print(f"{target} lnc{lnc}  {case.name:<44} {outcome}  {time.perf_counter() - start:5.1f} s", flush=True)
    return error <= 1


if __name__ == "__main__":
    sys.exit(main())
