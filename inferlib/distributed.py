"""Several processes, usually one per host: how they find each other, and how process 0 leads them.

Every process runs the same programs on its part of one mesh. Process 0 takes requests and schedules. Before it starts a
program, it sends the program's key and host inputs to the others, which start the same program (`Channel`). They decide
nothing, so events on process 0 alone (clocks, random seeds, errors, an abandoned stream) cannot put them out of step.
The connections also show that a process died: the others end at once instead of waiting in a collective.
"""

from __future__ import annotations

import atexit
import hashlib
import ipaddress
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from queue import Empty
from typing import Any, NoReturn

import jax

# The only private part of JAX in use here: the coordinator's address, which JAX may detect, and the key-value store.
from jax._src.distributed import global_state

from inferlib.links import Link, read_secret
from inferlib.messages import Message, MessageError

log = logging.getLogger(__name__)

_PATIENCE = 30  # seconds until JAX ends all processes because one is stopped, or does not end with the others
_KEY = "inferlib/channel"
_DONE, _LOST, _REPORT, _REPORTS = "done", "lost", "report", "reports"  # kinds of messages, beside those of orders


class PeerError(ValueError):
    """Another process failed; the message names it and says why."""


class _Signal(Enum):
    ENDED = "the connection ended"


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    secret: str | Path | None = None,
    timeout: int = 300,
) -> int:
    """Join the other processes, before any other use of JAX. Returns the number of this process.

    coordinator: "host:port" on which process 0 listens, reachable from all processes. If the host is localhost or
        another loopback address, process 0 listens there alone, otherwise on all of its interfaces.
    processes: number of processes.
    process: number of this process.
    secret: a file with the same 16 bytes or more for all processes, which others may not read; by default
        ~/.config/inferlib/secret, which is made if it is missing. Only a process that knows it can take part.
    timeout: seconds to wait for the others; then this process ends with a message.

    `jax.distributed.initialize` finds arguments that are left out: on Cloud TPU, under SLURM and Open MPI (which run
    one process per GPU), and in Kubernetes indexed jobs. Raises ValueError if an argument is wrong or missing,
    SecretError for a file that is no use, RuntimeError if JAX is in use already.
    """
    global _channel
    _check(coordinator, processes, process)
    word = read_secret(secret)
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
            coordinator_bind_address=coordinator if _loopback(coordinator) else None,
        )
    except ValueError as error:
        raise ValueError(
            f"{error} Neither Cloud TPU, SLURM, Open MPI nor Kubernetes says it here: give coordinator, processes "
            "and process"
        ) from None
    else:
        if global_state.num_processes > 1:
            _channel = _connect(global_state.process_id, global_state.num_processes, word)
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
    """Connections between process 0 and each other process, which carry typed messages over TCP.

    process: number of this process. After the `agreement`, the end of any process ends all of them, with a message on
    stderr.
    """

    def __init__(self, process: int, links: dict[int, Link]):
        self.process, self._links = process, links
        self._begun = self._ready = self._done = False
        for peer in links:
            threading.Thread(target=self._listen, args=(peer,), name=f"process-{peer}", daemon=True).start()

    @property
    def leads(self) -> bool:
        """True on process 0."""
        return self.process == 0

    @contextmanager
    def together(self, order: Message) -> Iterator[None]:
        """On process 0: order the others to do what the block does. If the block fails, no process can continue."""
        if not self._ready:
            raise RuntimeError("an earlier error or interrupt put the processes out of step: start them again")
        self._ready = False
        self.order(order)
        yield
        self._ready = True

    def order(self, order: Message) -> None:
        """On process 0: send `order` to every other process without waiting for it."""
        data = order.encode()
        for peer, link in self._links.items():
            try:
                link.send(data)
            except OSError:
                self._end(peer)

    def orders(self) -> Iterator[Message]:
        """On the other processes: the orders of process 0, until it is done."""
        while (order := self._take(0)).kind != _DONE:
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
        reports = self._exchange(_Report(socket.gethostname(), error and str(error), _digests(settings)))
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
            self.order(Message(_DONE))
            for peer in self._links:
                self._take(peer, _PATIENCE)
        elif self._done:
            with suppress(OSError):
                self._links[0].send(Message(_DONE).encode())
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
                self._links[0].send(Message(_REPORT, asdict(report)).encode())
            answer = self._links[0].inbox.get()
            return [self._ended(0), report] if answer is _Signal.ENDED else _reports(answer)
        reports = [report]
        for peer in sorted(self._links):
            value = self._links[peer].inbox.get()
            reports.append(self._ended(peer) if value is _Signal.ENDED else _Report(**value.fields))
        self._begun = not _problem(reports)
        for link in self._links.values():
            with suppress(OSError):
                link.send(Message(_REPORTS, {"reports": [asdict(r) for r in reports]}).encode())
        return reports

    def _ended(self, peer: int) -> _Report:
        return _Report(self._links[peer].host, "it has ended", {})

    def _take(self, peer: int, timeout: float | None = None) -> Message:
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
                message = link.receive()
                if message.kind == _LOST:
                    self._exit(str(message.fields["reason"]))
                if message.kind == _DONE:
                    self._begun = False
                elif message.kind == _REPORTS:
                    self._begun = not _problem(_reports(message))
                link.inbox.put(message)
        except (EOFError, OSError):
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
                self._links[peer].send(Message(_LOST, {"reason": reason}).encode())
        self._exit(reason)

    def _exit(self, reason: str) -> NoReturn:
        _exit(f"{reason}; process {self.process} cannot go on without it")


