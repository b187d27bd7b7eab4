"""Tuning: searches block sizes of TPU kernels by executing the listings that the compiler writes."""
