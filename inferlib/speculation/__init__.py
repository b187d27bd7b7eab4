"""Speculative decoding: what drafts the tokens that a step verifies, and how a user chooses it."""
