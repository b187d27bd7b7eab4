"""Compare every architecture with transformers, or with its published arithmetic in torch, and print the table that
`models/README.md` shows.

    python benchmarks/families.py --write

The checkpoints are the tiny random ones of the tests, in float32. The table shows the largest difference of a logit
over the cases of an architecture (options of its configuration), and the standard deviation of the reference's logits.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from rich.progress import track

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "models" / "README.md"
HEADER = (
    "| architecture | recipe | cases | largest difference of a logit | standard deviation of logits |",
    "|---|---|---|---|---|",
)


def measure() -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Architecture and recipe -> (largest difference, standard deviation) of each case."""
    sys.path.insert(0, str(ROOT))
    from inferlib.models.families import family_of
    from tests.helpers.oracle import make_checkpoint, reference_logits
    from tests.helpers.oracle_cases import CASES
    from tests.models.test_parity import one_pass, prompt_of

    differences = defaultdict(list)
    for case in track(CASES, "against transformers"):
        with tempfile.TemporaryDirectory() as folder:
            path, tokens = make_checkpoint(Path(folder), case.family, **case.options), prompt_of(case)
            expected = reference_logits(path, tokens)
            hf = json.loads((path / "config.json").read_text())
            differences[hf["architectures"][0], family_of(hf).name].append(
                (float(np.abs(one_pass(path, tokens, stacked=True) - expected).max()), expected.std())
            )
    return differences | looped() | lanes() | searched()


def looped() -> dict[tuple[str, str], list[tuple[float, float]]]:
    """The differences of models that transformers does not have, from the published arithmetic in torch."""
    from inferlib.models.families import family_of
    from tests.helpers.looped import CASES, looped_logits, make_looped
    from tests.models.test_parity import one_pass

    differences, tokens = defaultdict(list), np.random.default_rng(0).integers(0, 131, 50).astype(np.int32)
    for hf in track(CASES.values(), "against torch"):
        with tempfile.TemporaryDirectory() as folder:
            path, expected = make_looped(Path(folder), hf), looped_logits(hf, tokens)
            name = hf.get("architectures", [hf.get("model_class_name")])[0]
            error = float(np.abs(one_pass(path, tokens, stacked=True) - expected).max())
            differences[name, family_of(hf).name].append((error, expected.std()))
    return differences


def lanes() -> dict[tuple[str, str], list[tuple[float, float]]]:
    """The differences of models with lanes, from the published arithmetic in torch."""
    from inferlib.models.families.laneformer import LANEFORMER
    from tests.helpers.lanes import CASES, lane_logits, make_lanes
    from tests.models.test_parity import one_pass

    cases, tokens = [], np.random.default_rng(0).integers(0, 131, 50).astype(np.int32)
    for hf in track(CASES.values(), "against torch"):
        with tempfile.TemporaryDirectory() as folder:
            path, expected = make_lanes(Path(folder), hf), lane_logits(hf, tokens)
            cases.append((float(np.abs(one_pass(path, tokens, stacked=True) - expected).max()), expected.std()))
    return {(LANEFORMER.architectures[0], LANEFORMER.name): cases}


def searched() -> dict[tuple[str, str], list[tuple[float, float]]]:
    """The differences of a Llama model of which a search took parts, from transformers with zeros in their place."""
    from inferlib.models.families.nemotron_nas import NEMOTRON_NAS
    from tests.helpers.oracle import reference_logits
    from tests.helpers.searched import make_searched
    from tests.models.test_parity import one_pass

    tokens = np.random.default_rng(0).integers(0, 131, 50).astype(np.int32)
    with tempfile.TemporaryDirectory() as folder:
        whole, path = make_searched(Path(folder))
        expected = reference_logits(whole, tokens)
        error = float(np.abs(one_pass(path, tokens, stacked=True) - expected).max())
    return {(NEMOTRON_NAS.architectures[0], NEMOTRON_NAS.name): [(error, expected.std())]}


def table(differences: dict[tuple[str, str], list[tuple[float, float]]]) -> str:
    rows = [
        f"| {name} | {recipe} | {len(cases)} | {max(d for d, _ in cases):.0e} | {min(s for _, s in cases):.1f} |"
        for (name, recipe), cases in sorted(differences.items())
    ]
    return "\n".join((*HEADER, *rows)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table in models/README.md")
    arguments = parser.parse_args()
    text = table(measure())
    print(text)
    if arguments.write:
        before = PAGE.read_text(encoding="utf-8").split(HEADER[0])[0]
        PAGE.write_text(before + text, encoding="utf-8")


if __name__ == "__main__":
    main()
