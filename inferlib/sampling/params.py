"""Sampling parameters of one request, with the names and meanings of vLLM's `SamplingParams`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from inferlib.sampling import logits_processors
from inferlib.sampling.logits_processors import LogitsProcessor

# Widths of the sampler's tables: compiled programs have static shapes.
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKENS = 16
MAX_OUTPUTS = 1024  # of one prompt: the host holds a sequence for each

# A request with a lower temperature is greedy: dividing logits by less only adds rounding errors.
MIN_TEMPERATURE = 1e-5

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request.

    Every field is checked on construction: a `ValueError` names the field, its value and what is allowed.

    Attributes:
        n: number of independent outputs per prompt, at most 1024; 1 when greedy, since all would be equal.
        max_tokens: most tokens to generate, at least 1; None means up to the context limit.
        min_tokens: tokens to generate before a stop token (end of sequence, `stop_token_ids`) may be chosen.
        temperature: 0 (or less than 1e-5) picks the most likely token; at most 100.
        top_k: sample among the k most likely tokens; 0 or -1 for all of them.
        top_p: sample among the fewest most likely tokens whose probability reaches top_p, in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
        repetition_penalty: in [0.01, 100]; logits of tokens in the prompt or the output are divided by it if
            positive, multiplied by it if negative.
        presence_penalty: in [-2, 2], subtracted from the logits of tokens in the output.
        frequency_penalty: in [-2, 2], subtracted once for each time that the token is in the output.
        logit_bias: token id -> number in [-100, 100] added to its logit; at most 300 entries. Stored as a dict.
        allowed_token_ids: the only tokens that may be chosen; at most 300. None: all. Stored as a tuple.
        bad_words: words that never appear in the output, as text or as token ids; stop tokens are no exception. The
            last token of a word is not chosen where it would complete the word. A text counts as tokens with and
            without a space before it. Stored as a tuple. The tokens of all words, `allowed_token_ids` and
            `logit_bias` are at most 300 together.
        seed: in [0, 2**32); the same seed gives the same tokens whatever else is in the batch. None: the
            engine chooses one.
        stop: strings that end the output. Stored as a tuple.
        stop_token_ids: tokens that end the output; with the end-of-sequence tokens at most 16. Stored as a tuple.
        ignore_eos: generate past the end-of-sequence tokens.
        include_stop_str_in_output: keep the stop string at the end of the text.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: number of most likely tokens, at most 20, whose log-probabilities are reported at each step besides
            that of the chosen token; None reports none at all.
        prompt_logprobs: the same for the tokens of the prompt.
        truncate_prompt_tokens: use only so many of the prompt's last tokens; -1: as many as leave room for max_tokens
            (for one token if that is None). None: a prompt that is too long is an error.
        logits_processors: functions `f(token_ids, logits)`, or `f(prompt_token_ids, token_ids, logits)`, that return
            logits: lists of ids, of the tokens generated so far, and a float32 array [V] of the model's own logits.
            They run on the host, one after the other, before all else that is said here, and log-probabilities of the
            output are of what the last one returns. Slow: each token of every request in the batch then waits for the
            host, which gets all logits and returns them. An error in a function ends its request. Stored as a tuple.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str | Sequence[int]] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_OUTPUTS)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        _check_float("temperature", self.temperature, 0.0, 100.0)
        if self.greedy and self.n > 1:
            raise ValueError(f"n must be 1 when temperature is 0 (all outputs would be equal), got {self.n}")
        _check_int("top_k", self.top_k, -1)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**32 - 1)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        most = self.truncate_prompt_tokens
        if most is not None and not (_is(Integral, most) and most == -1):
            _check_int("truncate_prompt_tokens", most, 1)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "allowed_token_ids", _checked_allowed(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", _checked_words(self.bad_words))
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logits_processors", logits_processors.checked(self.logits_processors))

    @property
    def greedy(self) -> bool:
        """True if every step chooses the most likely token."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def takes_argmax(self) -> bool:
        """True if each token is the argmax of the model's own logits, with nothing else to compute or report."""
        return (
            self.greedy
            and self.min_tokens == 0
            and self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and not (self.logit_bias or self.allowed_token_ids or self.bad_words or self.logits_processors)
            and self.logprobs is None
        )

    def stop_ids(self, eos_ids: Iterable[int]) -> tuple[int, ...]:
        """All tokens that end this request, given the model's end-of-sequence tokens.

        Raises:
            ValueError: more than MAX_STOP_TOKENS of them.
        """
        ids = tuple(dict.fromkeys((*(self.stop_token_ids or ()), *(() if self.ignore_eos else eos_ids))))
        if len(ids) > MAX_STOP_TOKENS:
            raise ValueError(
                f"stop_token_ids and the model's end-of-sequence tokens are {len(ids)} tokens together; "
                f"the compiled sampler holds at most {MAX_STOP_TOKENS}"
            )
        return ids

    def validate_for(self, vocab: int) -> None:
        """Raise ValueError if a token id is not in [0, vocab)."""
        named: dict[str, Iterable[int] | None] = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": [i for word in self.bad_words or () if not isinstance(word, str) for i in word],
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in named.items():
            outside = [i for i in ids or () if i >= vocab]
            if outside:
                raise ValueError(f"{name}: token {outside[0]} is not in the model's vocabulary, [0, {vocab})")


