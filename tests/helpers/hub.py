"""A stand-in for the Hugging Face Hub on loopback: what its HTTP interface answers about one repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class StandIn:
    """files: names to contents. downloads: names that were asked for. tokens: of requests that had one.

    gated: refuse what has no token.
    """

    repository: str
    files: dict[str, bytes]
    gated: bool = False
    url: str = ""
    downloads: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)

    @contextmanager
    def serve(self) -> Iterator[StandIn]:
        handler = type("Handler", (_Handler,), {"hub": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    @staticmethod
    def of(repository: str, folder: Path) -> StandIn:
        """A repository with the files of a folder."""
        files = {f.relative_to(folder).as_posix(): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
        return StandIn(repository, files)


class _Handler(BaseHTTPRequestHandler):
    hub: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        if token := self.headers.get("Authorization"):
            hub.tokens.add(token)
        about, files = f"/api/models/{hub.repository}", f"/{hub.repository}/resolve/"
        if not path.startswith((about, files)):
            self._refuse(404, "RepoNotFound")
        elif hub.gated and not token:
            self._refuse(403, "GatedRepo")
        elif path in (about, f"{about}/revision/main", f"{about}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in hub.files]
            self._answer({"id": hub.repository, "sha": COMMIT, "siblings": siblings})
        elif path.startswith(f"{about}/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in hub.files.items()
            ]
            self._answer(entries)
        elif path.startswith(files) and (name := path.removeprefix(files).partition("/")[2]) in hub.files:
            if self.command == "GET":
                hub.downloads.append(name)
            self._send(hub.files[name], "application/octet-stream")
        else:
            self._refuse(404, "EntryNotFound" if path.startswith(files) else "RevisionNotFound")

    def _answer(self, value: object) -> None:
        self._send(json.dumps(value).encode(), "application/json")

    def _send(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
