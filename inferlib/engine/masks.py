"""Masks of the tokens that the grammars of a dispatch's sequences leave, made on the host while the device works."""

from __future__ import annotations

import numpy as np

from inferlib.engine.constraint import Constraint, fill
from inferlib.engine.scheduler import Places
from inferlib.engine.sequence import Sequence, Status
from inferlib.programs.program import Logits, Masks
from inferlib.sampling.sampler import mask_words
from inferlib.sampling.structured import StructuredOutputError


def masks_of(places: tuple[Places, Places], logits: Logits) -> tuple[Masks, list[Sequence]]:
    """Masks for logits, whose shapes alone are read, and the sequences that ended: their output is complete, or failed.

    places: see `Dispatch.places`. Every earlier token is known.
    """
    pairs = [(None, []) if x is None else _mask(of, *x.shape) for of, x in zip(places, logits, strict=True)]
    return Masks(*(mask for mask, _ in pairs)), [s for _, ended in pairs for s in ended]


def _mask(places: Places, rows: int, vocab: int) -> tuple[np.ndarray, list[Sequence]]:
    mask = np.full((rows, mask_words(vocab)), -1, np.int32)
    followed = [(s, s.constraint, at) for s, at in places if s.constraint is not None]
    fill([(constraint, at) for _, constraint, at in followed if not constraint.free], mask)
    for s, constraint, at in followed:
        try:
            constraint.check()
        except StructuredOutputError as error:
            s.fail(error)
        else:
            if _must_go_on(s, constraint) and not constraint.without_ends(mask[at]):
                s.finish("stop")
    return mask, [s for s, *_ in followed if s.status is Status.FINISHED]


def _must_go_on(s: Sequence, constraint: Constraint) -> bool:
    """True if no end of the grammar may be chosen now."""
    return constraint.free or len(s.tokens) < s.params.min_tokens or not s.stop_ids.issuperset(constraint.ends)
