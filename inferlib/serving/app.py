"""The routes of the server, as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inferlib.async_llm import AsyncLLM
from inferlib.serving.auth import KeyCheck
from inferlib.serving.chat import answer_chat
from inferlib.serving.completions import answer_completion
from inferlib.serving.embeddings import answer_embeddings
from inferlib.serving.errors import ApiError
from inferlib.serving.exchange import Endpoint
from inferlib.serving.metrics import CONTENT_TYPE
from inferlib.serving.models import check_health, current_load, list_models, one_model
from inferlib.serving.responses import answer_response
from inferlib.serving.service import ServerOptions, Service
from inferlib.serving.streaming import encode
from inferlib.serving.tokens import detokenize, tokenize

App = Callable[..., Awaitable[None]]

_PAGE = Path(__file__).with_name("page.html")
# The page loads nothing from elsewhere, and runs no script but its own.
_PAGE_HEADERS = {"content-security-policy": "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'"}

_ANSWERS = {
    "/v1/chat/completions": answer_chat,
    "/v1/completions": answer_completion,
    "/v1/embeddings": answer_embeddings,
    "/v1/responses": answer_response,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}


def build_app(llm: AsyncLLM, options: ServerOptions) -> tuple[App, Service]:
    """An ASGI application that serves a model. It closes `llm` when it ends."""
    service = Service(llm, options)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await llm.aclose()

    def get(path: str, value: Callable[[Request], Any]) -> Route:
        async def answer(request: Request) -> Response:
            return _json(200, value(request))

        return Route(path, answer, methods=["GET"])

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    async def page(request: Request) -> Response:
        return Response(_PAGE.read_bytes(), media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)

    routes = [
        *(Route(path, Endpoint(service, answer), methods=["POST"]) for path, answer in _ANSWERS.items()),
        get("/v1/models", lambda request: list_models(service)),
        get("/v1/models/{name:path}", lambda request: one_model(service, request.path_params["name"])),
        get("/health", lambda request: check_health(service)),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/", page, methods=["GET"]),
        get("/load", lambda request: current_load(service)),
    ]
    handlers: dict[Any, Any] = {HTTPException: _http_error, ApiError: _api_error}
    app: App = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    return (KeyCheck(app, options.keys) if options.keys else app), service


def _json(status: int, value: Any) -> Response:
    return Response(encode(value), status, media_type="application/json")


async def _api_error(request: Request, error: ApiError) -> Response:
    return _json(error.status, error.body())


async def _http_error(request: Request, error: HTTPException) -> Response:
    where = f"{request.method} {request.url.path}"
    fixes = {404: "this server has no such address: see /v1/models", 405: "it takes another method"}
    message = f"{where}: {fixes.get(error.status_code, error.detail)}"
    response = _json(error.status_code, ApiError(error.status_code, message).body())
    response.headers.update(error.headers or {})
    return response
