"""What users ask before they run a model: `inferlib.explain`, `inferlib.plan` and `inferlib.compile`.

The commands `inferlib info`, `plan` and `compile` call the same functions.
"""
