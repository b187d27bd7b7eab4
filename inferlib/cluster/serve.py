"""OpenAI's HTTP interface by replicas on Ray Serve.

    serve run inferlib.cluster.serve:build model=Qwen/Qwen3-0.6B least=3 most=3

An ingress takes requests, and hands each to a replica, whose answer it passes on. A request whose replica is lost goes
to another one if its client has nothing of the answer yet.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from inferlib.async_llm import AsyncLLM
from inferlib.cluster.forwarding import ForwardedRequest, Head, answer_parts
from inferlib.cluster.prefixes import prefix_blocks
from inferlib.serving.app import build_app
from inferlib.serving.errors import ApiError
from inferlib.serving.service import ServerOptions
from inferlib.serving.structured import warmup_modes

_LOG = logging.getLogger("ray.serve")
# What each replica counts for itself, and a page that asks for it.
_OF_ONE_REPLICA = ("/", "/load", "/metrics")
# Of the connection between the client and the ingress alone.
_CONNECTION = (b"connection", b"content-length", b"host", b"keep-alive", b"transfer-encoding")


@dataclass(frozen=True)
class Replicas:
    """How many replicas there are, and what each takes.

    least, most: Ray Serve keeps the number between them, and aims at `target` open requests a replica.
    concurrent: most open requests of a replica; more wait in the ingress.
    imbalance: how many open requests more than the least busy replica one may have and still get a request for the
        prefix that it has cached.
    attempts: how often a request is tried whose replicas are lost.
    cpus, gpus, resources: what a replica takes of a node, in Ray's terms, such as resources={"TPU": 4}.
    """

    least: int = 1
    most: int = 1
    target: float = 64
    concurrent: int = 256
    imbalance: int = 8
    attempts: int = 3
    cpus: float = 1
    gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not 1 <= self.least <= self.most:
            raise ValueError(f"least={self.least}, most={self.most}: there is at least 1 replica, and least <= most")
        for name in ("concurrent", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give at least 1")
        if self.imbalance < 0:
            raise ValueError(f"imbalance={self.imbalance}: give 0 or more")

    def actor_options(self) -> dict[str, Any]:
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "resources": dict(self.resources)}

    def deployment_options(self) -> dict[str, Any]:
        router: dict[str, Any] = {
            "request_router_class": "inferlib.cluster.router.PrefixRouter",
            "request_router_kwargs": {"imbalance": self.imbalance},
        }
        options: dict[str, Any] = {
            "max_ongoing_requests": self.concurrent,
            "ray_actor_options": self.actor_options(),
            "request_router_config": RequestRouterConfig(**router),
        }
        if self.least == self.most:
            return options | {"num_replicas": self.least}
        scaling = AutoscalingConfig(
            min_replicas=self.least, max_replicas=self.most, target_ongoing_requests=self.target
        )
        return options | {"autoscaling_config": scaling}


@serve.deployment
class Replica:
    """One `LLM`, and the server's application on it."""

    def __init__(self, model: str, server: ServerOptions, options: Mapping[str, Any]):
        self._llm = AsyncLLM(model, **{"progress": False, **options})
        if self._llm.llm.config.platform != "cpu" and "artifacts" not in options:
            self._llm.llm.warmup(warmup_modes())
        self._app, self._service = build_app(self._llm, server)

    async def answer(self, request: ForwardedRequest) -> AsyncIterator[Head | bytes]:
        async with aclosing(answer_parts(self._app, request)) as parts:  # type: ignore[type-var]
            async for part in parts:
                yield part


