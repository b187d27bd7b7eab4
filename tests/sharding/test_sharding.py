"""A model on a mesh of fake CPU devices does what it does on one. Some two minutes, nearly all of it compilations."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from typer.testing import CliRunner

from inferlib import LLM
from inferlib.cache.plan import plan_cache
from inferlib.checkpoint.load import load_weights
from inferlib.checkpoint.safetensors import SafetensorsSource
from inferlib.cli import app
from inferlib.compile.program_set import ProgramSet
from inferlib.compile.programs import ProgramKey
from inferlib.config import Buckets, ConfigurationError, EngineConfig
from inferlib.engine.engine import Engine
from inferlib.engine.sequence import Sequence
from inferlib.explain import explain
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.config import AttentionSpec
from inferlib.models.families import config_from_hf, family_of
from inferlib.models.layout import Layout, head_layout
from inferlib.sampling.params import SamplingParams
from inferlib.sharding import axes
from inferlib.sharding.mesh import Parallelism, ShardingError, make_mesh
from inferlib.sharding.rules import PRESETS, Rules, preset
from inferlib.sharding.shards import Shards, make_shards, planned_shards
from tests.oracle import make_checkpoint
from tests.test_poison import poison

ROWS, CHUNK, MAX_LEN = 4, 16, 64
MESHES = ["tp=2", "tp=4", "tp=8", "dp=2", "tp=2,dp=2", "tp=4,rules=tp_sp"]
EXPLAINED = ["tp=4", "tp=2,dp=2", "tp=4,rules=tp_sp"]  # where compiled collectives are read, and tokens of all families
FAMILIES = ["llama", "gemma3", "qwen3", "smollm2"]
_TWO = {"num_hidden_layers": 2}
# 6 query and 2 KV heads, 131 tokens: on 4 and 8 devices heads are copied and padded, the vocabulary nearly always.
SHAPES = {
    "llama": ("llama", _TWO),
    "gemma3": ("gemma3_text", {**_TWO, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3": ("qwen3", _TWO),
    "smollm2": (
        "llama",
        {**_TWO, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}
        | {"tie_word_embeddings": True},
    ),
    "biased": ("llama", {**_TWO, "attention_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", _TWO),  # RMS norm over all heads together
    "cohere2": ("cohere2", _TWO),  # attention and feed-forward in parallel
}


@pytest.fixture(scope="module", autouse=True)
def quick_compilations():
    """Half the time for the same collectives."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    @functools.cache
    def build(shape: str) -> Path:
        family, options = SHAPES[shape]
        return make_checkpoint(tmp_path_factory.mktemp(shape), family, **options)

    return build


@pytest.fixture(scope="module")
def programs_of(checkpoint) -> Callable[..., ProgramSet]:
    """`programs_of(shape, parallel, scan=False)`: programs without weights; "" is a single device."""

    @functools.cache
    def build(shape: str, parallel: str, scan: bool = False) -> ProgramSet:
        shards = make_shards(Parallelism.parse(parallel))
        config = config_from_hf(json.loads((checkpoint(shape) / "config.json").read_text()))
        model = abstract_model(config, "float32", scan=scan, shards=shards.tensor)
        buckets = Buckets(prefill=(CHUNK,), batch=(ROWS,), cache=(MAX_LEN,))
        settings = EngineConfig(ROWS, MAX_LEN, buckets, decode_steps=4, scan=scan, shards=shards)
        plan = plan_cache(model, rows=ROWS, max_len=MAX_LEN, chunk=CHUNK, dtype="float32")
        return ProgramSet(model, plan, settings)

    return build


@pytest.fixture(scope="module")
def engine_of(checkpoint, programs_of) -> Callable[..., Engine]:
    """`engine_of(shape, parallel, scan=False)`: a new engine; weights and programs are shared."""

    @functools.cache
    def weights(*which) -> tuple[jax.Array, ...]:
        return load(checkpoint(which[0]), programs_of(*which).model, programs_of(*which).config.shards)

    def build(shape: str, parallel: str = "", scan: bool = False) -> Engine:
        programs = programs_of(shape, parallel, scan)
        engine = Engine(programs.model, weights(shape, parallel, scan), programs.config)
        engine.programs = programs
        return engine

    return build


