"""Every kernel on the stand-in against float64 numpy, with unseen slots of caches poisoned.

126 small programs, 30 s of which most is compiling what surrounds the kernels.
"""

from __future__ import annotations

import pytest

from inferlib.nki_kernels import cases, simulator

# Every case on both generations, on one core and on two; all four pairs occur.
PAIRS = ((("trn2", 1), ("trn3", 2)), (("trn2", 2), ("trn3", 1)))
ALL = [(case, pair) for at, case in enumerate(cases.ALL) for pair in PAIRS[at % 2]]


@pytest.mark.parametrize(("case", "pair"), ALL, ids=[f"{case.name}-{t}-lnc{n}" for case, (t, n) in ALL])
def test_equals_the_oracle(case, pair):
    target, lnc = pair
    if case.only_gen4 and target == "trn2":
        pytest.skip("trn2 has no such dtype")
    with simulator.session(target):
        assert case.run(lnc) <= 1
