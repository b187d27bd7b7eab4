"""`python -m inferlib`: the command line, of the environment of this Python."""

from __future__ import annotations

from inferlib.cli import app

if __name__ == "__main__":
    app(prog_name="python -m inferlib")
