"""Requests of every kind at a time, of `benchmarks/soak.py`. About 20 s, most of which compiles programs."""

from __future__ import annotations

import pytest

from benchmarks.soak import soak, tiny_model
from inferlib.programs.counter import compilations
from tests.helpers.engines import assert_accounted


@pytest.mark.release
def test_nothing_is_lost_or_wrong_or_left(tmp_path):
    llm = tiny_model(tmp_path)
    before = compilations()
    report = soak(llm, requests=400, sample=40)
    assert report.result.wrong == []
    assert report.result.kinds.total() == 400
    assert compilations() == before
    assert not llm.engine.scheduler.running
    assert_accounted(llm.engine)
    assert report.last.threads <= report.first.threads + 2
    assert report.last.files <= report.first.files + 2
