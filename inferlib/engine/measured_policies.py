"""What a cache policy lost where it was measured, said when it is chosen."""

from __future__ import annotations

import logging
from functools import cache

from inferlib import configs
from inferlib.ops.cache_policy import CachePolicy

log = logging.getLogger(__name__)


@cache
def warn_of_losses(policy: CachePolicy) -> None:
    """Log the policy's row of the table in docs/guide/long_contexts.md, once in a process."""
    log.warning("cache_policy %s drops what it scores low: %s", policy, losses(policy.method))


def losses(method: str) -> str:
    """A sentence on what a method lost."""
    measured = configs.cache_policies()
    (asked, later), (asked_of_all, later_of_all) = measured["policies"][method], measured["none"]
    return (
        f"{measured['model']} that keeps {measured['budget']} of {measured['tokens']} positions answers {asked} of "
        f"{measured['questions']} questions that the prompt asks, and {later} that a later turn asks; with all of them "
        f"{asked_of_all} and {later_of_all} (docs/guide/long_contexts.md; `inferlib eval --tasks needles,turns "
        "--cache-policy` measures a model of yours)"
    )
