"""What `StructuredOutputs` takes, and masks in the sampler."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib import SamplingParams, StructuredOutputs
from inferlib.sampling.sampler import mask_words, pack, permitted, sample, unpack

LIST = {"type": "array", "items": {"$ref": "#/$defs/node"}}


def schema_of(node) -> dict:
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def test_a_kind_is_stored_as_its_text():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    outputs = StructuredOutputs(json=schema)
    assert outputs == StructuredOutputs(json=json.dumps(schema))
    assert (outputs.kind, outputs.text) == ("json", json.dumps(schema))
    assert hash(outputs) == hash(StructuredOutputs(json=schema))
    assert json.loads(StructuredOutputs(choice=["a", "b", "a"]).text) == ["a", "b"]
    assert StructuredOutputs(json={}).text == "{}"
    assert SamplingParams(structured_outputs={"regex": "a+"}).structured_outputs == StructuredOutputs(regex="a+")
    assert dataclasses.replace(SamplingParams(structured_outputs=outputs), top_k=3).structured_outputs == outputs
    assert SamplingParams(temperature=0.0, structured_outputs=outputs).chosen_with_host


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give one of json, regex, choice, grammar; there is none"),
        ({"json": {}, "regex": "a"}, "there is json and regex"),
        ({"json": "{"}, "json is not JSON: .*give a schema as a mapping or text"),
        ({"json": [1]}, "must be a JSON schema.*Model.model_json_schema"),
        ({"json": "3"}, "must be a JSON schema"),
        ({"json": True}, "must be a JSON schema"),
        ({"json": {"const": {1}}}, "must hold nothing but JSON"),
        ({"regex": ""}, "regex must be a text that is not empty"),
        ({"regex": "a", "after": 3}, "after must be a text that is not empty"),
        ({"choice": "yes"}, "choice must be a list of texts"),
        ({"choice": []}, "choice must be a list of texts"),
        ({"choice": ["a", ""]}, "choice must be a list of texts"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is about JSON: give json"),
        ({"regex": "a" * 300_000}, "regex has 300000 characters, and at most 262144 are allowed: shorten it"),
    ],
)
def test_wrong_fields_are_errors_that_name_the_fix(fields, message):
    with pytest.raises(ValueError, match=rf"structured_outputs.*{message}"):
        StructuredOutputs(**fields)


def test_a_mapping_has_known_fields():
    for wrong in ({"schema": {}}, "json", 3):
        with pytest.raises(ValueError, match="structured_outputs must be StructuredOutputs"):
            SamplingParams(structured_outputs=wrong)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        schema_of({"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}),
        schema_of(LIST | {"minItems": 1}),
        schema_of({"type": "array", "prefixItems": [{"$ref": "#/$defs/node"}], "minItems": 1}),
        schema_of({"anyOf": [{"$ref": "#/$defs/node"}, {"allOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}]}),
    ],
)
def test_a_schema_without_a_finite_value_is_refused(schema):
    with pytest.raises(ValueError, match=r"no finite value.*Leave the property out of 'required', or allow null"):
        StructuredOutputs(json=schema)


@pytest.mark.parametrize(
    "schema",
    [
        schema_of(LIST),
        schema_of({"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}),
        schema_of({"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}})
        | {"required": ["next"]},
        schema_of({"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1}),
        {"properties": {"type": {"enum": [1]}, "$ref": {}, "required": {"type": "string"}}, "required": ["type"]},
        {"type": "array", "prefixItems": [{}, {"type": "array", "items": {"$ref": "#/prefixItems/0"}, "minItems": 2}]},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "integer"}}},
    ],
)
def test_one_that_has_a_finite_value_is_taken(schema):
    assert StructuredOutputs(json=schema).kind == "json"


def test_a_schema_nested_too_deeply_is_refused():
    schema = {}
    for _ in range(70):
        schema = {"items": schema}
    with pytest.raises(ValueError, match=r"nested deeper than 64 levels: move its inner parts to \$defs"):
        StructuredOutputs(json=schema)


def random_mask(rng, rows: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """A mask, and what it says of each token."""
    bits = rng.random((rows, mask_words(vocab) * 32)) < 0.3
    bits[:, 0] = True
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32), bits[:, :vocab]


def test_a_mask_has_a_bit_for_each_token():
    mask, bits = random_mask(np.random.default_rng(0), 3, 71)
    np.testing.assert_array_equal(permitted(jnp.array(mask), 71), bits)


@pytest.mark.parametrize("mode", ["greedy", "logprobs"])
def test_only_tokens_of_the_mask_are_chosen(mode):
    """As without it where the others are improbable; and log-probabilities are those of all tokens."""
    rng = np.random.default_rng(1)
    rows, vocab = 4, 50
    logits = rng.normal(size=(rows, vocab)).astype(np.float32)
    mask, bits = random_mask(rng, rows, vocab)
    kinds = [SamplingParams(temperature=0.0), SamplingParams(top_k=5), SamplingParams(top_p=0.5), SamplingParams()]
    params = unpack(*map(jnp.array, pack([(p, 7, ()) for p in kinds])))
    zeros, run = (np.zeros((rows, vocab), np.int32), np.arange(rows)), jax.jit(partial(sample, mode=mode))
    mine = run(logits, params, *zeros, mask=mask)
    theirs = run(np.where(bits, logits, -np.inf).astype(np.float32), params, *zeros)
    np.testing.assert_array_equal(mine.token, theirs.token)
    assert bits[np.arange(rows), mine.token].all()
    if mode == "logprobs":
        expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(rows), mine.token]
        np.testing.assert_allclose(mine.logprob, expected, rtol=1e-5)