def load(path: Path, model: AbstractModel, shards: Shards, wrap: Callable = lambda source: source):
    family = family_of(json.loads((path / "config.json").read_text()))
    return load_weights(wrap(SafetensorsSource(path)), family, model, shards=shards)


def run(engine: Engine, sequences: list[Sequence]) -> list[Sequence]:
    for s in sequences:
        engine.add(s)
    while engine.busy:
        engine.advance()
    return sequences


def requests(params: list[SamplingParams], lengths: list[int], seed: int) -> list[Sequence]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 131, n).tolist() for n in lengths]
    return [Sequence(p, params[i % len(params)], 8 + i, seed=i) for i, p in enumerate(prompts)]


# ---- the same results


def logits(engine: Engine) -> np.ndarray:
    prompt = np.random.default_rng(1).integers(0, 131, 40).tolist()
    (s,) = run(engine, [Sequence(prompt, GREEDY, 0, 0, detail="logits")])
    return np.concatenate(s.prompt_details)[:, : engine.model.config.vocab]


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
# More prompts than rows, one of several chunks: rows are used again while others decode.
LENGTHS = [10, 3, 30, 1, 9, 16, 21]
MIXED = [
    SamplingParams(temperature=0.8, top_p=0.9, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=5, repetition_penalty=1.2, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.2, logprobs=20, ignore_eos=True),
    SamplingParams(temperature=1.2, min_p=0.05, logit_bias={7: 2.0, 130: 3.0}, ignore_eos=True),
]


@pytest.fixture(scope="module")
def expected(engine_of) -> Callable:
    """`expected(what, shape)`: on one device."""

    @functools.cache
    def compute(what: str, shape: str):
        engine = engine_of(shape)
        if what == "logits":
            return logits(engine)
        return run(engine, requests([GREEDY] if what == "greedy" else MIXED, LENGTHS, seed=2))

    return compute


def assert_same_logits(engine: Engine, shape: str, expected: Callable) -> None:
    want = expected("logits", shape)
    assert np.abs(logits(engine) - want).max() < 2e-5 * np.abs(want).max()


def assert_same_tokens(engine: Engine, shape: str, expected: Callable) -> None:
    got = run(engine, requests([GREEDY], LENGTHS, seed=2))
    assert [s.tokens for s in got] == [s.tokens for s in expected("greedy", shape)]
    assert [len(s.tokens) for s in got] == [8 + i for i in range(len(LENGTHS))]


@pytest.mark.parametrize("parallel", MESHES)
@pytest.mark.parametrize("shape", FAMILIES)
def test_the_same_logits(shape, parallel, engine_of, expected):
    assert_same_logits(engine_of(shape, parallel), shape, expected)


@pytest.mark.parametrize(
    ("shape", "parallel"),
    [("biased", "tp=4,rules=tp_sp"), ("olmo2", "tp=8"), ("olmo2", "tp=2,rules=tp_sp"), ("cohere2", "tp=4")],
)
def test_the_same_logits_with_rarer_layers(shape, parallel, engine_of, expected):
    """Biases, an RMS norm over all heads of which some are copies, parallel blocks."""
    assert_same_logits(engine_of(shape, parallel), shape, expected)


@pytest.mark.parametrize(
    ("shape", "parallel"),
    [(shape, p) for shape in FAMILIES for p in (MESHES if shape == "smollm2" else EXPLAINED)],
)
def test_the_same_greedy_tokens(shape, parallel, engine_of, expected):
    """Of more prompts than there are rows, under continuous batching."""
    assert_same_tokens(engine_of(shape, parallel), shape, expected)


