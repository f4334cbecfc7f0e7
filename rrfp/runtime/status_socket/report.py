"""The line that a process writes to each program that connects to its status socket."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rrfp.errors import ProtocolError
from rrfp.runtime import records
from rrfp.runtime.stall.answers import Survey


@dataclass(frozen=True, slots=True)
class JobReport:
    """A job at one moment, or why there is nothing to report.

    Attributes:
        pid: of the process that answers.
        pipeline: stages and method, for people.
        survey: of all ranks; None where the process refuses the reader, or has given up.
        failure: why.
    """

    pid: int
    pipeline: str
    survey: Survey | None = None
    failure: str = ""

    def line(self) -> bytes:
        """As one line of JSON."""
        return json.dumps(records.to_plain(self)).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> JobReport:
        """Read what `line` made.

        Raises:
            ProtocolError: for anything else, such as the line of another version.
        """
        try:
            plain = json.loads(line)
        except ValueError as error:
            raise ProtocolError(f"the line of a status socket cannot be read: {error}") from None
        return records.from_plain(cls, plain, "the line of a status socket")
