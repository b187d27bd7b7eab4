"""`AsyncLLM`: many streams that come and go, each with its own results, and nothing left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial

import numpy as np
import pytest

from inferlib import AsyncLLM, SamplingParams
from inferlib.engine.engine import Engine
from inferlib.engine.text import OutputText
from tests.helpers.llms import new_engine, random_prompts, stopped_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = random_prompts([9, 3, 14, 1], seed=41)


@pytest.fixture(scope="module")
def expected(small):
    return [output.outputs[0] for output in small.generate(PROMPTS, GREEDY)]


async def last(stream):
    outputs = [output async for output in stream]
    return outputs[-1] if outputs else None


async def completion(llm, prompt, params=GREEDY, **options):
    output = await last(llm.generate(prompt, params, **options))
    assert output.finished
    return output.outputs[0]


def assert_idle(llm: AsyncLLM) -> None:
    """No request is open, and all rows and pages are free."""
    runner, engine = llm.llm._runner, llm.llm.engine
    assert runner.settled().result()
    assert llm.open_requests == 0
    assert not runner._texts
    assert not runner._feeds
    assert engine.scheduler.idle
    assert [pages.free for pages in engine.scheduler.pages] == [engine.plan.pages]


# ---- results


def test_streams_give_what_generate_gives(small, expected):
    """More streams than rows; each output has what the one before it had."""

    async def read(llm, prompt, result):
        tokens, text = [], ""
        async for output in llm.generate(prompt, GREEDY):
            (piece,) = output.outputs
            assert piece.token_ids[: len(tokens)] == tokens
            assert piece.text.startswith(text)
            assert piece.finish_reason == ("length" if output.finished else None)
            assert output.metrics.generated == len(piece.token_ids)
            tokens, text = piece.token_ids, piece.text
        assert piece == result

    async def main():
        async with AsyncLLM(small) as llm:
            await asyncio.gather(*map(read, [llm] * len(PROMPTS), PROMPTS, expected))
            assert_idle(llm)

    asyncio.run(main())


@pytest.mark.slow
def test_every_kind_of_output(small):
    """Several outputs, stop strings, log-probabilities, those of the prompt, and a chat template."""
    params = SamplingParams(seed=3, max_tokens=20, n=2, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    free = small.generate(PROMPTS[0], params)[0].outputs[0].text
    params = dataclasses.replace(params, stop=free[5:8])
    (result,) = small.generate(PROMPTS[0], params)
    messages, template = [{"role": "user", "content": "ab"}], "{{ messages[0].content }}"
    (answer,) = small.chat(messages, GREEDY, chat_template=template)

    async def main():
        llm = AsyncLLM(small)
        async for output in llm.generate(PROMPTS[0], params):
            for piece in output.outputs:
                assert len(piece.logprobs) == len(piece.token_ids)
        assert output.outputs == result.outputs
        assert output.prompt_logprobs == result.prompt_logprobs
        assert output.metrics.itl > 0
        assert (await last(llm.chat(messages, GREEDY, chat_template=template))).outputs == answer.outputs

    asyncio.run(main())


def test_a_slow_reader_gets_merged_outputs(small, expected):
    """While its event loop is busy elsewhere, nothing is stored for it but its request's tokens."""

    async def main():
        stream = AsyncLLM(small).generate(PROMPTS[0], GREEDY)
        task = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        small.generate(PROMPTS[1], dataclasses.replace(GREEDY, max_tokens=40))  # blocks, and outlasts the stream
        output = await task
        assert (output.finished, output.outputs) == (True, [expected[0]])
        assert [output async for output in stream] == []

    asyncio.run(main())


def test_one_wake_up_a_dispatch(small):
    """Of eight streams at a time, beside a generate of another thread."""

    async def main():
        llm, loop = AsyncLLM(small), asyncio.get_running_loop()
        calls, call_soon = 0, loop.call_soon_threadsafe

        def counted(function, *arguments, **options):
            nonlocal calls
            calls += "Readers" in function.__qualname__
            return call_soon(function, *arguments, **options)

        loop.call_soon_threadsafe = counted
        before = small.stats.dispatches
        other = asyncio.to_thread(small.generate, PROMPTS, GREEDY)
        await asyncio.gather(other, *(completion(llm, PROMPTS[i % 4]) for i in range(8)))
        assert 0 < calls <= small.stats.dispatches - before

    asyncio.run(main())


