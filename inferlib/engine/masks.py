"""Masks of the tokens that the grammars of a dispatch's sequences leave, made on the host while the device works."""

from __future__ import annotations

import numpy as np

from inferlib.engine.constraint import Asked, Constraint, fill
from inferlib.engine.scheduler import Places
from inferlib.engine.sequence import Sequence, Status
from inferlib.programs.arguments import Logits, Masks
from inferlib.sampling.sampler import mask_words
from inferlib.sampling.structured import StructuredOutputError


def masks_of(
    places: tuple[Places, Places], logits: Logits, drafts: np.ndarray | None = None
) -> tuple[Masks, list[Sequence]]:
    """Masks for logits, whose shapes alone are read, and the sequences that ended: their output is complete, or failed.

    places: see `Dispatch.places`. Every earlier token is known. drafts [B, C - 1]: that the rows verify, if they do.
    """
    (chunks, rows), ended = logits, []
    of_chunks = None if chunks is None else _mask(places[0], chunks.shape, None, ended)
    drafts = None if drafts is None else drafts.copy()
    of_rows = None if rows is None else _mask(places[1], rows.shape, drafts, ended)
    return Masks(of_chunks, of_rows, drafts), ended


def _mask(places: Places, shape: tuple[int, ...], drafts: np.ndarray | None, ended: list[Sequence]) -> np.ndarray:
    """The mask of logits of a shape; takes those out of `drafts` that cannot stand, and adds to `ended`."""
    *lead, vocab = shape
    mask = np.full((*lead, mask_words(vocab)), -1, np.int32)
    positions = 1 if drafts is None else lead[1]
    flat, asked = mask.reshape(-1, mask.shape[-1]), []
    followed = [(s, s.constraint, at) for s, at in places if s.constraint is not None]
    for _, constraint, at in followed:
        fitting = [] if drafts is None else constraint.fitting([token for token in drafts[at].tolist() if token >= 0])
        if drafts is not None:
            drafts[at, len(fitting) :] = -1
        if not constraint.free:
            asked.append(Asked(constraint, at * positions, fitting))
    fill(asked, flat)
    for s, constraint, at in followed:
        try:
            constraint.check()
        except StructuredOutputError as error:
            s.fail(error)
        else:
            _without_ends(s, constraint, flat[at * positions :][:positions], None if drafts is None else drafts[at])
        if s.status is Status.FINISHED:
            ended.append(s)
    return mask


def _without_ends(s: Sequence, constraint: Constraint, mask: np.ndarray, drafts: np.ndarray | None) -> None:
    """Take ends of the grammar that may not be chosen yet out of a sequence's masks [C, W]. Where nothing is left it is
    complete: behind a draft, this does not stand, and the next step comes to it."""
    standing = 0 if drafts is None else int((drafts >= 0).sum())
    for i in range(1 + standing):
        if _must_go_on(s, constraint, len(s.tokens) + i) and not constraint.without_ends(mask[i]):
            if i == 0:
                s.finish("stop")
            elif drafts is not None:
                drafts[i - 1 :] = -1
            return


def _must_go_on(s: Sequence, constraint: Constraint, count: int) -> bool:
    """True if no end of the grammar may be chosen behind `count` tokens."""
    return constraint.free or count < s.params.min_tokens or not s.stop_ids.issuperset(constraint.ends)
