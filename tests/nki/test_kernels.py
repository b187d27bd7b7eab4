"""Every kernel on the stand-in against float64 numpy, with unseen slots of caches poisoned.

80 small programs, 15 s of which most is compiling what surrounds the kernels.
"""

from __future__ import annotations

import pytest

from inferlib.nki_kernels import cases, simulator

# Generations and cores in turn. trn2 lacks the dtype of some cases, and refuses it: test_faults.py.
PAIRS = (("trn2", 1), ("trn3", 2), ("trn2", 2), ("trn3", 1))
ALL = [(case, ("trn3", 1 + at % 2) if case.only_gen4 else PAIRS[at % 4]) for at, case in enumerate(cases.ALL)]


@pytest.mark.parametrize(("case", "pair"), ALL, ids=[f"{case.name}-{t}-lnc{n}" for case, (t, n) in ALL])
@pytest.mark.fast_cases(25)
def test_equals_the_oracle(case, pair):
    target, lnc = pair
    with simulator.session(target):
        assert case.run(lnc) <= 1
