"""What a user decides about training."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from inferlib.option_checks import ConfigurationError

_MOST = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Options of every run of training.

    steps: of the optimizer. batch: rows of a step, over all devices. length: tokens of a row. lr: the highest learning
    rate, reached after `warmup` steps and followed by a cosine down to a tenth. clip: largest norm of a gradient. seed:
    of order, and of weights that begin at random. devices: how many share each batch; None: all. save_every: steps
    between checkpoints. log_every: steps between lines of the log.

    Raises ConfigurationError for others.
    """

    steps: int = 2400
    batch: int = 32
    length: int = 512
    lr: float = 1e-4
    warmup: int = 100
    clip: float = 1.0
    seed: int = 0
    devices: int | None = None
    save_every: int = 1000
    log_every: int = 20

    def __post_init__(self):
        for name in ("steps", "batch", "save_every", "log_every"):
            self.check_whole(name, 1)
        self.check_whole("length", 16)
        for name in ("warmup", "seed"):
            self.check_whole(name, 0)
        self.check_whole("devices", 1, optional=True)
        self.check_number("lr", 1.0)
        self.check_number("clip", 1e9)

    def check_whole(self, name: str, least: int, *, optional: bool = False) -> None:
        """Raise ConfigurationError unless a field is a whole number of at least this, or None if it is optional."""
        value = getattr(self, name)
        if not (type(value) is int and least <= value <= _MOST) and not (optional and value is None):
            raise ConfigurationError(f"{name} must be a whole number from {least} to {_MOST}, got {value!r:.100}")

    def check_number(self, name: str, most: float) -> None:
        """Raise ConfigurationError unless a field is a number above 0 and at most this."""
        value = getattr(self, name)
        if type(value) not in (int, float) or not 0 < value <= most:
            raise ConfigurationError(f"{name} must be above 0 and at most {most}, got {value!r:.100}")

    def deciding(self) -> dict[str, Any]:
        """The options that decide what is learned."""
        return {k: v for k, v in asdict(self).items() if k not in ("devices", "save_every", "log_every")}


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(TrainingSettings):
    """Options of `finetune`, beside those of `TrainingSettings`.

    samples: how many rows the teacher writes itself, to learn from beside those of the texts.

    Raises ConfigurationError for others.
    """

    samples: int = 0

    def __post_init__(self):
        super().__post_init__()
        self.check_whole("samples", 0)


@dataclass(frozen=True, kw_only=True)
class DistillSettings(TrainingSettings):
    """Options of `distill_eagle3`, beside those of `TrainingSettings`.

    draft_vocab: how many of the model's tokens the head can draft, those that the texts have most of; None: 8192, or
    all of a smaller vocabulary. unroll: drafts in a row that the head is trained on (training-time test), each of which
    weighs `decay` times the one before. continuations: how many training rows are beginnings of texts that the model
    itself goes on with, greedily; half of each batch is of these and of its answers to chats.

    Raises ConfigurationError for others.
    """

    steps: int = 6000
    batch: int = 16
    lr: float = 3e-4
    warmup: int = 200
    draft_vocab: int | None = None
    unroll: int = 5
    decay: float = 0.8
    continuations: int = 0

    def __post_init__(self):
        super().__post_init__()
        self.check_whole("unroll", 1)
        self.check_whole("continuations", 0)
        self.check_whole("draft_vocab", 16, optional=True)
        self.check_number("decay", 1.0)
        if self.unroll >= self.length:
            raise ConfigurationError(f"rows of {self.length} tokens are too short for {self.unroll} drafts in a row")

    def drafted(self, vocab: int) -> int:
        """How many tokens of a vocabulary the head can draft."""
        if self.draft_vocab is None:
            return min(8192, vocab)
        if self.draft_vocab > vocab:
            raise ConfigurationError(f"draft_vocab is {self.draft_vocab}, and the model has {vocab} tokens")
        return self.draft_vocab
