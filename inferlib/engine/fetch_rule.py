"""Whether pages come back from a tier sooner than their cells are computed, by what both took so far."""

from __future__ import annotations

from inferlib.engine.fetch import SourceName

_WEIGHT = 0.9  # of all that was measured before, against the last measurement
_TRIES = 16


class Rate:
    """Units a second, recent ones more than old ones; None until something was measured."""

    def __init__(self) -> None:
        self._units = self._seconds = 0.0

    def add(self, units: float, seconds: float) -> None:
        """Count units that took some seconds."""
        self._units = _WEIGHT * self._units + units
        self._seconds = _WEIGHT * self._seconds + seconds

    @property
    def value(self) -> float | None:
        return self._units / self._seconds if self._units and self._seconds else None


class FetchRule:
    """Pages are fetched if that takes less time than to compute them.

    computed: tokens of prompts a second, in the steps that computed some. link: bytes a second from the host to the
    devices. disk: bytes a second from files. What was not measured yet is taken to be fetched sooner. Of the decisions
    against the disk, one in sixteen is not followed, so that its measure does not stay what it was in a bad moment.
    """

    def __init__(self) -> None:
        self.computed, self.link, self.disk = Rate(), Rate(), Rate()
        self._against = 0

    def choose(self, tokens: int, nbytes: int) -> dict[SourceName, bool]:
        """The tiers to fetch `nbytes` bytes from, in place of computing `tokens` tokens."""
        host = self._faster(tokens, nbytes, self.link)
        disk = self._faster(tokens, nbytes, self.link, self.disk)
        if host and not disk:
            self._against += 1
            disk = self._against % _TRIES == 0
        return {"host": host, "disk": disk}

    def _faster(self, tokens: int, nbytes: int, *ways: Rate) -> bool:
        """True if bytes go these ways, one after the other, in less time than the tokens are computed in."""
        rate = self.computed.value
        return rate is None or sum(nbytes / way.value for way in ways if way.value) < tokens / rate
