"""Inspection: reading what a compiler made, modules and listings of kernels, and reporting it."""
