from __future__ import annotations

import json
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import tokenizers
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from inferlib.checkpoint.gguf import GGUFCheckpoint
from inferlib.checkpoint.known import resolve
from inferlib.checkpoint.source import CheckpointError
from inferlib.tokenizer import TextStream, Tokenizer

DATA = Path(__file__).parents[1] / "data"
CORPUS = [json.loads(line) for line in (DATA / "corpus.jsonl").read_bytes().splitlines()]
GOLDEN = json.loads((DATA / "smollm2_135m.json").read_bytes())

# References, written from the definitions of the algorithms.

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def printable_bytes() -> list[str]:
    """GPT-2's character for each byte: itself if it can be seen, else one from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(hidden)) for byte in range(256)]


def digits_alone(text: str) -> list[str]:
    pieces, word = [], ""
    for char in text:
        if unicodedata.category(char).startswith("N"):
            pieces += [word, char]
            word = ""
        else:
            word += char
    return [piece for piece in [*pieces, word] if piece]


def byte_level_reference(text: str, vocab: dict[str, int], ranks: dict[tuple[str, str], int], special: list[str]):
    """SmolLM's tokenizer: special tokens, digits one by one, GPT-2's words, byte pairs joined by rank."""
    alphabet, ids = printable_bytes(), []
    for part in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
        if part in special:
            ids.append(vocab[part])
            continue
        words = (word for piece in digits_alone(part) for word in regex.findall(GPT2_WORDS, piece))
        for word in words:
            symbols = [alphabet[byte] for byte in word.encode()]
            symbols = [symbol for symbol in symbols if symbol in vocab]  # some bytes were never seen in training
            while len(symbols) > 1:
                pairs = list(pairwise(symbols))
                at = min(range(len(pairs)), key=lambda i: (ranks.get(pairs[i], len(ranks)), i))
                if pairs[at] not in ranks:
                    break
                symbols[at : at + 2] = ["".join(pairs[at])]
            ids += [vocab[symbol] for symbol in symbols]
    return ids


def sentencepiece_reference(text: str, scores: dict[str, float], ids: dict[str, int]) -> list[int]:
    """SentencePiece: a space in front, the best-scored pair joined first, bytes for what is left over."""
    symbols = list(("\u2581" + text.replace(" ", "\u2581")) if text else "")
    while True:
        pairs = enumerate(a + b for a, b in pairwise(symbols))
        joined = [(scores[pair], -i) for i, pair in pairs if pair in scores]
        if not joined:
            break
        at = -max(joined)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    encoded = []
    for symbol in symbols:
        encoded += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return encoded


# Small tokenizers, trained on the corpus


def trained(pre_tokenizer: Any, alphabet: list[str]) -> tuple[list[str], list[str]]:
    """(vocabulary in the order it was learned, merges)."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].get), merges


@pytest.fixture(scope="module")
def byte_level_metadata() -> dict[str, Any]:
    words = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    learned, merges = trained(words, printable_bytes())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, "<tool>", *learned]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": np.array([3, 3, 3, 4] + [1] * len(learned), np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    }


@pytest.fixture(scope="module")
def byte_level(byte_level_metadata) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(byte_level_metadata)


@pytest.fixture(scope="module")
def sentencepiece_metadata() -> dict[str, Any]:
    # Learned on Latin text, so that other scripts fall back to bytes.
    words = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(r"[^ -~]"), "removed"), pre_tokenizers.Metaspace()]
    )
    learned, _ = trained(words, [])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0.0] * 259 + [-float(i) for i in range(len(learned))], np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(learned), np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="module")
def sentencepiece(sentencepiece_metadata) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(sentencepiece_metadata)


# GGUF


