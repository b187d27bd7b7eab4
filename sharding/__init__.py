"""Meshes, logical axis names, the table that maps one to the other, and the collectives that follow."""