def test_the_same_with_stacked_layers(engine_of, expected):
    engine = engine_of("smollm2", "tp=2,dp=2", scan=True)
    assert_same_logits(engine, "smollm2", expected)
    assert_same_tokens(engine, "smollm2", expected)


@pytest.mark.parametrize(
    ("shape", "parallel"),
    [("llama", "tp=4"), ("llama", "tp=2,dp=2"), ("smollm2", "tp=8")],
)
def test_the_same_samples(shape, parallel, engine_of, expected):
    """Seeded tokens under every kind of parameter; log-probabilities, ranks and alternatives."""
    got, want = run(engine_of(shape, parallel), requests(MIXED, LENGTHS, seed=2)), expected("mixed", shape)
    assert [s.tokens for s in got] == [s.tokens for s in want]
    assert len({tuple(s.tokens) for s in got}) == len(got)
    pairs = [pair for a, b in zip(got, want, strict=True) for pair in zip(a.logprobs, b.logprobs, strict=True)]
    assert len(pairs) > 30
    for a, b in pairs:
        assert (a.token, a.rank) == (b.token, b.rank)
        np.testing.assert_array_equal(a.top_ids, b.top_ids)
        np.testing.assert_allclose(a.logprob, b.logprob, atol=5e-5)
        np.testing.assert_allclose(a.top_logprobs, b.top_logprobs, atol=5e-5)


@pytest.mark.parametrize("parallel", ["tp=4", "tp=2,dp=2"])
def test_poison_changes_no_token(parallel, engine_of, expected):
    """NaN in every cell and row that is not valid, before each dispatch; gemma3 has a ring, which wraps."""
    engine = engine_of("gemma3", parallel)
    engine.config = dataclasses.replace(engine.config, in_flight=1)
    advance, shares = engine.advance, []

    def poisoned():
        old = (engine.cache, engine.state)
        shares.append(poison(engine))
        where = jax.tree.map(lambda x: x.sharding, old)
        engine.cache, engine.state = jax.device_put((engine.cache, engine.state), where)
        return advance()

    engine.advance = poisoned
    got = run(engine, requests([GREEDY], LENGTHS, seed=2))
    assert [s.tokens for s in got] == [s.tokens for s in expected("greedy", "gemma3")]
    assert len(shares) > 5
    assert shares[0] == 0
    assert 0 < max(shares) < 0.9


# ---- collectives

_COLLECTIVE = re.compile(r"= (\(?[^=]*?\)?) (all-reduce|all-gather|reduce-scatter)\(.*?replica_groups=\{\{([\d,]+)\}")
_ARRAY = re.compile(r"(f32|s32)\[([\d,]*)\]")
_CALL = re.compile(r"(?:condition|body|calls|to_apply)=%([\w.-]+)")


def compiled_collectives(hlo: str, shards: Shards) -> Counter[tuple[str, str, int]]:
    """How many collectives of each (kind, mesh axis, bytes) a run of a compiled module makes.

    XLA merges collectives that do not wait for each other into one over several arrays: every array counts. The body
    of a loop counts as often as it runs, or once where that is not known.
    """
    found: dict[str, Counter] = {}
    calls: dict[str, list[tuple[str, int]]] = {}
    name = entry = ""
    for line in hlo.splitlines():
        if head := re.match(r"(ENTRY )?%([\w.-]+) \(.*\{$", line):
            name = head[2]
            entry = name if head[1] else entry
            found[name], calls[name] = Counter(), []
        elif match := _COLLECTIVE.search(line):
            arrays, kind, group = match.groups()
            members = [int(device) for device in group.split(",")]
            along_tensor = members[1] - members[0] == 1 and len(members) == shards.tensor
            for _, sizes in _ARRAY.findall(arrays):
                nbytes = 4 * prod(int(size) for size in sizes.split(",") if size)
                nbytes *= len(members) if kind == "reduce-scatter" else 1
                found[name][kind, "tensor" if along_tensor else "data", nbytes] += 1
        elif " while(" in line or " call(" in line or " fusion(" in line:
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            calls[name] += [(called, int(trips[1]) if trips else 1) for called in _CALL.findall(line)]

    def total(computation: str) -> Counter:
        counts = Counter(found[computation])
        for called, times in calls[computation]:
            for key, count in total(called).items():
                counts[key] += times * count
        return counts

    return total(entry)


