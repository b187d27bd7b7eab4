"""Compiled programs: what they compute, for which static shapes, and the count of compilations."""
