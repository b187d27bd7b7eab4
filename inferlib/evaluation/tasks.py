"""Small tasks that a model of some hundred million weights can do, made up from a seed: a prompt, and its answer.

They show what text alone does not: whether a model with fewer bits, or one that reads or keeps less of its cache, still
finds what its context says. `TASKS` names them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from inferlib.tokenizer import Tokenizer

# ruff: noqa: SIM905 (lists of words read better as text)
_NAMES = "Anna Bruno Clara David Elena Felix Greta Henry Irene Jonas Karla Louis Marta Nils Olga Peter".split()
_WORDS = "river apple stone candle mirror garden bottle window ladder basket hammer pillow carpet button saddle".split()
_COUNTRIES = (
    "France Germany Italy Spain Japan China Russia Egypt Greece Austria Portugal Poland Cuba Canada Kenya".split()
)
_CITIES = (
    "Paris Berlin Rome Madrid Tokyo Beijing Moscow Cairo Athens Vienna Lisbon Warsaw Havana Ottawa Nairobi".split()
)
_KINDS = {
    "animal": "horse tiger rabbit eagle salmon spider monkey camel goose whale donkey beetle".split(),
    "fruit": "apple banana cherry grape lemon mango peach pear plum melon orange apricot".split(),
    "colour": "red blue green yellow purple brown black white pink grey violet scarlet".split(),
}
_SUBJECTS = ("The old farmer", "A young teacher", "The tall sailor", "My neighbour", "The quiet doctor", "A clever fox")
_ACTIONS = ("walked along", "looked at", "painted", "remembered", "talked about", "waited near", "slowly left")
_PLACES = (
    "the harbour",
    "a wooden bridge",
    "the market square",
    "an empty field",
    "the railway station",
    "a small inn",
)
_SECRET = "The secret number of {} is"
_ASK = "\n\nRemember what the text said. "  # without it, SmolLM2-135M makes up every third number


@dataclass(frozen=True)
class Question:
    """A prompt and the text that should follow. choices: texts of which the likeliest should be the answer; without,
    the model generates."""

    prompt: str
    answer: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """What questions are made of. context: tokens of a long prompt."""

    draw: random.Random
    tokenizer: Tokenizer
    context: int

    def tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def number(self, digits: int = 5) -> str:
        return "".join(self.draw.choices("0123456789", k=digits))

    def filler(self, parts: list[str]) -> str:
        """A context of sentences that matter to nothing, with the parts spread evenly between them."""
        sentences: list[str] = []
        left = self.context - sum(map(self.tokens, parts))
        while left > 0:
            sentences.append(" ".join(map(self.draw.choice, (_SUBJECTS, _ACTIONS, _PLACES))) + ".")
            left -= self.tokens(" " + sentences[-1])
        for i, part in reversed(list(enumerate(parts))):
            sentences.insert((2 * i + 1) * len(sentences) // (2 * len(parts)), part)
        return " ".join(sentences)


def copying(source: Source) -> Iterator[Question]:
    """Repeat words, after two examples."""
    while True:
        rows = [" ".join(source.draw.sample(_WORDS, 5)) for _ in range(3)]
        shown = "".join(f"Words: {row}\nAgain: {row}\n\n" for row in rows[:2])
        yield Question(f"{shown}Words: {rows[2]}\nAgain:", rows[2])


def arithmetic(source: Source) -> Iterator[Question]:
    """Add two numbers of a digit, after eight examples."""
    while True:
        pairs = [(source.draw.randint(1, 9), source.draw.randint(1, 9)) for _ in range(9)]
        shown = "".join(f"{a} + {b} = {a + b}\n" for a, b in pairs[:-1])
        a, b = pairs[-1]
        yield Question(f"{shown}{a} + {b} =", str(a + b))


def capitals(source: Source) -> Iterator[Question]:
    """Choose a capital among four."""
    while True:
        country, capital = source.draw.choice(list(zip(_COUNTRIES, _CITIES, strict=True)))
        others = source.draw.sample([city for city in _CITIES if city != capital], 3)
        yield Question(f"The capital of {country} is", f" {capital}", tuple(f" {city}" for city in (capital, *others)))


def labels(source: Source) -> Iterator[Question]:
    """Label a word as many examples do, of which a context is full."""
    while True:
        kind = source.draw.choice(list(_KINDS))
        word = source.draw.choice(_KINDS[kind])
        pairs = [(each, name) for name, words in _KINDS.items() for each in words if each != word]
        shown = [source.draw.choice([pair for pair in pairs if pair[1] == name]) for name in _KINDS]
        asked, rows = f"{word} is a kind of", []
        left = source.context - source.tokens(asked)
        while left > 0:
            other, name = shown.pop() if shown else source.draw.choice(pairs)
            rows.append(f"{other} is a kind of {name}\n")
            left -= source.tokens(rows[-1])
        source.draw.shuffle(rows)
        yield Question("".join(rows) + asked, f" {kind}", tuple(f" {name}" for name in _KINDS))


def retrieval(source: Source) -> Iterator[Question]:
    """Find the value of a key in a list that fills a context."""
    while True:
        keys, text = source.draw.sample([f"{name}'s {word}" for name in _NAMES for word in _WORDS], 200), ""
        values, left = {}, source.context
        for key in keys:
            values[key] = source.number(3)
            text += (more := f" {_SECRET.format(key)} {values[key]}.")
            left -= source.tokens(more)
            if left <= 0:
                break
        key = source.draw.choice(list(values))
        yield Question(text.strip() + _ASK + _SECRET.format(key), values[key])


def needle(source: Source) -> Iterator[Question]:
    """Find a secret number in a context."""
    while True:
        yield _needles(source, 1)[0]


def needles(source: Source) -> Iterator[Question]:
    """Find each of three secret numbers in a context."""
    while True:
        yield from _needles(source, 3)


def turns(source: Source) -> Iterator[Question]:
    """The third secret number of a context, after the first two were asked for and told."""
    while True:
        *told, last = _needles(source, 3)
        context = last.prompt.partition(_ASK)[0]
        asked = "".join(_ASK + q.prompt.partition(_ASK)[2] + f" {q.answer}." for q in told)
        yield Question(context + asked + _ASK + last.prompt.partition(_ASK)[2], last.answer)


def _needles(source: Source, count: int) -> list[Question]:
    numbers = {name: source.number() for name in source.draw.sample(_NAMES, count)}
    context = source.filler([f"{_SECRET.format(name)} {number}." for name, number in numbers.items()])
    return [Question(context + _ASK + _SECRET.format(name), number) for name, number in numbers.items()]


TASKS: dict[str, Callable[[Source], Iterator[Question]]] = {
    task.__name__: task for task in (copying, arithmetic, capitals, labels, retrieval, needle, needles, turns)
}


def questions(name: str, tokenizer: Tokenizer, *, count: int, context: int, seed: int = 0) -> list[Question]:
    """So many questions of a task of `TASKS`, always the same."""
    return list(islice(TASKS[name](Source(random.Random(f"{name} {seed}"), tokenizer, context)), count))
