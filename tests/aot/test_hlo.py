"""Reading compiled modules: bytes, trips, collectives, copies. About 3 s."""

from __future__ import annotations

import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from inferlib.inspection.hlo import CollectiveCall, Module, Shape, read_shapes
from inferlib.ops.loops import expected_trips


def module(text: str) -> Module:
    return Module(textwrap.dedent(text))


# As the TPU compiler writes: a loop of four trips over a stacked weight (argument 0) and a cache (argument 1) that it
# updates in place; the reduction sits in an asynchronous call.
LOOP = """\
    HloModule test

    %sliced (p0: bf16[4,256,128], p1: s32[], p2: bf16[8,256]) -> bf16[8,128] {
      %p0 = bf16[4,256,128]{2,1,0:T(8,128)(2,1)} parameter(0)
      %p1 = s32[]{:T(128)} parameter(1)
      %zero = s32[]{:T(128)} constant(0)
      %slice = bf16[1,256,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p0, %p1, %zero, %zero)
      %p2 = bf16[8,256]{1,0:T(8,128)(2,1)S(1)} parameter(2)
      ROOT %dot = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} convolution(%p2, %slice), dim_labels=bf_io->bf
    }

    %update (p0.1: bf16[4,64,128], p1.1: s32[], p2.1: bf16[8,128]) -> bf16[4,64,128] {
      %p0.1 = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} parameter(0)
      %p1.1 = s32[]{:T(128)} parameter(1)
      %p2.1 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(2)
      %one = bf16[1,8,128]{2,1,0:T(8,128)(2,1)} bitcast(%p2.1)
      ROOT %put = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%p0.1, %one, %p1.1, %p1.1, %p1.1)
    }

    %reduce_async (q0: bf16[8,128]) -> bf16[8,128] {
      %q0 = bf16[8,128]{1,0} parameter(0)
      ROOT %sum = bf16[8,128]{1,0} all-reduce(%q0), replica_groups={{0,1}}, to_apply=%add
    }

    %condition (c: (s32[], bf16[4,256,128], bf16[4,64,128])) -> pred[] {
      %c = (s32[]{:T(128)}, bf16[4,256,128]{2,1,0}, /*index=2*/bf16[4,64,128]{2,1,0}) parameter(0)
      %count = s32[]{:T(128)} get-tuple-element(%c), index=0
      %four = s32[]{:T(128)} constant(4)
      ROOT %less = pred[]{:T(512)} compare(%count, %four), direction=LT
    }

    %body (b: (s32[], bf16[4,256,128], bf16[4,64,128])) -> (s32[], bf16[4,256,128], bf16[4,64,128]) {
      %b = (s32[]{:T(128)}, bf16[4,256,128]{2,1,0:T(8,128)(2,1)}, bf16[4,64,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
      %at = s32[]{:T(128)} get-tuple-element(%b), index=0
      %w = bf16[4,256,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%b), index=1
      %kv = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%b), index=2
      %x = bf16[8,256]{1,0:T(8,128)(2,1)S(1)} broadcast(%at), dimensions={}
      %y = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(%w, %at, %x), kind=kOutput, calls=%sliced, \
backend_config={"estimated_cycles":"1000"}
      %start = ((bf16[8,128]{1,0}), bf16[8,128]{1,0}) call-start(%y), to_apply=%reduce_async
      %done = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} call-done(%start)
      %new = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} fusion(%kv, %at, %done), kind=kLoop, calls=%update
      COPY
      ROOT %out = (s32[], bf16[4,256,128], bf16[4,64,128]) tuple(%at, %w, %new)
    }

    ENTRY %main (a0: bf16[4,256,128], a1: bf16[4,64,128]) -> bf16[4,64,128] {
      %a0 = bf16[4,256,128]{2,1,0:T(8,128)(2,1)} parameter(0)
      %a1 = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} parameter(1)
      %start.1 = s32[]{:T(128)} constant(0)
      %init = (s32[], bf16[4,256,128], bf16[4,64,128]) tuple(%start.1, %a0, %a1)
      %loop = (s32[], bf16[4,256,128], bf16[4,64,128]) while(%init), condition=%condition, body=%body
      ROOT %result = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=2
    }
    """


def loop(copy: str = "") -> Module:
    return module(LOOP.replace("COPY", copy))


def test_a_loop_counts_each_trip_and_a_slice_counts_as_itself():
    cost = loop().cost
    weight, written = 256 * 128 * 2, 8 * 128 * 2
    reduced = 2 * written  # its operand and its result
    assert 0 <= cost.bytes / 4 - (weight + written + reduced) < 64  # the counters


