"""docs/how-to/megatron.md: the flags that it lists are those that are refused, and its example trains."""

from __future__ import annotations

import re
from importlib.util import find_spec
from itertools import pairwise

import pytest
from fork_server import fork_server, printed
from installed import ROOT

from rrfp.integrations.megatron.checks import REFUSED, WEIGHT_GATHERING

__all__ = ["fork_server"]

PAGE = (ROOT / "docs" / "how-to" / "megatron.md").read_text(encoding="utf-8")
(COMMAND,) = re.findall(r"^    torchrun --standalone --nproc-per-node (\d+ \S+)$", PAGE, re.MULTILINE)


def test_every_flag_that_is_refused_stands_there_with_its_reason() -> None:
    section = PAGE.split("\n## Refused\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)`(?: above 1)? \| (.+) \|$", section, re.MULTILINE))
    assert {name: reason for name, reason in rows.items() if name not in WEIGHT_GATHERING} == dict(REFUSED)
    assert set(WEIGHT_GATHERING) <= set(rows)


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_example_prints_the_losses_of_megatrons_schedule() -> None:
    ranks, script = COMMAND.split()
    output, stock = (printed(ROOT / script, *more, ranks=int(ranks), timeout_s=85) for more in ((), ("--stock",)))
    assert output == stock
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", output)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 1
    assert all(later < earlier for earlier, later in pairwise(losses))
