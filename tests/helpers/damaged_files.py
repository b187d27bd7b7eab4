"""Damaged model files, by the thousand: whatever a file holds, an error of ours says so, soon.

The tests try some of each kind. To try more of them, with other seeds and in a process that may die:

    python -m tests.helpers.damaged_files 300 --seed 1      # seconds; prints what ended as it should not
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import signal
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inferlib.chat import ChatTemplate
from inferlib.checkpoint.gguf import GGUFCheckpoint
from inferlib.checkpoint.laid_out import LaidOutWeights, stored_model
from inferlib.checkpoint.load import plan_load
from inferlib.conversion import convert
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import abstract_model
from inferlib.models.families import config_from_hf, family_of
from inferlib.tokenizer import Tokenizer

SECONDS = 20  # that a case may take

WRONG = (
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**63, 2**64, 10**12, 10**30, -(10**18), 1.5, -0.5, 1e308),
    *(math.nan, math.inf, -math.inf, "", "x", "\0", "é" * 40, "../x", "/dev/zero", "a" * 10_000),
    *([], {}, [[]], [None], [1, 2], ["a"], {"x": 1}, {"a": {}}, [1.5, "b", None]),
)
TEXTS = ("[" * 100_000, '{"a":' * 100_000, "", "null", "[]", "1", '"', "\ufeff{}", "\0", "{}", '{"a": 1e999}')


class Endless(BaseException):
    """A case did not end."""


@contextmanager
def limited(seconds: int = SECONDS) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Endless(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def problem(case: str, call: Callable[[], Any]) -> str:
    """How a call ended if that is not as it should: it returns, or raises an error of inferlib's or OSError."""
    try:
        with limited():
            call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, OSError) or (
            isinstance(error, Exception) and type(error).__module__.startswith("inferlib")
        ):
            return ""
        at = traceback.extract_tb(error.__traceback__)[-1]
        return f"{case}: {type(error).__name__}: {str(error)[:200]} at {at.filename}:{at.lineno}"
    return ""


# ---- damage


def damaged_value(draw: random.Random, value: Any) -> tuple[Any, str]:
    """A copy of a JSON value with one place in it wrong, and what was done."""
    value = json.loads(json.dumps(value))
    path, at = [], value
    while isinstance(at, (dict, list)) and at and (not path or draw.random() < 0.8):
        key = draw.choice(list(at)) if isinstance(at, dict) else draw.randrange(len(at))
        path.append(key)
        parent, at = at, at[key]
    if not path:
        return draw.choice(WRONG), "whole"
    key = path[-1]
    if draw.random() < 0.15:
        parent.pop(key)
        return value, f"without {path}"
    if isinstance(at, int) and draw.random() < 0.3:
        parent[key] = at + draw.choice((-1, 1, 7, at, 1000 * at, 10**7 * at))
    else:
        parent[key] = draw.choice(WRONG)
    return value, f"{path} = {str(parent[key])[:60]!r}"


def damaged_json(draw: random.Random, value: Any) -> tuple[bytes, str]:
    """JSON of a value with up to three places in it wrong, or text that is damaged."""
    if draw.random() < 0.08:
        text = draw.choice(TEXTS)
        return text.encode(), f"text {text[:20]!r}"
    what = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        value, done = damaged_value(draw, value)
        what.append(done)
    data = json.dumps(value).encode()
    return damaged_bytes(draw, data, ", ".join(what)) if draw.random() < 0.1 else (data, ", ".join(what))


def damaged_bytes(draw: random.Random, data: bytes, what: str = "") -> tuple[bytes, str]:
    """Bytes cut off, changed or moved."""
    data, at = bytearray(data), draw.randrange(len(data) + 1)
    match kind := draw.choice(("cut", "flip", "word", "insert", "remove")):
        case "cut":
            del data[at:]
        case "flip":
            for place in draw.choices(range(len(data)), k=min(len(data), draw.choice((1, 2, 8)))):
                data[place] = draw.randrange(256)
        case "word":
            data[at : at + 8] = struct.pack("<Q", draw.choice((0, 1, 5, 255, 2**31, 2**32 - 1, 2**62, 2**64 - 1)))
        case "insert":
            data[at:at] = draw.randbytes(draw.choice((1, 4, 100)))
        case "remove":
            del data[at : at + draw.choice((1, 4, 100))]
    return bytes(data), f"{what} {kind} at {at}"


# ---- what is read


def opened(path: Path) -> None:
    """All that is read of a model before its tensors."""
    files = ModelFiles.open(path)
    model = abstract_model(files.config, "float32", quantization=files.quantization(None))
    if not isinstance(files.source, LaidOutWeights):
        plan_load(files.source, family_of(files.hf), model)


def spoken(folder: Path) -> None:
    """A text and a chat, through a directory's tokenizer."""
    tokenizer = Tokenizer.from_directory(folder)
    tokenizer.decode(tokenizer.encode("to be, or not: tö 12 <eos>"))
    if tokenizer.chat_template is not None:
        tokenizer.chat_template.render([{"role": "user", "content": "hi"}], tools=None)


