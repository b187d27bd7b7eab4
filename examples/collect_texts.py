"""Collect text to distill a head on, from what is installed: `python examples/collect_texts.py texts.jsonl`.

It takes Python's standard library and its documentation, the documentation and sources of installed packages, and
/usr/share/doc. Each line of the file is {"text", "source", "license", "split"}; one source of 25 is held out. What
belongs together, a package for example, is one source, so that nothing like a held-out text is trained on.
`license` is what the source says of itself; look at it before you publish what you train.

With --chats, lines {"messages", ...} follow: requests to edit, to summarise and to explain passages of the texts to
train on, which the model answers before it is distilled.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

SUFFIXES = {".py", ".md", ".rst", ".txt", ".html", ".htm"}
SHORTEST, LONGEST = 400, 100_000  # characters of a text
MOST_OF_SOURCE = 2_000_000  # characters
PASSAGE = 200, 900  # characters of a text that a chat is about
PROSE = re.compile(r"[A-Z][^={}<>|`_\[\]]{60,}[.!?]")
REQUESTS = (
    "Summarise this passage in a few sentences:\n\n{}",
    "{}\n\nWhat are the main points of the text above?",
    "Proofread the following text and return it:\n\n{}",
    "Rewrite this text as a list of bullet points:\n\n{}",
    "Repeat this text, with its mistakes corrected:\n\n{}",
    "Explain this to a beginner:\n\n{}",
    "{}\n\nQuote the two most important sentences.",
    "Write a title and a short abstract for this text:\n\n{}",
    "Make this text shorter, but leave its words as they are:\n\n{}",
    "Which questions does this text answer? Answer them.\n\n{}",
)


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


def passages(text: str) -> Iterator[str]:
    """Paragraphs of prose, one after the other as long as they are short."""
    passage = ""
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = " ".join(paragraph.split())
        if len(paragraph) > PASSAGE[1] or not PROSE.fullmatch(paragraph):
            continue
        if len(passage) + len(paragraph) > PASSAGE[1]:
            yield passage
            passage = ""
        passage = f"{passage}\n\n{paragraph}".strip()
    yield passage


def chats(lines: list[dict[str, str]], count: int) -> Iterator[dict[str, object]]:
    """Requests about passages of texts that are trained on, in any order; no two are the same."""
    training = [line for line in lines if line["split"] == "train"]
    about = [(line, passage) for line in training for passage in passages(line["text"]) if len(passage) > PASSAGE[0]]
    every = list(itertools.product(REQUESTS, about))
    for request, (line, passage) in random.Random(0).sample(every, min(count, len(every))):
        messages = [{"role": "user", "content": request.format(passage)}]
        yield {"messages": messages, "source": line["source"], "license": line["license"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--most", type=int, default=60_000_000, help="characters in all")
    parser.add_argument("--chats", type=int, default=0, help="requests about passages that the model is to answer")
    options = parser.parse_args()
    lines: list[dict[str, str]] = []
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
            lines.append({"text": text, "source": source, "license": terms, "split": split})
            out.write(json.dumps(lines[-1]) + "\n")
            count[split] += len(text)
            licenses[terms] += len(text)
            if count.total() > options.most:
                break
        asked = [json.dumps(chat) + "\n" for chat in chats(lines, options.chats)]
        out.writelines(asked)
    print(
        f"{options.out}: {count['train']:,} characters to train on, {count['held_out']:,} held out, {len(asked)} chats"
    )
    for terms, size in licenses.most_common(8):
        print(f"{size:>14,}  {terms}")


if __name__ == "__main__":
    main()
