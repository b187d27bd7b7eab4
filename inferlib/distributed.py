"""Several processes, usually one per host: how they find each other, and how process 0 leads them.

Every process runs the same programs on its part of one mesh. Process 0 takes requests and schedules. Before it starts a
program, it sends the program's key and host inputs to the others, which start the same program (`Channel`). They decide
nothing, so nothing that happens on process 0 alone (clocks, random seeds, errors, an abandoned stream) can put them out
of step. The connections also show that a process died: the others end at once instead of waiting in a collective.
"""

from __future__ import annotations

import atexit
import os
import pickle
import secrets
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import jax

# The only private part of JAX in use here: the coordinator's address, which JAX may detect, and the key-value store.
from jax._src.distributed import global_state

# A host that vanishes does not close its connections; probes notice within 5 + 3 * 5 seconds.
_PROBES = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
_PATIENCE = 30  # seconds until JAX ends all processes because one is stopped, or does not end with the others
_KEY = "inferlib/channel"


class PeerError(ValueError):
    """Another process failed; the message names it and says why."""


class _Signal(Enum):
    DONE = "process 0 no longer needs the others"
    ENDED = "the connection ended"


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout: int = 300,
) -> int:
    """Join the other processes, before any other use of JAX. Returns the number of this process.

    coordinator: "host:port" on which process 0 listens, reachable from all processes.
    processes: number of processes.
    process: number of this process.
    timeout: seconds to wait for the others; then this process ends with a message.

    `jax.distributed.initialize` finds arguments that are left out: on Cloud TPU, under SLURM and Open MPI (which run
    one process per GPU), and in Kubernetes indexed jobs. Raises ValueError if an argument is wrong or missing,
    RuntimeError if JAX is in use already.
    """
    global _channel
    _check(coordinator, processes, process)
    complete = None not in (coordinator, processes, process)
    late = f"the processes did not find each other within {timeout} s: was each started, with the same coordinator?"
    watch = threading.Timer(timeout, _exit, [late])
    watch.daemon = True
    watch.start()
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            cluster_detection_method="deactivate" if complete else None,
            initialization_timeout=timeout + _PATIENCE,  # JAX would end this process without a helpful message
            heartbeat_timeout_seconds=_PATIENCE,
            shutdown_timeout_seconds=_PATIENCE,
        )
    except ValueError as error:
        raise ValueError(
            f"{error} Neither Cloud TPU, SLURM, Open MPI nor Kubernetes says it here: give coordinator, processes "
            "and process"
        ) from None
    else:
        if global_state.num_processes > 1:
            _channel = _connect(global_state.process_id, global_state.num_processes)
            atexit.register(_channel.close)
    finally:
        watch.cancel()
    return global_state.process_id


def channel() -> Channel | None:
    """The channel between the processes; None if there is only one process.

    Raises RuntimeError if JAX runs in several processes and `initialize` was not called.
    """
    if _channel is None and jax.process_count() > 1:
        raise RuntimeError(
            f"JAX runs in {jax.process_count()} processes: call inferlib.distributed.initialize() first, in place of "
            "jax.distributed.initialize()"
        )
    return _channel


class Channel:
    """Connections between process 0 and each other process, which carry pickled values over TCP. As with JAX's own
    coordinator, the network must be trusted.

    process: number of this process. After the `agreement`, the end of any process ends all of them, with a message on
    stderr.
    """

    def __init__(self, process: int, links: dict[int, _Link]):
        self.process, self._links = process, links
        self._begun = self._ready = self._done = False
        for peer in links:
            threading.Thread(target=self._listen, args=(peer,), name=f"process-{peer}", daemon=True).start()

    @property
    def leads(self) -> bool:
        """True on process 0."""
        return self.process == 0

    @contextmanager
    def together(self, order: Any) -> Iterator[None]:
        """On process 0: order the others to do what the block does. If the block fails, no process can continue."""
        if not self._ready:
            raise RuntimeError("an earlier error or interrupt put the processes out of step: start them again")
        self._ready = False
        self.order(order)
        yield
        self._ready = True

    def order(self, order: Any) -> None:
        """On process 0: send `order` to every other process without waiting for it."""
        data = pickle.dumps(order, pickle.HIGHEST_PROTOCOL)
        for peer, link in self._links.items():
            try:
                link.send(data)
            except OSError:
                self._end(peer)

    def orders(self) -> Iterator[Any]:
        """On the other processes: the orders of process 0, until it is done."""
        while (order := self._take(0)) is not _Signal.DONE:
            yield order
        self._done = True

    @contextmanager
    def agreement(self, settings: dict[str, Any]) -> Iterator[None]:
        """A block that succeeds on all processes or on none. settings: must be equal on all of them.

        Afterwards no process can continue without the others. Raises the block's own error, else PeerError, which names
        the processes where the block failed or whose settings differ.
        """
        if self._ready:
            raise RuntimeError("on several processes a program runs one LLM, and there is one already")
        error = None
        try:
            yield
        except Exception as caught:
            error = caught
        reports = self._exchange(_Report(socket.gethostname(), error and str(error), settings))
        problem = _problem(reports)
        if error is not None:
            raise error
        if problem:
            raise PeerError(problem)
        for peer, link in self._links.items():
            if link.ended:
                self._end(peer)

    def ready(self) -> None:
        """Let process 0 give orders from here on. It may end at any time."""
        self._ready = True

    def close(self) -> None:
        """At the end of this process: tell the others, and wait until they are done too."""
        if self.leads and self._ready:
            self.order(_Signal.DONE)
            for peer in self._links:
                self._take(peer, _PATIENCE)
        elif self._done:
            with suppress(OSError):
                self._links[0].send(pickle.dumps(_Signal.DONE))
        elif self._begun:
            # This process failed while the others wait for it. JAX would wait for them; closed connections end them.
            sys.stdout.flush()
            os._exit(1)
        self._begun = False
        for link in self._links.values():
            link.close()

    def _exchange(self, report: _Report) -> list[_Report]:
        """The reports of all processes, in the order of their numbers."""
        if not self.leads:
            with suppress(OSError):
                self._links[0].send(pickle.dumps(report))
            reports = self._links[0].inbox.get()
            return [self._ended(0), report] if reports is _Signal.ENDED else reports
        reports = [report]
        for peer in sorted(self._links):
            value = self._links[peer].inbox.get()
            reports.append(self._ended(peer) if value is _Signal.ENDED else value)
        self._begun = not _problem(reports)
        for link in self._links.values():
            with suppress(OSError):
                link.send(pickle.dumps(reports))
        return reports

    def _ended(self, peer: int) -> _Report:
        return _Report(self._links[peer].host, "it has ended", {})

    def _take(self, peer: int, timeout: float | None = None) -> Any:
        try:
            value = self._links[peer].inbox.get(timeout=timeout)
        except Empty:
            self._end(peer, f"did not end within {timeout} s")
        if value is _Signal.ENDED:
            self._end(peer)
        return value

    def _listen(self, peer: int) -> None:
        link = self._links[peer]
        try:
            while True:
                value = link.receive()
                if isinstance(value, _Lost):
                    self._exit(value.reason)
                if value is _Signal.DONE:
                    self._begun = False
                elif isinstance(value, list):
                    self._begun = not _problem(value)
                link.inbox.put(value)
        except (EOFError, OSError, pickle.UnpicklingError):
            link.ended = True
        except Exception as error:
            self._end(peer, f"sends what cannot be read, another version of inferlib: {error}")
        if self._begun:
            self._end(peer)
        link.inbox.put(_Signal.ENDED)

    def _end(self, lost: int, what: str = "has ended") -> NoReturn:
        reason = f"process {lost} on {self._links[lost].host} {what}"
        for peer in self._links.keys() - {lost} if self.leads else ():
            with suppress(OSError):
                self._links[peer].send(pickle.dumps(_Lost(reason)))
        self._exit(reason)

    def _exit(self, reason: str) -> NoReturn:
        _exit(f"{reason}; process {self.process} cannot go on without it")


