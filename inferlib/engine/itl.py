"""A target of the time between tokens (ITL): it bounds the prompt tokens of steps in which rows decode.

Without one, a step takes as many prompt tokens as it has room for, and rows that decode wait for it (see Sarathi-Serve,
OSDI 2024, on the choice).
"""

from __future__ import annotations

import logging
from math import prod

from inferlib.config import EngineConfig
from inferlib.engine.step_times import Shape, StepTimes
from inferlib.option_checks import ConfigurationError
from inferlib.programs.keys import MODES, Mode

log = logging.getLogger(__name__)


class ItlBound:
    """The shapes of prefills that may share a step with rows that decode.

    Until `learn` was called, and where no measured step is short enough, they are the smallest ones, so prompts always
    go on.
    """

    def __init__(self, config: EngineConfig):
        self.config, self.target = config, config.itl
        self._most: dict[Mode, int] = {}  # prompt tokens of a step

    def learn(self, mode: Mode, times: StepTimes) -> None:
        """Choose by the times of this mode's steps. Raises ConfigurationError if the target is less than a decode
        step takes."""
        assert self.target is not None
        rows = f"{self.config.max_batch} rows in mode {mode!r}"
        if self.target < times.decode:
            raise ConfigurationError(
                f"itl {self.target:g} is less than a decode step of {rows} takes: give at least {_up(times.decode)} "
                f"({_up(min(times.mixed.values()))} with the shortest prefill), or lower max_batch"
            )
        long = [prod(shape) for shape, seconds in times.mixed.items() if seconds > self.target]
        fit = [prod(shape) for shape in times.mixed if prod(shape) < min(long, default=prod(shape) + 1)]
        self._most[mode] = max(fit, default=0)
        if not fit:
            log.warning(
                "itl %g is less than the shortest prefill beside %s takes, %s: prompts go on in such steps",
                self.target,
                rows,
                _up(min(times.mixed.values())),
            )

    def within(self, shapes: tuple[Shape, ...], mode: Mode) -> tuple[Shape, ...]:
        """The shapes that a step in this mode may prefill beside rows that decode, fewest tokens first.

        A mode that was not measured counts as the one before it.
        """
        if self.target is None:
            return shapes
        most = 0
        for lesser in MODES[: MODES.index(mode) + 1]:
            most = self._most.get(lesser, most)
        # A step that ends within a prompt ends at a multiple of the unit, so a smaller shape might hold nothing.
        least = min(prod(shape) for shape in shapes if prod(shape) >= self.config.prefill_unit)
        return tuple(shape for shape in shapes if prod(shape) <= max(most, least))


def _up(seconds: float) -> str:
    """Rounded up, to three digits."""
    return f"{seconds * 1.005:.3g}"
