"""What the device stores of every row between dispatches, so that decoding needs nothing from the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from inferlib.models.config import LoopSpec
from inferlib.sampling.sampler import pack
from inferlib.sharding import axes


class RowState(NamedTuple):
    """The state of R rows; every program donates it.

    token [R]: last token, not yet in the cache; length [R]: tokens in the cache; active [R] bool;
    budget [R]: tokens still to generate; generated [R]: tokens generated; ints [R, NI], floats [R, NF]: packed
    sampling parameters; counts [R, V]: token counts for penalties (see `inferlib.sampling.sampler`); pages [R, M]:
    where the positions of a row lie in the cache (see `StepContext.table`), which `row_changes` alone changes.
    history [R, max_len]: the token at each position up to `length`, if drafts are made of it; else None.
    adapter [R]: the slot of a row's adapter, 0 if it has none, which `row_changes` alone changes; None if no weight has
    adapters.
    features [R, C, D], first [R]: what a model that drafts has yet to run, if it defers, see `Pending`; the former only
    if it reads hidden states.
    dropped [R]: positions before a row's last cell that its cache no longer has, if caches are compacted; else None.
    ahead [R, N]: how many cells more than `length` a row has in layers of each level above 0, if there are any; else
    None (see `inferlib.models.cache_levels`). The pages of these levels follow in `pages`.
    depth [R]: how many steps of a loop's core the row takes, 0 for all, which `row_changes` alone changes; None of
    models that repeat no layers. threshold [R]: by what its tokens leave earlier, see `Depth`, likewise; None of models
    whose tokens do not.
    skipped [R]: how many of its positions a row lacks in layers that see fewer tokens of its prompt, if there are any
    (see `inferlib.models.propagation`); else None.
    core [R, 2, D]: of a row whose last token is in a loop's core, the state, and what each step injects. taken [R]: how
    many steps that token has taken; -1: it has not begun. None unless rows go on there, see
    `inferlib.programs.depthwise`.
    """

    token: jax.Array
    length: jax.Array
    active: jax.Array
    budget: jax.Array
    generated: jax.Array
    ints: jax.Array
    floats: jax.Array
    counts: jax.Array
    pages: jax.Array
    history: jax.Array | None = None
    adapter: jax.Array | None = None
    features: jax.Array | None = None
    first: jax.Array | None = None
    dropped: jax.Array | None = None
    depth: jax.Array | None = None
    threshold: jax.Array | None = None
    taken: jax.Array | None = None
    core: jax.Array | None = None
    ahead: jax.Array | None = None
    skipped: jax.Array | None = None

    @staticmethod
    def zeros(
        rows: int,
        vocab: int,
        columns: int,
        history: int = 0,
        features: tuple[int, int, str] | None = None,
        numbers: tuple[str, ...] = (),
        core: tuple[int, str] | None = None,
        levels: int = 0,
    ) -> RowState:
        """history: how many positions that has; 0: there is none. features: C, D and the dtype, if there are some.
        numbers: which of `NUMBERS` there are. core: D and the dtype, if there is one.
        levels: N."""

        def vector():
            return jnp.zeros((rows,), jnp.int32)

        ints, floats = pack([None] * rows)
        return RowState(
            token=vector(),
            length=vector(),
            active=jnp.zeros((rows,), bool),
            budget=vector(),
            generated=vector(),
            ints=jnp.array(ints),
            floats=jnp.array(floats),
            counts=jnp.zeros((rows, vocab), jnp.int32),
            pages=jnp.zeros((rows, columns), jnp.int32),
            history=jnp.zeros((rows, history), jnp.int32) if history else None,
            features=None if features is None else jnp.zeros((rows, *features[:2]), features[2]),
            core=None if core is None else jnp.zeros((rows, 2, core[0]), core[1]),
            ahead=jnp.zeros((rows, levels), jnp.int32) if levels else None,
            **{name: vector() for name in numbers},
        )

    def head(self, rows: int) -> RowState:
        """The first `rows` rows, with the pages of all."""
        return jax.tree.map(lambda x: x[:rows], self)._replace(pages=self.pages)

    def with_head(self, head: RowState) -> RowState:
        """These rows with the first ones replaced."""
        rows = head.token.shape[0]
        if rows == self.token.shape[0]:
            return head
        pair = self._replace(pages=None), head._replace(pages=None)  # type: ignore[arg-type]
        return jax.tree.map(lambda x, y: x.at[:rows].set(y), *pair)._replace(pages=self.pages)

    def with_tokens(self, rows: jax.Array, positions: jax.Array, tokens: jax.Array) -> RowState:
        """The state whose history, if there is one, has these tokens; rows or positions that it lacks are dropped."""
        if self.history is None:
            return self
        return self._replace(history=self.history.at[rows, positions].set(tokens, mode="drop"))

    def started(self, rows: jax.Array, first: jax.Array) -> RowState:
        """The state in which nothing is dropped of those rows [P] whose prompts start, where `first` is true."""
        if self.dropped is None:
            return self
        rows = jnp.where(first, rows, self.dropped.size)
        ahead = None if self.ahead is None else self.ahead.at[rows].set(0, mode="drop")
        return self._replace(dropped=self.dropped.at[rows].set(0, mode="drop"), ahead=ahead)

    def with_skipped(self, rows: jax.Array, first: jax.Array, skipped: jax.Array) -> RowState:
        """The state after chunks [P] of rows, behind which the rows lack `skipped` positions in later layers. first:
        true where a prompt starts. A row may have several chunks, and lacks more behind each."""
        if self.skipped is None:
            return self
        fresh = self.skipped.at[jnp.where(first, rows, self.skipped.size)].set(0, mode="drop")
        return self._replace(skipped=fresh.at[rows].max(skipped, mode="drop"))

    def not_begun(self, rows: jax.Array) -> RowState:
        """The state in which the last tokens of rows [P] are in no loop's core."""
        return self if self.taken is None else self._replace(taken=self.taken.at[rows].set(-1, mode="drop"))

    def with_pending(self, rows: jax.Array, features: jax.Array | None, first: jax.Array) -> RowState:
        """The state in which tokens from positions `first` [P] on are pending of rows [P], with features [P, D] of the
        first of them, if there are any."""
        if self.first is None:
            return self
        state = self._replace(first=self.first.at[rows].set(first, mode="drop"))
        if self.features is None or features is None:
            return state
        return state._replace(features=self.features.at[rows, 0].set(features, mode="drop"))