@dataclass(frozen=True)
class _Lost:
    reason: str


@dataclass(frozen=True)
class _Report:
    host: str
    error: str | None
    settings: dict[str, Any]


def _problem(reports: list[_Report]) -> str:
    """The processes that cannot continue, and why; "" if all can."""
    failed = [f"process {i} on {r.host}: {r.error}" for i, r in enumerate(reports) if r.error is not None]
    if failed:
        return "; ".join(failed)
    first, differences = reports[0].settings, []
    for i, report in enumerate(reports):
        names = [name for name in first if report.settings[name] != first[name]]
        if names:
            differences.append(f"process {i} on {report.host} differs from process 0 in {', '.join(names)}")
    return "; ".join(differences)


class _Link:
    """A connection. host: name of the other end. inbox: values received, in order. ended: no more will come."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.host, self.inbox, self.ended = "", SimpleQueue(), False
        self._connection, self._file = connection, connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send a pickled value. Raises OSError if the connection ended."""
        with self._sending:
            self._connection.sendall(data)

    def receive(self) -> Any:
        """The next value; raises EOFError or OSError at the end of the connection."""
        return pickle.load(self._file)

    def close(self) -> None:
        with suppress(OSError):  # it may have ended
            self._connection.shutdown(socket.SHUT_RDWR)

    def greet(self, line: str) -> list[str]:
        """Send a line of words and return the words of the other end. Raises OSError if none come."""
        self._connection.settimeout(_PATIENCE)
        self._connection.sendall(f"{line}\n".encode())
        words = self._file.readline(1024).decode().split()
        self._connection.settimeout(None)
        return words


_channel: Channel | None = None
_exiting = threading.Lock()


def _exit(message: str) -> NoReturn:
    """End the process from any thread. The main thread may wait in JAX for ever, so there is no other way."""
    _exiting.acquire()
    os.write(2, f"inferlib: {message}\n".encode())
    os._exit(1)


def _check(coordinator: str | None, processes: int | None, process: int | None) -> None:
    if coordinator is not None and not coordinator.rpartition(":")[2].isdecimal():
        raise ValueError(f"coordinator must be HOST:PORT, got {coordinator!r}")
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be at least 1, got {processes}")
    if process is not None and not 0 <= process < (processes or process + 1):
        raise ValueError(f"process must be a number from 0 to processes - 1, got {process} of {processes}")


def _connect(process: int, processes: int) -> Channel:
    """Connect to process 0, or to all others. JAX's key-value store tells them its port and a word that keeps strangers
    out."""
    host, store = socket.gethostname(), global_state.client
    assert store is not None
    if process > 0:
        address = (global_state.coordinator_address or "").rpartition(":")[0].strip("[]")
        port, word = store.blocking_key_value_get(_KEY, 1000 * _PATIENCE).split()
        link = _Link(socket.create_connection((address, int(port))))
        link.host = link.greet(f"{word} {process} {host}")[0]
        return Channel(process, {0: link})
    word, links, both = secrets.token_hex(), {}, socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=processes, dualstack_ipv6=both) as server:
        store.key_value_set(_KEY, f"{server.getsockname()[1]} {word}")
        while len(links) < processes - 1:
            link = _Link(server.accept()[0])
            with suppress(OSError, ValueError):  # a stranger
                answer, peer, name = link.greet(host)
                if secrets.compare_digest(answer, word):
                    link.host, links[int(peer)] = name, link
    return Channel(0, links)
