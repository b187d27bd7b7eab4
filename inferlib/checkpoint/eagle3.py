"""EAGLE-3 heads on disk, as they are published: `config.json` beside safetensors with `fc.weight`, `midlayer.*`,
`norm.weight`, `lm_head.weight`, `d2t`, `t2d`, and maybe `embed_tokens.weight` (github.com/SafeAILab/EAGLE).

`d2t` [U] is what is added to a draft's number to give the target's id; `t2d` [V] says which of the target's tokens can
be drafted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from einops import rearrange
from jax.experimental.layout import Format
from jax.sharding import NamedSharding

from inferlib.checkpoint.assemble import LoadItem, layer_assembly, top_assembly
from inferlib.checkpoint.load import load_each
from inferlib.checkpoint.safetensors import SafetensorsSource, write_safetensors
from inferlib.checkpoint.source import CheckpointError, read_json
from inferlib.models.abstract import WeightSpec
from inferlib.models.config import AttentionSpec, ConfigError, MlpSpec, ModelConfig
from inferlib.models.eagle3 import AbstractHead, Eagle3Config, default_feature_layers
from inferlib.models.families.common import LAYER, FusedExperts, options_of
from inferlib.models.families.llama import LLAMA
from inferlib.models.pieces import Assembly, Piece, assembly
from inferlib.sharding.shards import Shards

ARCHITECTURE = "LlamaForCausalLMEagle3"
_LAYER, _TOP = LAYER | {"hidden_norm": "hidden_norm"}, {"final_norm": "norm", "head": "lm_head"}
_LAYERS = "midlayer.", "layers.0."  # how the layer's tensors begin, as first published and as written by others
_REFUSED = ("norm_before_residual", "norm_before_fc", "fc_norm")  # options that change what a head computes
_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Eagle3Files:
    """An opened head. hf: its config.json. prefix: how the names of its layer's tensors begin."""

    path: Path
    hf: dict[str, Any]
    config: Eagle3Config
    source: SafetensorsSource
    prefix: str

    @staticmethod
    def open(path: str | Path, target: ModelConfig) -> Eagle3Files:
        """The head in a directory, for a target. Raises CheckpointError or ConfigError if it is damaged, not supported,
        or the head of another model."""
        directory = Path(path)
        if not directory.is_dir():
            raise CheckpointError(
                f"{directory} is no directory: an EAGLE-3 head is one with config.json and safetensors"
            )
        hf, source = read_json(directory / "config.json"), SafetensorsSource(directory)
        names = set(source.names())
        prefix = next((x for x in _LAYERS if any(name.startswith(x) for name in names)), None)
        if prefix is None or "fc.weight" not in names:
            raise CheckpointError(
                f"{directory} holds no EAGLE-3 head: it has no fc.weight or no {' or '.join(_LAYERS)}* beside it; give "
                "the directory of a head for this model, or train one with inferlib distill eagle3"
            )
        config = head_config(hf, target, embeds="embed_tokens.weight" in names, of=directory)
        layers, inputs = len(config.feature_layers), source.shape("fc.weight")[-1]
        if inputs != layers * target.dim:
            raise CheckpointError(
                f"{directory} is the head of another model: its fc takes {inputs} numbers, and {layers} hidden states "
                f"of this one are {layers} x {target.dim}"
            )
        return Eagle3Files(directory, hf, config, source, prefix)

    def load(
        self,
        head: AbstractHead,
        *,
        shards: Shards = Shards(),  # noqa: B008
        formats: Sequence[Format | NamedSharding | None] | None = None,
    ) -> tuple[jax.Array, ...]:
        """The weights in the order of `head.model.specs`, on their devices; formats: see `load_weights`. Raises
        CheckpointError for tensors that are missing, of another shape, or that no head has."""
        items = [_item(head, weight, self.prefix) for weight in head.model.weights]
        identity = "d2t" not in set(self.source.names())
        if identity and self.config.model.vocab != self.config.target_vocab:
            raise CheckpointError(
                f"{self.path} has no d2t, and its head chooses among {self.config.model.vocab} of "
                f"{self.config.target_vocab} tokens: fetch all its files again"
            )
        if identity:
            zeros = (Piece("d2t", (self.config.model.vocab,), values=(0.0,) * self.config.model.vocab),)
            items = [replace(item, pieces=(zeros,)) if item.weight.part == "d2t" else item for item in items]
        self._check(items)
        return load_each(self.source, items, head.model, shards, formats)

    def _check(self, items: Sequence[LoadItem]) -> None:
        """Raise CheckpointError unless the tensors are those of the head."""
        wanted = {p.tensor: p.shape for item in items for p in item.pieces[0] if p.values is None}
        present = {name: tuple(self.source.shape(name)) for name in self.source.names()}
        problems = [f"{name} {shape} is missing" for name, shape in wanted.items() if name not in present]
        problems += [
            f"{name} is {present[name]} instead of {shape}"
            for name, shape in wanted.items()
            if present.get(name, shape) != shape
        ]
        problems += [f"{name} is of no part" for name in sorted(present.keys() - wanted.keys() - {"t2d"})]
        if problems:
            raise CheckpointError(f"{self.path} does not hold the head of its config.json: {'; '.join(problems[:5])}")
        if "d2t" in wanted:
            ids = self.source.read("d2t").astype(np.int64) + np.arange(self.config.model.vocab)
            if ids.min() < 0 or ids.max() >= self.config.target_vocab:
                raise CheckpointError(
                    f"{self.path} names token {ids.max() if ids.min() >= 0 else ids.min()} in d2t, of a model of "
                    f"{self.config.target_vocab}: fetch it again"
                )


