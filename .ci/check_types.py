"""Type errors of pyright against `pyright-baseline.json`: no file may have more than it lists, public modules none.

python .ci/check_types.py            # exit code 1 if there are more
python .ci/check_types.py --write    # take what there is as the baseline, where it is less
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASELINE = ROOT / "pyright-baseline.json"
# What users import or call.
PUBLIC = (
    "inferlib/__init__.py",
    "inferlib/cli/",
    "inferlib/config.py",
    "inferlib/conversion.py",
    "inferlib/deploy/",
    "inferlib/distributed.py",
    "inferlib/llm.py",
    "inferlib/outputs.py",
    "inferlib/sampling/params.py",
    "inferlib/sharding/mesh.py",
)


def errors() -> list[dict]:
    run = subprocess.run([sys.executable, "-m", "pyright", "--outputjson"], cwd=ROOT, capture_output=True, text=True)
    try:
        report = json.loads(run.stdout)
    except json.JSONDecodeError:
        sys.exit(f"pyright failed: {run.stderr or run.stdout}")
    return [entry for entry in report["generalDiagnostics"] if entry["severity"] == "error"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="lower the baseline to what there is")
    args = parser.parse_args()
    all_errors = errors()
    counts = Counter(str(Path(error["file"]).relative_to(ROOT)) for error in all_errors)
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else None
    allowed = counts if baseline is None else baseline
    worse = {file: count for file, count in counts.items() if count > allowed.get(file, 0) or file.startswith(PUBLIC)}
    for error in all_errors:
        file = str(Path(error["file"]).relative_to(ROOT))
        if file in worse:
            line = error["range"]["start"]["line"] + 1
            print(f"{file}:{line}: {error['message'].splitlines()[0]} ({error.get('rule', 'syntax')})")
    for file, count in sorted(worse.items()):
        print(f"{file}: {count} type errors, the baseline has {allowed.get(file, 0)}")
    total, before = sum(counts.values()), sum(allowed.values())
    print(f"pyright: {total} type errors in {len(counts)} files, the baseline has {before}")
    if args.write:
        lower = {file: min(count, allowed.get(file, 0)) for file, count in sorted(counts.items()) if file in allowed}
        BASELINE.write_text(json.dumps(lower, indent=1) + "\n")
    elif total < before:
        print("there are fewer than the baseline has: run python .ci/check_types.py --write")
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