def promised(programs: ProgramSet, key: ProgramKey) -> Counter[tuple[str, str, int]]:
    (step,) = explain(programs.model, programs.plan, programs.config, [key]).steps
    counts = Counter()
    for c in step.collectives:
        counts[c.kind, c.axis, c.nbytes] += c.count
    return counts


def assert_promise_kept(programs: ProgramSet, key: ProgramKey) -> Counter:
    counts = compiled_collectives(programs.get(key).as_text(), programs.config.shards)
    assert counts == promised(programs, key), str(key)
    return counts


@pytest.mark.parametrize("parallel", EXPLAINED)
@pytest.mark.parametrize("shape", ["llama", "gemma3", "qwen3", "olmo2", "cohere2"])
def test_collectives_are_those_promised(shape, parallel, programs_of):
    programs = programs_of(shape, parallel)
    rows = programs.config.rows
    for key in (
        ProgramKey("greedy", rows, MAX_LEN, steps=4),
        ProgramKey("greedy", rows, MAX_LEN, chunks=1, chunk=CHUNK),
    ):
        assert_promise_kept(programs, key)


@pytest.mark.parametrize("parallel", ["tp=4", "dp=2"])
def test_collectives_of_sampling_are_those_promised(parallel, programs_of):
    programs = programs_of("llama", parallel)
    rows = programs.config.rows
    for key in (
        ProgramKey("logprobs", rows, MAX_LEN, chunks=1, chunk=CHUNK),
        ProgramKey("logprobs", 0, MAX_LEN, chunks=1, chunk=CHUNK, detail="logprobs"),
        ProgramKey("sample", rows, MAX_LEN),
    ):
        counts = assert_promise_kept(programs, key)
        assert bool(counts) == (parallel == "tp=4")  # replicas have nothing to say but in a loop


def test_collectives_of_stacked_layers_are_those_promised(programs_of):
    programs = programs_of("smollm2", "tp=2,dp=2", scan=True)
    counts = assert_promise_kept(programs, ProgramKey("greedy", 2, MAX_LEN, steps=4))
    assert counts["all-reduce", "tensor", 4 * 2 * 72] == 1 + 2 * 2  # the embedding, two in each layer
    assert counts["all-reduce", "data", 4] == 2


def test_sampling_gathers_no_logits(programs_of):
    """The largest array that sampling sends has a few numbers per row, whatever the vocabulary."""
    programs = programs_of("llama", "tp=4")
    key = ProgramKey("logprobs", ROWS, MAX_LEN)
    (step,) = explain(programs.model, programs.plan, programs.config, [key]).steps
    assert {c.nbytes for c in step.collectives} == {4 * ROWS * 96, 4 * ROWS, 4 * ROWS * 4 * 20}


# ---- explain


