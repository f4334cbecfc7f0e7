"""`ScheduleRRFP` over stock `PipelineStage` s: gradients, losses and outputs are those of one process.

Each test is one launch of ranks that run many cases; the modules of `torch_cases`, and `torch_mesh_cases`, say what
each is about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

import pytest
from fork_server import fork_server, reports
from integrations import torch_mesh_cases
from integrations.torch_cases import calls, failures, messages, placements, refusals, weights, wrappers

__all__ = ["fork_server"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

#: Cases whose placement differs with the number of ranks, above all on an odd one.
OF_PLACEMENT: Sequence[Any] = (
    placements.looped,
    placements.vee,
    placements.vee_split,
    placements.unequally_many,
    placements.three_chunks_in_a_vee,
    placements.stages_in_any_order,
    wrappers.traced_stages,
)


def cases_of(*modules: ModuleType) -> Iterator[FunctionType]:
    """The functions without arguments that modules of cases define."""
    for module in modules:
        for name, value in vars(module).items():
            is_own = isinstance(value, FunctionType) and value.__module__ == module.__name__ and name[0] != "_"
            if is_own and value.__code__.co_argcount + value.__code__.co_kwonlyargcount == 0:
                yield value


def run(functions: Sequence[FunctionType], ranks: int) -> None:
    cases = [f"{function.__module__}.{function.__name__}" for function in functions]
    lines = reports("integrations/torch_ranks.py", *cases, ranks=ranks, timeout_s=170)
    failed = [f"rank {line['rank']}: {case}\n{line[case][-3000:]}" for line in lines for case in cases if line[case]]
    assert not failed, "\n".join(failed)


#: Of what FSDP shards, beside whole stages.
OTHER_SHARDS: Sequence[Any] = (
    torch_mesh_cases.fsdp_of_checkpointed_modules,
    torch_mesh_cases.fsdp_of_parts_and_the_whole,
)

#: Of two ranks those that repeat others, on as many or on three.
REPEATED = (*OF_PLACEMENT, placements.twenty_steps)


@pytest.mark.parametrize("part", range(2))
def test_on_two_ranks(part: int) -> None:
    cases = cases_of(placements, calls, messages, wrappers, weights, refusals, failures)
    run([case for case in cases if case not in REPEATED][part::2], 2)


@pytest.mark.long
def test_placements_on_two_ranks() -> None:
    run(REPEATED, 2)


def test_placements_on_three_ranks() -> None:
    run(OF_PLACEMENT, 3)


def test_with_data_and_tensor_parallelism_on_two_by_two_ranks() -> None:
    run([case for case in cases_of(torch_mesh_cases) if case not in OTHER_SHARDS], 4)


@pytest.mark.long
def test_other_shards_of_fsdp_on_two_by_two_ranks() -> None:
    run(OTHER_SHARDS, 4)