# ---- leaving


@pytest.mark.slow
def test_hundreds_of_streams_half_of_them_dropped(small, expected):
    """At random moments, in all ways there are: nothing leaks, and what is read to its end is right."""
    rng = np.random.default_rng(42)
    params = dataclasses.replace(GREEDY, max_tokens=4)
    # When each is left, in outputs: never begun, after one, two, or (for half of them) not at all.
    count = 500
    when = rng.integers(0, 6, count)
    how = rng.integers(0, 4, count)

    async def use(llm, i):
        stream = llm.generate(PROMPTS[i % 4], params, request_id=f"stream {i}")
        if when[i] == 0:
            return
        seen = 0
        async for output in stream:
            seen += 1
            if when[i] > 2 or seen < when[i] or output.finished:
                continue
            match how[i]:
                case 0:
                    break
                case 1:
                    llm.abort(stream.request_id)
                case 2:
                    await stream.aclose()
                case 3:
                    raise OSError("of the reader")
        if when[i] > 2:
            assert output.outputs[0].token_ids == expected[i % 4].token_ids[:4]

    async def main():
        gc.freeze()  # the collection looks only at what this test makes, not at the whole suite
        async with AsyncLLM(small) as llm:
            tasks = [asyncio.create_task(use(llm, i)) for i in range(count)]
            await asyncio.sleep(0)
            for i in rng.integers(0, count, count // 10):
                tasks[i].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            wrong = [r for r in results if r is not None and not isinstance(r, OSError | asyncio.CancelledError)]
            assert not wrong, wrong[0]
            del tasks, results
            await asyncio.sleep(0)  # until then the loop refers to the results, and so to the readers' frames
            gc.collect()
            assert_idle(llm)
            assert len(asyncio.all_tasks()) == 1
            assert (await completion(llm, PROMPTS[0])) == expected[0]

    before = set(threading.enumerate())
    asyncio.run(main())
    assert set(threading.enumerate()) <= before  # those of earlier tests' engines may end here


def test_abort_from_another_task_and_thread(small, expected):
    """The reader gets what there is; so does one that had not begun."""
    endless = dataclasses.replace(GREEDY, max_tokens=None)

    async def main():
        llm = AsyncLLM(small)
        stream = llm.generate(PROMPTS[0], endless, request_id="a")
        waiting = llm.generate(PROMPTS[1], GREEDY, request_id="b")
        with stopped_engine(3):
            first = await anext(stream)
            llm.abort("b")
            await asyncio.to_thread(llm.abort, "a")
        *_, output = [output async for output in stream]
        assert (output.request_id, output.finished) == ("a", True)
        (piece,) = output.outputs
        assert (piece.finish_reason, piece.text) == ("abort", small.tokenizer.decode(piece.token_ids))
        assert piece.token_ids[: len(first.outputs[0].token_ids)] == first.outputs[0].token_ids
        output = await last(waiting)
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "abort")
        assert_idle(llm)
        assert await completion(llm, PROMPTS[0]) == expected[0]

    asyncio.run(main())


def test_a_stream_that_is_closed_while_a_task_waits_for_it(small):
    async def main():
        llm = AsyncLLM(small)
        with stopped_engine(0):
            async with aclosing(llm.generate(PROMPTS[0], GREEDY)) as stream:
                task = asyncio.create_task(last(stream))
                await asyncio.sleep(0)
                with pytest.raises(RuntimeError, match="one at a time"):
                    await anext(stream)
            assert await task is None
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert_idle(llm)

    asyncio.run(main())


def test_closing_aborts_what_is_open(small):
    async def main():
        async with AsyncLLM(small) as llm:
            stream = llm.generate(PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=None))
            with stopped_engine(3) as event:
                await anext(stream)
                closed = asyncio.create_task(llm.aclose())
                await asyncio.sleep(0)  # until it waits for the engine
                event.set()
                await closed
        assert (await last(stream)).outputs[0].finish_reason == "abort"
        assert_idle(llm)
        with pytest.raises(RuntimeError, match="this AsyncLLM is closed"):
            llm.generate(PROMPTS[0])

    asyncio.run(main())


