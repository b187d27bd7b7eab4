"""The sampler's rules, one by one in float64."""

from __future__ import annotations

import numpy as np
import scipy.special

from inferlib.sampling import PROMPT_FLAG


def reference_process(logits, params, prompt, output, eos=()):
    """Processed logits [V] in float64, one rule after the other."""
    logits = np.asarray(logits, np.float64).copy()
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if params.allowed_token_ids:
        logits[np.setdiff1d(np.arange(len(logits)), params.allowed_token_ids)] = -np.inf
    for word in params.bad_words:
        start = len(output) - len(word) + 1
        if start >= 0 and tuple(output[start:]) == word[:-1]:
            logits[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        logits[list(params.stop_ids(eos))] = -np.inf
    for token in {*prompt, *output}:
        positive = logits[token] > 0
        logits[token] *= 1 / params.repetition_penalty if positive else params.repetition_penalty
    for token in output:
        logits[token] -= params.frequency_penalty
    for token in set(output):
        logits[token] -= params.presence_penalty
    return logits


def reference_keep(distance, top_k=0, top_p=1.0, min_p=0.0):
    """Mask [V] of the tokens that remain, from sorted distances; tokens tied with the last of them remain too."""
    distance = np.asarray(distance, np.float64)
    survivors = np.exp(-distance) >= min_p
    if top_k:
        survivors &= distance <= np.sort(distance[survivors])[:top_k][-1]
    if top_p < 1:
        order = np.sort(distance[survivors])
        mass = np.cumsum(np.exp(-order))
        survivors &= distance <= order[np.searchsorted(mass, top_p * mass[-1])]
    return survivors


def reference_probs(processed, params):
    """Probabilities [V] of drawing each token."""
    distance = (processed.max() - processed) / params.temperature
    survivors = reference_keep(distance, max(params.top_k, 0), params.top_p, params.min_p)
    return scipy.special.softmax(np.where(survivors, -distance, -np.inf))


def counts_of(vocab, prompt, output):
    counts = np.bincount(np.asarray(output, int), minlength=vocab).astype(np.int32)
    counts[list(prompt)] |= PROMPT_FLAG
    return counts
