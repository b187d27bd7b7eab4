"""Calibrated quantisation: weights in fewer bits, chosen by what they multiply on a text."""
