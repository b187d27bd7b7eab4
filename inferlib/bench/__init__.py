"""A client that measures servers with OpenAI's interface: what `inferlib bench` runs."""
