"""How good a model is on a text, alone and against another."""
