"""Logical axis names: what a dimension of a weight, an activation or a cache means.

Model code uses only these names; a table chosen at deployment says which mesh axis carries each.
"""

VOCAB = "vocab"  # V: rows of the embedding, columns of the head
DRAFTS = "drafts"  # the tokens that a draft head can choose
EMBED = "embed"  # D: model width
KV_HEADS = "kv_heads"  # K: key/value heads
QUERIES = "queries"  # G: query heads per KV head (in fused weights: G queries, one key, one value)
HEAD_DIM = "head_dim"  # h: head size
LATENT = "latent"  # R: low-rank latents of queries, of keys and values, or of a learned residual
HEAD_OUT = "head_out"  # h: a head's output, as the input of the output projection
MLP = "mlp"  # F: feed-forward width
GATE_UP = "gate_up"  # 2: the gate and the up half
EXPERTS = "experts"  # E: feed-forwards that tokens are routed to
ROUTES = "routes"  # E: a router's columns, one for each expert
PER_LAYER = "per_layer"  # P: per-layer embeddings; tables have those of all layers
STREAMS = "streams"  # N: parallel residuals
LANES = "lanes"  # L: residuals of which each has its own part of every layer
ADAPTERS = "adapters"  # S: slots of adapters, which change weights
LAYERS = "layers"  # L: stacked layers of a scanned segment
PAGES = "pages"  # N: cache pages
POSITIONS = "positions"  # S: positions in a cache page
TOKEN_IDS = "token_ids"  # V: rows of a table that every device has whole
CONTEXT = "context"  # rows of a table of learned positions
TOKENS = "tokens"  # C: tokens of a prefill chunk
ROWS = "rows"  # R: rows of the engine's state