def read_gguf(file: Path) -> None:
    gguf = GGUFCheckpoint(file)
    config_from_hf(gguf.config())
    gguf.tokenizer().encode("to be")
    for name in list(gguf.names())[:3]:
        gguf.read(name)


class Cases:
    """Damaged files of each kind, made from a good model directory with a tokenizer. folder: to write to."""

    KINDS = ("config", "tokenizer", "safetensors", "gguf", "converted", "template")

    def __init__(self, model: Path, folder: Path):
        self.model, self.folder = Path(shutil.copytree(model, folder / "good")), folder

    def tried(self, kind: str, seed: int, seconds: float) -> tuple[list[str], int]:
        """What ended as it should not, and the number of cases that fit into the time."""
        ends, outcomes = time.monotonic() + seconds, []
        for outcome in self.outcomes(kind, seed):
            if time.monotonic() > ends:
                break
            outcomes.append(outcome)
        return list(filter(None, outcomes)), len(outcomes)

    def outcomes(self, kind: str, seed: int) -> Iterator[str]:
        """Without end: what was wrong with how a case ended, or nothing."""
        draw, try_one = random.Random(f"{kind} {seed}"), getattr(self, f"_{kind}")
        while True:
            yield try_one(draw)

    def _json(self, draw: random.Random, folder: Path, name: str, read: Callable[[Path], None]) -> str:
        """Damage one JSON file of a directory for the time of a case."""
        file = folder / name
        good = file.read_bytes()
        data, what = damaged_json(draw, json.loads(good))
        file.write_bytes(data)
        try:
            return problem(f"{name}: {what}", lambda: read(folder))
        finally:
            file.write_bytes(good)

    def _config(self, draw: random.Random) -> str:
        return self._json(draw, self.model, "config.json", opened)

    def _tokenizer(self, draw: random.Random) -> str:
        name = draw.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"))
        return self._json(draw, self.model, name, spoken)

    def _safetensors(self, draw: random.Random) -> str:
        folder = self._copy("safetensors")
        file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        good = file.read_bytes()
        size = int.from_bytes(good[:8], "little")
        header = json.loads(good[8 : 8 + size])
        if draw.random() < 0.3:
            names = {name: file.name for name in header if name != "__metadata__"}
            data, what = damaged_json(draw, {"metadata": {}, "weight_map": names})
            index.write_bytes(data)
        else:
            data, what = damaged_json(draw, header)
            file.write_bytes(len(data).to_bytes(8, "little") + data + good[8 + size :])
        try:
            return problem(f"safetensors: {what}", lambda: opened(folder))
        finally:
            index.unlink(missing_ok=True)
            file.write_bytes(good)

    def _gguf(self, draw: random.Random) -> str:
        file, good = self.folder / "damaged.gguf", gguf_bytes(draw)
        data, what = (good, "values") if draw.random() < 0.5 else damaged_bytes(draw, good)
        file.write_bytes(data)
        return problem(f"gguf: {what}", lambda: read_gguf(file))

    def _converted(self, draw: random.Random) -> str:
        folder = self.folder / "converted"
        if not folder.exists():
            convert(self.model, folder, quantization="int8", progress=False)
        return self._json(draw, folder, "inferlib.json", _described)

    def _template(self, draw: random.Random) -> str:
        parts = draw.choices(_TEMPLATE, k=draw.randrange(1, 6))
        text = "".join(parts)
        messages = [{"role": "user", "content": "hi"}]
        return problem(f"template {text!r}", lambda: ChatTemplate(text, "<s>", None).render(messages))

    def _copy(self, name: str) -> Path:
        folder = self.folder / name
        return folder if folder.exists() else Path(shutil.copytree(self.model, folder))


def _described(folder: Path) -> None:
    """What loading compares before it reads arrays."""
    opened(folder)
    files = ModelFiles.open(folder)
    stored_model(files.config, files.source.dtype.name, files.source.quantization)


_TEMPLATE = (
    *(
        "{{ 1/0 }}",
        "{{ range(1000000)|list }}",
        "{{ messages[5] }}",
        "{{ messages[0].content.x.y }}",
        "{% for m in 3 %}",
    ),
    *(
        "{% for m in messages %}",
        "{% endfor %}",
        "{{ m.role }}",
        "{{ 'a' + 1 }}",
        "{{ [].__class__ }}",
        "{{ bos_token }}",
    ),
    *("{{ x() }}", "{% if", "%}", "{{ tools|tojson }}", "{{ messages|tojson(indent='x') }}", "{{ {}[messages] }}"),
    *("{{ strftime_now('%') }}", "{{ strftime_now(3) }}", "{{ raise_exception('no') }}", "{{ 'é'|int('x') }}"),
    *(
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
        "{% set x = 1 %}",
    ),
    *("{% generation %}", "{% endgeneration %}", "{{ messages|sum }}", "{{ '%d' % 'x' }}", "{{ ''.format(1)|round }}"),
    *("{{ none.x.y }}", "{{ -'a' }}", "{{ {'a': 1}|dictsort('b') }}", "{% include 'x' %}", "{% break %}", "text\n"),
)


