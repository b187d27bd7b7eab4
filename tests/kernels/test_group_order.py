"""The order of choices by group, by XLA and by the TPU kernel, interpreted, against NumPy. About 15 s."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.ops.group_order import GroupOrder, _by_counting, _by_kernel, _by_sorting, group_order
from inferlib.pallas_kernels import group_order_tpu
from tests.helpers.kernels import lowered_for_cuda, with_further


def expected(ids: np.ndarray, groups: int, numbers: np.ndarray | None = None) -> GroupOrder:
    tokens, chosen = ids.shape
    order = np.argsort(ids.reshape(-1), kind="stable")
    places = np.argsort(order).reshape(tokens, chosen).T
    sizes = np.bincount(ids.reshape(-1), minlength=groups + 1)[:groups]
    token = order // chosen
    names = token if numbers is None else numbers[token]
    return GroupOrder(names, order % chosen, ids.reshape(-1)[order], places, sizes)


def check(run, ids: np.ndarray, groups: int, numbers: np.ndarray | None = None) -> None:
    numbers_of = None if numbers is None else jnp.asarray(numbers, jnp.int32)
    result = jax.jit(run)(jnp.asarray(ids, jnp.int32), numbers_of)
    for name, got, want in zip(GroupOrder._fields, result, expected(ids, groups, numbers), strict=True):
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, want, err_msg=name)


@pytest.fixture
def forms(monkeypatch):
    """Of `groups`, by name; those of the kernel are interpreted."""
    kernel = partial(group_order_tpu.group_order, interpret=True)
    monkeypatch.setattr(group_order_tpu, "group_order", kernel)

    def made(groups: int, bits: tuple[int, int]):
        of_xla = {"sorting": _by_sorting, "counting": _by_counting}
        kernel = partial(_by_kernel, groups=groups, bits=bits)
        return {name: partial(form, groups=groups) for name, form in of_xla.items()} | {"kernel": kernel}

    return made


SIZES = {"some": (400, 6, 16), "every": (2048, 8, 128), "one": (3, 1, 2), "few": (1, 8, 300), "more": (2100, 8, 20)}


# Two sizes are the other form's as well before a release.
FURTHER = (("every", "sorting"), ("more", "counting"))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("size", "form"),
    with_further([*((size, form) for size in SIZES for form in ("sorting", "counting")), ("some", "kernel")], FURTHER),
)
def test_random_equal_and_absent_choices(size, form, forms):
    tokens, chosen, groups = SIZES[size]
    rng = np.random.default_rng(tokens)
    run = forms(groups, ((tokens - 1).bit_length(), (chosen - 1).bit_length()))[form]
    shape = tokens, chosen
    check(run, rng.integers(0, groups + 1, shape), groups)
    check(run, np.full(shape, groups - 1), groups)  # all groups but one are empty
    check(run, np.full(shape, groups), groups)  # and all are
    check(run, np.where(rng.random(shape) < 0.5, groups, rng.integers(0, 2, shape) * (groups - 1)), groups)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("form", ["sorting", "counting", "kernel"])
def test_tokens_with_numbers(form, forms):
    rng, run = np.random.default_rng(0), forms(5, (18, 0))[form]  # keys have all their 31 bits
    numbers = np.sort(rng.permutation(1 << 18)[:1500])
    numbers[-1] = (1 << 18) - 1
    check(run, rng.integers(0, 6, (1500, 1)), 5, numbers)


@pytest.mark.release
def test_as_many_keys_as_there_are_bits(forms):
    """65536 choices, the most that the kernel sorts, in 64 registers: numbers and positions take 32 bits."""
    check(forms(64, (13, 3))["kernel"], np.random.default_rng(0).integers(0, 65, (8192, 8)), 64)


def test_what_the_kernel_does_not_sort_is_xlas():
    assert group_order_tpu.unsupported(65536, 256, 16) is None
    assert "65537 choices are more than 65536" in group_order_tpu.unsupported(65537, 8, 17)
    assert "have more than 31 bits" in group_order_tpu.unsupported(4096, 256, 23)
    assert "have more than 31 bits" in group_order_tpu.unsupported(65536, 8, 17)
    with pytest.raises(ValueError, match="does not sort these: 65537 choices"):
        jax.eval_shape(partial(group_order_tpu.group_order, groups=8, of_token=17), jnp.zeros(65537, jnp.int32))
    with pytest.raises(ValueError, match="need `most`"):
        group_order(jnp.zeros((3, 1), jnp.int32), 2, numbers=jnp.arange(3))
    for tokens, most in ((70000, 0), (4096, 1 << 29)):
        ids = np.random.default_rng(1).integers(0, 9, (tokens, 1))
        numbers = np.arange(tokens) if most else None
        check(
            lambda ids, numbers, most=most: group_order(ids, 8, numbers=numbers, most=most, backend="pallas_tpu"),
            ids,
            8,
            numbers,
        )


def test_nvidia_gpus_sort_nothing():
    """XLA:GPU compiles every sort anew, one or two for each layer."""
    for tokens in (16, 2048):
        ids = jax.ShapeDtypeStruct((tokens, 8), jnp.int32)
        run = jax.jit(partial(group_order, groups=128, backend="pallas_gpu"))
        assert "stablehlo.sort" not in lowered_for_cuda(run, ids)
        assert "stablehlo.sort" in run.lower(ids).as_text()