def test_explain_says_what_the_devices_hold(engine_of):
    for which in (("smollm2", "tp=4"), ("gemma3", "tp=2,dp=2")):
        engine = engine_of(*which)
        told = explain(engine.model, engine.plan, engine.config, [])
        for placements, arrays in (
            (told.weights, engine.weights),
            (told.cache, engine.cache),
            (told.state, engine.state),
        ):
            parts = [array.addressable_shards[0].data for array in arrays]
            held = Counter((part.shape, part.nbytes) for part in parts)
            said = Counter()
            for p in placements:
                said[p.local_shape, p.nbytes // p.count] += p.count
            assert said == held
            assert sum(p.nbytes for p in placements) == sum(part.nbytes for part in parts)


def test_explain_as_text(programs_of):
    programs = programs_of("smollm2", "tp=4")
    key = ProgramKey("greedy", ROWS, MAX_LEN)
    text = str(explain(programs.model, programs.plan, programs.config, [key]))
    flat = " ".join(text.split())
    assert "tensor 4 x data 1, rules tp" in flat
    # 3 KV heads on 4 devices: a padded one.
    assert "attn.qkv 2 embed, kv_heads/tensor, queries, head_dim 72 x 4 x 5 x 8 72 x 1 x 5 x 8 23.0 kB" in flat
    assert "25.0% of query heads, 25.0% of cache" in flat
    assert "all-reduce tensor attention 2 1.2 kB 2.3 kB" in flat
    alone = programs_of("smollm2", "")
    text = str(explain(alone.model, alone.plan, alone.config, [key]))
    assert "no collectives" in text
    assert "Padding" not in text


def test_explain_counts_stacked_layers_one_by_one(programs_of):
    stacked, unrolled = (programs_of("smollm2", "tp=2,dp=2", scan) for scan in (True, False))
    told = [explain(p.model, p.plan, p.config, []) for p in (stacked, unrolled)]
    assert told[0] == told[1]


def test_explain_needs_no_devices():
    shards = planned_shards(Parallelism(tensor=64, data=32, rules="tp_sp"))
    assert (shards.tensor, shards.data, shards.splits_tokens) == (64, 32, True)
    assert shards.sharding((axes.EMBED, axes.MLP)).shard_shape((8, 128)) == (8, 2)
    assert planned_shards(Parallelism()) == Shards()


# ---- layouts


@given(kv_heads=st.integers(1, 12), group=st.integers(1, 7), shards=st.integers(1, 16))
def test_head_layout(kv_heads, group, shards):
    spec = AttentionSpec(kv_heads * group, kv_heads, 8, 1.0, None)
    layout = head_layout(spec, shards)
    assert layout.groups % shards == 0
    assert np.array(layout.source).shape == (layout.groups, layout.queries + 2)
    seen, groups_of_kv = [], Counter()
    for *queries, key, value in layout.source:
        assert key == value
        groups_of_kv[key] += 1
        heads = [q for q in queries if q >= 0]
        assert all(q // group == key for q in heads)
        seen += heads
    assert sorted(seen) == list(range(spec.heads))
    assert {groups_of_kv[kv] for kv in range(kv_heads)} == {layout.copies}
    # Padding is less than a device's share; whatever divides stays as it is.
    assert groups_of_kv[-1] < shards
    assert layout.plain == (kv_heads % shards == 0)


def test_waste():
    def waste(shards: int) -> dict[str, float]:
        spec = config_from_hf(SMOLLM2)
        return {name: round(share, 4) for name, share in Layout(spec, shards).waste().items()}

    assert set(waste(1).values()) == set(waste(3).values()) == {0.0}
    assert waste(2) == {"query heads": 0.25, "cache": 0.25, "feed-forward": 0.0, "vocabulary": 0.0}
    # 3 KV heads on 8 devices: two copies of each and two groups of zeros; 2 of 16 query slots per copy pair stay empty.
    assert waste(8)["query heads"] == round(1 - 9 / 16, 4)
    assert waste(8)["cache"] == round(1 - 3 / 8, 4)


SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


# ---- loading


def laid_out(read: Callable[[str], np.ndarray], spec, model: AbstractModel) -> np.ndarray:
    """A Llama weight as `assemble` should lay it out, slot by slot."""
    if spec.block is None:
        x = read({"embed": "model.embed_tokens", "head": "lm_head", "final_norm": "model.norm"}[spec.part] + ".weight")
        out = np.zeros(spec.shape, np.float32)
        if spec.part == "head":
            out[:, : x.shape[0]] = x.T
        else:
            out[: x.shape[0]] = x
        return out
    attn = model.config.layers[spec.block].attention
    source, h = model.layout.heads(attn).source, attn.head_dim
    suffix = ".bias" if spec.part.endswith("_bias") else ".weight"
    get = lambda module: read(f"model.layers.{spec.block}.{module}{suffix}")  # noqa: E731
    out = np.zeros(spec.shape, np.float32)
    match spec.part.removesuffix("_bias"):
        case "attn.qkv":
            q, k, v = (get(f"self_attn.{x}_proj") for x in "qkv")
            for group, slots in enumerate(source):
                for slot, head in enumerate(slots):
                    x = q if slot < len(slots) - 2 else k if slot == len(slots) - 2 else v
                    if head >= 0:
                        out[..., group, slot, :] = x[head * h : (head + 1) * h].T
        case "attn.o" if suffix == ".weight":
            o = get("self_attn.o_proj")
            for group, (*slots, _, _) in enumerate(source):
                for slot, head in enumerate(slots):
                    if head >= 0:
                        out[group, slot] = o[:, head * h : (head + 1) * h].T
        case "mlp.gate_up":
            for i, name in enumerate(("gate", "up")):
                x = get(f"mlp.{name}_proj")
                out[..., i, : x.shape[0]] = x.T
        case "mlp.down" if suffix == ".weight":
            x = get("mlp.down_proj")
            out[: x.shape[1]] = x.T
        case module:
            names = {"pre_attn_norm": "input_layernorm", "pre_mlp_norm": "post_attention_layernorm"}
            names |= {"attn.o": "self_attn.o_proj", "mlp.down": "mlp.down_proj"}
            out[:] = get(names[module])
    return out


@pytest.mark.parametrize(("shape", "parallel"), [("biased", "tp=2"), ("biased", "tp=8"), ("smollm2", "tp=4,dp=2")])
def test_loaded_weights_are_laid_out(shape, parallel, checkpoint, programs_of):
    model, shards = programs_of(shape, parallel).model, programs_of(shape, parallel).config.shards
    source = SafetensorsSource(checkpoint(shape))
    for spec, weight in zip(model.specs, load(checkpoint(shape), model, shards), strict=True):
        assert weight.sharding.is_equivalent_to(shards.sharding(spec.axes), weight.ndim), spec.name
        np.testing.assert_array_equal(np.asarray(weight), laid_out(source.read, spec, model), err_msg=spec.name)


class CountedReads:
    """A source that notes the bytes of each part that is taken from what it read."""

    def __init__(self, source: SafetensorsSource):
        self._source, self.taken = source, {}

    def __getattr__(self, name: str):
        return getattr(self._source, name)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        taken = self.taken.setdefault(name, [])

        class View(np.ndarray):
            def __getitem__(self, index):
                part = np.asarray(super().__getitem__(index))
                taken.append(part.nbytes)
                return part

        return self._source.read(name, rows).view(View)


def test_each_device_reads_its_share(checkpoint, programs_of):
    sources = []

    def wrap(source):
        sources.append(CountedReads(source))
        return sources[0]

    programs = programs_of("llama", "tp=4")
    load(checkpoint("llama"), programs.model, programs.config.shards, wrap)
    (source,) = sources
    assert set(source.taken) == set(source.names())
    split = [name for name in source.names() if re.search(r"_proj", name)]
    assert len(split) == 2 * 7
    for name in split:
        assert source.taken[name] == [source.nbytes(name) // 4] * 4, name


# ---- bad input


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "cannot read 'tp'"),
        ("tp=", "cannot read 'tp='"),
        ("pp=2", "cannot read 'pp=2'"),
        ("tp=two", "needs a number of devices"),
        ("tp=-2", "needs a number of devices"),
        ("tp=²", "needs a number of devices"),
        ("tp=0", "positive number of devices"),
        ("tp=2,tensor=4", "tensor appears twice"),
    ],
)
def test_parallelism_that_cannot_be_read(text, message):
    with pytest.raises(ShardingError, match=re.escape(message)):
        Parallelism.parse(text)


