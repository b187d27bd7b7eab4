"""An HTTP server with OpenAI's interface, on `AsyncLLM`: what `inferlib serve` runs. It needs the extra `serve`.

A request goes through `app.py` (route, key, limits) to a module of its endpoint (`chat.py`, `completions.py`, ...),
which reads it by `protocol.py`, runs it by `generation.py` and answers in JSON or, by `streaming.py`, in events.
"""