def head_config(
    hf: Mapping[str, Any], target: ModelConfig, *, embeds: bool = False, of: str | Path = "the head"
) -> Eagle3Config:
    """The head that a config.json describes. of: where it lies, for messages. Raises CheckpointError if it is of
    another target, ConfigError if it is not supported."""
    more = options_of(hf, "eagle_config")
    if odd := [name for name in _REFUSED if hf.get(name) or more.get(name)]:
        raise ConfigError(f"{odd[0]} in config.json of {of} is not supported: train a head without it")
    if target.streams > 1:
        raise ConfigError(f"{target.family} has {target.streams} residuals, and an EAGLE-3 head takes states of one")
    must_run_once(target)
    if more.get("use_aux_hidden_state") is False:
        raise ConfigError(f"{of} takes hidden states of one layer, so it is no EAGLE-3 head")
    if hf.get("vocab_size") != target.vocab:
        raise CheckpointError(
            f"{of} is of another model, with a vocabulary of {hf.get('vocab_size')}; this one has {target.vocab}"
        )
    vocab = hf.get("draft_vocab_size") or target.vocab
    model = LLAMA.config({**hf, "vocab_size": vocab, "num_hidden_layers": hf.get("num_hidden_layers", 1)})
    layers = _feature_layers(hf.get(_IDS) or more.get(_IDS), len(target.layers), of)
    return Eagle3Config(model, target.vocab, target.dim, layers, embeds)


def must_run_once(target: ModelConfig) -> None:
    """Raise ConfigError for a target that repeats layers or has lanes, of which no head is published."""
    if target.loop is not None:
        raise ConfigError(
            f"{target.family} repeats layers, and an EAGLE-3 head takes states of layers that run once: draft by "
            "'ngram:3' or by a model"
        )
    if target.lanes is not None:
        raise ConfigError(
            f"{target.family} has lanes, and an EAGLE-3 head takes states of one residual: draft by 'ngram:3' or by a "
            "model"
        )


def _feature_layers(ids: Any, count: int, of: str | Path) -> tuple[int, ...]:
    """After how many layers hidden states are taken; ids: numbers of the layers that they are outputs of, or None."""
    if ids is None:
        return default_feature_layers(count)
    if not isinstance(ids, list) or not all(type(i) is int and i >= -1 for i in ids):
        raise ConfigError(f"{_IDS} in config.json of {of} must be a list of numbers of layers, it is {ids!r:.100}")
    if odd := [i for i in ids if i >= count]:
        raise CheckpointError(f"{of} is of another model: it takes the output of layer {odd[0]}; this one has {count}")
    return tuple(i + 1 for i in ids)