@dataclass(frozen=True)
class _Report:
    """error: why the block failed here. settings: their digests."""

    host: str
    error: str | None
    settings: dict[str, str]


def _digests(settings: dict[str, Any]) -> dict[str, str]:
    """Digests that are equal for equal settings. The settings are values whose repr says everything."""
    return {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in settings.items()}


def _reports(message: Message) -> list[_Report]:
    return [_Report(**report) for report in message.fields["reports"]]


def _problem(reports: list[_Report]) -> str:
    """The processes that cannot continue, and why; empty if all can."""
    failed = [f"process {i} on {r.host}: {r.error}" for i, r in enumerate(reports) if r.error is not None]
    if failed:
        return "; ".join(failed)
    first, differences = reports[0].settings, []
    for i, report in enumerate(reports):
        names = [name for name in first if report.settings.get(name) != first[name]]
        if names:
            differences.append(f"process {i} on {report.host} differs from process 0 in {', '.join(names)}")
    return "; ".join(differences)


_channel: Channel | None = None
_SECRETS = "its secret may be another; copy ~/.config/inferlib/secret to every host, or give secret= (--secret)"
_exiting = threading.Lock()


def _exit(message: str) -> NoReturn:
    """End the process from any thread. There is no other way: the main thread may wait in JAX forever."""
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


def _loopback(coordinator: str | None) -> bool:
    """True if the host of "host:port" is this machine alone."""
    host = _host(coordinator or "")
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _connect(process: int, processes: int, secret: bytes) -> Channel:
    """Connect to process 0, or to all others. JAX's key-value store tells them its port."""
    host, store, coordinator = socket.gethostname(), global_state.client, global_state.coordinator_address or ""
    assert store is not None
    if process > 0:
        port = int(store.blocking_key_value_get(_KEY, 1000 * _PATIENCE))
        try:
            connection = socket.create_connection((_host(coordinator), port), timeout=_PATIENCE)
            link = Link(connection, secret, leads=False, patience=_PATIENCE)
            link.host = link.greet(Message("greeting", {"process": process, "host": host})).fields["host"]
        except (EOFError, OSError, MessageError) as error:
            raise PeerError(f"process 0 does not answer ({error}): {_SECRETS}") from None
        return Channel(process, {0: link})
    with _listener(coordinator, processes) as server:
        store.key_value_set(_KEY, str(server.getsockname()[1]))
        return Channel(0, _accept(server, processes, secret))


def _listener(coordinator: str, processes: int) -> socket.socket:
    if _loopback(coordinator):
        host = "127.0.0.1" if _host(coordinator) == "localhost" else _host(coordinator)
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=processes, dualstack_ipv6=both)


def _accept(server: socket.socket, processes: int, secret: bytes) -> dict[int, Link]:
    """The links to all other processes. Each connection has a thread, so that a stranger's delays nobody."""
    links: dict[int, Link] = {}
    greeting = Message("greeting", {"host": socket.gethostname()})

    def welcome(connection: socket.socket, address: tuple) -> None:
        try:
            link = Link(connection, secret, leads=True, patience=_PATIENCE)
            fields = link.greet(greeting).fields
            link.host, process = str(fields["host"]), fields["process"]
        except (EOFError, OSError, MessageError, KeyError) as error:
            log.warning("a connection from %s is turned away: %s", address[0], error)
            connection.close()
        else:
            links.setdefault(process, link)

    server.settimeout(0.2)
    while links.keys() != set(range(1, processes)):
        with suppress(TimeoutError):
            threading.Thread(target=welcome, args=server.accept(), daemon=True).start()
    return links
