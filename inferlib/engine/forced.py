"""Tokens that grammars force, as drafts of the steps that choose tokens with the host.

When a step is planned, the tokens of the one before it are chosen, but the host does not know them yet. Where a grammar
forces them too, the forced tokens behind them are known, and the step verifies these as drafts. So of a run of forced
tokens the first comes by a step of its own, and no step waits for the host.
"""

from __future__ import annotations

import numpy as np

from inferlib.engine.sequence import Sequence


def forced_tokens(sequences: list[Sequence]) -> dict[Sequence, list[int]]:
    """The tokens that grammars force behind those in flight, if all of these are forced, for each sequence.

    There are none if a function of a user changes logits: it gets the logits of one token a step.
    """
    if any(s.params.logits_processors for s in sequences):
        return {}
    return {s: _behind_in_flight(s, s.constraint.forced()) for s in sequences if s.constraint is not None}


def _behind_in_flight(s: Sequence, forced: list[int]) -> list[int]:
    in_flight = 1 + len(s.drafts) if s.scheduled > len(s.tokens) else 0
    return forced[in_flight:]


def draft_rows(sequences: list[Sequence], columns: list[int], rows: int, count: int) -> np.ndarray:
    """Drafts [rows, count] of sequences at these columns; -1 where there is none."""
    drafts = np.full((rows, count), -1, np.int32)
    for s, column in zip(sequences, columns, strict=True):
        drafts[column, : len(s.drafts)] = s.drafts
    return drafts
