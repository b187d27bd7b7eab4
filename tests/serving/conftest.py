"""A server of a tiny model, and OpenAI's client for it."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Iterator

import httpx
import openai
import pytest

from inferlib import LLM, Buckets
from tests.helpers.cli_model import make_model
from tests.helpers.llms import build_llm
from tests.helpers.servers import serving


@pytest.fixture(scope="package", autouse=True)
def certificates() -> Iterator[None]:
    """Those that clients trust are read once: each client reads them, which takes it longer than a request."""
    with pytest.MonkeyPatch.context() as patch:
        read, once = ssl.create_default_context, functools.cache(ssl.create_default_context)

        def context(*purpose: ssl.Purpose, **files: str | None) -> ssl.SSLContext:
            return read(*purpose, **files) if purpose else once(**files)

        patch.setattr(ssl, "create_default_context", context)
        yield


@pytest.fixture(scope="package")
def served_llm(tmp_path_factory) -> LLM:
    """Four rows of 128 positions; its tokens are bytes, and its text is mostly no UTF-8. Leave it idle."""
    folder = make_model(tmp_path_factory.mktemp("served"), layers=1)
    return build_llm(folder, Buckets(prefill=(16,), batch=(4,), cache=(128,)), decode_steps=2)


@pytest.fixture(scope="package")
def address(served_llm) -> Iterator[str]:
    with serving(served_llm) as where:
        yield where


@pytest.fixture
def client(address) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def http(address) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=60) as made:
        yield made
