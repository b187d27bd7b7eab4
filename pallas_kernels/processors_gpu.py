"""The GPU that launches are sized for."""

PROCESSORS = 132  # streaming multiprocessors of an H100 (SXM) or H200, on which all sizes were measured