def test_byte_level_equals_the_reference(byte_level, byte_level_metadata):
    vocab = {token: i for i, token in enumerate(byte_level_metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(byte_level_metadata["tokenizer.ggml.merges"])}
    for text in [*CORPUS, "a <tool> b<tool>"]:
        ids = byte_level.encode(text)
        assert ids == byte_level_reference(text, vocab, ranks, [*vocab][:4])
        assert byte_level.decode(ids, skip_special_tokens=False) == text
    assert byte_level.vocab_size == len(vocab)
    assert byte_level.decode([1, vocab["a"], 2, 3]) == "a<tool>"


def test_sentencepiece_equals_the_reference(sentencepiece, sentencepiece_metadata):
    tokens, types = (sentencepiece_metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    ids = {token: i for i, token in enumerate(tokens)}
    scores = {
        token: score
        for token, score, kind in zip(tokens, sentencepiece_metadata["tokenizer.ggml.scores"], types, strict=True)
        if kind == 1
    }
    for text in CORPUS:
        encoded = sentencepiece.encode(text)
        assert encoded == [1, *sentencepiece_reference(text, scores, ids)]
        assert sentencepiece.decode(encoded) == text
    assert any(len(ids) > 2 for ids in map(sentencepiece.encode, CORPUS))
    assert sentencepiece.encode("a</s>b", add_special_tokens=False) == [ids["\u2581a"], 2, ids["\u2581b"]]


def test_gemma_joins_in_the_order_of_ids_and_spells_spaces_out(sentencepiece_metadata):
    learned = sentencepiece_metadata["tokenizer.ggml.tokens"][259:]
    tokens = [*sentencepiece_metadata["tokenizer.ggml.tokens"][:259], "  ", "    ", *learned]
    gemma = Tokenizer.from_gguf_metadata(
        sentencepiece_metadata
        | {
            "general.architecture": "gemma2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": np.zeros(len(tokens), np.float32),
            "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [4, 4] + [1] * len(learned)),
            "tokenizer.ggml.add_space_prefix": False,
        }
    )
    ids = {token.replace(" ", "\u2581"): i for i, token in enumerate(tokens)}
    scores = {token: -float(i) for token, i in ids.items() if i >= 259}
    assert gemma.encode("a    b", add_special_tokens=False) == [ids["a"], 260, ids["b"]]
    for text in CORPUS:
        # Without a space in front, which the reference puts there.
        expected = sentencepiece_reference("\u0000" + text, scores, ids)[2:]
        expected = expected if text else []
        encoded = gemma.encode(text, add_special_tokens=False)
        assert encoded == expected
        assert gemma.decode(encoded) == text


def test_phi3_special_tokens_swallow_white_space(sentencepiece_metadata):
    metadata = dict(sentencepiece_metadata) | {"general.architecture": "phi3"}
    phi3 = Tokenizer.from_gguf_metadata(metadata)
    assert phi3.encode("</s>\n a") == phi3.encode("</s>a")
    assert phi3.encode("<s>\n a") != phi3.encode("<s>a")


# Published examples of how each vocabulary cuts text into words.
SPLITS = {
    "gpt-2": ["Hello", " world", "'s", " 1234", "  ", " x", "\n\n"],
    "smollm": ["Hello", " world", "'s", " ", "1", "2", "3", "4", "  ", " x", "\n\n"],
    "llama-bpe": ["Hello", " world", "'s", " ", "123", "4", "  ", " x", "\n\n"],
    "dbrx": ["Hello", " world", "'s", " ", "123", "4", "  ", " x", "\n\n"],
    "qwen2": ["Hello", " world", "'s", " ", "1", "2", "3", "4", "  ", " x", "\n\n"],
    "tekken": ["Hello", " world", "'s", " ", "1", "2", "3", "4", "  ", " x", "\n\n"],
    "gpt-4o": ["Hello", " world's", " ", "123", "4", "  ", " x", "\n\n"],
}


@pytest.mark.parametrize("name", SPLITS)
def test_pre_tokenizers(byte_level_metadata, name):
    # With every word a token and no merges, tokens are words where these are taken whole; elsewhere, bytes.
    tokenizer = Tokenizer.from_gguf_metadata(byte_level_metadata | {"tokenizer.ggml.pre": name})
    words = tokenizer._backend.pre_tokenizer.pre_tokenize_str("".join(SPLITS[name]))
    alphabet = printable_bytes()
    assert ["".join(alphabet[b] for b in word.encode()) for word in SPLITS[name]] == [word for word, _ in words]


def test_qwen2_normalises(byte_level_metadata):
    tokenizer = Tokenizer.from_gguf_metadata(byte_level_metadata | {"tokenizer.ggml.pre": "qwen2"})
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_bos_and_eos(byte_level_metadata):
    def edges(**keys: Any) -> list[int]:
        tokenizer = Tokenizer.from_gguf_metadata(
            byte_level_metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
        )
        assert tokenizer.bos_token_id == 1
        x_ids = tokenizer.encode("x", add_special_tokens=False)
        return ["x" if token == x_ids[0] else token for token in tokenizer.encode("x")]

    assert edges() == ["x"]
    assert edges(pre="llama-bpe") == [1, "x"]
    assert edges(pre="llama-bpe", add_bos_token=False) == ["x"]
    assert edges(add_bos_token=True, add_eos_token=True) == [1, "x", 0]


def test_eos_ids_include_undeclared_ends_of_a_turn(byte_level, byte_level_metadata):
    assert byte_level.eos_token_ids == (0, 2)
    tokenizer = Tokenizer.from_gguf_metadata(byte_level_metadata | {"tokenizer.ggml.eot_token_id": 1})
    assert tokenizer.eos_token_ids == (0, 1, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "tokenizer 't5' is not supported; known: gpt2, llama"),
        ({"pre": "martian"}, "pre-tokenizer 'martian' is not supported; known: gpt-2, smollm"),
        ({"pre": None}, "lacks metadata key 'tokenizer.ggml.pre'"),
        ({"tokens": None}, "lacks metadata key 'tokenizer.ggml.tokens'"),
        ({"merges": None}, "lacks metadata key 'tokenizer.ggml.merges'"),
        ({"merges": ["\u0120 \u2581"]}, "tokenizer is damaged"),
        ({"token_type": [1, 2]}, "tokens, 2 token types"),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000, beyond its"),
    ],
)
def test_gguf_metadata_that_is_no_use(byte_level_metadata, changes, message):
    metadata = byte_level_metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf_metadata(metadata)