def test_parallelism():
    assert Parallelism.parse("") == Parallelism()
    both = Parallelism.parse(" tp=4, dp=2 ")
    assert (both, both.devices) == (Parallelism(tensor=4, data=2), 8)
    for parallel in (both, Parallelism(rules="tp_sp")):
        assert Parallelism.parse(str(parallel)) == parallel


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ((("widht", "tensor"),), "unknown logical axes ['widht']; known: "),
        (((axes.MLP, "model"),), "unknown mesh axes ['model']; known: "),
        (((axes.MLP, "tensor"), (axes.MLP, "data")), "twice"),
    ],
)
def test_rules_that_name_what_there_is_not(table, message):
    with pytest.raises(ShardingError, match=re.escape(message)):
        Rules("mine", table)


def test_rules():
    rules = Rules("mine", ((axes.MLP, "tensor"), (axes.EMBED, "tensor")))
    assert rules.spec((axes.EMBED, None, axes.QUERIES)) == PartitionSpec("tensor", None, None)
    with pytest.raises(ShardingError, match=r"two dimensions of .* on one mesh axis"):
        rules.spec((axes.EMBED, axes.GATE_UP, axes.MLP))
    with pytest.raises(ShardingError, match="no sharding preset is called 'tpp'; known: tp, tp_sp"):
        preset("tpp")
    for make in (make_shards, planned_shards):  # also where nothing is to be split
        with pytest.raises(ShardingError, match="no sharding preset is called 'best'"):
            make(Parallelism.parse("rules=best"))
    assert {preset(name).name for name in PRESETS} == set(PRESETS)
    with pytest.raises(ValueError, match="a mesh needs rules"):
        Shards(make_mesh(Parallelism(tensor=2)))


