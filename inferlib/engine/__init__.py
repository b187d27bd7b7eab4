"""Continuous batching: requests go in, tokens come out."""
