"""Matrices of a cost table: checked copies, read-only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rrfp.costs.streams import Matrix
from rrfp.errors import ConfigError


def _length(value: object) -> int | None:
    """The number of entries of a list, tuple or array; None for any other value."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    is_array = isinstance(value, np.ndarray) and value.ndim > 0
    return len(value) if is_list or is_array else None  # type: ignore[arg-type]


def checked_matrix(name: str, rows: Matrix, num_rows: int, num_columns: int, meaning: str) -> Matrix:
    """A checked, read-only float64 copy of `rows`.

    Args:
        name: of the field in the file, for errors.
        rows: a nested sequence or an array.
        num_rows: how many it must have.
        num_columns: how many entries each must have.
        meaning: of the number of rows, for errors.

    Raises:
        ConfigError: if it has another shape, or an entry that is no finite number >= 0.
    """
    length = _length(rows)
    if length is None:
        raise ConfigError(f"{name} must be a list of {num_rows} rows ({meaning})")
    if length != num_rows:
        raise ConfigError(f"{name} has {length} rows, must have {num_rows} ({meaning})")
    for index, row in enumerate(rows):
        entries = _length(row)
        if entries is None:
            raise ConfigError(f"{name}[{index}] must be a list of {num_columns} numbers (one a microbatch)")
        if entries != num_columns:
            raise ConfigError(f"{name}[{index}] has {entries} entries, must have {num_columns} (one a microbatch)")
    try:
        matrix = np.array(rows, dtype=np.float64, order="C") if num_rows else np.empty((0, num_columns))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} must hold finite numbers >= 0 only ({error})") from None
    if matrix.shape != (num_rows, num_columns):
        raise ConfigError(f"{name} must hold numbers only, {num_rows} rows of {num_columns}")
    wrong = ~(np.isfinite(matrix) & (matrix >= 0))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ConfigError(f"{name}[{row}][{column}] is {matrix[row, column]}, must be a finite number >= 0")
    return read_only(matrix + 0.0)  # -0.0 becomes 0.0: equal tables must have equal bytes


def read_only(matrix: Matrix) -> Matrix:
    """``matrix`` itself, read-only from now on."""
    matrix.setflags(write=False)
    return matrix
