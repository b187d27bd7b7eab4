"""What is on its way between memories is bounded by bytes, and changes no token."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from inferlib.engine import transit
from inferlib.engine.transit import Transit
from tests.helpers.llms import new_engine
from tests.helpers.sequences import run, sequence
from tests.helpers.shared_beginnings import crowd, crowd_out, prompt_of


def test_batches_wait_for_those_before_them(monkeypatch):
    """One that is larger than the limit goes alone, and what has arrived takes no room."""
    monkeypatch.setattr(transit, "MOST_BYTES", 10)
    waited: list[int] = []
    monkeypatch.setattr(transit, "wait", lambda futures: waited.append(futures[0].number))
    under_way = Transit()
    for number, nbytes in enumerate([6, 4, 1, 2, 9, 30]):
        under_way.make_room(nbytes)
        future: Future = Future()
        future.number = number  # type: ignore[attr-defined]
        if nbytes == 2:  # it has arrived by then
            future.set_result(None)
        under_way.add_future(nbytes, future)
    assert waited == [0, 1, 2, 4]


@pytest.mark.slow
@pytest.mark.usefixtures("always_fetched")
def test_one_batch_at_a_time_is_enough(tight, alone, monkeypatch):
    """Of pages, snapshots and what rows get, in both directions."""
    kind = "gpt_oss"
    monkeypatch.setattr(transit, "MOST_BYTES", 1)
    with new_engine(tight(kind), host_cache=1 << 26, in_flight=1) as engine:
        source = engine.source
        s = sequence(prompt_of(41, 0, 0), 5)
        run(engine, [s])
        run(engine, crowd())
        crowd_out(engine)
        again = sequence(s.prompt, 9)
        assert run(engine, [again])[0] == alone(kind, s.prompt, 9)
        assert again.cached >= 32
        assert source.hit_tokens["host"] > 0
        assert len(source._transit._batches) == 1
