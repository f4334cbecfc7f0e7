"""The ranks that save and load together, over a gloo group of their own: saves run beside the caller's collectives."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgpack
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rrfp.compute.gradients.process_groups import all_gather_bytes
from rrfp.errors import ConfigError, RrfpError
from rrfp.log import get_logger

logger = get_logger(__name__)

#: A path may have bytes that are no text.
_ANY_PATH = "surrogatepass"


@dataclass(frozen=True, slots=True)
class Ranks:
    """See the module's docstring."""

    #: Of all ranks; None in a job of one process.
    group: dist.ProcessGroup | None = None
    #: This one's, in the group.
    rank: int = 0
    #: Of each rank of the group, its number in ``torch.distributed``; and the numbers of those that were lost.
    numbers: Sequence[int] = (0,)
    lost: Sequence[int] = ()

    @classmethod
    def of(cls, pipe: object) -> Ranks:
        """The ranks that use ``pipe``: those that are left where it has lost some, else all; see `of_process`."""
        survivors = getattr(pipe, "_survivors", None)
        if survivors is None:
            return cls.of_process()
        if under_way:  # it cannot become complete without a rank that was lost, and may wait for it
            logger.warning("the asynchronous save that was under way when a rank was lost is given up")
            under_way.clear()
        return cls._of_group(survivors.group)

    @classmethod
    def of_process(cls) -> Ranks:
        """The ranks of this job, once the save that is under way is complete; the first call makes the group."""
        while under_way:
            under_way.pop().result()
        if not dist.is_initialized():
            if (world := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
                raise ConfigError(
                    f"torch.distributed is not initialised, must be for a checkpoint of {world} ranks: call "
                    "torch.distributed.init_process_group before"
                )
            # DCP would say in each call, on whatever thread, that it runs in one process.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            return cls()
        default = dist.group.WORLD
        if _groups.get("of") is not default:
            _groups.update(of=default, group=dist.new_group(backend="gloo"))
        return cls._of_group(_groups["group"])

    @classmethod
    def _of_group(cls, group: dist.ProcessGroup) -> Ranks:
        numbers = dist.get_process_group_ranks(group)
        lost = sorted({*range(dist.get_world_size())} - {*numbers})
        return cls(group, dist.get_rank(group), numbers, lost)

    @property
    def number(self) -> int:
        """This rank's, in ``torch.distributed``."""
        return self.numbers[self.rank]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank: plain data, as msgpack has it. Nothing is pickled."""
        packed: bytes = msgpack.packb(value, unicode_errors=_ANY_PATH)
        with failures("checkpoint: another rank has ended", self):
            gathered = [packed] if self.group is None else all_gather_bytes(packed, self.group)
            return [msgpack.unpackb(each, unicode_errors=_ANY_PATH) for each in gathered]

    def from_first(self, value: Any) -> Any:
        return self.gather(value)[0]

    @contextmanager
    def together(self, text: str) -> Iterator[None]:
        """Raise on all ranks what the block raises on the first, so that no rank waits for one that failed."""
        problem: tuple[bool, str] | None = None
        cause: Exception | None = None
        try:
            yield
        except RrfpError as error:
            problem, cause = (True, str(error)), error
        except Exception as error:
            problem, cause = (False, failure_text(text, self.number, error)), error
        problems = [each for each in self.gather(problem) if each is not None]
        if problems:
            is_callers, message = problems[0]
            raise (ConfigError if is_callers else RrfpError)(message) from cause


def failure_text(text: str, rank: int, error: BaseException) -> str:
    reason = str(error).partition("\n")[0]  # torch's own have a stack of C++ behind
    return f"{text}: rank {rank}: {type(error).__name__}: {reason}"


@contextmanager
def failures(text: str, ranks: Ranks, failed: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turn DCP's exception, which is no Exception, into one that begins with ``text`` and names a rank's failure."""
    try:
        yield
    except CheckpointException as error:
        failed()
        rank, (failure, _) = min(error.failures.items())
        raise RrfpError(failure_text(text, ranks.numbers[rank], failure)) from error
    except Exception as error:  # of the group: the rank at fault has a traceback of its own
        raise RrfpError(failure_text(text, ranks.number, error)) from None


#: The last asynchronous save of this process: its thread uses the group.
under_way: list[Future[None]] = []

#: The group, and the default group that it belongs to.
_groups: dict[str, Any] = {}