def _is(kind: type, value: Any) -> bool:
    """isinstance for numbers; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _check_int(name: str, value: Any, low: int, high: int = _INT32_MAX) -> None:
    if not _is(Integral, value) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}], got {value!r}")


def _check_float(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    # NaN fails every comparison.
    if not _is(Real, value) or not low <= value <= high or (low_open and value == low):
        allowed = f"{'(' if low_open else '['}{low:g}, {high:g}]"
        raise ValueError(f"{name} must be a number in {allowed}, got {value!r}")


def _checked_bias(bias: object) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {bias!r}")
    if len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias must have at most {MAX_LOGIT_BIAS} entries, got {len(bias)}")
    for token, value in bias.items():
        _check_int("logit_bias: a token id", token, 0)
        _check_float(f"logit_bias[{token}]", value, -100.0, 100.0)
    return {int(token): float(value) for token, value in bias.items()}


def _checked_stop(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError(f"stop must be a string or a sequence of strings, none of them empty, got {stop!r}")
    return tuple(strings)


def _checked_ids(name: str, ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise ValueError(f"{name} must be a sequence of token ids, got {ids!r}")
    for token in ids:
        _check_int(f"{name}: a token id", token, 0)
    return tuple(int(token) for token in ids)


def _checked_allowed(ids: object) -> tuple[int, ...] | None:
    if ids is None:
        return None
    allowed = tuple(dict.fromkeys(_checked_ids("allowed_token_ids", ids)))
    if not 0 < len(allowed) <= MAX_LOGIT_BIAS:
        raise ValueError(f"allowed_token_ids must be 1 to {MAX_LOGIT_BIAS} tokens, got {len(allowed)}")
    return allowed


def _checked_words(words: object) -> tuple[str | tuple[int, ...], ...]:
    if words is None:
        return ()
    listed = (words,) if isinstance(words, str) else words
    if not isinstance(listed, Sequence) or isinstance(listed, bytes):
        raise ValueError(f"bad_words must be a list of words, each text or token ids, got {words!r}")
    checked = []
    for word in listed:
        if isinstance(word, str) and word.strip():
            checked.append(word)
        elif isinstance(word, Sequence) and not isinstance(word, str | bytes) and len(word):
            checked.append(_checked_ids("bad_words", word))
        else:
            raise ValueError(f"bad_words must be texts or sequences of token ids, none of them empty, got {word!r}")
    return tuple(checked)
