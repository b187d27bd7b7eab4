"""What a cache policy lost is said when it is chosen."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from inferlib import Buckets, configs
from inferlib.engine import measured_policies
from inferlib.engine.measured_policies import losses, warn_of_losses
from inferlib.ops.cache_policy import METHODS
from tests.helpers.llms import build_llm

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "long_contexts.md"


def test_a_policy_that_is_chosen_says_what_it_lost(checkpoint, caplog):
    warn_of_losses.cache_clear()
    path, buckets = checkpoint("llama", num_hidden_layers=1), Buckets(prefill=(8,), batch=(1, 2), cache=(128,))
    with caplog.at_level(logging.WARNING, measured_policies.__name__):
        for _ in range(2):
            build_llm(path, buckets, cache_policy="keydiff:64:8")
        build_llm(path, buckets)
    assert [record.getMessage() for record in caplog.records] == [
        f"cache_policy keydiff:64:8 drops what it scores low: {losses('keydiff')}"
    ]
    assert "answers 7 of 12 questions that the prompt asks, and 6 that a later turn asks; with all" in losses("keydiff")


def test_each_method_has_the_row_of_the_table():
    measured, page = configs.cache_policies(), PAGE.read_text(encoding="utf-8")
    assert set(measured["policies"]) == set(METHODS)
    rows = re.findall(r"^\| (.+) \| \d+ % \| (\d+)(?: of 12)? \| (\d+)(?: of 12)? \|$", page, re.MULTILINE)
    table = {
        method: [int(asked), int(later)]
        for names, asked, later in rows
        for method in re.findall(rf"`(\w+):{measured['budget']}`", names)
    }
    assert table == measured["policies"]
