"""Changes drawn by seed over whole packages, and the list of those that no test can, or need, notice."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutation.operators import Change, changes

SURVIVORS = Path(__file__).with_name("survivors.toml")

_FIELDS = ("file", "where", "operator", "old", "new", "reason")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change to a file of the tree.

    Attributes:
        file: its path inside the tree.
        change: what changes.
    """

    file: str
    change: Change

    @property
    def key(self) -> tuple[str, ...]:
        """What it is, wherever in the file it stands: other lines may come and go."""
        change = self.change
        return self.file, change.where, change.operator, change.old, change.new, str(change.nth)

    def __str__(self) -> str:
        change = self.change
        new = " ".join(change.new.split())
        return f"{self.file}:{change.line} {change.where}: {change.operator}: {change.old}  ->  {new}"


def mutants_of(tree: Path, packages: Sequence[str]) -> Iterator[Mutant]:
    """Every change to the packages, or files."""
    for package in packages:
        at = tree / package
        for path in [at] if at.is_file() else sorted(at.rglob("*.py")):
            for change in changes(path.read_text()):
                yield Mutant(str(path.relative_to(tree)), change)


def draw(mutants: Sequence[Mutant], seed: int, number: int) -> list[Mutant]:
    """``number`` of the mutants: the same for the same seed, few others when code changes, none when files move."""

    def lot(mutant: Mutant) -> tuple[bytes, str]:
        return hashlib.sha256("\0".join((str(seed), *mutant.key[1:])).encode()).digest(), mutant.file

    return sorted(mutants, key=lot)[:number]


def known_survivors(path: Path = SURVIVORS) -> Mapping[tuple[str, ...], str]:
    """Why each known survivor survives, by `Mutant.key`.

    Raises:
        ValueError: if an entry lacks a field or gives no reason.
    """
    entries = tomllib.loads(path.read_text()).get("survivor", [])
    for entry in entries:
        if not all(isinstance(entry.get(field), str) for field in _FIELDS) or not entry["reason"].strip():
            raise ValueError(f"{path.name}: an entry needs {', '.join(_FIELDS)}: {entry}")
    return {(*(entry[field] for field in _FIELDS[:-1]), str(entry.get("nth", 0))): entry["reason"] for entry in entries}


def as_entry(mutant: Mutant) -> str:
    """A survivor as it stands in the list, without its reason."""
    change = mutant.change
    fields = {"file": mutant.file, "where": change.where, "operator": change.operator, "old": change.old}
    lines = [f"{name} = {_quoted(text)}" for name, text in (*fields.items(), ("new", change.new))]
    nth = [f"nth = {change.nth}"] if change.nth else []
    return "\n".join(["[[survivor]]", *lines, *nth, 'reason = ""'])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'
