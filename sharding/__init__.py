"""Logical axis names: what each dimension of a weight, an activation or a cache means."""
