"""Recurrent mixers, one module each with the spec, the layer, the states of a row, the costs, and how checkpoints
become parameters (see `inferlib.models.recurrent`). A family's recipe imports the spec; nothing else names it."""
