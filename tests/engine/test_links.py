"""Processes take part only with the secret, and nothing that strangers send does more than end their connection."""

from __future__ import annotations

import contextlib
import pickle
import random
import socket
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

from inferlib import distributed
from inferlib.engine.calls import Call
from inferlib.links import Link, SecretError, read_secret
from inferlib.messages import Message, MessageError
from inferlib.programs.arguments import ChunkInput
from inferlib.programs.keys import ProgramKey
from inferlib.programs.row_changes import Changes, Count, Grant, Move, Restore, Save

SECRET = b"known to the processes alone"
SECONDS = 5


def pair(*secrets: bytes) -> list[Link]:
    """Two ends of a connection, of which the first leads."""
    links: list = [None, None]

    def open_end(i: int, end: socket.socket) -> None:
        links[i] = Link(end, secrets[i], leads=i == 0, patience=SECONDS)

    server = socket.create_server(("127.0.0.1", 0))
    with server:
        other = socket.create_connection(server.getsockname())
        thread = threading.Thread(target=open_end, args=(1, other))
        thread.start()
        open_end(0, server.accept()[0])
        thread.join()
    return links


# ---- messages


def test_a_call_arrives_as_it_was_sent():
    key = ProgramKey("sample", 4, 64, chunks=2, chunk=16, detail="logits")
    ints = np.arange(6, dtype=np.int32).reshape(2, 3)
    chunk = ChunkInput(ints, ints[:, ::2], ints[:0], np.float32([[0.5, np.inf]]))
    changes = Changes([Move(3, 1)], {7: 2, 5: 7}, [Grant(1, 0, 5)], [Count(1, -1, 0), Count(1, 9, 1 << 30)])
    changes.snapshots += [Save(3, 0), Restore(1, 0), Save(2, 0)]
    cascade = Call(ProgramKey("greedy", 8, 64, cascade=True), (), False, None, prefixes=ints)
    for call in (Call(key, (1, 3), True, chunk, changes), Call(ProgramKey("greedy", 4, 64), (), False, None), cascade):
        arrived = Call.from_message(Message.decode(call.to_message().encode()))
        assert arrived[:3] == call[:3]
        assert arrived.changes == call.changes
        assert list(arrived.changes.copies) == list(call.changes.copies)
        assert (arrived.prefixes is None) == (call.prefixes is None)
        arrays = (list(x.chunk or ()) + ([] if x.prefixes is None else [x.prefixes]) for x in (arrived, call))
        for a, b in zip(*arrays, strict=True):
            assert (a.dtype, a.tolist()) == (b.dtype, b.tolist())


def test_damaged_bytes_are_no_message():
    data = bytearray(Message("call", {"rows": [1, 2]}, (np.zeros((2, 3), np.int32),)).encode())
    rng = random.Random(0)
    for _ in range(500):
        damaged = data[: rng.randrange(len(data))] if rng.random() < 0.3 else bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        with contextlib.suppress(MessageError):
            assert isinstance(Message.decode(bytes(damaged)).kind, str)
    for head in (b"[" * 100_000, b'["call", {}, [["|O8", [1]]]]', b'["call", {}, [["<i4", [1000000000000]]]]'):
        with pytest.raises(MessageError):
            Message.decode(struct.pack("<I", len(head)) + head + bytes(8))
    with pytest.raises(MessageError, match="another version"):
        Call.from_message(Message("call", {"key": {"mode": "greedy"}}))


# ---- connections


def test_messages_go_both_ways():
    first, other = pair(SECRET, SECRET)
    for sender, receiver in ((first, other), (other, first)) * 2:
        sender.send(Message("hello", {"n": 1}, (np.float32([1, 2]),)).encode())
        assert receiver.receive().arrays[0].tolist() == [1, 2]
    first.close()
    with pytest.raises(EOFError):
        other.receive()


def test_another_secret_is_turned_away():
    first, other = pair(SECRET, SECRET + b"!")
    for sender, receiver in ((first, other), (other, first)):
        sender.send(Message("hello").encode())
        with pytest.raises(MessageError, match="not signed"):
            receiver.receive()


def test_what_was_sent_cannot_be_changed_repeated_or_returned():
    data = Message("hello").encode()
    for change in ("changed", "repeated", "returned", "long"):
        first, other = pair(SECRET, SECRET)
        first.send(data)
        frame = other._file.read(8 + 32 + len(data))
        if change == "changed":
            frame = frame[:-1] + bytes([frame[-1] ^ 1])
        elif change == "long":
            frame = struct.pack("<Q", 1 << 62) + frame[8:]
        forged, receiver = (other, first) if change == "returned" else (first, other)
        receiver._received = 1 if change == "repeated" else 0
        forged._connection.sendall(frame)
        with pytest.raises(MessageError):
            receiver.receive()


STRANGERS = {
    "not ASCII": "\u00e9 1 x\n".encode(),
    "a pickle": pickle.dumps(ValueError("x")),
    "a length": bytes(32) + struct.pack("<Q", 1 << 62) + bytes(64),
    "long": b"a" * 5000 + b"\n",
    "nothing": b"",
}


def test_strangers_do_not_keep_the_others_out(caplog):
    """One leaves, others send nonsense or nothing; all came before the process that belongs here."""
    with distributed._listener("localhost:1", 2) as server, contextlib.ExitStack() as stack:
        address = server.getsockname()
        assert address[0] == "127.0.0.1"
        socket.create_connection(address).close()
        for data in STRANGERS.values():
            stranger = stack.enter_context(socket.create_connection(address))
            stranger.sendall(data)

        def join() -> None:
            link = Link(socket.create_connection(address), SECRET, leads=False, patience=SECONDS)
            link.greet(Message("greeting", {"process": 1, "host": "a host"}))

        threading.Thread(target=join).start()
        links = distributed._accept(server, 2, SECRET)
    assert {process: link.host for process, link in links.items()} == {1: "a host"}


@pytest.mark.parametrize(
    ("coordinator", "loopback"),
    [("localhost:1", True), ("127.0.0.1:1", True), ("[::1]:1", True), ("10.0.0.1:1", False), ("host0:1", False)],
)
def test_loopback(coordinator, loopback):
    assert distributed._loopback(coordinator) == loopback


# ---- the file with the secret


def test_the_default_secret_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    made = read_secret()
    assert len(made) == 64
    assert read_secret() == made
    (file,) = (tmp_path / ".config" / "inferlib").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_secret_that_is_no_use(tmp_path):
    file = tmp_path / "secret"
    with pytest.raises(SecretError, match="No such file"):
        read_secret(file)
    file.write_text("short")
    file.chmod(0o644)
    with pytest.raises(SecretError, match=f"chmod 600 {file}"):
        read_secret(file)
    file.chmod(0o600)
    with pytest.raises(SecretError, match="5 bytes, fewer than 16"):
        read_secret(file)
    with pytest.raises(SecretError, match="Is a directory"):
        read_secret(tmp_path)
