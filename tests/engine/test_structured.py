"""Structured outputs: grammars that tokens follow, with masks made between the two programs of a step. About 20 s."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import sys
from random import Random

import jax
import jsonschema
import numpy as np
import pytest
import tokenizers

from inferlib import LLM, AsyncLLM, Buckets, SamplingParams, StructuredOutputs
from inferlib.engine.constraint import Asked, fill
from inferlib.engine.grammars import Grammars
from inferlib.engine.scheduler import Scheduler
from inferlib.option_checks import ConfigurationError
from inferlib.sampling.structured import StructuredOutputError
from inferlib.tokenizer import Tokenizer
from tests.helpers.engines import assert_accounted
from tests.helpers.json_schemas import random_schema
from tests.helpers.llms import build_llm, new_engine, random_prompts, reference
from tests.helpers.tokenizer import VOCAB

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
BUCKETS = Buckets((8,), (2, 4), (64,))
FOUR_ROWS = Buckets((8,), (4,), (64,))
CITIES = ["London", "Los Angeles", "Lima", "Rome"]
CODE = r"[a-z]{2,5}-[0-9]{3}"
EOS = 2


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("llama", num_hidden_layers=1)


@pytest.fixture
def llm(changed) -> LLM:
    return changed


def structured(params: SamplingParams = GREEDY, **fields) -> SamplingParams:
    return dataclasses.replace(params, structured_outputs=StructuredOutputs(**fields))


def outputs(llm: LLM, prompts, params):
    return [output.outputs[0] for output in llm.generate(prompts, params)]


LIST = {"type": "array", "items": {"enum": CITIES}, "minItems": 5, "maxItems": 6}
# A long list, a sampled expression with log-probabilities and a greedy choice; and three that follow no grammar, one of
# them processed.
KINDS = [
    dataclasses.replace(GREEDY, ignore_eos=True, max_tokens=30),
    structured(SamplingParams(seed=5, max_tokens=50, top_k=20), json=LIST, whitespace_pattern=""),
    structured(SamplingParams(seed=3, max_tokens=40, logprobs=2, presence_penalty=0.5), regex=CODE),
    dataclasses.replace(GREEDY, logits_processors=[lambda tokens, logits: logits + np.arange(VOCAB) / 99]),
    SamplingParams(temperature=0.7, seed=4, max_tokens=17, top_p=0.8, ignore_eos=True),
    structured(choice=CITIES),
]
LENGTHS = [3, 5, 19, 30, 8, 9]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [None, pytest.param("dp=2,tp=2", marks=pytest.mark.release), "preempted"])
def test_outputs_follow_their_grammars_and_change_no_other(path, llm, parallel, monkeypatch):
    """More prompts than rows, beside those that follow none; on a mesh, where pages run out, and again, from the cache:
    the tokens are those of each alone. On the mesh all are scored: so its programs are of one mode."""
    it = llm if parallel in (None, "preempted") else build_llm(path, FOUR_ROWS, parallel=parallel, decode_steps=1)
    preempt, preempted = Scheduler._preempt, []
    monkeypatch.setattr(Scheduler, "_preempt", lambda self, s: (preempted.append(s.params), preempt(self, s)))
    prompts, kinds = random_prompts(LENGTHS), KINDS
    if it is not llm:
        kinds = [dataclasses.replace(params, logprobs=params.logprobs or 0) for params in KINDS]
    alone = [outputs(llm, [prompt], params)[0] for prompt, params in zip(prompts, KINDS, strict=True)]
    with new_engine(it, pages=4 if parallel == "preempted" else None):
        for _ in range(2):
            got = outputs(it, prompts, kinds)
            assert [x.token_ids for x in got] == [x.token_ids for x in alone]
            assert [x.text for x in got] == [x.text for x in alone]
            assert_accounted(it.engine)
    assert len(json.loads(alone[1].text)) >= 5
    assert re.fullmatch(CODE, alone[2].text)
    assert alone[5].text in CITIES
    assert all(x.finish_reason == "stop" and x.token_ids[-1] == EOS for x in (alone[1], alone[2], alone[5]))
    assert any(params.structured_outputs for params in preempted) == (parallel == "preempted")


def test_the_best_of_the_tokens_that_fit_is_chosen_and_log_probabilities_are_of_all(llm, path):
    """By one pass of the reference, and by looking which tokens lead on to a choice."""
    (prompt,) = random_prompts([7], seed=2)
    (output,) = outputs(llm, [prompt], structured(dataclasses.replace(GREEDY, logprobs=1), choice=CITIES))
    logits = reference(path, [*prompt, *output.token_ids[:-1]])[len(prompt) - 1 :]
    scores, text = jax.nn.log_softmax(logits, axis=-1), ""
    for i, (token, row) in enumerate(zip(output.token_ids, logits, strict=True)):
        pieces = {t: llm.tokenizer.decode([t], skip_special_tokens=False) for t in range(VOCAB)}
        fit = [t for t, piece in pieces.items() if any(city.startswith(text + piece) for city in CITIES)]
        fit = [EOS] if text in CITIES else fit
        assert row[token] > row[fit].max() - 1e-3
        assert token in fit
        assert output.logprobs[i][token].logprob == pytest.approx(float(scores[i, token]), abs=1e-3)
        text += pieces[token]


def answers(llm: LLM, schemas: list[dict], **options):
    """A sampled answer to each of these schemas."""
    params = [
        structured(SamplingParams(seed=i, max_tokens=240, temperature=0.8), json=schema, **options)
        for i, schema in enumerate(schemas)
    ]
    return outputs(llm, random_prompts([6] * len(schemas)), params)


@pytest.mark.slow
@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.release)])
def test_every_answer_to_a_random_schema_validates(path, count):
    """A random model writes anything that it may."""
    llm, random = build_llm(path, Buckets((8,), (8,), (256,)), decode_steps=1), Random(count)
    schemas = [random_schema(random) for _ in range(count)]
    whole = 0
    for schema, answer in zip(schemas, answers(llm, schemas, whitespace_pattern=" ?"), strict=True):
        if answer.finish_reason == "stop":
            whole += 1
            jsonschema.validate(json.loads(answer.text), schema)
    assert whole > 0.98 * count  # numbers may have many digits


def test_white_space_comes_to_an_end(llm):
    """Where the model prefers it, and where there is to be none."""
    space = llm.tokenizer.encode(" ")[0]
    likes_space = dataclasses.replace(GREEDY, logit_bias={space: 100.0}, max_tokens=60)
    schema = {"type": "array", "maxItems": 0}
    for options, spaces in (({}, 40), ({"whitespace_pattern": ""}, 0), ({"whitespace_pattern": " {3}"}, 3)):
        (answer,) = outputs(llm, [[5, 6]], structured(likes_space, json=schema, **options))
        assert answer.text == f"[{' ' * spaces}]"


@pytest.mark.parametrize("params", [dict(min_tokens=20), dict(ignore_eos=True)])
def test_a_complete_text_ends_whatever_is_to_go_on(llm, params):
    """Without an end-of-sequence token, which may not be chosen; where the grammar can go on, it does."""
    greedy = dataclasses.replace(GREEDY, **params)
    (answer,) = outputs(llm, [[5, 6]], structured(greedy, choice=CITIES))
    assert answer.text in CITIES
    assert answer.finish_reason == "stop"
    assert EOS not in answer.token_ids
    (answer,) = outputs(llm, [[5, 6]], structured(greedy, regex="a+"))
    assert EOS not in answer.token_ids[:20]
    assert len(answer.token_ids) >= 20
    assert_accounted(llm.engine)


def test_several_outputs_each_have_a_place_in_the_grammar(llm):
    params = structured(SamplingParams(n=6, seed=1, max_tokens=40), regex=CODE)
    (request,) = llm.generate([[5, 6, 7]], params)
    texts = [output.text for output in request.outputs]
    assert all(re.fullmatch(CODE, text) for text in texts)
    assert len(set(texts)) > 3


def test_an_output_is_free_up_to_a_text_before_which_it_does_not_end(llm):
    """The token in which the text ends may have more; and a model that would end at once goes on."""
    params = SamplingParams(seed=1, max_tokens=50)
    free = outputs(llm, [[5, 6]], dataclasses.replace(params, logit_bias={EOS: -100.0}))[0].text
    (answer,) = outputs(llm, [[5, 6]], structured(params, choice=["Rome"], after=free[5:7]))
    before, _, rest = answer.text.partition(free[5:7])
    assert free.startswith(before)
    assert re.fullmatch(".?Rome", rest)
    ends = dataclasses.replace(params, logit_bias={EOS: 100.0})
    (answer,) = outputs(llm, [[5, 6]], structured(ends, choice=["Rome"], after=free[5]))
    assert re.fullmatch(f"[^{re.escape(free[5])}]*{re.escape(free[5])}.?Rome", answer.text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": {"type": "strnig"}}, "json: Invalid type: strnig"),
        ({"json": {"uniqueItems": True}}, "does not follow these keywords, so leave them out"),
        (
            {"json": {"type": "string", "format": "password"}},
            "Unknown format: password: leave it out, or give a pattern",
        ),
        ({"json": {"enum": []}}, "no value fits it, so correct it"),
        ({"json": {}, "whitespace_pattern": "(("}, "unclosed group.*correct it"),
        ({"regex": "(?=a)b"}, r"write the expression without \(\?=,"),
        ({"grammar": "root ::= ("}, "grammar: .*correct it"),
        ({"grammar": "nothing"}, "grammar: .*correct it"),
    ],
)
def test_wrong_grammars_are_errors_that_name_the_fix(llm, fields, message):
    with pytest.raises(ValueError, match=rf"(?s)prompt 0: structured_outputs.*{message}"):
        llm.generate([[5]], structured(**fields))
    assert llm.engine.scheduler.idle


@pytest.mark.parametrize("grammar", ['start: "a" "b"+ "c"', 'root ::= "a" "b" "b"* "c"'])
def test_a_grammar_has_either_form(llm, grammar):
    (answer,) = outputs(llm, [[5, 6]], structured(SamplingParams(seed=1, max_tokens=30), grammar=grammar))
    assert re.fullmatch("ab+c", answer.text)


def test_an_error_of_a_grammar_ends_its_request_and_no_other(llm):
    """The rest of its parameters leaves no token of the grammar."""
    prompts, a = random_prompts([5, 9]), llm.tokenizer.encode("a")
    (expected,) = outputs(llm, prompts[:1], GREEDY)
    stream = llm.stream(prompts[0], GREEDY)
    pieces = iter(stream)
    next(pieces)
    with pytest.raises(
        StructuredOutputError, match="does not follow the grammar of structured_outputs: allowed_token_ids"
    ):
        llm.generate(prompts[1:], structured(dataclasses.replace(GREEDY, allowed_token_ids=a), regex="ab"))
    assert "".join(pieces) is not None
    assert stream.output.outputs[0].token_ids == expected.token_ids
    assert llm.engine.scheduler.idle
    assert_accounted(llm.engine)


def test_streams_compile_their_grammar_in_a_thread_and_abort_frees_it(llm):
    async def main():
        async with AsyncLLM(llm) as it:
            wrong = it.generate([5], structured(json={"type": "strnig"}))
            with pytest.raises(ValueError, match="Invalid type: strnig"):
                await anext(wrong)
            assert not it.open_requests
            stream = it.generate([5], structured(dataclasses.replace(GREEDY, max_tokens=50), regex="[a-z]{50}"), "one")
            first = await anext(stream)
            (sequence,) = stream._feed.request.sequences
            assert sequence.constraint is not None
            it.abort("one")
            outs = [output async for output in stream]
            assert outs[-1].outputs[0].finish_reason == "abort"
            assert re.fullmatch("[a-z]+", first.outputs[0].text + "a")
            assert sequence.constraint is None
            never = it.generate([5], structured(regex="a"))
            await never.aclose()
            assert [output async for output in never] == []
            assert not it.open_requests

    asyncio.run(main())
    assert_accounted(llm.engine)


def test_sequences_of_one_grammar_share_few_matchers(llm, monkeypatch):
    """Copies of a matcher wait for each other, so that sequences that run together get several."""
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    grammars, compiled = llm._grammars, []
    compile = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda wanted: compiled.append(wanted) or compile(wanted))
    wanted = StructuredOutputs(regex="[a-f]{1,40}")
    for _ in range(2):  # one after the other
        grammars.constraint(wanted)
    assert len(compiled) == 1
    together = [grammars.constraint(wanted) for _ in range(8)]
    assert len(compiled) == 3
    del together
    grammars.constraint(wanted)
    assert len(compiled) == 3


def test_several_processes_refuse_them(llm, monkeypatch):
    monkeypatch.setattr(llm, "_channel", object())
    with pytest.raises(ValueError, match="structured_outputs run in one process, and several processes share this"):
        llm.prepare([5], structured(regex="a"))


def test_they_need_llguidance_and_a_tokenizer(llm, monkeypatch):
    with pytest.raises(ConfigurationError, match="need a tokenizer, and the model directory"):
        Grammars(None, (), VOCAB).check()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"need llguidance: pip install 'inferlib\[structured\]'"):
        llm.prepare([5], structured(regex="a"))


def sentencepiece() -> Tokenizer:
    """Words that begin with a space, and bytes for what is in no word."""
    words = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁yes", "yes", "no", "n", "o"]
    model = tokenizers.models.BPE({word: i for i, word in enumerate(words)}, [("n", "o")], byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    parts = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    backend.decoder = tokenizers.decoders.Sequence([*parts, tokenizers.decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, eos_token_ids=(1,))


@pytest.mark.parametrize("vocab", [300, 263, 200])
def test_tokens_of_sentencepiece_and_bytes(vocab):
    """Also of models with more tokens than the tokenizer, or fewer."""
    tokenizer = sentencepiece()
    constraint = Grammars(tokenizer, (1,), vocab).constraint(StructuredOutputs(choice=["yes", "noé"]))

    def allowed() -> set[int]:
        mask = np.full((2, -(-vocab // 32)), -1, np.int32)
        fill([Asked(constraint, 1, [])], mask)
        assert (mask[0] == -1).all()
        return set(np.flatnonzero(np.unpackbits(mask[1].view(np.uint8), bitorder="little")))

    ids = {name: tokenizer._backend.token_to_id(name) for name in ("yes", "no", "n", "<0xC3>", "<0xA9>", "<0x79>")}
    beginnings = {ids["yes"], ids["no"], ids["n"], ids["<0x79>"], tokenizer._backend.token_to_id("<0x6E>")}
    assert allowed() == {token for token in beginnings if token < -(-vocab // 32) * 32}
    for name in ("no", "<0xC3>", "<0xA9>"):
        constraint.accept(ids[name])
    assert allowed() == {1}
