"""Metrics as a table of comma-separated values."""

from __future__ import annotations

import os

from rrfp.callbacks.figures import Metrics, Tokens, metric_names
from rrfp.callbacks.row_file import RowFile
from rrfp.callbacks.rows import Rows
from rrfp.core.topology import Topology


class Csv(Rows):
    """Appends a row for each step and evaluation, with the columns of `rrfp.callbacks.metrics`; on rank 0 only.

    The first line names the columns. A resumed run goes on in the same file, if its columns are the same: another
    number of stages needs another file. The steps between its checkpoint and the end of the run before are in it twice
    then: the later row counts. A figure that does not exist, such as a limit that is not set, is an empty cell.

    Args:
        path: of the file, in a folder of rank 0's host that exists.
        tokens: as in `JsonLines`.

    Raises:
        ConfigError: for an impossible ``tokens``; by the pipeline on rank 0, where the file cannot be written or has
            other columns.
    """

    def __init__(self, path: str | os.PathLike[str], *, tokens: Tokens = None) -> None:
        super().__init__(RowFile(path), tokens)

    def check(self, topology: Topology) -> None:
        """See `Callback`."""
        self._file.head = ",".join(metric_names(topology.stages))
        super().check(topology)

    def text(self, row: Metrics) -> str:
        """See `Rows`."""
        return ",".join("" if value is None else str(value) for value in row.values())
