"""`inferlib generate` with prompts and `inferlib info`: options, streams, errors. About 30 s."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import typer

from inferlib import LLM, SamplingParams, StructuredOutputs
from inferlib.checkpoint.safetensors import SafetensorsSource
from inferlib.cli.generate import generate
from inferlib.cli.output import write
from inferlib.sampling.generation_config import _FIELDS
from tests.helpers.cli_model import COMMAND, Commands, error_of, make_model
from tests.helpers.oracle import make_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def inferlib(tmp_path_factory) -> Commands:
    return Commands(make_model(tmp_path_factory.mktemp("model"), layers=1))


def text_of(inferlib: Commands, prompt: str, params: SamplingParams = GREEDY) -> str:
    return inferlib.llm.generate(prompt, params)[0].outputs[0].text


# ---- options


def test_help_does_not_import_jax():
    code = "import sys, inferlib.cli; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_shell_completes_commands_and_options():
    """As bash asks for it, once `inferlib --install-completion` has told it how."""
    for words, expected in (("inferlib gen", ["generate"]), ("inferlib generate --max-l", ["--max-len"])):
        asked = {"_INFERLIB_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        command = [sys.executable, "-c", "from inferlib.cli import app; app(prog_name='inferlib')"]
        done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=True)
        assert done.stdout.split() == expected


@pytest.mark.slow
def test_python_runs_the_commands():
    """And its help and errors name a command that works there."""
    command = [sys.executable, "-P", "-m", "inferlib"]
    assert b"v6e" in subprocess.run([*command, "targets"], capture_output=True, check=True).stdout
    wrong = subprocess.run([*command, "target"], capture_output=True)
    assert wrong.returncode == 2
    assert b"python -m inferlib" in wrong.stderr


def test_targets_are_listed_without_jax():
    code = "import sys; from inferlib.cli import app; app(['targets', 'v5e-8'], standalone_mode=False)"
    shown = subprocess.run([sys.executable, "-c", code + "; sys.exit('jax' in sys.modules)"], capture_output=True)
    assert shown.returncode == 0
    assert b"2 x 4 chips" in shown.stdout


def test_every_sampling_parameter_is_an_option_with_its_default():
    """Those that a model may suggest have none; the seed is the engine's, functions are Python's, and each kind of
    structured output has an option of its own."""
    options = {name: p.default for name, p in inspect.signature(generate).parameters.items()}
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    del fields["logits_processors"], fields["structured_outputs"]
    assert {field.name for field in dataclasses.fields(StructuredOutputs)} <= options.keys() | {
        "json",
        "whitespace_pattern",
    }
    assert fields.keys() <= options.keys()
    different = {name: options[name] for name in fields if options[name] != fields[name]}
    assert different == dict.fromkeys(_FIELDS.values()) | {"seed": 0}


@pytest.mark.slow
def test_defaults_are_those_of_python(inferlib, tmp_path):
    """What the model suggests, then what `SamplingParams` has: also for a line of a file."""
    folder = shutil.copytree(inferlib.model, tmp_path / "model")
    suggested = {"temperature": 0.5, "top_k": 4, "max_new_tokens": 5}
    (folder / "generation_config.json").write_text(json.dumps(suggested))
    options = ("generate", "--model", folder, "--max-batch", "2", "--seed", "3")
    llm = LLM(folder, max_batch=2, seed=3, progress=False)
    result = inferlib(*options, "hello")
    assert result.stdout == llm.generate("hello")[0].outputs[0].text + "\n"
    result = inferlib(*options, "hello", "--generation-config", "none", "--temperature", "0", "--json")
    (tokens,) = (output["token_ids"] for output in json.loads(result.stdout)["outputs"])
    assert tokens == llm.generate("hello", SamplingParams(temperature=0.0))[0].outputs[0].token_ids
    assert len(tokens) == 16
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "hello", "sampling_params": {"seed": 1}}, {"prompt": "x" * 253}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert inferlib(*options, "--input", source, "--output", target, "--top-k", "0").exit_code == 0
    records = {record["line"]: record for record in map(json.loads, target.read_text().splitlines())}
    params = dataclasses.replace(llm.get_default_sampling_params(), top_k=0, seed=1)
    (expected,) = llm.generate("hello", params)
    assert records[1]["outputs"][0]["token_ids"] == expected.outputs[0].token_ids
    assert len(expected.outputs[0].token_ids) == 5
    assert records[2]["generated_tokens"] == 3  # the room that the prompt leaves


class Recorder:
    """Stands in for the model, records what a prompt was to be generated with, and ends the command."""

    compilations = 0
    seen: ClassVar[dict] = {}

    def __init__(self, *args, **options):
        self.seen.update(args=args, **options)

    def get_default_sampling_params(self):
        return SamplingParams()

    def prepare(self, prompt, params, *, fit, adapter):
        self.seen.update(prompt=prompt, params=params, fit=fit, adapter=adapter)
        raise ValueError("recorded")


def test_options_reach_the_request(inferlib, monkeypatch):
    monkeypatch.setattr(inferlib, "build", Recorder)
    words = """
        --dtype bfloat16 --quantization int8 --kv-cache-dtype fp8 --expert-placement slots.json --max-len 64
        --artifacts compiled --parallel tp=2 --backend matmul=xla --seed 7 --json --revision main --cache-memory 0.5
        --max-tokens 9 --min-tokens 2 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1
        --presence-penalty 0.2 --frequency-penalty -0.3 --logit-bias 5=-1.5 --logit-bias 6=2 --stop ab --stop c
        --stop-token-id 8 --stop-token-id 9 --ignore-eos --include-stop-str-in-output --no-skip-special-tokens --n 3
        --logprobs 4 --prompt-logprobs 1 --allowed-token-id 5 --allowed-token-id 9 --bad-word ab --bad-word c
        --truncate-prompt-tokens 3 --generation-config none --no-prefix-caching --itl 0.25 --speculation ngram:5
        --attention-pages quest:8 --sparse-prefill mean:0.9 --host-cache 1GiB --disk-cache pages --disk-cache-size 2GiB
        --cache-policy knorm:64 --depth 2 --exit-threshold 0.03 --prefill-devices 1,2 --adapters sql=a,mail=b
        --adapter mail --max-adapters 1 --max-adapter-rank 32 --adapter-parts attn,mlp.down --depthwise-batching
        --depthwise-quorum 3
    """
    assert error_of(inferlib.generate("hello", *words.split())) == "recorded"
    assert Recorder.seen == {
        "args": (str(inferlib.model),),
        "dtype": "bfloat16",
        "revision": "main",
        "generation_config": "none",
        "quantization": "int8",
        "kv_cache_dtype": "fp8",
        "expert_placement": Path("slots.json"),
        "backend": "matmul=xla",
        "expert_load": False,
        "max_batch": 2,
        "max_len": 64,
        "cache_memory": "0.5",
        "prefix_caching": False,
        "prefill_devices": [1, 2],
        "host_cache": "1GiB",
        "disk_cache": Path("pages"),
        "disk_cache_size": "2GiB",
        "itl": 0.25,
        "speculation": "ngram:5",
        "attention_pages": "quest:8",
        "sparse_prefill": "mean:0.9",
        "cache_policy": "knorm:64",
        "adapters": {"sql": "a", "mail": "b"},
        "max_adapters": 1,
        "max_adapter_rank": 32,
        "adapter_parts": "attn,mlp.down",
        "depthwise_batching": 3,
        "compile_cache": None,
        "parallel": "tp=2",
        "artifacts": Path("compiled"),
        "seed": 7,
        "prompt": "hello",
        "fit": False,
        "adapter": "mail",
        "params": SamplingParams(
            max_tokens=9,
            min_tokens=2,
            temperature=0.5,
            top_k=3,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=-0.3,
            logit_bias={5: -1.5, 6: 2.0},
            stop=["ab", "c"],
            stop_token_ids=[8, 9],
            ignore_eos=True,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            n=3,
            logprobs=4,
            prompt_logprobs=1,
            allowed_token_ids=[5, 9],
            bad_words=["ab", "c"],
            truncate_prompt_tokens=3,
            depth=2,
            exit_threshold=0.03,
        ),
    }


# ---- prompts and output


@pytest.mark.slow
def test_text_goes_to_stdout_and_one_line_of_numbers_to_stderr(inferlib):
    result = inferlib.generate("hello")
    assert result.exit_code == 0, result.output
    assert result.stdout == text_of(inferlib, "hello") + "\n"
    summary = result.stderr.splitlines()
    assert len(summary) == 1
    for part in ("5 prompt tokens", "8 generated", "TTFT", "ITL", "tokens/s"):
        assert part in summary[0]


def test_prompts_keep_their_order(inferlib):
    prompts = ["a long prompt, which takes more tokens", "b", "c"]
    result = inferlib.generate(*prompts)
    assert result.stdout == "".join(text_of(inferlib, p) + "\n" for p in prompts)
    assert "3 prompts, 40 prompt tokens, 24 generated, mean TTFT" in result.stderr


def test_stdin_is_one_prompt(inferlib):
    result = inferlib.generate(stdin="two\nlines é\n")
    assert result.stdout == text_of(inferlib, "two\nlines é") + "\n"


def test_chat(inferlib):
    result = inferlib.generate("--chat", "--system", "Be brief.", "hello")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert result.stdout == inferlib.llm.chat(messages, GREEDY)[0].outputs[0].text + "\n"


def test_chat_templates(inferlib, tmp_path):
    """Another template, with options of its own; for messages of a file, too, which may be continued."""
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[-1].content }}{{ mark }}")
    options = ("--chat-template", file, "--chat-template-kwargs", '{"mark": "!"}')
    result = inferlib.generate("--chat", *options, "hello")
    assert result.stdout == text_of(inferlib, "hello!") + "\n"
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Well"}]
    lines = [
        {"messages": messages},
        {"messages": messages, "chat_template_kwargs": {"mark": "?"}},
        {"messages": messages, "continue_final_message": True},
        {"prompt": "a", "tools": []},
        {"messages": messages, "chat_template_kwargs": [1]},
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert inferlib.generate("--input", source, "--output", target, *options).exit_code == 1
    records = {record["line"]: record for record in map(json.loads, target.read_text().splitlines())}
    texts = {line: record["outputs"][0]["text"] for line, record in records.items() if "outputs" in record}
    assert texts == {i: text_of(inferlib, text) for i, text in ((1, "Well!"), (2, "Well?"), (3, "Well"))}
    assert "tools goes with messages" in records[4]["error"]
    assert "chat_template_kwargs must map" in records[5]["error"]


def test_json(inferlib):
    result = inferlib.generate("--json", "--logprobs", "2", "--prompt-logprobs", "0", "ab", "é")
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["prompt"], second["prompt"]) == ("ab", "é")
    params = dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=0)
    expected = inferlib.llm.generate("ab", params)[0]
    output, wanted = first["outputs"][0], expected.outputs[0]
    assert output["text"] == wanted.text
    assert output["token_ids"] == wanted.token_ids
    assert output["finish_reason"] == "length"
    assert output["cumulative_logprob"] == pytest.approx(wanted.cumulative_logprob, abs=1e-4)
    assert [[entry["token_id"] for entry in step] for step in output["logprobs"]] == [
        list(step) for step in wanted.logprobs
    ]
    assert (first["prompt_tokens"], first["generated_tokens"]) == (2, 8)
    assert first["prompt_logprobs"][0] is None
    assert first["prompt_logprobs"][1][0]["token_id"] == expected.prompt_token_ids[1]


@pytest.mark.slow
def test_sampling_with_several_outputs(inferlib):
    outputs = json.loads(inferlib.generate("--json", "--temperature", "1", "--n", "3", "ab").stdout)["outputs"]
    assert len({tuple(output["token_ids"]) for output in outputs}) == 3


def test_logit_bias_forces_a_token(inferlib):
    token = inferlib.llm.tokenizer.encode("x")[0]
    result = inferlib.generate("--logit-bias", f"{token}=100", "ab")
    assert result.stdout == "x" * 8 + "\n"


def test_stream_gives_the_same_text(inferlib):
    result = inferlib.generate("--stream", "hello")
    assert result.stdout == text_of(inferlib, "hello") + "\n"
    assert "5 prompt tokens, 8 generated" in result.stderr


@pytest.mark.slow
def test_a_terminal_gets_a_stream(inferlib):
    """The whole command on a terminal, where a spinner and a progress bar come before the text."""
    parent, child = pty.openpty()
    command = [*COMMAND, "generate", "hello", "--model", inferlib.model, "--max-tokens", "8"]
    command += ["--temperature", "0"]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child)
    os.close(child)
    shown = b""
    while True:
        try:
            shown += os.read(parent, 4096)
        except OSError:  # the other side is closed
            break
    os.close(parent)
    assert process.wait() == 0, shown.decode()
    shown = shown.decode()
    assert "compiling and reading the prompt" in shown
    assert "8 generated" in shown
    assert text_of(inferlib, "hello").replace("\n", "\r\n") in shown


# ---- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--model", "/nowhere"], "'/nowhere': the path does not exist"),
        (["x", "--dtype", "int3"], "dtype 'int3' is not supported"),
        (["x", "--max-len", "1000"], "max_len 1000 exceeds the model's context of 256"),
        (["x", "--max-tokens", "300"], "1 tokens plus max_tokens 300 exceeds max_len 256"),
        (["x", "--top-p", "1.5"], "top_p must be a number in (0, 1], got 1.5"),
        (["x", "--n", "2"], "n must be 1 when temperature is 0"),
        (["x", "--min-tokens", "9"], "min_tokens must be at most max_tokens (8)"),
        (["x", "--logit-bias", "5"], "--logit-bias must be ID=VALUE"),
        (["x", "--logit-bias", "999=1"], "token 999 is not in the model's vocabulary"),
        (["ok", ""], "prompt 2: the prompt is empty"),
        ([""], "the prompt is empty"),
        (["x", "--system", "s"], "--system needs --chat"),
        (["x", "--logprobs", "1"], "add --json"),
        (["x", "--chat-template", "t"], "give --chat"),
        (["x", "--chat", "--chat-template", "/nowhere"], "/nowhere: No such file or directory"),
        (["x", "--chat", "--chat-template-kwargs", "[1]"], "--chat-template-kwargs is a JSON object"),
        (["x", "--generation-config", "vllm"], "generation_config must be 'auto' or 'none', got 'vllm'"),
        (["x", "--bad-word", ""], "bad_words must be texts"),
        (["x", "y", "--stream"], "--stream shows the text of one prompt"),
        (["x", "--stream", "--json"], "--stream shows the text of one prompt"),
        (["--input", "a"], "--input and --output go together"),
        (["--output", "a"], "--input and --output go together"),
        (["x", "--input", "a", "--output", "b"], "give no prompts"),
        (["x", "--resume"], "give --input and --output"),
        (["--input", "a", "--output", "b", "--resume", "--overwrite"], "give one of them"),
    ],
)
def test_bad_input_is_one_line(inferlib, arguments, message):
    assert message in error_of(inferlib.generate(*arguments))


def test_bad_stdin(inferlib):
    assert "stdin must be UTF-8 text" in error_of(inferlib.generate(stdin=b"caf\xe9"))
    assert "the prompt is empty" in error_of(inferlib.generate(stdin=""))


def test_other_exceptions_keep_their_traceback(inferlib, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("a bug")

    monkeypatch.setattr(inferlib, "build", broken)
    result = inferlib.generate("x")
    assert isinstance(result.exception, RuntimeError)
    assert result.exc_info[2] is not None


def test_an_end_of_file_keeps_its_traceback(inferlib, monkeypatch):
    """Typer alone would print "Aborted." and hide where it came from."""

    def ended(*args, **options):
        raise EOFError("marshal data too short")

    monkeypatch.setattr(inferlib, "build", ended)
    result = inferlib.generate("x")
    assert isinstance(result.exception, RuntimeError)
    assert isinstance(result.exception.__cause__, EOFError)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_under_stdout(monkeypatch, capsys):
    # Closing it fails, too.
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(typer.Exit) as end:
            write("text")
    assert end.value.exit_code == 2
    assert "error: cannot write to stdout: No space left on device" in capsys.readouterr().err


# ---- info


def test_info(inferlib, tmp_path, monkeypatch):
    model = make_model(tmp_path / "model", layers=2)
    monkeypatch.setattr(SafetensorsSource, "read", None)  # no weights are read
    facts = json.loads(inferlib("info", model, "--json", "--max-len", "100").stdout)
    vocab, width, hidden, layers = 260, 96, 80, 2
    attention = width * 24 * (6 + 2 * 2) + 6 * 24 * width
    parameters = 2 * vocab * width + layers * (attention + 3 * width * hidden + 2 * width) + width
    assert facts["family"] == "llama"
    assert facts["parameters"] == parameters
    assert facts["stored_bytes"] == 4 * parameters
    assert facts["weight_bytes"] == {
        "float32": 4 * parameters,
        "bfloat16": 2 * parameters,
        "float16": 2 * parameters,
    }
    token = layers * 2 * 2 * 24 * 2  # k and v, 2 KV heads of 24, 2 bytes
    assert facts["cache_bytes"]["bfloat16"] == {
        "per_token": token,
        "beyond_windows": token,
        "states": 0,
        "snapshot": 0,
        "per_sequence": 128 * token,  # a whole page
    }
    (segment,) = facts["layers"]
    assert segment["repeat"] == layers
    assert segment["pattern"][0]["attention"]["heads"] == 6
    assert facts["context"] == 256

    table = inferlib("info", model).stdout
    assert "2, all alike: 6 heads of 24, 2 for keys and values" in " ".join(table.split())
    assert "cache of 256 tokens" in table


def test_info_counts_windows_as_rings(inferlib, tmp_path):
    make_checkpoint(tmp_path, "gemma3_text", max_position_embeddings=2048)
    facts = json.loads(inferlib("info", tmp_path, "--json").stdout)
    layer = 2 * 2 * 24 * 4  # bytes of a token in a layer in float32
    window, chunk = 8, 512
    assert facts["cache_bytes"]["float32"] == {
        "per_token": 7 * layer,
        "beyond_windows": layer,
        "states": 0,
        "snapshot": layer * 6 * (window + chunk),
        "per_sequence": layer * (2048 + 6 * (window + chunk)),
    }
    table = " ".join(inferlib("info", tmp_path).stdout.split())
    assert "5 of kind 1, 1 of kind 2, 1 of kind 1" in table
    assert "window 8" in table
    assert "beyond windows" in table


def test_info_counts_shared_caches_once(inferlib, tmp_path):
    make_checkpoint(tmp_path, "gemma3n_text", max_position_embeddings=2048)
    facts = json.loads(inferlib("info", tmp_path, "--json").stdout)
    layer = 2 * 2 * 24 * 4  # bytes of a token in a layer in float32
    assert facts["cache_bytes"]["float32"] == {
        "per_token": 3 * layer,
        "beyond_windows": layer,
        "states": 0,
        "snapshot": layer * 2 * (8 + 512),
        "per_sequence": layer * (2048 + 2 * (8 + 512)),
    }
    table = " ".join(inferlib("info", tmp_path).stdout.split())
    assert "2 for keys and values of layer 1" in table
    assert "70% sparse" in table
    assert "residuals 3, by AltUp" in table


def test_info_says_once_what_is_left_out(inferlib, tmp_path, caplog):
    make_checkpoint(tmp_path, "gemma3", num_hidden_layers=2)
    assert "family gemma3" in " ".join(inferlib("info", tmp_path).stdout.split())
    assert caplog.text.count("of images or sound are left out") == 1


def test_info_of_a_shape(inferlib):
    facts = json.loads(inferlib("info", "--config", "smollm2-135m", "--json").stdout)
    assert facts["parameters"] == 134_515_008
    assert facts["stored_bytes"] is None
    assert "134.5 million" in inferlib("info", "--config", "smollm2-135m").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a model or the name of a shape"),
        (["m", "--config", "c"], "give either a model or the name of a shape"),
        (["/nowhere"], "the path does not exist"),
        (["--config", "nothing"], "no model shape is called 'nothing'; known: "),
        (["--config", "smollm2-135m", "--max-len", "10000"], "exceeds the model's context of 8192"),
    ],
)
def test_info_of_nothing(inferlib, arguments, message):
    assert message in error_of(inferlib("info", *arguments))


def test_info_of_an_unknown_architecture(inferlib, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["NewForCausalLM"]}')
    assert "NewForCausalLM" in error_of(inferlib("info", tmp_path))
