"""Adapters at run time: each row computes what the model does with its adapter merged."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from inferlib import LLM, Buckets, SamplingParams
from inferlib.checkpoint.source import CheckpointError
from inferlib.config import EngineConfig
from inferlib.engine.scheduler import Scheduler
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import abstract_model
from inferlib.models.adapters import AdapterSlots
from inferlib.models.config import ConfigError
from inferlib.option_checks import ConfigurationError
from inferlib.outputs import RequestOutput
from inferlib.planning.recorder import record
from inferlib.programs.counter import compilations
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program_set import ProgramSet
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import planned_shards
from tests.helpers.adapters import modules_of, write_adapter
from tests.helpers.eagle3 import make_head
from tests.helpers.engines import assert_accounted
from tests.helpers.llms import build_llm, random_prompts
from tests.helpers.poison import poison

BUCKETS = Buckets(prefill=(16,), batch=(4,), cache=(64,), tile=8)
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
PROMPTS = random_prompts([13, 5, 21, 9, 17, 3], seed=8)
QUERIES = "model.layers.0.self_attn.q_proj"
NAMES = ["first", "second", None, "third", "first", "third"]
# Of each adapter: rank, alpha and what it changes, by endings of modules' names; the third changes one layer alone.
ADAPTERS: dict[str, tuple[int, float, tuple[str, ...]]] = {
    "first": (4, 16, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    "second": (2, 8, ("q_proj", "v_proj", "up_proj")),
    "third": (3, 9, ("1.self_attn.o_proj", "1.mlp.down_proj", "1.self_attn.k_proj")),
}
_OTHERS = ("c_attn", "c_proj", "c_fc", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"fan_in_fan_out": True},
    "minicpm3": {},
    "llama rslora": {"use_rslora": True, "rank_pattern": {"k_proj": 1}, "alpha_pattern": {"v_proj": 2}},
}


@pytest.fixture(scope="session")
def written(checkpoint, tmp_path_factory) -> Callable[[str], tuple[Path, dict[str, Path]]]:
    """`written(family)`: a checkpoint and the folders of its adapters, by their names."""

    @functools.cache
    def write(family: str) -> tuple[Path, dict[str, Path]]:
        path, folder = checkpoint(family.split()[0]), tmp_path_factory.mktemp("adapters")
        for name, (rank, alpha, endings) in ADAPTERS.items():
            endings = endings if name == "third" and "llama" in family else (*endings, *_OTHERS)
            modules, options = modules_of(path, endings, rank), FAMILIES[family]
            for pattern, other in options.get("rank_pattern", {}).items():
                modules |= {m: (other, *sizes) for m, (_, *sizes) in modules.items() if m.endswith(pattern)}
            write_adapter(folder / name, modules, r=rank, lora_alpha=alpha, **options)
        return path, {name: folder / name for name in ADAPTERS}

    return write


def build(path: Path, adapters: dict[str, Path], **options: Any) -> LLM:
    return build_llm(path, BUCKETS, **{"adapters": adapters, "decode_steps": 1} | options)


@pytest.fixture(scope="module")
def llm(written) -> LLM:
    """Room for two of three adapters; four rows. Leave it idle."""
    return build(*written("llama"), max_adapters=2, decode_steps=2)


@pytest.fixture(scope="session")
def without_adapters() -> Callable[[Path], LLM]:
    """`without_adapters(path)`: a shared LLM that takes none, whose weights tests replace."""
    return functools.cache(lambda path: build_llm(path, BUCKETS, decode_steps=1))


def expected_of(
    without: LLM, path: Path, adapters: dict[str, Path]
) -> Callable[[list[int], str | None], tuple[list[int], Any]]:
    """What a model generates for a prompt by an adapter that is merged, with log-probabilities."""
    files = ModelFiles.open(path)
    weights = {name: files.merged(folder).load(without.engine.model) for name, folder in adapters.items()}
    weights[""] = files.load(without.engine.model)

    @functools.cache
    def compute(prompt: tuple[int, ...], name: str) -> tuple[list[int], Any]:
        without.engine.weights = weights[name]
        without.reset_prefix_cache()
        (output,) = without.generate(list(prompt), GREEDY)
        return output.outputs[0].token_ids, without.logprobs([[*prompt, *output.outputs[0].token_ids]])[0]

    return lambda prompt, name: compute(tuple(prompt), name or "")


@pytest.fixture(scope="session")
def expected(written, without_adapters):
    return functools.cache(lambda family: expected_of(without_adapters(written(family)[0]), *written(family)))


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_as_merged(llm: LLM, compute, prompts=PROMPTS, names=NAMES) -> None:
    """Tokens of rows that run together, and log-probabilities of each."""
    pairs = list(zip(prompts, names, strict=True))
    wanted = [compute(prompt, name) for prompt, name in pairs]
    assert tokens_of(llm.generate(prompts, GREEDY, adapter=names)) == [tokens for tokens, _ in wanted]
    for (prompt, name), (tokens, logprobs) in zip(pairs, wanted, strict=True):
        got = llm.logprobs([[*prompt, *tokens]], adapter=name)[0]
        np.testing.assert_allclose(got, logprobs, rtol=2e-4, atol=2e-4)
    assert_idle(llm)


def assert_idle(llm: LLM) -> None:
    """No row has an adapter, and every slot is free or has an idle one."""
    pool = llm.engine.adapters
    assert pool is not None
    assert not any(pool._users.values())
    assert list(pool._idle) == list(pool._users) or set(pool._idle) == set(pool._users)
    slots = sorted([*pool._free, *pool._slots.values()])
    assert slots == list(range(1, llm.config.adapters.count + 1))  # pyright: ignore[reportOptionalMemberAccess]
    assert_accounted(llm.engine)


@pytest.mark.slow
def test_each_row_has_its_adapter(llm, expected):
    """More rows than may run, more adapters than slots; the adapters differ in what they generate."""
    compute = expected("llama")
    assert len({tuple(compute(PROMPTS[0], name)[0]) for name in (*ADAPTERS, None)}) == 4
    before = llm.stats.adapter_loads
    assert_as_merged(llm, compute)
    assert llm.stats.adapter_loads > before + 2
    assert llm.stats.adapter_evictions > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama rslora", {"scan": True}),
        pytest.param("gpt2", {}, marks=pytest.mark.release),
        pytest.param("minicpm3", {"scan": True}, marks=pytest.mark.release),
    ],
)
def test_families_stacks_and_patterns(family, options, written, expected):
    """Patterns of ranks and alphas, rsLoRA, in stacked layers; one module for queries, keys and values, transposed;
    latent attention."""
    assert_as_merged(build(*written(family), **options), expected(family))


@pytest.mark.slow
def test_room_for_some_parts(written, without_adapters, tmp_path):
    """Adapters of queries have no factors beside other weights; adapters of others are refused."""
    path, adapters = written("llama")
    write_adapter(tmp_path, modules_of(path, ("q_proj",), 4), r=4, lora_alpha=8)
    llm = build(path, {"a": tmp_path}, adapter_parts="attn.qkv")
    assert {weight.part for weight, _ in llm.engine.model.adapted} == {"attn.qkv"}
    compute = expected_of(without_adapters(path), path, {"a": tmp_path})
    assert_as_merged(llm, compute, names=[name and "a" for name in NAMES])
    with pytest.raises(CheckpointError, match=r"room for changes of attn\.qkv alone: give adapter_parts \S+ too, or"):
        llm.load_adapter("more", adapters["second"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param("tp=4", marks=pytest.mark.release),  # key/value heads are copied
        "tp=2,dp=2",
        pytest.param("tp=2,dp=2,rules=dp_attention", marks=pytest.mark.release),
        pytest.param("cp=2,tp=2,rules=tp2d", marks=pytest.mark.release),  # factors in parts of both sides
    ],
)
def test_on_a_mesh(parallel, written, expected):
    llm, compute = build(*written("llama"), parallel=parallel, max_adapters=2), expected("llama")
    wanted = [compute(prompt, name)[0] for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    assert tokens_of(llm.generate(PROMPTS, GREEDY, adapter=NAMES)) == wanted
    assert_idle(llm)


@pytest.mark.parametrize(
    "parallel",
    ["tp=2,rules=dp_attention", pytest.param("tp=4,rules=tp_sp", marks=pytest.mark.release), "cp=2,tp=2,rules=tp2d"],
)
def test_adapters_take_no_collectives(parallel, llm):
    shards, steps = planned_shards(Parallelism.parse(parallel)), []
    for adapters in (None, AdapterSlots(3, 4)):
        config = EngineConfig.make("cpu", 4, 64, BUCKETS, shards, llm.model_config)
        config = dataclasses.replace(config, adapters=adapters)
        model = abstract_model(llm.model_config, "float32", shards=shards, adapters=adapters)
        programs = ProgramSet.make(model, config)
        keys = ProgramKey("greedy", config.rows, 64), ProgramKey("greedy", config.rows, 64, chunks=2, chunk=8)
        steps.append([record(model, programs.plan, programs.config, key) for key in keys])
    names = ["adapter_a", "adapter_b"]
    assert any(name in spec.name for spec in model.specs for name in names)
    without, with_adapters = steps
    if "dp_attention" in parallel:  # which slot each token has, beside the tokens
        with_adapters = [[c for c in step if c not in without[i]] for i, step in enumerate(with_adapters)]
        assert all(len({c.kind for c in step}) <= 1 for step in with_adapters)
    else:
        assert with_adapters == without


@pytest.mark.release
def test_other_devices_prefill(written, expected):
    """They have slots of their own, and nothing compiles. A name that another adapter got since is that one's."""
    path, adapters = written("llama")
    llm = build(path, adapters, max_adapters=2, page_size=8, prefill_devices=[1])
    compute = expected("llama")
    wanted, other = [compute(*pair)[0] for pair in zip(PROMPTS, NAMES, strict=True)], compute(PROMPTS[2], "second")[0]
    llm.warmup(["greedy"])
    before = compilations()
    for _ in range(2):
        assert tokens_of(llm.generate(PROMPTS, GREEDY, adapter=NAMES)) == wanted
        llm.reset_prefix_cache()
    assert llm.stats.handed_tokens == 2 * sum((len(prompt) - 1) // 8 * 8 for prompt in PROMPTS)
    llm.unload_adapter("first")
    llm.load_adapter("first", adapters["second"])
    assert tokens_of(llm.generate(PROMPTS[2], GREEDY, adapter="first")) == [other]
    assert compilations() == before
    assert_idle(llm)


@pytest.mark.release
def test_quantised_weights(written, without_adapters):
    """Each product is that of the quantised weight, and the adapter's in full precision beside it. Adapters go with a
    mesh above."""
    path, adapters = written("llama")
    llm = build(path, adapters, quantization="int8")
    pool, model = llm.engine.adapters, llm.engine.model
    assert pool is not None
    prompts = [PROMPTS[1], PROMPTS[5]]  # which share a step: so none goes beside rows, and there is a program less
    got = {name: llm.generate(prompts, GREEDY, adapter=name) for name in ("first", None)}
    scores = {name: llm.logprobs([PROMPTS[2]], adapter=name)[0] for name in ("first", None)}
    without = without_adapters(path)
    values = dict(zip((factor.name for factor in model.factors), pool.find("first").values.arrays, strict=True))
    arrays = iter(llm.engine.weights)
    whole = {}
    for weight in model.weights:
        stored = [next(arrays) for _ in weight.arrays]
        contracting = tuple(weight.contracting)
        whole[weight.name] = (
            np.asarray(weight.scheme.tensor(*stored).dequantized(contracting, np.float32))
            if weight.scheme
            else np.asarray(stored[0])
        )
    for name in ("first", None):
        merged = {key: x + _change(values, key, x.shape) * (name is not None) for key, x in whole.items()}
        without.engine.weights = tuple(
            jax.numpy.asarray(merged[weight.name]) for weight in without.engine.model.weights
        )
        without.reset_prefix_cache()
        assert tokens_of(without.generate(prompts, GREEDY)) == tokens_of(got[name])
        np.testing.assert_allclose(without.logprobs([PROMPTS[2]])[0], scores[name], rtol=1e-3, atol=1e-3)
    assert not np.allclose(scores["first"], scores[None], atol=1e-2)


def _change(values: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """What an adapter adds to a weight, of its factors a [*I, P, R] and b [P, R, *O]."""
    if f"{name}.adapter_a" not in values:
        return np.zeros(shape, np.float32)
    a, b = values[f"{name}.adapter_a"], values[f"{name}.adapter_b"]
    change = np.einsum("ipr,pro->ipo", a.reshape(-1, *a.shape[-2:]), b.reshape(*b.shape[:2], -1))
    return change.reshape(shape)


@pytest.mark.slow
def test_prompts_share_pages_by_their_adapter(llm, expected):
    """Of equal adapters under two names too, but never of others; and a salt keeps users of one adapter apart."""
    prompt, compute = random_prompts([40], seed=77)[0], expected("llama")
    llm.reset_prefix_cache()
    hits = []
    for name in ("first", None, "second", "first", None):
        (output,) = llm.generate(prompt, GREEDY, adapter=name)
        assert output.outputs[0].token_ids == compute(prompt, name)[0]
        hits.append(output.num_cached_tokens)
    assert [hit > 0 for hit in hits] == [False, False, False, True, True]
    salted = {"prompt_token_ids": prompt, "cache_salt": "a"}
    assert [llm.generate(salted, GREEDY, adapter="first")[0].num_cached_tokens > 0 for _ in range(2)] == [False, True]
    llm.load_adapter("again", llm.engine.adapters.find("first").path)
    assert llm.generate(prompt, GREEDY, adapter="again")[0].num_cached_tokens > 0
    llm.unload_adapter("again")


@pytest.mark.slow
def test_nothing_compiles_while_adapters_come_and_go(written, expected):
    """After warm-up, which nothing follows: adapters that are loaded, evicted, unloaded while their requests run."""
    path, adapters = written("llama")
    llm, compute = build(path, {}, max_adapters=2, max_adapter_rank=4), expected("llama")
    assert llm.adapters == ()
    llm.warmup(["greedy"])
    before = compilations()
    for name, folder in adapters.items():
        llm.load_adapter(name, folder)
    assert llm.adapters == tuple(adapters)
    for names in (NAMES, NAMES[::-1]):
        wanted = [compute(prompt, name)[0] for prompt, name in zip(PROMPTS, names, strict=True)]
        assert tokens_of(llm.generate(PROMPTS, GREEDY, adapter=names)) == wanted
    requests = [llm.prepare(prompt, GREEDY, adapter="third") for prompt in PROMPTS]
    llm.unload_adapter("third")
    assert llm.adapters == ("first", "second")
    outputs = sorted(llm.run(requests), key=lambda output: output.request_id)
    assert tokens_of(outputs) == [compute(prompt, "third")[0] for prompt in PROMPTS]
    with pytest.raises(ValueError, match="no adapter is called 'third'; those that are loaded: 'first', 'second'"):
        llm.generate(PROMPTS[0], GREEDY, adapter="third")
    assert_idle(llm)
    assert llm.engine.adapters is not None
    assert [adapter.name for adapter in llm.engine.adapters._slots] != ["third"]
    assert compilations() == before
    assert llm.stats.program_misses == 0


@pytest.mark.slow
def test_rows_that_are_preempted_cancelled_or_lost(llm, expected):
    """With pages for a row and a half, NaN in whatever is not valid, streams that are left, and a failed program."""
    compute, more = expected("llama"), dataclasses.replace(GREEDY, max_tokens=30)
    llm.reset_prefix_cache()
    with poisoned(llm):
        outputs = llm.generate(PROMPTS, more, adapter=NAMES)
        assert llm.engine.scheduler.preemptions > 0
    for output, prompt, name in zip(outputs, PROMPTS, NAMES, strict=True):
        assert output.outputs[0].token_ids[:9] == compute(prompt, name)[0]
    for _ in zip(range(2), llm.stream(PROMPTS[1], more, adapter="second"), strict=False):
        pass
    assert_as_merged(llm, compute)
    with failing(llm), pytest.raises(RuntimeError, match="broken"):
        llm.generate(PROMPTS[0], GREEDY, adapter="second")
    assert_as_merged(llm, compute)


@contextlib.contextmanager
def poisoned(llm: LLM) -> Iterator[None]:
    """Pages for a row and a half, and NaN in whatever is not valid, before each dispatch. A further engine would take
    the factors, which programs that write them are donated."""
    engine, advance = llm.engine, llm.engine.advance
    config = dataclasses.replace(engine.config, in_flight=1)
    plan = dataclasses.replace(engine.plan, pages=engine.plan.columns * 3 // 2)

    def acting(**options):
        poison(engine)
        return advance(**options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "advance", acting)
        patch.setattr(engine, "config", config)
        patch.setattr(engine, "scheduler", Scheduler(config, plan, adapters=engine.adapters))
        yield


@contextlib.contextmanager
def failing(llm: LLM) -> Iterator[None]:
    """The next program fails."""
    engine, program = llm.engine, type(llm.engine)._program

    def broken(key):
        raise RuntimeError("broken")

    engine._program = broken  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        engine._program = functools.partial(program, engine)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.release
@pytest.mark.parametrize("method", ["eagle3", "draft"])
def test_with_speculation(method, written, expected, tmp_path):
    """By a head or a model without adapters, whose weights are behind their factors."""
    path, adapters = written("llama")
    model = make_head(tmp_path / "head", path, 40) if method == "eagle3" else path
    llm, compute = build(path, adapters, speculation=f"{method}:{model}:2", max_adapters=2), expected("llama")
    wanted = [compute(prompt, name)[0] for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    assert tokens_of(llm.generate(PROMPTS, GREEDY, adapter=NAMES)) == wanted
    assert_idle(llm)


def test_a_model_that_slept_has_its_adapters(llm, expected):
    wanted = expected("llama")(PROMPTS[0], "first")[0]
    assert tokens_of(llm.generate(PROMPTS[0], GREEDY, adapter="first")) == [wanted]
    llm.sleep()
    llm.wake()
    assert tokens_of(llm.generate(PROMPTS[0], GREEDY, adapter="first")) == [wanted]


@pytest.mark.slow
def test_other_ways_to_ask(llm, expected):
    """Streams, beams, vectors and one name for all prompts."""
    compute = expected("llama")
    stream = llm.stream(PROMPTS[0], GREEDY, adapter="second")
    list(stream)
    assert stream.output is not None
    assert stream.output.outputs[0].token_ids == compute(PROMPTS[0], "second")[0]
    outputs = llm.generate(PROMPTS[:2], GREEDY, adapter="second")
    assert tokens_of(outputs) == [compute(prompt, "second")[0] for prompt in PROMPTS[:2]]
    vectors = [llm.embed(PROMPTS[0], adapter=name) for name in ("first", None)]
    assert not np.allclose(*vectors, atol=1e-3)


def test_without_adapters_programs_are_as_before(llm):
    """They take no input more; with adapters two arrays for each weight, and the row's slot."""
    model = abstract_model(llm.model_config, "float32")
    config = dataclasses.replace(EngineConfig.make("cpu", 4, 64, BUCKETS, None, llm.model_config), page_size=16)
    key = ProgramKey("greedy", 4, 64)
    without = ProgramSet.make(model, config).inputs(key)
    assert without[2].adapter is None
    weights, cache, state, control = llm.engine.programs.inputs(key)
    assert len(weights) == len(without[0]) + len(llm.engine.model.factors)
    assert jax.tree.map(lambda x: x.shape, state._replace(adapter=None)) == jax.tree.map(lambda x: x.shape, without[2])
    assert (len(cache), control.shape) == (len(without[1]), without[3].shape)
    assert len(llm.engine.model.factors) == 2 * 4 * 2  # layers, weights, factors
    factors = sum(factor.arrays[0].nbytes for factor in llm.engine.model.factors)
    assert llm.engine.programs.demand().weights == model.nbytes + factors
    assert llm.engine.model.nbytes == model.nbytes + factors


# ---- what is refused


def test_unknown_names_and_missing_room(llm, small):
    with pytest.raises(ValueError, match=r"prompt 1: no adapter is called 'x'; those that are loaded: 'first', 's"):
        llm.generate([[5], [6]], GREEDY, adapter=[None, "x"])
    with pytest.raises(ValueError, match="no adapter is called 3"):
        llm.generate([5], GREEDY, adapter=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="2 prompts but 1 adapters"):
        llm.generate([[5], [6]], GREEDY, adapter=["first"])
    with pytest.raises(ValueError, match=r"an adapter is called 'first' already, .*: unload it first"):
        llm.load_adapter("first", llm.engine.adapters.find("first").path)
    with pytest.raises(ValueError, match="no adapter is called 'x'"):
        llm.unload_adapter("x")
    with pytest.raises(ConfigurationError, match="an adapter's name is a text without blanks around it, got ' '"):
        llm.load_adapter(" ", llm.engine.adapters.find("first").path)
    for call in (lambda: small.generate([5], GREEDY, adapter="first"), lambda: small.load_adapter("a", ".")):
        with pytest.raises(ValueError, match=r"no room for adapters: build LLM\(..., max_adapters=8\)"):
            call()


@pytest.mark.parametrize(
    ("modules", "config", "message"),
    [
        ({QUERIES: (9, 64, 64)}, {"r": 9}, "has rank 9, and there is room for 4: give max_adapter_rank=9"),
        (
            {"model.layers.0.self_attn.x": (4, 8, 8)},
            {},
            "changes .*self_attn.x, and the model has no such",
        ),
        ({"model.layers.7.self_attn.q_proj": (4, 64, 64)}, {}, "and the model has no such weight: take an adapter of"),
        ({QUERIES: (4, 8, 8)}, {}, r"as \(8, 8\), and the model's weight is \(.*: take an adapter of this model"),
        ({"lm_head": (4, 64, 131)}, {}, "changes lm_head, which is no projection that adapters change at run time"),
        ({"model.embed_tokens": (4, 131, 64)}, {}, "changes model.embed_tokens, which is no projection that adapters"),
        ({QUERIES: (4, 64, 64)}, {"use_dora": True}, "has DoRA, which is not supported"),
        ({QUERIES: (4, 64, 64)}, {"modules_to_save": ["lm_head"]}, "has modules_to_save"),
        ({}, {}, "changes nothing"),
    ],
)
def test_adapters_that_do_not_suit_are_refused(llm, tmp_path, modules, config, message):
    write_adapter(tmp_path, modules, **config)
    with pytest.raises(CheckpointError, match=message):
        llm.load_adapter("new", tmp_path)
    assert "new" not in llm.adapters


def test_damaged_factors_experts_and_absorbed_latents_are_refused(llm, written, checkpoint, tmp_path):
    path, _ = written("llama")
    name, sizes = next(iter(modules_of(path, ("q_proj",), 4).items()))
    tensors = write_adapter(tmp_path / "nan", {name: sizes})
    next(iter(tensors.values()))[0, 0] = np.nan
    save_file(tensors, tmp_path / "nan" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"is damaged: factors of .* are not finite"):
        llm.load_adapter("nan", tmp_path / "nan")
    for family, ending, what in (
        ("qwen3_moe", "experts.1.down_proj", "an expert's projection: train it without that, or merge it for good"),
        ("minicpm3", "kv_b_proj", "which is no projection that adapters change at run time"),
    ):
        other = checkpoint(family)
        write_adapter(tmp_path / family, dict(list(modules_of(other, (ending,), 4).items())[:1]))
        with pytest.raises(CheckpointError, match=what):
            LLM(other, dtype="float32", adapters={"a": tmp_path / family}, progress=False)


def test_wrong_options(written, tmp_path):
    path, adapters = written("llama")
    for options, message in (
        ({"max_adapters": 0}, "max_adapters must be 1 to 1024, got 0"),
        ({"max_adapters": True}, "max_adapters must be a whole number"),
        ({"max_adapters": 1, "max_adapter_rank": 9999}, "max_adapter_rank must be 1 to 512"),
        ({"max_adapter_rank": 4}, "max_adapter_rank is of adapters: give adapters or max_adapters too"),
        ({"adapter_parts": "attn"}, "adapter_parts is of adapters: give adapters or max_adapters too"),
        ({"max_adapters": 1, "adapter_parts": "attn,"}, "adapter_parts are names of a layer's weights, such as"),
        (
            {"max_adapters": 1, "adapter_parts": ["attn", "conv"]},
            "has 'conv', which names no weight that adapters",
        ),
        ({"adapters": ["a"]}, r"adapters are a mapping of names to directories, got \['a'\]"),
        ({"adapters": {"": "x"}}, "an adapter's name is a text"),
        ({"adapters": {"a": tmp_path}}, "has no adapter_config.json: an adapter is a directory that PEFT wrote"),
        ({"adapters": adapters, "max_adapter_rank": 3}, "has rank 4, and there is room for 3: give max_adapter_rank=4"),
        (
            {"adapters": adapters, "artifacts": tmp_path},
            "programs of artifacts take no adapters: leave them out, or",
        ),
    ):
        with pytest.raises((ConfigurationError, ConfigError, CheckpointError), match=message):
            build_llm(path, BUCKETS, **options)
    with pytest.raises(TypeError, match="'enable_lora'; here it is adapters or max_adapters"):
        LLM(path, enable_lora=True)  # pyright: ignore[reportCallIssue]
