"""The line that a process writes to each program that connects to its status socket."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from rrfp.errors import ProtocolError
from rrfp.runtime import records
from rrfp.runtime.stall.status import JobStatus

#: A longer line is no report.
MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class JobReport:
    """A job at one moment, or why there is nothing to report."""

    pid: int
    #: Stages and method, for people.
    pipeline: str
    #: Of all ranks; None where the process refuses the reader, or has given up.
    survey: JobStatus | None = None
    #: Why.
    failure: str = ""

    def line(self) -> bytes:
        """As one line of JSON; of a job so large that it would be longer than `MOST_BYTES` without the stacks."""
        line = json.dumps(records.to_plain(self)).encode() + b"\n"
        if len(line) <= MOST_BYTES or self.survey is None:
            return line
        answers = tuple(
            answer if answer.status is None else replace(answer, status=replace(answer.status, stack=""))
            for answer in self.survey.answers
        )
        without = replace(self, survey=replace(self.survey, answers=answers))
        return json.dumps(records.to_plain(without)).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> JobReport:
        if len(line) > MOST_BYTES:
            raise ProtocolError(f"the line of a status socket cannot be read: it has more than {MOST_BYTES} bytes")
        try:
            plain = json.loads(line)
        except RecursionError:
            raise ProtocolError("the line of a status socket cannot be read: it is nested too deeply") from None
        except ValueError as error:
            raise ProtocolError(f"the line of a status socket cannot be read: {error}") from None
        report = records.from_plain(cls, plain, "the line of a status socket")
        if (survey := report.survey) is not None and survey.asker not in range(len(survey.answers)):
            raise ProtocolError(
                f"the line of a status socket cannot be read: asker is {survey.asker}, of {len(survey.answers)} ranks"
            )
        return report