def test_the_loop_over_steps_counts_once():
    """Of a decode program that counts its steps: a step reads every layer once, and loops inside run in full."""
    layers, steps, width = 5, 3, 64

    def run(weights, x):
        def step(_, x):
            return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

        return lax.fori_loop(0, steps, step, x)

    text = jax.jit(run).lower(jnp.zeros((layers, width, width)), jnp.zeros((8, width))).compile().as_text()
    every, one = Module(text).cost.bytes, Module(text, counted=steps).cost.bytes
    assert layers * width * width * 4 < one
    assert steps * one * 0.9 < every <= steps * one
    # A loop inside another is not that over steps, whatever its trips.
    assert Module(text, counted=layers).cost.bytes == every


def test_a_loop_of_unknown_length_counts_as_often_as_it_is_expected_to_run():
    def run(times, x):
        with expected_trips(6.7):
            return lax.fori_loop(0, times, lambda _, x: jnp.tanh(x @ x), x)

    x = jnp.zeros((64, 64))
    text = jax.jit(run).lower(jnp.int32(0), x).compile().as_text()
    cost, once = Module(text).cost, Module(text.replace("expected_trips=7", "")).cost
    assert 4 * once.bytes < cost.bytes <= 7 * once.bytes
    assert (cost.balanced, once.balanced) == (1, 0)


def test_what_a_tpu_moves_is_counted_once():
    """A slice fetched asynchronously, an array that is not yet written, and one that rows are exchanged into."""
    whole, part = "bf16[64,128]{1,0:T(8,128)(2,1)}", "bf16[8,128]{1,0:T(8,128)(2,1)S(1)}"
    cost = module(f"""\
        HloModule test

        ENTRY %main (a0: bf16[64,128], a1: s32[2]) -> bf16[64,128] {{
          %a0 = {whole} parameter(0)
          %a1 = s32[2]{{0:T(128)S(1)}} parameter(1)
          %start = (({whole}), {part}, s32[]{{:S(2)}}) slice-start(%a0), slice={{[0:8], [0:128]}}
          %done = {part} slice-done(%start)
          %room = {whole} custom-call(), custom_call_target="AllocateBuffer"
          ROOT %got = {whole} ragged-all-to-all(%a0, %room, %a1, %a1, %a1, %a1), replica_groups={{{{0,1}}}}
        }}
        """).cost
    assert cost.bytes == (8 + 64 + 64) * 128 * 2


def test_collectives_inside_asynchronous_calls_are_found():
    assert loop().collectives == (CollectiveCall("all-reduce", 8 * 128 * 2, 4),)


def test_in_place_updates_and_slices_are_no_copies():
    assert loop().copies([0, 1], smallest=0) == ()


@pytest.mark.parametrize(
    ("copy", "argument"),
    [
        ("%again = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} copy(%kv)", 1),
        ("%again = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} copy(%new)", 1),
        ("%again = bf16[4,256,128]{1,2,0:T(8,128)(2,1)S(1)} copy(%w)", 0),
        ("%again = bf16[4,128,256]{2,1,0:T(8,128)(2,1)} transpose(%w), dimensions={0,2,1}", 0),
    ],
)
def test_a_copy_is_traced_to_the_argument(copy, argument):
    (copied,) = loop(copy).copies([0, 1], smallest=0)
    assert (copied.argument, copied.count, copied.nbytes) == (
        argument,
        4,
        [4 * 256 * 128 * 2, 4 * 64 * 128 * 2][argument],
    )
    assert loop(copy).copies([1 - argument], smallest=0) == ()
    assert loop(copy).copies([argument], smallest=copied.nbytes + 1) == ()


def test_bringing_a_weight_on_chip_as_it_is_is_no_copy():
    assert loop("%again = bf16[4,256,128]{2,1,0:T(8,128)(2,1)S(1)} copy(%w)").copies([0, 1], smallest=0) == ()


def test_shapes_know_layout_tiles_and_memory():
    text = "(bf16[32,4,100]{2,1,0:T(4,128)(2,1)S(1)}, /*index=1*/s4[16]{0}, pred[]{:T(512)}, f32[3,5])"
    a, b, c, d = read_shapes(text)
    assert (a.order, a.space, a.nbytes, a.physical_bytes) == ((2, 1, 0), 1, 32 * 4 * 100 * 2, 32 * 4 * 128 * 2)
    assert (b.nbytes, c.nbytes, d) == (8, 1, Shape("f32", (3, 5)))
    assert d.nbytes == d.physical_bytes == 60


def test_reads_what_this_machine_compiles():
    """A scan over stacked weights, each read once."""
    layers, width = 5, 64

    def run(weights, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    arguments = jnp.zeros((layers, width, width)), jnp.zeros((8, width))
    cost = Module(jax.jit(run).lower(*arguments).compile().as_text()).cost
    weights = layers * width * width * 4
    assert weights <= cost.bytes < 4 * weights


def test_other_texts_are_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        Module("not a module")
