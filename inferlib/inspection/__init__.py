"""Inspection: reads what a compiler made (modules, listings of kernels) and reports what it costs."""
