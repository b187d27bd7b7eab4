"""How often a step passes over its logits, from what XLA makes of the sampler for GPUs.

Counted in the steps of Llama-3-8B with 512 rows that XLA compiles for an H100: each read or write of an array [N, V] of
four-byte numbers by a kernel is a pass. Scatters in place, of a few elements a row, are none.
"""

from __future__ import annotations

from inferlib.programs.keys import Mode

# The head writes; the maximum reads, and then the first token that equals it.
_GREEDY = 3
# The head writes, bans and allowed tokens read and write, penalties read logits and counts and write, temperature
# reads and writes, the mass of what min_p and top_k leave reads and writes, its sum and the draw read: 13. Then each of
# the 8 digits of a threshold reads the distances, for top_k, and distances and masses, for top_p.
_SAMPLE = 13 + 8 * 1 + 8 * 2
# Beside that: the normaliser, the rank and what is sorted. The sort itself is not counted.
_LOGPROBS = _SAMPLE + 10
_PASSES: dict[Mode, int] = {"greedy": _GREEDY, "sample": _SAMPLE, "logprobs": _LOGPROBS}


def logits_bytes(mode: Mode, rows: float, vocab: int) -> float:
    """Bytes of the logits that a step of `rows` rows reads and writes, of `vocab` tokens on a device."""
    return 4.0 * rows * vocab * _PASSES.get(mode, _LOGPROBS)
