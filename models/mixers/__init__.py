"""Recurrent mixers, one module each: its spec, its layer, what a row keeps, what it costs, how checkpoints become its
parameters (see `inferlib.models.recurrent`). A family's recipe imports the spec; nothing else needs to know of it."""
