"""Collect text to distill a head on, from what is installed: `python examples/collect_texts.py texts.jsonl`.

It takes Python's standard library and its documentation, the documentation and sources of installed packages, and
/usr/share/doc. Each line of the file is {"text", "source", "license", "split"}; one source of 25 is held out. What
belongs together, a package for example, is one source, so that nothing like a held-out text is trained on.
`license` is what the source says of itself; look at it before you publish what you train.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

SUFFIXES = {".py", ".md", ".rst", ".txt", ".html", ".htm"}
SHORTEST, LONGEST = 400, 100_000  # characters of a text
MOST_OF_SOURCE = 2_000_000  # characters


def installed_packages() -> Iterator[tuple[str, str, Path]]:
    """The source, license and path of each text file of an installed package."""
    for package in distributions():
        name = package.metadata["Name"]
        terms = package.metadata.get("License-Expression") or package.metadata.get("License") or "unknown"
        for file in package.files or ():
            if file.suffix in SUFFIXES and "test" not in str(file).lower():
                yield f"package {name}", terms.splitlines()[0][:80] if terms else "unknown", Path(str(file.locate()))


def standard_library() -> Iterator[tuple[str, str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(parts):
            yield f"python {parts[0]}", "PSF-2.0", path


def system_documentation(root: Path = Path("/usr/share/doc")) -> Iterator[tuple[str, str, Path]]:
    for path in sorted(root.rglob("*")) if root.is_dir() else ():
        name = path.name.removesuffix(".gz")
        if Path(name).suffix in SUFFIXES or name.startswith(("README", "NEWS", "changelog", "copyright")):
            package = path.relative_to(root).parts[0]
            yield f"debian {package}", f"see /usr/share/doc/{package}/copyright", path


def read(path: Path) -> str:
    """The text of a file; empty if it cannot be read as text."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError, EOFError, gzip.BadGzipFile):
        return ""
    if path.suffix in (".html", ".htm"):
        text = re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL | re.IGNORECASE)
        text = re.sub(r"<[^>]+>", "", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()[:LONGEST]


def is_held_out(source: str) -> bool:
    return int(hashlib.sha256(source.encode()).hexdigest(), 16) % 25 == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--most", type=int, default=60_000_000, help="characters in all")
    options = parser.parse_args()
    seen: set[bytes] = set()
    count, licenses, taken = Counter(), Counter(), Counter()
    sources = (*system_documentation(), *standard_library(), *installed_packages())
    sources = sorted(
        sources, key=lambda entry: hashlib.sha256(str(entry[2]).encode()).digest()
    )  # mixed, alike each time
    with options.out.open("w", encoding="utf-8") as out:
        for source, terms, path in sources:
            text = read(path)
            digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
            if len(text) < SHORTEST or digest in seen or taken[source] > MOST_OF_SOURCE:
                continue
            seen.add(digest)
            taken[source] += len(text)
            split = "held_out" if is_held_out(source) else "train"
            out.write(json.dumps({"text": text, "source": source, "license": terms, "split": split}) + "\n")
            count[split] += len(text)
            licenses[terms] += len(text)
            if count.total() > options.most:
                break
    print(f"{options.out}: {count['train']:,} characters to train on, {count['held_out']:,} held out")
    for terms, size in licenses.most_common(8):
        print(f"{size:>14,}  {terms}")


if __name__ == "__main__":
    main()
