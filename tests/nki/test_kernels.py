"""Every kernel on the stand-in against float64 numpy, with unseen slots of caches poisoned.

80 small programs, 15 s of which most is compiling what surrounds the kernels.
"""

from __future__ import annotations

import pytest

from inferlib.nki_kernels import cases, simulator

# Generations and cores in turn. trn2 lacks the dtype of some cases, and refuses it: test_faults.py.
PAIRS = (("trn2", 1), ("trn3", 2), ("trn2", 2), ("trn3", 1))
ALL = [(case, ("trn3", 1 + at % 2) if case.only_gen4 else PAIRS[at % 4]) for at, case in enumerate(cases.ALL)]


# Options together, and further sizes of pages and heads.
FURTHER = frozenset(
    (
        *("latents, DeepSeek-V3", "pages of 4096", "pages of 128", "pages in float8_e4m3", "eight tokens in a ring"),
        *("latents, several tokens, fewer positions", "prefill, pages of 128", "prefill, ring of pages"),
        *("latents, pages of 16", "pages of 8, several tokens", "eight tokens of sixteen heads", "experts, 128 tokens"),
    )
)
PARAMS = [
    pytest.param(
        case, pair, id=f"{case.name}-{pair[0]}-lnc{pair[1]}", marks=[pytest.mark.release] * (case.name in FURTHER)
    )
    for case, pair in ALL
]


@pytest.mark.parametrize(("case", "pair"), PARAMS)
@pytest.mark.fast_cases(25)
def test_equals_the_oracle(case, pair):
    target, lnc = pair
    with simulator.session(target):
        assert case.run(lnc) <= 1
