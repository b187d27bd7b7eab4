"""Connections between processes that share a secret: each end proves that it knows it, and signs every message.

The secret never travels. Both ends send a random number; a key for each direction follows from the secret and both
numbers (HMAC-SHA256, RFC 2104), and every message carries the HMAC of its number and its bytes. So strangers can
neither take part, nor change, repeat or insert messages. They can read them: nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
from pathlib import Path
from queue import SimpleQueue

from inferlib.messages import Message, MessageError

# A host that vanishes does not close its connections; probes notice within 5 + 3 * 5 seconds.
_PROBES = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
_LENGTH = struct.Struct("<Q")
_NUMBER_BYTES, _MAC_BYTES = 32, 32
_MOST_BYTES, _MOST_GREETING_BYTES = 1 << 30, 4096
_LEAST_SECRET_BYTES = 16


class SecretError(ValueError):
    """The file with the processes' secret cannot be used; the message says why."""


class Link:
    """A connection whose other end knows the secret.

    connection: a connection that was just opened, by the process that leads (process 0) or by another. host: name of
    the other end. inbox: received messages, in order. ended: no more will come. Raises OSError, EOFError or
    MessageError if the other end does not prove within `patience` seconds that it knows the secret.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, leads: bool, patience: float):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.host, self.inbox, self.ended = "", SimpleQueue(), False
        self._connection, self._file = connection, connection.makefile("rb")
        self._sending = threading.Lock()
        self._sent = self._received = 0
        connection.settimeout(patience)
        number = secrets.token_bytes(_NUMBER_BYTES)
        connection.sendall(number)
        other = self._read(_NUMBER_BYTES)
        numbers = number + other if leads else other + number
        keys = [hmac.digest(secret, b"inferlib" + role + numbers, "sha256") for role in (b"first", b"other")]
        self._key, self._other_key = keys if leads else reversed(keys)

    def greet(self, greeting: Message) -> Message:
        """Send a message and return the other end's, which proves that it knows the secret."""
        self.send(greeting.encode())
        answer = self.receive(_MOST_GREETING_BYTES)
        self._connection.settimeout(None)
        return answer

    def send(self, data: bytes) -> None:
        """Send an encoded message. Raises OSError if the connection ended."""
        with self._sending:
            mac = hmac.digest(self._key, _LENGTH.pack(self._sent) + data, "sha256")
            self._sent += 1
            self._connection.sendall(_LENGTH.pack(len(data)) + mac + data)

    def receive(self, most: int = _MOST_BYTES) -> Message:
        """The next message, of at most `most` bytes. Raises EOFError or OSError at the end of the connection, and
        MessageError if the sender does not know the secret."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > most:
            raise MessageError(f"a message of {length} bytes")
        mac, data = self._read(_MAC_BYTES), self._read(length)
        expected = hmac.digest(self._other_key, _LENGTH.pack(self._received) + data, "sha256")
        if not hmac.compare_digest(mac, expected):
            raise MessageError("a message that is not signed with the secret of this process")
        self._received += 1
        return Message.decode(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it may have ended
            self._connection.shutdown(socket.SHUT_RDWR)

    def _read(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise EOFError("the connection ended")
        return data


def read_secret(path: str | Path | None = None) -> bytes:
    """The secret that the processes share: the contents of a file that only its user can read.

    By default ~/.config/inferlib/secret, which is made if it is missing: processes with one home directory share it.
    Raises SecretError if the file cannot be read or made, is too short, or others can read it.
    """
    default = path is None
    file = Path.home() / ".config" / "inferlib" / "secret" if path is None else Path(path).expanduser()
    try:
        if default:
            _make_secret(file)
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:
            mode, secret = os.fstat(opened.fileno()).st_mode, opened.read(4096).strip()
    except OSError as error:
        raise SecretError(
            f"the secret of the processes, {file}: {error.strerror}; give each process a file with the same secret "
            "(secret=, --secret)"
        ) from None
    if mode & 0o027:
        raise SecretError(f"others can read or change the secret {file}: chmod 600 {file}")
    if len(secret) < _LEAST_SECRET_BYTES:
        raise SecretError(f"the secret {file} has {len(secret)} bytes, fewer than {_LEAST_SECRET_BYTES}")
    return secret


def _make_secret(file: Path) -> None:
    """Make the file unless it exists; if several processes do so at once, the first wins."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as opened:
        opened.write(secrets.token_hex())
    try:
        with contextlib.suppress(FileExistsError):
            os.link(draft, file)
    finally:
        draft.unlink()
