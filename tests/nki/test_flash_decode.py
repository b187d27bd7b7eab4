"""flash_decode on the stand-in against float64 numpy, with unseen slots poisoned."""

from __future__ import annotations

import pytest

from inferlib.nki_kernels import cases, simulator

# Every case on both generations, on one core and on two; all four pairs occur.
PAIRS = ((("trn2", 1), ("trn3", 2)), (("trn2", 2), ("trn3", 1)))


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("at", range(len(cases.DECODE)), ids=[case.name for case in cases.DECODE])
def test_equals_the_oracle(at, turn):
    case, (target, lnc) = cases.DECODE[at], PAIRS[at % 2][turn]
    if case.only_gen4 and target == "trn2":
        pytest.skip("trn2 has no such dtype")
    with simulator.session(target):
        assert case.run(lnc) <= 1