# Hugging Face directories


@pytest.fixture
def directory(tmp_path, byte_level) -> Path:
    PreTrainedTokenizerFast(
        tokenizer_object=byte_level._backend, bos_token="<|im_start|>", eos_token="<|im_end|>"
    ).save_pretrained(tmp_path)
    return tmp_path


def test_directory_equals_transformers(directory):
    ours, theirs = Tokenizer.from_directory(directory), AutoTokenizer.from_pretrained(directory)
    for text in CORPUS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert (ours.bos_token_id, ours.eos_token_ids, ours.vocab_size) == (1, (2,), len(theirs))
    assert ours.chat_template is None


def test_directory_unites_the_eos_ids_of_its_files(directory):
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    (directory / "config.json").write_text('{"eos_token_id": 9, "bos_token_id": 5}')
    assert Tokenizer.from_directory(directory).eos_token_ids == (7, 2, 9)
    (directory / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_directory(directory)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (5, (7, 2, 9))


def test_directory_ignores_truncation_and_padding(directory):
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    backend.save(str(directory / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.decode(tokenizer.encode(CORPUS[8])) == CORPUS[8]


def test_directory_chat_template_places(directory):
    def rendered() -> str:
        return Tokenizer.from_directory(directory).chat_template.render([{"role": "user", "content": "x"}])

    settings = json.loads((directory / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named {{ bos_token }}"}]
    for template, expected in (("plain {{ eos_token }}", "plain <|im_end|>"), (named, "named <|im_start|>")):
        (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
        assert rendered() == expected
    (directory / "chat_template.json").write_text('{"chat_template": "json"}')
    assert rendered() == "json"
    (directory / "chat_template.jinja").write_text("jinja \u4f60", encoding="utf-8")
    assert rendered() == "jinja \u4f60"


def test_directory_that_is_no_use(directory):
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not valid JSON"):
        Tokenizer.from_directory(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
        Tokenizer.from_directory(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_directory(directory)


def test_encode_refuses_what_is_no_text(byte_level):
    with pytest.raises(TypeError, match="must be a string, got bytes"):
        byte_level.encode(b"x")
    with pytest.raises(ValueError, match="lone surrogate"):
        byte_level.encode("a\ud83d")


# Streams


def streamed(tokenizer: Tokenizer, ids: list[int], sizes: Any, skip_special_tokens: bool = True) -> list[str]:
    stream, pieces, at = TextStream(tokenizer, skip_special_tokens=skip_special_tokens), [], 0
    while at < len(ids):
        size = next(sizes)
        pieces.append(stream.push(ids[at : at + size]))
        at += size
    return [*pieces, stream.finish()]


def forever(size: int):
    while True:
        yield size


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_stream_pieces_join_to_the_text(kind, request):
    tokenizer = request.getfixturevalue(kind)
    for text in CORPUS:
        ids = tokenizer.encode(text)
        for size in (1, 2, 7):
            pieces = streamed(tokenizer, ids, forever(size), skip_special_tokens=False)
            assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
            if "\ufffd" not in text:
                assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_stream_of_random_tokens(kind, request):
    """Most of these are not UTF-8; with few distinct ones, whole characters are likely too."""
    tokenizer, rng = request.getfixturevalue(kind), np.random.default_rng(0)
    emoji = tokenizer.encode("\U0001f642", add_special_tokens=False)
    for trial in range(400):
        choices = rng.integers(0, tokenizer.vocab_size + 20, 6).tolist() + emoji
        ids = rng.choice(choices if trial % 2 else tokenizer.vocab_size + 20, rng.integers(1, 60)).tolist()
        skip = bool(trial % 3)
        pieces = streamed(tokenizer, ids, iter(lambda: int(rng.integers(1, 5)), 0), skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip), ids


def test_stream_is_prompt(byte_level):
    """All the text that is complete has been given out after each token."""
    ids = byte_level.encode("".join(CORPUS))
    stream, text = TextStream(byte_level), ""
    for count, token in enumerate(ids[:1500], start=1):
        text += stream.push([token])
        assert text == byte_level.decode(ids[:count]).removesuffix("\ufffd")


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_stream_decodes_few_tokens_at_a_time(kind, request, monkeypatch):
    tokenizer, lengths = request.getfixturevalue(kind), []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: lengths.append(len(ids)) or decode(ids, **options))
    ids = tokenizer.encode("Some plain text, \u4f60\u597d. " * 50)
    streamed(tokenizer, ids, forever(1))
    assert max(lengths) <= 16
    assert len(lengths) <= 2 * len(ids) + 1
    # Bytes that never make a character, and special tokens, do not pile up either.
    lengths.clear()
    ids = [tokenizer.encode("\U0001f642")[-1]] * 100 if kind == "byte_level" else [1, 2] * 100
    streamed(tokenizer, ids, forever(1))
    assert max(lengths) <= 16


def test_stream_starts_anew_after_finish(sentencepiece):
    ids = sentencepiece.encode("Hello world")
    stream = TextStream(sentencepiece)
    for _ in range(2):
        assert stream.push(ids) + stream.finish() == "Hello world"


# The real file


@pytest.fixture(scope="module")
def smollm2() -> GGUFCheckpoint:
    return GGUFCheckpoint(resolve("smollm2"))


@pytest.mark.slow
def test_smollm2_equals_the_reference(smollm2):
    tokenizer, metadata = smollm2.tokenizer(), smollm2.metadata
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    vocab = {token: i for i, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    assert len(special) == 17
    for text in CORPUS:
        ids = tokenizer.encode(text)
        assert ids == byte_level_reference(text, vocab, ranks, special), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        pieces = streamed(tokenizer, ids, forever(1), skip_special_tokens=False)
        assert "".join(pieces) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, (2,), 49152)


@pytest.mark.slow
def test_smollm2_golden_prompts(smollm2):
    tokenizer = smollm2.tokenizer()
    for prompt in GOLDEN["prompts"]:
        assert tokenizer.encode(prompt["prompt"]) == prompt["prompt_ids"]
        assert tokenizer.decode(prompt["greedy_ids"], skip_special_tokens=False) == prompt["greedy_text"]
