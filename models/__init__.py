"""Model definitions: one decoder, and families as recipes."""
