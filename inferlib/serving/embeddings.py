"""`/v1/embeddings`: a vector of hidden states for each text."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from inferlib.option_checks import brief
from inferlib.programs.program_set import UnplannedProgramError
from inferlib.serving.errors import ApiError
from inferlib.serving.exchange import Exchange
from inferlib.serving.fields import Fields
from inferlib.serving.protocol import IGNORED, read_prompts
from inferlib.serving.service import Service


async def answer_embeddings(service: Service, body: Any, exchange: Exchange) -> dict[str, Any]:
    """`pooling` and `normalize` are those of `LLM.embed`."""
    fields = Fields(body)
    service.check_model(model := fields.take("model", str))
    prompts, form = read_prompts(fields, "input"), fields.take("encoding_format", str, "float")
    pooling, normalize = fields.take("pooling", str, "last"), fields.take("normalize", bool, True)
    if form not in ("float", "base64"):
        raise fields.wrong("encoding_format", f"must be float or base64, got {brief(form)}")
    width = service.llm.llm.model_config.dim
    fields.refuse({"dimensions": f"vectors have {width} numbers; cut them in the client"}, (width,))
    fields.ignore(IGNORED)
    fields.close()
    tokens = [await service.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    try:
        adapter = service.adapter_of(model)
        vectors = await service.llm.embed(tokens, pooling, normalize=normalize, adapter=adapter)
    except UnplannedProgramError:
        raise ApiError(400, "the server's programs make no vectors: start it without --artifacts") from None
    except ValueError as error:
        raise ApiError(400, str(error), param="input") from None
    count = sum(map(len, tokens))
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": _written(vector, form)} for i, vector in enumerate(vectors)
        ],
        "model": service.name_of(model),
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


def _written(vector: np.ndarray, form: str) -> str | list[float]:
    """base64: of the bytes of little-endian float32, for which OpenAI's Python client asks."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if form == "base64" else vector.tolist()