def test_more_devices_than_there_are(checkpoint):
    with pytest.raises(ShardingError, match=r"parallel=tp=8,dp=2 needs 16 devices, and there are 8"):
        LLM(checkpoint("llama"), max_len=MAX_LEN, parallel="tp=8,dp=2")


def test_rows_that_do_not_divide(checkpoint):
    with pytest.raises(ConfigurationError, match="max_batch 3 does not divide over 2 replicas"):
        LLM(checkpoint("llama"), max_batch=3, max_len=MAX_LEN, parallel="dp=2")


def test_llm_takes_parallel(checkpoint, expected):
    want = expected("greedy", "smollm2")
    buckets = Buckets(prefill=(CHUNK,), batch=(ROWS,), cache=(MAX_LEN,))
    llm = LLM(
        checkpoint("smollm2"),
        max_batch=ROWS,
        max_len=MAX_LEN,
        buckets=buckets,
        parallel=Parallelism(tensor=3),  # surplus devices stay unused
        progress=False,
    )
    assert {len(w.sharding.device_set) for w in llm.engine.weights} == {3}
    params = [dataclasses.replace(GREEDY, max_tokens=s.max_tokens) for s in want]
    outputs = llm.generate([s.prompt for s in want], params)
    assert [output.outputs[0].token_ids for output in outputs] == [s.tokens for s in want]


def test_info_of_a_mesh():
    """More devices than there are."""

    def info(parallel: str, *options: str):
        return CliRunner().invoke(app, ["info", "--config", "llama3-8b", "--parallel", parallel, *options])

    facts = json.loads(info("tp=16,dp=4", "--json").stdout)["parallel"]
    assert facts["mesh"] == {"tensor": 16, "data": 4}
    assert facts["waste"]["cache"] == 0.5
    decode, prefill = facts["steps"]
    assert (decode["tokens"], prefill["tokens"]) == (2, 512)  # 8 rows of 4 replicas
    by_purpose = {c["purpose"]: (c["count"], c["nbytes"]) for c in decode["collectives"]}
    assert by_purpose["attention"] == by_purpose["feed-forward"] == (32, 2 * 4096 * 2)
    assert "Arrays on tensor 16 x data 4, rules tp" in info("tp=16,dp=4").stdout
    assert "error: max_batch 8 does not divide over 3 replicas" in info("dp=3").stderr
    assert "error: cannot read 'tp:2'" in info("tp:2").stderr