# ---- GGUF


def gguf_bytes(draw: random.Random) -> bytes:
    """A small GGUF file, good but for some values of other types and sizes."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    def number(kind: int, form: str, value: Any) -> bytes:
        return struct.pack("<I" + form, kind, value)

    tokens = [b"<unk>", b"<s>", b"a", b"b", b"ab", b"\xe2\x96\x81", b"\xc3\xa9"]

    def array(kind: int, values: list[bytes]) -> bytes:
        return struct.pack("<IIQ", 9, kind, len(values)) + b"".join(values)

    def any_value() -> bytes:
        return draw.choice(
            (
                struct.pack("<I", 8) + text(draw.choice((b"", b"x", b"llama", b"gpt2", b"gpt-2"))),
                number(4, "I", draw.choice((0, 1, 3, 2**31, 2**32 - 1))),
                number(11, "q", draw.choice((-1, 2**62, 7))),
                number(12, "d", draw.choice((math.nan, math.inf, 0.5))),
                number(7, "?", True),
                array(8, [text(b"a"), text(b"b c")]),
                array(6, [struct.pack("<f", 1.5)]),
                array(4, []),
            )
        )

    meta = {
        b"general.architecture": struct.pack("<I", 8) + text(b"llama"),
        b"split.count": number(4, "I", 1),
        b"general.alignment": number(4, "I", 32),
        **{
            b"llama." + key: number(4, "I", value)
            for key, value in {
                b"block_count": 1,
                b"embedding_length": 8,
                b"feed_forward_length": 8,
                b"context_length": 64,
                b"attention.head_count": 2,
                b"attention.head_count_kv": 1,
                b"attention.key_length": 4,
                b"rope.dimension_count": 4,
                b"attention.sliding_window": 4,
            }.items()
        },
        b"llama.attention.layer_norm_rms_epsilon": number(6, "f", 1e-5),
        b"llama.rope.freq_base": number(6, "f", 1e4),
        b"llama.rope.scaling.type": struct.pack("<I", 8) + text(draw.choice((b"none", b"linear", b"yarn"))),
        b"llama.rope.scaling.factor": number(6, "f", 2.0),
        b"tokenizer.ggml.model": struct.pack("<I", 8) + text(draw.choice((b"llama", b"gpt2"))),
        b"tokenizer.ggml.pre": struct.pack("<I", 8) + text(b"gpt-2"),
        b"tokenizer.ggml.tokens": array(8, [text(token) for token in tokens]),
        b"tokenizer.ggml.scores": array(6, [struct.pack("<f", -i) for i in range(len(tokens))]),
        b"tokenizer.ggml.token_type": array(5, [struct.pack("<i", kind) for kind in (2, 3, 1, 1, 1, 4, 1)]),
        b"tokenizer.ggml.merges": array(8, [text(b"a b")]),
        b"tokenizer.ggml.bos_token_id": number(4, "I", 1),
        b"tokenizer.ggml.eos_token_id": number(4, "I", 1),
        b"tokenizer.ggml.add_space_prefix": number(7, "?", True),
        b"tokenizer.chat_template": struct.pack("<I", 8) + text(b"{{ messages }}"),
    }
    for _ in range(draw.choice((0, 1, 1, 2, 4))):
        key = draw.choice(list(meta))
        meta[key] = any_value()
        if draw.random() < 0.2:
            del meta[key]
    shapes = {b"token_embd.weight": (8, len(tokens)), b"output_norm.weight": (8,), b"rope_freqs.weight": (2,)}
    shapes |= {b"blk.0." + name + b".weight": (8, 8) for name in (b"attn_q", b"attn_output", b"ffn_up")}
    infos, at = [], 0
    for name, dims in shapes.items():
        if draw.random() < 0.1:
            dims = draw.choice(((), (0,), (2**62, 2), (1, 1, 1, 1, 1), (8, 2**32), (-1 % 2**64,)))
        kind = 0 if draw.random() < 0.9 else draw.choice((2, 8, 12, 14, 30, 24, 99))
        infos.append(text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, at))
        at += 4 * math.prod(dims) if math.prod(dims) < 1000 else 0
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(meta))
    head += b"".join(text(key) + value for key, value in meta.items()) + b"".join(infos)
    return head + bytes(-len(head) % 32 + at + 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(Cases.KINDS))
    options = parser.parse_args()
    from tests.helpers.cli_model import make_model

    with tempfile.TemporaryDirectory() as name:
        cases = Cases(make_model(Path(name) / "model", layers=1), Path(name))
        kinds = options.kinds.split(",")
        for kind in kinds:
            wrong, count = cases.tried(kind, options.seed, options.seconds / len(kinds))
            print(f"{kind}: {len(wrong)} of {count} end as they should not", *wrong[:20], sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
