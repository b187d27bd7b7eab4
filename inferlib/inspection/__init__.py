"""Inspection: reads the compiler's results (modules, listings of kernels) and reports their costs."""
