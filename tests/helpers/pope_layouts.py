"""The layouts of Pope et al. 2022 ("Efficiently Scaling Transformer Inference", sections 3.2 and 3.3).

By them the cost model is checked against published measurements of a large model. Attention is split over rows, or over
heads where there are fewer rows than chips; activations are bfloat16. T tokens, D width, F feed-forward, H query heads
times head size.
"""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.planning.collectives import Collective
from inferlib.planning.costs import Work
from inferlib.planning.network import Network

_BYTES = 2  # of an activation


def weight_stationary_2d(
    config: ModelConfig, network: Network, rows: int, chunk: int, live: float, *, int8: bool = False
) -> Work:
    """`rows` sequences of `chunk` new tokens each, `live` positions in the cache; mesh axes "yz" and "x".

    Every matrix is split over x along D and over yz along F or H, and stays; activations move, their traffic falling
    with the square root of the chips. Between layers they are split over all chips along D, and so is their norm.
    """
    x, yz = network.spans["x"].devices, network.spans["yz"].devices
    chips, tokens, collectives = x * yz, rows * chunk, []
    for layer in config.layers:
        attention, hidden = layer.attention, layer.mlp.hidden
        heads = attention.heads * attention.head_dim
        width, column = tokens * config.dim // x * _BYTES, tokens * _BYTES // yz
        for part in ("all",) if layer.parallel else ("attention", "feed-forward"):
            inner = 0 if part == "attention" else hidden
            queries = 0 if part == "feed-forward" else heads
            collectives += [
                Collective("all-reduce", "norm", "yz+x", tokens * 4),
                Collective("all-gather", "input", "yz", width),
                Collective("reduce-scatter", "gate, up and queries", "x", column * (2 * inner + queries)),
                Collective("all-gather", "inner", "x", column * (inner + queries)),
                Collective("reduce-scatter", "output", "yz", width),
            ]
            if queries:
                pair = 2 * attention.kv_heads * attention.head_dim
                collectives += [Collective("reduce-scatter", "key and value", "x", tokens * pair * _BYTES)]
            if queries and rows >= chips:
                collectives += [
                    Collective("all-to-all", "heads to rows and back", "yz+x", column * queries // x, count=2)
                ]
    flops, weights, cache = _whole(config, rows, chunk, live, 1 if int8 else 2)
    return Work(flops / chips, weights / chips, cache / min(chips, rows), collectives=tuple(collectives))


def weight_gathered(config: ModelConfig, network: Network, rows: int, chunk: int, live: float) -> Work:
    """As `weight_stationary_2d`, but rows are split over all chips ("yz" and "x") and stay, and each layer's weights
    are gathered: cheaper when there are far more tokens than D."""
    chips = network.target.chips
    flops, weights, cache = _whole(config, rows, chunk, live, _BYTES)
    gathered = tuple(
        Collective("all-gather", "weights", "yz+x", _parameters(config, layer) * _BYTES) for layer in config.layers
    )
    # Gathered weights are written, then read.
    return Work(flops / chips, 2.0 * weights, cache / chips, collectives=gathered)


def _parameters(config: ModelConfig, layer: LayerSpec) -> int:
    attention = layer.attention
    heads = 2 * (attention.heads + attention.kv_heads) * attention.head_dim
    return config.dim * (heads + 3 * layer.mlp.hidden)


def _whole(config: ModelConfig, rows: int, chunk: int, live: float, size: int) -> tuple[float, float, float]:
    """Operations, weight bytes and cache bytes of all devices together; weights of `size` bytes."""
    tokens, head = rows * chunk, config.vocab * config.dim
    flops = 2.0 * rows * head
    weights, cache = float(head * _BYTES), 0.0
    for layer in config.layers:
        attention, parameters = layer.attention, _parameters(config, layer)
        flops += 2.0 * tokens * parameters + 4.0 * tokens * attention.heads * attention.head_dim * live
        weights += parameters * size
        cache += 2 * _BYTES * attention.kv_heads * attention.head_dim * (rows * live + tokens)
    return flops, weights, cache
