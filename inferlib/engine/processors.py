"""Users' functions that change logits between the two programs of a step; see `inferlib.sampling.logits_processors`."""

from __future__ import annotations

from typing import Any

import numpy as np

from inferlib.engine.scheduler import Places
from inferlib.engine.sequence import Sequence, Status
from inferlib.programs.arguments import Logits
from inferlib.sampling.logits_processors import LogitsProcessorError, process


def processed(places: tuple[Places, Places], logits: Logits, vocab: int) -> tuple[Logits, list[Sequence]]:
    """The logits of a dispatch, on the host, after the functions of its sequences; and the sequences of which a
    function failed, whose logits are unchanged.

    places: see `Dispatch.places`. Every earlier result is known. Columns beyond `vocab` stand for no token.
    """
    failed: list[Sequence] = []
    return Logits(*(_changed(*pair, vocab, failed) for pair in zip(places, logits, strict=True))), failed


def _changed(places: Places, logits: Any, vocab: int, failed: list[Sequence]) -> Any:
    """Logits [N, V] after the functions of sequences at these places; adds those that fail to `failed`."""
    places = [(s, at) for s, at in places if s.params.logits_processors and s.status is not Status.FINISHED]
    if not places:
        return logits
    logits = np.array(logits)
    for s, at in places:
        try:
            functions = s.params.logits_processors or ()
            logits[at, :vocab] = process(functions, s.prompt, s.tokens, logits[at, :vocab])
        except LogitsProcessorError as error:
            s.fail(error)
            failed.append(s)
    return logits
