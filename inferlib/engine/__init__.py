"""Continuous batching: requests in, tokens out."""
