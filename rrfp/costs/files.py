"""The cost file: a `CostTable` as JSON, exactly the fields of the documented format.

This file knows the format's names and JSON's traps (NaN, repeated names, booleans as numbers); shapes and ranges are
checked by `CostTable`. Numbers survive a round trip bitwise.

Of a graph the fields of `rrfp.model.plain_graph` stand in place of the chain's chunks and placement, and

    "skipped": {"vision": [1]}                                    the microbatches that do not visit it

F, B, W and bytes have their rows in the order of the virtual stages, the latencies in that of the edges.
"""

import json
import os
import reprlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rrfp.atomic_files import write_atomically
from rrfp.costs.table import MATRICES, OPTIONAL_MATRICES, CostTable, Matrix
from rrfp.errors import ConfigError, Faults
from rrfp.model.plain_graph import checked_list, graph_from_plain, graph_to_plain, listed
from rrfp.model.visits import Skipped
from rrfp.plain import json_fault, path_of, whole

#: Name in the file of a chain -> attribute of the table, in the order of writing.
FIELDS = {
    "stages": "stages",
    "chunks": "chunks",
    "placement": "placement",
    "microbatches": "microbatches",
    **MATRICES,
    "sizes": "sizes",
}
#: Those of a graph beside the matrices, in the order of writing.
GRAPH_FIELDS = ("stages", "microbatches", "virtual_stages", "placement", "edges", "skipped")
_OPTIONAL = OPTIONAL_MATRICES | {"skipped", "sizes"}


def read_costs(path: str | os.PathLike[str]) -> CostTable:
    """Read a cost file.

    Args:
        path: of the file.

    Raises:
        ConfigError: if the file cannot be read or is malformed; one line that names the file and the field.
    """
    try:
        text = path_of("path", path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{os.fspath(path)}: is not JSON ({json_fault(error)})") from None
    try:
        return from_json(text)
    except ConfigError as error:
        raise ConfigError.joining(f"{os.fspath(path)}: {text}" for text in error.faults or (str(error),)) from None


def write_costs(path: str | os.PathLike[str], table: CostTable) -> None:
    """Write a cost file, or replace it; if it cannot be written, the old file stays and a ConfigError says why."""
    if not isinstance(table, CostTable):
        raise ConfigError(f"table is of type {type(table).__name__}, must be a CostTable")
    write_atomically(path, to_json(table))


def from_json(text: str) -> CostTable:
    """The table of a cost file's text.

    Every field is required except W, bytes and sizes, and of a graph skipped; with one virtual stage the latencies are
    empty lists. A file with virtual_stages is of a graph.

    Raises:
        ConfigError: if the text is not JSON, or fields are missing, unknown, repeated or wrong; names all of these.
    """
    try:
        document = json.loads(text, object_pairs_hook=_without_repeats)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON ({json_fault(error)})") from None
    if not isinstance(document, dict):
        raise ConfigError(f"must be a JSON object with the fields {', '.join(FIELDS)}")
    if "traceEvents" in document:
        raise ConfigError("is a trace, must be a cost file: `rrfp costs` makes one of a trace")
    is_graph = "virtual_stages" in document
    known = (*GRAPH_FIELDS, *MATRICES, "sizes") if is_graph else tuple(FIELDS)
    missing = [name for name in known if name not in document and name not in _OPTIONAL]
    with Faults() as faults:
        for name in document:
            if name not in known:
                faults.keep(f"field {reprlib.repr(name)} is unknown, must be one of: {', '.join(known)}")
        if missing:
            with faults.kept():
                subject, verb = ("field", "is") if len(missing) == 1 else ("fields", "are")
                raise ConfigError(f"{subject} {', '.join(missing)} {verb} missing")
        for name in MATRICES:
            if name in document:
                with faults.kept():
                    _check_numbers(name, document[name])
        if "sizes" in document and not isinstance(document["sizes"], list):
            faults.keep("sizes must be a list of numbers, one a microbatch")
    if is_graph:
        matrices = {FIELDS[name]: document[name] for name in MATRICES if name in document}
        graph, microbatches = graph_from_plain(document), whole("microbatches", document["microbatches"], 1)
        skipped = _skipped(document.get("skipped", {}), graph.names, microbatches)
        return CostTable.of_graph(graph, microbatches, skipped=skipped, sizes=document.get("sizes"), **matrices)
    fields: dict[str, Any] = {field: document.get(name) for name, field in FIELDS.items()}
    return CostTable(**fields)


def to_json(table: CostTable) -> str:
    """The cost file's text, one row a line, ending in a newline; `from_json` returns the same table, bitwise."""
    values = {name: getattr(table, field) for name, field in FIELDS.items()}
    if table.graph is not None:
        fields = {**graph_to_plain(table.graph), "microbatches": table.microbatches, "skipped": _skippers(table)}
        values = {
            **{name: fields[name] for name in GRAPH_FIELDS},
            **{name: values[name] for name in (*MATRICES, "sizes")},
        }
    lines = [
        f"{json.dumps(name)}: {_rows(value) if name in MATRICES else json.dumps(value)}"
        for name, value in values.items()
        if value is not None
    ]
    return "{" + ",\n ".join(lines) + "}\n"


def _skippers(table: CostTable) -> dict[str, list[int]] | None:
    """The microbatches that skip each virtual stage; None for none."""
    assert table.graph is not None
    skippers = {
        name: [m for m, skipped in enumerate(table.skipped) if v in skipped] for v, name in enumerate(table.graph.names)
    }
    return {name: microbatches for name, microbatches in skippers.items() if microbatches} or None


def _skipped(value: object, names: Sequence[str], microbatches: int) -> tuple[Skipped, ...]:
    if not isinstance(value, dict):
        raise ConfigError(f"skipped is {reprlib.repr(value)}, must be an object: NAME -> list of microbatches")
    skipped: list[set[int]] = [set() for _ in range(microbatches)]
    for name, skippers in value.items():
        if name not in names:
            raise ConfigError(f"skipped names {reprlib.repr(name)}, must be one of: {listed(names)}")
        for microbatch in checked_list(f"skipped[{name!r}]", skippers, "of microbatches"):
            skipped[whole(f"skipped[{name!r}]", microbatch, 0, microbatches - 1)].add(names.index(name))
    return tuple(map(frozenset, skipped))


def _rows(matrix: Matrix) -> str:
    return "[" + ",\n  ".join(json.dumps(row) for row in matrix.tolist()) + "]"


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuse repeated names, of which json keeps the last silently."""
    document = dict(pairs)
    if len(document) != len(pairs):
        repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ConfigError(f"field {reprlib.repr(repeated)} is given more than once")
    return document


def _check_numbers(name: str, rows: object) -> None:
    """Refuse entries that numpy would convert: booleans, numbers in quotes, null."""
    # `CostTable` refuses values that are no list of lists, except null, which would count as absent.
    if not isinstance(rows, list):
        raise ConfigError(f"{name} must be a list of rows of numbers")
    for v, row in enumerate(rows):
        for m, value in enumerate(row if isinstance(row, list) else ()):
            if type(value) is not float and type(value) is not int:
                raise ConfigError(f"{name}[{v}][{m}] is {json.dumps(value)[:40]}, must be a finite number >= 0")