def test_an_interrupt_ends_the_streams(small, expected, monkeypatch):
    """Ctrl-C within `asyncio.run`: KeyboardInterrupt, and the rows are free."""
    advance, left, llm, interrupted = Engine.advance, 4, AsyncLLM(small), threading.Event()
    main_thread = threading.main_thread().ident

    def interrupting(engine, **options):
        nonlocal left
        left -= 1
        if left == 0:
            signal.pthread_kill(main_thread, signal.SIGINT)
            assert interrupted.wait(300)
        return advance(engine, **options)

    async def main():
        params = dataclasses.replace(GREEDY, max_tokens=40)
        await asyncio.gather(*(completion(llm, prompt, params) for prompt in PROMPTS))

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "advance", interrupting)
            with pytest.raises(KeyboardInterrupt):
                asyncio.run(main())
    finally:
        interrupted.set()
        signal.signal(signal.SIGINT, before)
    assert_idle(llm)
    assert asyncio.run(completion(llm, PROMPTS[0])) == expected[0]


def test_event_loops_of_several_threads(small, expected):
    """Each gets its own results; a stream belongs to one; an open stream of a loop that is closed ends."""
    llm = AsyncLLM(small)

    async def some(start):
        for i in range(start, start + 3):
            assert await completion(llm, PROMPTS[i % 4]) == expected[i % 4]

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda i: asyncio.run(some(i)), range(3)))
    loop = asyncio.new_event_loop()
    stream = llm.generate(PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=None))
    loop.run_until_complete(anext(stream))
    with pytest.raises(RuntimeError, match="belongs to the event loop"):
        asyncio.run(last(stream))
    loop.close()
    assert asyncio.run(completion(llm, PROMPTS[1])) == expected[1]
    llm._open.clear()  # the stream is still referred to here
    assert_idle(llm)


# ---- errors


def test_an_error_of_a_request_is_its_own(small, expected, monkeypatch):
    """Of its text (as if the tokenizer panicked), of a program (which strikes all that run), or before it starts."""
    update = OutputText.update

    def failing(text):
        if text.sequence.prompt == PROMPTS[1]:
            raise OSError("panic")
        update(text)

    async def results(llm):
        return await asyncio.gather(*(completion(llm, prompt) for prompt in PROMPTS), return_exceptions=True)

    def check(got, count, text):
        wrong = [result for result in got if isinstance(result, RuntimeError)]
        assert len(wrong) == count
        assert all(text in str(error.__cause__) for error in wrong)
        assert all(result in (expected[i], *wrong) for i, result in enumerate(got))

    def receive(engine, broken):
        if len(engine.scheduler.running) == 2 and next(broken, False):
            raise ZeroDivisionError("of a dispatch")
        return Engine._receive(engine)

    async def main():
        llm = AsyncLLM(small)
        with monkeypatch.context() as patch:
            patch.setattr(OutputText, "update", failing)
            check(await results(llm), 1, "panic")
        with monkeypatch.context() as patch:
            patch.setattr(small.engine, "_receive", partial(receive, small.engine, iter([True])))
            check(await results(llm), 2, "of a dispatch")  # those that had rows
        with monkeypatch.context() as patch:
            patch.setattr(small.engine.scheduler, "plan", lambda steps: 1 / 0)  # strikes nobody, every time
            check(await results(llm), 4, "division")
        assert_idle(llm)
        check(await results(llm), 0, "")

    with new_engine(small):
        asyncio.run(main())


def test_bad_input(small):
    async def main():
        llm, dispatches = AsyncLLM(small), small.stats.dispatches
        stream = llm.generate(PROMPTS[0], request_id="twice")
        with pytest.raises(ValueError, match="an open request has the id 'twice': take another"):
            llm.generate(PROMPTS[0], request_id="twice")
        with pytest.raises(ValueError, match="no open request has the id 'unknown'"):
            llm.abort("unknown")
        with pytest.raises(ValueError, match="request_id must be a text, got 7"):
            llm.generate(PROMPTS[0], request_id=7)
        with pytest.raises(ValueError, match="the prompt is empty"):
            llm.generate([])
        with pytest.raises(ValueError, match="an LLM has its own: leave them out"):
            AsyncLLM(small, seed=1)
        assert llm.open_requests == 1
        await stream.aclose()
        assert llm.generate(PROMPTS[0], request_id="twice").request_id == "twice"
        assert (llm.open_requests, small.stats.dispatches) == (0, dispatches)

    asyncio.run(main())
