"""Training-time test: what passes over whole rows give is what the head gives as it drafts, a token at a time."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.cache.plan import plan_cache
from inferlib.checkpoint.eagle3 import Eagle3Files
from inferlib.checkpoint.load import load_weights
from inferlib.checkpoint.safetensors import SafetensorsSource
from inferlib.distillation.training import CHAIN, Passes, Target, TargetOutput, TrainingTimeTest
from inferlib.models.abstract import abstract_model
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.eagle3 import abstract_head
from inferlib.models.families import config_from_hf, family_of
from tests.helpers.eagle3 import make_head
from tests.helpers.oracle import make_checkpoint, reference_logits

ROWS, LENGTH, PASSES = 3, 12, 4
TOKENS = np.random.default_rng(0).integers(0, 131, (ROWS, LENGTH)).astype(np.int32)


class Trained:
    """A tiny target, a random head for it, and what the target says of rows."""

    def __init__(self, folder: Path):
        self.path = make_checkpoint(folder / "target", "llama", num_hidden_layers=8)
        hf = json.loads((self.path / "config.json").read_text())
        model = abstract_model(config_from_hf(hf), "float32", scan=True)
        self.target_weights = load_weights(SafetensorsSource(self.path), family_of(hf), model)
        files = Eagle3Files.open(make_head(folder / "head", self.path, 40), model.config)
        self.head = abstract_head(files.config, "float32")
        self.weights = files.load(self.head)
        self.target, self.passes = Target(model, files.config.feature_layers), Passes(self.head)
        self.ids = np.arange(40, dtype=np.int32) + np.asarray(self.head.merge(self.weights).d2t[...])
        self.outputs = jax.jit(self.target.outputs)(self.target_weights, TOKENS, self.ids)
        self.embeddings = self.target.embeddings(self.target_weights, jnp.asarray(TOKENS))

    def logits(self) -> list[np.ndarray]:
        """Of each pass over the rows."""
        over = jax.jit(lambda *arrays: list(self.passes.over(*arrays, PASSES)))
        return [np.asarray(x) for x in over(self.weights, self.outputs.features, self.embeddings)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


def test_the_target_says_what_it_computes(trained):
    for row, tokens in enumerate(TOKENS):
        logits = reference_logits(trained.path, tokens)
        said, expected = trained.outputs.logits[row], logits[:, trained.ids]
        np.testing.assert_allclose(said, expected, rtol=0, atol=1e-4 * logits.std())
        best = logits.argmax(-1)
        expected = [list(trained.ids).index(token) if token in trained.ids else -1 for token in best]
        np.testing.assert_array_equal(trained.outputs.best[row], expected)
    assert (np.asarray(trained.outputs.best) >= 0).any()
    assert (np.asarray(trained.outputs.best) < 0).any()


def drafted(trained: Trained, row: int, position: int) -> np.ndarray:
    """Logits [PASSES, U] of the head as an engine runs it: a chunk up to a position, then a token a step."""
    head, tokens = trained.head, TOKENS[row]
    plan = plan_cache(head.model, rows=1, max_len=2 * LENGTH, chunk=LENGTH, dtype="float32")
    module, zero = head.merge(trained.weights), jnp.zeros(1, jnp.int32)
    table = trained.target.model.merge(trained.target_weights).embed[...]

    @jax.jit
    def run(cache, batch, hidden):
        ctx = StepContext(batch, head.config.model, plan.max_len)
        embeddings = module.embedding(batch.tokens, table, ctx.shards)
        x, cache = module(embeddings, hidden, ctx, plan.view(cache)[0])
        return x[-1:], plan.flatten((cache,)), module.logits(x[-1:], ctx.shards)

    fused = module.fuse(trained.outputs.features[row, : position + 1])
    batch = StepBatch.of_chunks(jnp.asarray(tokens[None, 1 : position + 2]), zero, zero)
    hidden, cache, logits = run(plan.allocate(), batch, fused)
    every = [logits]
    for number in range(1, PASSES):
        batch = StepBatch.of_rows(jnp.asarray(tokens[[position + 1 + number]]), jnp.asarray([position + 1 + number]))
        hidden, cache, logits = run(cache, batch, hidden)
        every.append(logits)
    return np.concatenate(every)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "position"), [(0, 0), pytest.param(1, 4, marks=pytest.mark.release), (2, LENGTH - PASSES - 1)]
)
def test_passes_equal_drafting_a_token_at_a_time(trained, row, position):
    logits = np.stack([x[row, position] for x in trained.logits()])
    expected = drafted(trained, row, position)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * expected.std())


def softmax(x: np.ndarray) -> np.ndarray:
    y = np.exp(x - x.max(-1, keepdims=True))
    return y / y.sum(-1, keepdims=True)


@pytest.mark.slow
def test_the_loss_is_cross_entropy_with_what_the_target_says(trained):
    """Written down with loops. Half of the chains begin with the right draft, so that some stand."""
    logits = [x.astype(np.float64) for x in trained.logits()]
    best = np.array(trained.outputs.best)
    for row in range(ROWS):
        for t in range(0, LENGTH - 1, 2):
            best[row, t + 1] = logits[0][row, t].argmax()
    outputs = TargetOutput(trained.outputs.features, trained.outputs.logits, jnp.asarray(best))
    loss = jax.jit(TrainingTimeTest(trained.passes, PASSES, 0.7).loss)
    total, metrics = loss(trained.weights, outputs, trained.embeddings)
    likely, expected, standing = softmax(np.asarray(outputs.logits, np.float64)), 0.0, 0.0
    stands = np.ones((ROWS, LENGTH), bool)
    for number in range(PASSES):
        losses, agrees, count = 0.0, 0, ROWS * (LENGTH - 1 - number)
        for row in range(ROWS):
            for t in range(LENGTH - 1 - number):
                at = t + 1 + number
                right = logits[number][row, t].argmax() == best[row, at]
                stands[row, t] &= right
                agrees += right
                standing += stands[row, t] / count if number < CHAIN else 0
                if best[row, at] >= 0:
                    losses -= likely[row, at] @ np.log(softmax(logits[number][row, t]))
        expected += 0.7**number * losses / count
        assert metrics.agreeing[number] == pytest.approx(agrees / count)
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert float(metrics.standing) == pytest.approx(standing)
    assert metrics.standing > 0


@pytest.mark.slow
def test_what_is_behind_a_row_changes_nothing(trained):
    """Rolled, the first positions are behind the row: what the target says of them is of no draft."""
    garbage = trained.outputs._replace(
        logits=trained.outputs.logits.at[:, 0].set(1e4), best=trained.outputs.best.at[:, 0].set(7)
    )
    test = TrainingTimeTest(trained.passes, PASSES, 0.8)
    at = next(i for i, w in enumerate(trained.head.model.weights) if w.part == "fc")

    def loss(fc, outputs):
        weights = (*trained.weights[:at], fc, *trained.weights[at + 1 :])
        return test.loss(weights, outputs, trained.embeddings)

    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    clean, dirty = (gradient(trained.weights[at], x) for x in (trained.outputs, garbage))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    assert np.abs(clean[1]).max() > 0
