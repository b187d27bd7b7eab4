"""What a user decides about distilling a head."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from inferlib.option_checks import ConfigurationError

_MOST = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """Options of `distill_eagle3`.

    steps: of the optimizer. batch: rows of a step, over all devices. length: tokens of a row. lr: the highest learning
    rate, reached after `warmup` steps and followed by a cosine down to a tenth. clip: largest norm of a gradient.
    draft_vocab: how many of the model's tokens the head can draft, those that the texts have most of; None: 8192, or
    all of a smaller vocabulary. unroll: drafts in a row that the head is trained on (training-time test), each of which
    weighs `decay` times the one before. continuations: so many training rows are the beginnings of texts that the model
    itself goes on with, greedily, and half of each batch is of these. seed: of weights and order. devices: so many
    share each batch; None: all. save_every: steps between checkpoints. log_every: steps between lines of the log.

    Raises ConfigurationError for others.
    """

    steps: int = 6000
    batch: int = 16
    length: int = 512
    lr: float = 3e-4
    warmup: int = 200
    clip: float = 1.0
    draft_vocab: int | None = None
    unroll: int = 5
    decay: float = 0.8
    continuations: int = 0
    seed: int = 0
    devices: int | None = None
    save_every: int = 1000
    log_every: int = 20

    def __post_init__(self):
        least = dict.fromkeys(("steps", "batch", "unroll", "save_every", "log_every"), 1)
        least |= {"length": 16, "warmup": 0, "continuations": 0, "seed": 0, "draft_vocab": 16, "devices": 1}
        for name, low in least.items():
            value = getattr(self, name)
            whole = type(value) is int and low <= value <= _MOST
            if not whole and not (name in ("draft_vocab", "devices") and value is None):
                raise ConfigurationError(f"{name} must be a whole number from {low} to {_MOST}, got {value!r:.100}")
        for name, high in (("lr", 1.0), ("clip", 1e9), ("decay", 1.0)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value <= high:
                raise ConfigurationError(f"{name} must be above 0 and at most {high}, got {value!r:.100}")
        if self.unroll >= self.length:
            raise ConfigurationError(f"rows of {self.length} tokens are too short for {self.unroll} drafts in a row")

    def drafted(self, vocab: int) -> int:
        """How many tokens of a vocabulary the head can draft."""
        if self.draft_vocab is None:
            return min(8192, vocab)
        if self.draft_vocab > vocab:
            raise ConfigurationError(f"draft_vocab is {self.draft_vocab}, and the model has {vocab} tokens")
        return self.draft_vocab

    def deciding(self) -> dict[str, Any]:
        """The options that decide what is learned."""
        return {k: v for k, v in asdict(self).items() if k not in ("devices", "save_every", "log_every")}
