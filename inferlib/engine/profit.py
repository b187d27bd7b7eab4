"""How many tokens to draft: as many as give most tokens for their time.

A draft stands with some probability if those before it stood, which is learnt from each row: also while nothing is
drafted, as steps then tell whether a draft would have stood. So a step of k drafts gives 1 + a + ... + a^k tokens of a
row. What it takes is measured; until then it is estimated from what a step takes for weights and for tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from inferlib.engine.sequence import Sequence
from inferlib.programs.keys import Mode, ProgramKey
from inferlib.speculation.settings import Speculation

# How many tokens take as long as the rest of a step: reading the weights.
_WEIGHTS, _LARGE_WEIGHTS = {"cpu": 32}, 512
_ALONE = {"cpu": 0.5}  # what a single token's step takes of that: its products are of a matrix and a vector
_FIRST = 0.6  # of drafts stand, as long as nothing is known
_PRIOR = 4.0  # how many drafts of its own a row needs to count as much as all rows before it
_FADING, _OF_ALL, _OF_TIMES = 0.8, 0.05, 0.2
_LONG = 0.01  # seconds of a step that are many times what the host needs for a dispatch
_FOLLOWED = 0.5  # of a change of one number's times, on a logarithmic scale, the others follow


def tokens_of_weights(platform: str) -> int:
    """How many tokens take as long as the rest of a step does."""
    return _WEIGHTS.get(platform, _LARGE_WEIGHTS)


class Profit:
    """What is known of drafts and of the times of steps."""

    def __init__(self, speculation: Speculation, platform: str):
        self.counts = (0, *speculation.counts)
        self.usual = _FIRST
        self._weights, self._alone = tokens_of_weights(platform), _ALONE.get(platform, 1.0)
        self._seconds: dict[tuple[str, int, int], float] = {}  # of a step, by mode, rows and drafts

    def choose(self, sequences: SequenceOf[Sequence], mode: Mode, rows: int) -> int:
        """How many tokens each step of a dispatch drafts for these sequences, in a program of `rows` rows."""
        likely = [min(self.acceptance(s), 0.99) for s in sequences]

        def rate(count: int) -> float:
            return sum((1 - a ** (count + 1)) / (1 - a) for a in likely) / self.seconds(mode, rows, count)

        return max(self.counts, key=rate)

    def choose_certain(self, certain: SequenceOf[int], mode: Mode, rows: int) -> int:
        """The most profitable number of drafts where `certain` of each sequence's are sure to stand and no others are
        made."""

        def rate(count: int) -> float:
            return sum(1 + min(known, count) for known in certain) / self.seconds(mode, rows, count)

        return max(self.counts, key=rate)

    def acceptance(self, s: Sequence) -> float:
        """How likely a draft of a sequence stands."""
        return (s.stood + _PRIOR * self.usual) / (s.tried + _PRIOR)

    def has_long_steps(self, mode: Mode, rows: int) -> bool:
        """Whether steps are known to take so long that a dispatch of one leaves the host time to plan the next."""
        return any(self._seconds.get((mode, rows, count), 0.0) >= _LONG for count in self.counts)

    def seconds(self, mode: Mode, rows: int, count: int) -> float:
        """An estimate of what a step takes, no more than what one of more drafts does; where no step of such rows was
        measured, in other units."""
        known = [other for other in self.counts if (mode, rows, other) in self._seconds]
        if not known:
            return self._relative(rows, count)
        if count in known:
            return min(self._seconds[mode, rows, other] for other in known if other >= count)
        nearest = min(known, key=lambda other: abs(other - count))
        return self._seconds[mode, rows, nearest] * self._relative(rows, count) / self._relative(rows, nearest)

    def _relative(self, rows: int, count: int) -> float:
        tokens = rows * (1 + count)
        return self._weights * (self._alone if tokens == 1 else 1.0) + tokens

    def learn(self, s: Sequence, tried: int, stood: int) -> None:
        """Learn from a dispatch. tried: how many drafts of a row could stand; stood: how many did."""
        if tried:
            s.tried, s.stood = _FADING * s.tried + tried, _FADING * s.stood + stood
            self.usual += _OF_ALL * (stood / tried - self.usual)

    def learn_time(self, key: ProgramKey, seconds: float) -> None:
        """What a step took. Other work on a machine slows steps of any number of drafts, so their estimates follow."""
        entry: tuple[Mode, int, int] = key.mode, key.rows, key.drafts
        before = self._seconds.get(entry, seconds)
        now = before + _OF_TIMES * (seconds - before)
        for other in [(key.mode, key.rows, count) for count in self.counts]:
            if other in self._seconds:
                self._seconds[other] *= (now / before) ** _FOLLOWED
        self._seconds[entry] = now