def new_head(target: ModelConfig, draft_vocab: int, feature_layers: Sequence[int] | None = None) -> dict[str, Any]:
    """The config.json of a new head: its layer is as wide as the target's, with heads as the target's if those are
    plain. feature_layers: after how many of the target's layers it takes hidden states; None: as published."""
    must_run_once(target)
    layer = next((x for x in target.layers if isinstance(x.attention, AttentionSpec)), None)
    attention = layer.attention if layer is not None else None
    assert attention is None or isinstance(attention, AttentionSpec)
    size = attention.head_dim if attention else 64
    heads = attention.heads if attention else max(target.dim // size, 1)
    dense = next((x.mlp for x in target.layers if isinstance(x.mlp, MlpSpec)), None)
    layers = feature_layers or default_feature_layers(len(target.layers))
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": target.dim,
        "target_hidden_size": target.dim,
        "intermediate_size": dense.hidden if dense else 4 * target.dim,
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": attention.kv_heads if attention else heads,
        "head_dim": size,
        "rope_theta": attention.rope.base if attention and attention.rope else 10_000.0,
        "max_position_embeddings": target.context,
        "rms_norm_eps": target.norm.eps,
        "vocab_size": target.vocab,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        "eagle_config": {"use_aux_hidden_state": True, _IDS: [n - 1 for n in layers]},
    }


def _item(head: AbstractHead, weight: WeightSpec, prefix: str) -> LoadItem:
    made, layer = _assembly(head.config, weight, prefix), None if weight.block is None else head.config.layer
    return LoadItem(weight, layer, (made.pieces,), FusedExperts(), made.arrange)


def _assembly(config: Eagle3Config, weight: WeightSpec, prefix: str) -> Assembly:
    """How a weight of the head is made of published tensors."""
    dim, part = config.model.dim, weight.part
    if weight.block is not None:
        names = {key: prefix + module for key, module in _LAYER.items()}
        inputs = 2 * dim if part in ("attn.qkv", "attn.v") else dim
        return layer_assembly(names, config.layer, part, inputs, weight.shape)
    if part == "fc":
        return assembly(Piece("fc.weight", weight.shape[::-1]), "out wide -> wide out")
    if part == "d2t":
        return assembly(Piece("d2t", (config.model.vocab,)), "u -> u")
    if part == "embed":
        return assembly(Piece("embed_tokens.weight", (config.target_vocab, dim)), "v d -> v d")
    return top_assembly(_TOP, config.model, part)


# ---- writing


def save_head(directory: Path, hf: Mapping[str, Any], head: AbstractHead, weights: Sequence[Any]) -> None:
    """Write a head as it is published. hf: its config.json. weights: whole on one device at least."""
    tensors: dict[str, np.ndarray] = {}
    for weight, array in zip(head.model.weights, weights, strict=True):
        tensors |= _published(head.config, weight, np.asarray(array))
    ids = tensors["d2t"] + np.arange(head.config.model.vocab)
    tensors["t2d"] = np.isin(np.arange(head.config.target_vocab), ids)
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(dict(hf), indent=2) + "\n", encoding="utf-8")


def _published(config: Eagle3Config, weight: WeightSpec, x: np.ndarray) -> dict[str, np.ndarray]:
    """The published tensors of a weight."""
    made, part = _assembly(config, weight, _LAYERS[0]), weight.part
    names = [piece.tensor for piece in made.pieces]
    group = config.attention.group
    if part == "attn.qkv":
        parts = x[:, :, :group], x[:, :, group : group + 1], x[:, :, group + 1 :]
        matrices = [rearrange(p, "d k g h -> (k g h) d") for p in parts]
    elif part == "attn.qkv_bias":
        parts = x[:, :group], x[:, group : group + 1], x[:, group + 1 :]
        matrices = [p.reshape(-1) for p in parts]
    elif part == "attn.o":
        matrices = [rearrange(x, "k g h d -> d (k g h)")]
    elif part == "mlp.gate_up":
        matrices = [x[:, half].T for half in range(x.shape[1])]
    elif part == "mlp.gate_up_bias":
        matrices = list(x)
    elif part == "d2t":
        matrices = [x.astype(np.int64)]
    else:  # a vector, a table, or a matrix that is stored [out, in]
        matrices = [x if x.ndim == 1 or part == "embed" else x.T]
    return dict(zip(names, map(np.ascontiguousarray, matrices), strict=True))
