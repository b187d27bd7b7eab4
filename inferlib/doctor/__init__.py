"""`inferlib doctor`: whether this machine's installation, rates, kernels and step times are as they should be."""
