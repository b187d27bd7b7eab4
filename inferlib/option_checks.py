"""Values of options as users write them: what is read from text, and errors that name what to give instead."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np

from inferlib.ops import int4_cells
from inferlib.ops.backend import Backend
from inferlib.ops.cache_policy import CachePolicy
from inferlib.ops.quantized import SCHEMES
from inferlib.ops.selected_pages import PageSelection
from inferlib.ops.sparse_prefill import SparsePrefill
from inferlib.ops.token_propagation import TokenPropagation
from inferlib.speculation.settings import Speculation


class ConfigurationError(ValueError):
    """An engine setting that cannot work."""


DTYPES = ("float32", "bfloat16", "float16")
PLATFORMS = ("cpu", "gpu", "tpu", "neuron")
# What a cache's values are stored as, by the names that users write.
CALIBRATED_CACHE = "int4_calibrated"
PACKED_CACHES = ("int4", CALIBRATED_CACHE)
KV_CACHE_DTYPES = {name: np.dtype(SCHEMES[name].values) for name in ("int8", "fp8")}
KV_CACHE_DTYPES |= dict.fromkeys(PACKED_CACHES, int4_cells.DTYPE)
# The platform that each kind of kernel runs on; a CPU interprets all of them.
_RUNS_ON = {"pallas_tpu": "tpu", "pallas_gpu": "gpu", "pallas": "gpu", "nki": "neuron"}
# Operations that the option `backend` can leave to XLA.
OPERATIONS = tuple(name for name, kind in get_type_hints(Backend).items() if "xla" in get_args(kind))


def check_dtype(dtype: str) -> None:
    """Raise ConfigurationError if weights cannot have this dtype."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigurationError(f"dtype {dtype!r} is not supported; choose one of {', '.join(DTYPES)}")


def check_page_size(size: Any) -> None:
    """Raise ConfigurationError unless this is a power of two."""
    if type(size) is not int or size < 1 or size & (size - 1):
        raise ConfigurationError(f"page_size must be a power of two, got {brief(size)}")


def check_snapshots(count: Any) -> None:
    """Raise ConfigurationError unless this is a number of snapshots, or None."""
    if count is not None and (type(count) is not int or count < 0):
        raise ConfigurationError(
            f"snapshots is how many rings and states are kept for prompts that begin alike, 0 or more, got "
            f"{brief(count)}"
        )


def check_kv_cache_dtype(name: str | None) -> None:
    """Raise ConfigurationError if the cache cannot store keys and values in this type; None is the model's dtype."""
    if name is not None and (not isinstance(name, str) or name not in KV_CACHE_DTYPES):
        raise ConfigurationError(
            f"kv_cache_dtype {name!r} is not supported; choose one of {', '.join(KV_CACHE_DTYPES)}, or leave it out "
            "for the model's own dtype"
        )


def checked_path(name: str, value: Any) -> Path:
    """The path that a user gives as the option `name`, its ~ expanded; it need not exist. Raises ConfigurationError for
    what no file can be called, and where its folder may not be read."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(f"{name} must be the path of a file or directory, got {value!r}")
    path = Path(text)
    try:
        path = path.expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except OSError as error:
        raise ConfigurationError(f"{name} {brief(text)} cannot be opened: {error.strerror}") from None
    except (ValueError, RuntimeError) as error:  # characters that paths lack; no home for ~
        raise ConfigurationError(f"{name} {brief(text)} is not a path: {error}") from None
    return path


def checked_output(name: str, value: Any) -> Path:
    """`checked_path` of something to write. Raises ConfigurationError if the folder that it is to be in is missing, or
    may not be written to."""
    path = checked_path(name, value)
    folder = path.absolute().parent
    if not path.name or not folder.is_dir():
        raise ConfigurationError(f"{name} {brief(str(path))} cannot be created: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"{name} {brief(str(path))} cannot be created: {folder} may not be written to")
    return path


def is_list(value: Any) -> bool:
    """True for lists, tuples, arrays and other iterables, but not for text, bytes and arrays of no dimension."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) > 0


def brief(value: Any) -> str:
    """A wrong value as a message shows it: on one line, and cut."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def check_backend(backend: Backend, platform: str) -> None:
    """Raise ConfigurationError if a chosen kernel does not run on the platform."""
    for name, kernel in vars(backend).items():
        if platform not in ("cpu", _RUNS_ON.get(kernel, platform)):
            raise ConfigurationError(
                f"backend {name}={kernel!r} is a kernel for platform {_RUNS_ON[kernel]!r}, and this is {platform!r}: "
                f"choose {name}='xla', or leave backend to EngineConfig.make"
            )


_BYTES = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def memory_option(value: Any) -> int | float:
    """Bytes, or a share in (0, 1] as a float, of an option that may be text, such as "16GiB" or "0.5". Raises
    ConfigurationError."""
    number = _number_of_bytes(value)
    if not _is_size(number) and not (isinstance(number, float) and 0 < number <= 1):
        raise ConfigurationError(
            "cache_memory is a number of bytes, a text such as '16GiB', or a share of a device's memory in (0, 1] such "
            f"as 0.8, got {brief(value)}"
        )
    return number


def size_option(name: str, value: Any) -> int:
    """Bytes of an option called `name` that may be text, such as "16GiB". Raises ConfigurationError."""
    number = _number_of_bytes(value)
    if not _is_size(number):
        raise ConfigurationError(f"{name} is a number of bytes, or a text such as '16GiB', got {brief(value)}")
    return number


def _number_of_bytes(value: Any) -> Any:
    """The number in a text, which is a float if it has a point and no unit; whatever else is given stays."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?b)?", value.strip().lower())):
        number = float(match[1]) * _BYTES.get(match[2], 1)
        return number if "." in match[1] and not match[2] else int(number)
    return value


