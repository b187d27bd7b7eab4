"""Checkpoints of a run of training, by Orbax, from which it goes on after an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import jax


class Checkpoints:
    """The two newest checkpoints of a run, in `folder`; a context manager. A state is a tree of arrays."""

    def __init__(self, folder: Path):
        import orbax.checkpoint as ocp  # takes a third of a second

        self.args = ocp.args
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def newest(self, first: Any) -> tuple[Any, int]:
        """The state of the newest checkpoint, on the devices of `first`, and its step; `first` and 0 without one."""
        step = self.manager.latest_step() or 0
        if not step:
            return first, 0
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), first)
        jax.tree.map(lambda x: x.delete(), first)  # or devices would have both through the whole run
        return self.manager.restore(step, args=self.args.StandardRestore(like)), step

    def save(self, step: int, state: Any) -> None:
        self.manager.save(step, args=self.args.StandardSave(state))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.manager.close()
