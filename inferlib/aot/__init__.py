"""Compilation ahead of time: child processes that compile for a target, and the artifacts that they write."""