def _is_size(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def bytes_option(value: Any) -> int | None:
    """`memory_option` where no device is known, of which a share could be taken; None stays."""
    size = None if value is None else memory_option(value)
    if isinstance(size, float):
        raise ConfigurationError(f"cache_memory is in bytes here, such as '16GiB', as no device is known: got {size}")
    return size


def speculation_option(value: Any) -> Speculation | None:
    """See `Speculation.read`. Raises ConfigurationError."""
    try:
        return Speculation.read(value)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def selection_option(value: Any) -> PageSelection | None:
    """See `PageSelection.read`. Raises ConfigurationError."""
    try:
        return PageSelection.read(value)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def sparse_option(value: Any) -> SparsePrefill | TokenPropagation | None:
    """See `SparsePrefill.read` and, of fastkv, `TokenPropagation.read`. Raises ConfigurationError."""
    fewer_tokens = isinstance(value, TokenPropagation) or (isinstance(value, str) and value.startswith("fastkv"))
    try:
        return TokenPropagation.read(value) if fewer_tokens else SparsePrefill.read(value)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def parts_option(name: str, value: Any) -> tuple[str, ...] | None:
    """The option `name`: names of weights, as a text with commas between or as a sequence; None: it is not given.
    Raises ConfigurationError."""
    names = value.split(",") if isinstance(value, str) else value
    if names is None:
        return None
    if not isinstance(names, list | tuple) or not names or not all(isinstance(x, str) and x.strip() for x in names):
        raise ConfigurationError(
            f"{name} are names of a layer's weights, such as 'attn.qkv' or 'attn,mlp.down', got {brief(value)}"
        )
    return tuple(x.strip() for x in names)


def policy_option(value: Any) -> CachePolicy | None:
    """See `CachePolicy.read`. Raises ConfigurationError."""
    try:
        return CachePolicy.read(value)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def backend_option(option: str) -> str:
    """The option in one spelling, whatever the order of its parts. Raises ConfigurationError for what is none."""
    if isinstance(option, str) and option in ("auto", "xla"):
        return option
    known = [f"{name}=xla" for name in OPERATIONS]
    parts = {part.strip() for part in option.split(",")} if isinstance(option, str) else {repr(option)}
    if not parts <= set(known):
        raise ConfigurationError(
            f"backend {brief(option)} is neither 'auto' nor 'xla' nor of the form '{','.join(known[:2])}'; operations "
            f"are {', '.join(OPERATIONS)}"
        )
    return "xla" if parts == set(known) else ",".join(part for part in known if part in parts)


def with_option(backend: Backend, option: str) -> Backend:
    """Apply a user's `backend` option to a platform's default. "auto" changes nothing; "xla" leaves all `OPERATIONS` to
    XLA; "matmul=xla,decode_attention=xla" leaves these.

    A kernel that works with another goes with it: chunk writes with either attention, `expert_mlp` with grouped
    products if weights are quantised in groups, `qkv_attention`, which includes decode attention, with that. Raises
    ConfigurationError for any other option.
    """
    option = backend_option(option)
    if option == "auto":
        return backend
    names = {part.removesuffix("=xla") for part in option.split(",")} if option != "xla" else set(OPERATIONS)
    names |= {"qkv_attention"} if "decode_attention" in names else set()
    return replace(backend, **dict.fromkeys(names, "xla"))


def check_flag(name: str, value: Any, *, optional: bool = False) -> None:
    """Raise ConfigurationError if an option is neither True nor False, nor None where that is `optional`."""
    if not (isinstance(value, bool) or (optional and value is None)):
        raise ConfigurationError(f"{name} must be True or False{', or None' if optional else ''}, got {brief(value)}")


def check_depthwise(rows: Any) -> None:
    """Raise ConfigurationError unless this is True, False or a number of rows that wait."""
    if not isinstance(rows, bool) and (type(rows) is not int or rows < 1):
        raise ConfigurationError(f"depthwise_batching is True, False or a number of rows from 1 on, got {brief(rows)}")


def check_itl(itl: Any) -> None:
    """Raise ConfigurationError if this is no target of the time between tokens."""
    if itl is None:
        return
    is_number = isinstance(itl, int | float | np.integer | np.floating) and not isinstance(itl, bool)
    if not is_number or not 0 < itl < math.inf:
        raise ConfigurationError(f"itl must be seconds above 0, such as 0.05, got {brief(itl)}")


def check_priority(priority: Any) -> None:
    """Raise ConfigurationError if this is no priority of a request."""
    is_number = isinstance(priority, int | float | np.integer | np.floating) and not isinstance(priority, bool)
    if not is_number or not math.isfinite(priority):
        raise ConfigurationError(f"priority must be a finite number, lower ones first, got {brief(priority)}")


def check_seed(seed: Any) -> None:
    """Raise ConfigurationError if this is no seed of an `LLM`."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**64:
        raise ConfigurationError(f"seed must be a whole number in [0, 2**64), got {brief(seed)}")


def whole_number(name: str, size: Any) -> int:
    """The value of an option called `name` as an int. Raises ConfigurationError."""
    try:
        if isinstance(size, bool):
            raise TypeError
        return operator.index(size)
    except TypeError:
        raise ConfigurationError(f"{name} must be a whole number, got {brief(size)}") from None