@serve.deployment
class Ingress:
    """Takes requests by HTTP, and passes the answers of replicas on."""

    def __init__(self, replicas: DeploymentHandle, attempts: int, body: int):
        self._replicas = replicas.options(stream=True)
        self._attempts, self._body = attempts, body

    async def __call__(self, request: Request) -> Response:
        try:
            return await self._answer(await self._forwarded(request))
        except ApiError as error:
            return JSONResponse(error.body(), error.status)

    async def _forwarded(self, request: Request) -> ForwardedRequest:
        """Raises ApiError."""
        path = request.url.path
        if path in _OF_ONE_REPLICA:
            raise ApiError(404, f"{path} is of one server, and here are several: see Ray's dashboard and metrics")
        body = await request.body()
        if len(body) > self._body:
            raise ApiError(413, f"the body is larger than {self._body} bytes: send less")
        headers = tuple((name, value) for name, value in request.headers.raw if name.lower() not in _CONNECTION)
        return ForwardedRequest(request.method, path, headers, body, prefix_blocks(body))

    async def _answer(self, request: ForwardedRequest) -> Response:
        """Nothing goes to the client before the first part of the body is here: until then another replica can answer.
        Raises ApiError."""
        for attempt in range(self._attempts):
            parts: Any = self._replicas.answer.remote(request)
            try:
                head = await anext(parts)
                first = await anext(parts, b"")
            except RayActorError:
                _LOG.warning("a replica was lost: attempt %d of %d", attempt + 1, self._attempts)
                continue
            except (RayServeException, RayError) as error:
                raise ApiError(503, f"no replica answers: {error}", code="unavailable") from None
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
            headers.pop("content-length", None)
            return StreamingResponse(_rest(first, parts, _is_stream(headers)), head.status, headers)
        raise ApiError(503, "the replicas that had this request were lost: try again", code="replica_lost")


def _is_stream(headers: Mapping[str, str]) -> bool:
    return headers.get("content-type", "").startswith("text/event-stream")


async def _rest(first: bytes, parts: Any, stream: bool) -> AsyncIterator[bytes]:
    """The body from its first part on. A stream whose replica is lost ends with an error; anything else breaks off."""
    try:
        yield first
        async for part in parts:
            yield part
    except RayActorError:
        if not stream:
            raise
        error = ApiError(503, "the replica was lost while it answered: send the request again", code="replica_lost")
        yield f"data: {json.dumps(error.body())}\n\n".encode()
    finally:
        parts.cancel()


def application(
    model: str, replicas: Replicas | None = None, server: ServerOptions | None = None, **options: Any
) -> serve.Application:
    """What `ray.serve.run` takes. options: those of `LLM`."""
    replicas, server = replicas or Replicas(), server or ServerOptions(names=(model,))
    deployed = Replica.options(**replicas.deployment_options()).bind(model, server, options)
    # The ingress computes nothing, so it takes no CPU of its own.
    ingress = Ingress.options(max_ongoing_requests=1 << 14, ray_actor_options={"num_cpus": 0})
    return ingress.bind(deployed, replicas.attempts, server.limits.body)


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """For `serve run` and `serve deploy`.

    arguments: `model`, `served_model_name`, fields of `Replicas` by their names, and `engine`, a mapping of `LLM`'s
    options; on the command line, mappings are in JSON. Raises ValueError for others.
    """
    rest = dict(arguments)
    model, engine = rest.pop("model", None), rest.pop("engine", {})
    if not isinstance(model, str):
        raise ValueError("model is missing: give model=NAME")
    name = str(rest.pop("served_model_name", model))
    kinds: dict[str, Any] = {f.name: type(f.default) for f in dataclasses.fields(Replicas) if f.name != "resources"}
    if unknown := sorted(rest.keys() - kinds.keys() - {"resources"}):
        known = ", ".join(["model", "served_model_name", "engine", *kinds, "resources"])
        raise ValueError(f"{unknown[0]} is no argument: there are {known}")
    values: dict[str, Any] = {
        key: _mapping(key, value) if key == "resources" else kinds[key](value) for key, value in rest.items()
    }
    return application(model, Replicas(**values), ServerOptions(names=(name,)), **_mapping("engine", engine))


def _mapping(name: str, value: Any) -> dict[str, Any]:
    """A mapping, or one in JSON. Raises ValueError."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a mapping, got {value!r:.100}")
    return dict(value)
