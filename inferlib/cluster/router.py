"""Routing on Ray Serve: a request goes where its prefix is cached, unless that replica has too much to do."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from inferlib.cluster.forwarding import ForwardedRequest
from inferlib.cluster.prefixes import PrefixTable


class PrefixRouter(RequestRouter):
    """Chooses the replica that got the longest prefix of a prompt, and otherwise the less busy one of two at random."""

    def initialize_state(self, imbalance: int = 8, capacity: int = 1 << 16, **_: Any) -> None:
        """imbalance: how many requests more than the least busy replica one may have and still be chosen for its
        cache. capacity: of the table of prefixes, in blocks."""
        self._imbalance, self._table = imbalance, PrefixTable(capacity)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas in order of preference; within a group Ray takes the least busy one."""
        if not candidate_replicas:
            return []
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        replicas = {_name(replica.replica_id): replica for replica in candidate_replicas}
        cached = self._table.longest(_blocks(pending_request), replicas)
        if cached is None:
            return [two]
        least = min(self._open_requests(replica) for replica in candidate_replicas)
        if self._open_requests(replicas[cached]) > least + self._imbalance:
            return [two]
        return [[replicas[cached]], two]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._table.add(_blocks(pending_request), _name(replica_id))

    def _open_requests(self, replica: RunningReplica) -> int:
        """How many requests of a replica are open, as far as this router knows.

        A replica that was not asked for a while counts as free, so that Ray asks it.
        """
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def _name(replica: ReplicaID) -> str:
    return replica.unique_id


def _blocks(pending: PendingRequest | None) -> tuple[bytes, ...]:
    request = pending.args[0] if pending is not None and pending.args else None
    return request.blocks if isinstance(request, ForwardedRequest) else ()
