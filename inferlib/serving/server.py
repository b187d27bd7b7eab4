"""The process of a server: its socket, TLS, signals, and an orderly end."""

from __future__ import annotations

import signal
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from inferlib.async_llm import AsyncLLM
from inferlib.serving.app import build_app
from inferlib.serving.service import ServerOptions


@dataclass(frozen=True)
class Address:
    """The address that a server listens at. port: 0 takes a free one. certificate, key: PEM files; with them the server
    speaks HTTPS."""

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: Path | None = None
    key: Path | None = None

    @property
    def scheme(self) -> str:
        return "http" if self.certificate is None else "https"

    def check(self) -> None:
        """Raises ValueError, or OSError, if the files of TLS cannot be used."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile go together: give both or neither")
        if self.certificate is None or self.key is None:
            return
        for option, file in (("--ssl-certfile", self.certificate), ("--ssl-keyfile", self.key)):
            if not file.is_file():
                raise ValueError(f"{option} {file} is no file: give a PEM file")
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.certificate, self.key)
        except ssl.SSLError as error:
            raise ValueError(f"{self.certificate} and {self.key} are no certificate and its key: {error}") from None

    def bind(self) -> socket.socket:
        """A socket of this address, which does not listen yet. Raises ValueError if there is none."""
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except (OSError, UnicodeError, ValueError) as error:
            why = getattr(error, "strerror", None) or "no name"
            raise ValueError(f"--host {self.host!r:.100} is no address of this machine: {why}") from None
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(where)
        except OSError as error:
            made.close()
            why = error.strerror or str(error)
            raise ValueError(f"{self.host}:{self.port} cannot be had ({why}): choose another --port") from None
        return made


class Server(uvicorn.Server):
    """A server in this thread. SIGTERM and Ctrl-C end it when the requests that run are answered, or at the latest
    after `drain` seconds; a second signal ends it at once."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions, address: Address, *, drain: float = 60):
        app, self.service = build_app(llm, options)
        super().__init__(_config(app, address, drain))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.draining = True
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)

    def serve_on(self, bound: socket.socket) -> None:
        """Answer requests until a signal comes."""
        # uvicorn raises the signals once more when it has ended, which is to do no harm.
        before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.run(sockets=[bound])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _config(app: Any, address: Address, drain: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain)),
        ssl_certfile=address.certificate,
        ssl_keyfile=address.key,
    )
