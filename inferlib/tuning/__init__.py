"""Tuning: block sizes of TPU kernels, searched for by the listings that the compiler writes."""
