"""Tokens of a verification, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from inferlib.distillation.chains import score

TEXT = np.arange(100, 114)  # 14 tokens, of which 3 are the prompt


def chains(standing: dict[int, int], size: int = 4) -> np.ndarray:
    """Chains of which, behind token t + 1, so many drafts stand."""
    drafts = np.full((len(TEXT), size), -1)
    for t, count in standing.items():
        right = TEXT[t + 2 : t + 2 + count]
        drafts[t, : len(right)] = right
    return drafts


def test_drafts_that_never_stand_give_one_token():
    result = score([chains({})], [TEXT], [3])
    assert (result.tokens, result.acceptance) == (1.0, 0.0)
    assert result.verifications == 6  # from token 3 on, as long as four drafts lie within the text


def test_drafts_that_always_stand_give_five():
    result = score([chains(dict.fromkeys(range(10), 4))], [TEXT], [3])
    assert (result.tokens, result.acceptance) == (5.0, 1.0)


def test_a_verification_begins_where_the_last_one_ended():
    """Token 3 is known: 2 of its drafts stand, so tokens 4, 5 and 6 follow; then none; then one."""
    result = score([chains({2: 2, 3: 4, 4: 4, 6: 1})], [TEXT], [3])
    assert result == (3 + 1 + 2, 3, 3 + 1 + 2, 2 + 0 + 1)
    assert result.tokens == pytest.approx(2)


def test_a_draft_behind_one_that_does_not_stand_does_not_count():
    drafts = chains(dict.fromkeys(range(10), 4))
    drafts[:, 0] = -1
    assert score([drafts], [TEXT], [3]).tokens == 1


def test_texts_that_end_at_once_count_for_nothing():
    assert score([chains({})], [TEXT[:5]], [3]) == (0, 0, 0, 0)
