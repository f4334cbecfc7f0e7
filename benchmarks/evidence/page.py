"""Fills pages with figures from the committed result files: each stands between two comments, and is never typed.

    python -m benchmarks.evidence.page [--check]

A block, `<!-- figures: NAME -->` to `<!-- end -->`, is a table of `benchmarks/evidence/blocks.py`. A figure in a
sentence, `<!--= NAME ARGUMENT; ... -->` to `<!--/-->`, is one of `benchmarks/evidence/sentences.py`. Without its result
file a block says that it is missing, and a sentence stays as it is. `--check` writes nothing and ends with exit code 1
where a page differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.evidence.blocks import BLOCKS
from benchmarks.evidence.sentences import FIGURES

ROOT = Path(__file__).resolve().parents[2]
#: Those with figures.
PAGES = tuple(ROOT / "docs" / name for name in ("evidence.md", "full-comparison.md", "measurements.md", "when.md"))

_BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
#: No bar parts the arguments: it would part the cells of a table.
_FIGURE = re.compile(r"(<!--= (?P<name>\w+)(?: (?P<arguments>[^|]+?))? -->)(?P<old>.*?)(<!--/-->)")


def filled(text: str, root: Path = ROOT) -> str:
    """``text`` with the figures of the result files under ``root``.

    Raises:
        KeyError: if it names a block, a figure or what it is about, and that is not there.
    """
    text = _BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found['name']](root)}\n\n{found[3]}", text)

    def figure(found: re.Match[str]) -> str:
        arguments = found["arguments"].split("; ") if found["arguments"] else ()
        value = FIGURES[found["name"]](root, *arguments)
        return found[1] + (found["old"] if value is None else value) + found[5]

    return _FIGURE.sub(figure, text)


def differing() -> Iterator[tuple[Path, str]]:
    """The pages that are not as they should be, and how they should be."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (wanted := filled(text)) != text:
            yield page, wanted


def main() -> None:
    """Fill the pages, or check them."""
    parser = argparse.ArgumentParser(description="Fill pages with the figures of result files.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page differs")
    checks = parser.parse_args().check
    pages = list(differing())
    for page, text in pages:
        print(page.relative_to(ROOT))
        if not checks:
            page.write_text(text, encoding="utf-8")
    if checks and pages:
        sys.exit("these pages have other figures than the result files: python -m benchmarks.evidence.page fills them")


if __name__ == "__main__":
    main()
