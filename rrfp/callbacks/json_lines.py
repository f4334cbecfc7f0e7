"""Metrics as lines of JSON."""

from __future__ import annotations

import json
import math
import os

from rrfp.callbacks.figures import Metrics, Tokens
from rrfp.callbacks.row_file import RowFile
from rrfp.callbacks.rows import Rows


class JsonLines(Rows):
    """Appends a line of JSON for each step and evaluation, with the names of `rrfp.callbacks.metrics`; on rank 0 only.

    A resumed run goes on in the same file. The steps between its checkpoint and the end of the run before are in it
    twice then: the later row counts. A number that JSON lacks, such as a loss of nan, is null.

    Args:
        path: of the file, in a folder of rank 0's host that exists.
        tokens: of a microbatch, for ``tokens_per_second``, or a function of `StepEnded` that returns those of the step,
            over all replicas, such as ``lambda step: sum(step.sizes)``; None: not known.

    Raises:
        ConfigError: for an impossible ``tokens``; by the pipeline on rank 0, where the file cannot be written or ends
            with something else.
    """

    def __init__(self, path: str | os.PathLike[str], *, tokens: Tokens = None) -> None:
        super().__init__(RowFile(path, start='{"time": '), tokens)

    def text(self, row: Metrics) -> str:
        """See `Rows`."""
        return json.dumps({name: None if _is_no_number(value) else value for name, value in row.items()})


def _is_no_number(value: float | str | None) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