# Fields of one number of each row, if there are any.
NUMBERS = ("adapter", "first", "dropped", "depth", "threshold", "taken", "skipped")
_ROW = (axes.ROWS,)
# A `RowState` of the logical axes of every field.
_PENDING = (axes.ROWS, None, None), _ROW
STATE_AXES: Any = RowState._make(
    [
        *[*[_ROW] * 5, *[(axes.ROWS, None)] * 2, (axes.ROWS, axes.VOCAB), *[(axes.ROWS, None)] * 2],
        *[_ROW, *_PENDING, _ROW, _ROW, _ROW, _ROW, (axes.ROWS, None, None), (axes.ROWS, None), _ROW],
    ]
)


def state_axes(**there: bool) -> Any:
    """The logical axes of the fields of a state, None of those that it lacks. there: by the names of optional fields,
    whether it has them."""
    return STATE_AXES._replace(**{name: None for name, present in there.items() if not present})


def of_loop(loop: LoopSpec | None) -> dict[str, bool]:
    """Whether the state of a model has each of the fields that say how rows take its loop."""
    return {"depth": loop is not None, "threshold": loop is not None and loop.early_exit is not None}


def axes_of(state: RowState) -> Any:
    """The logical axes of the fields of this state."""
    return RowState._make(None if x is None else names for names, x in zip(STATE_AXES, state, strict=True))


def map_state(function: Callable, names: RowState, *states: RowState) -> Any:
    """A `RowState` of function(names, *fields) of each field; None of one that there is not."""
    fields = zip(names, *states, strict=True)
    return RowState._make(None if of_field[0] is None else function(*of_field) for of_field in fields)
