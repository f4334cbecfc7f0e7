"""docs/how-to/torch-pipelining.md, torchtitan: its script trains with the schedule of its command line."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from fork_server import fork_server, run
from installed import ROOT

__all__ = ["fork_server"]

PAGE = (ROOT / "docs" / "how-to" / "torch-pipelining.md").read_text().split("\n## torchtitan\n")[1].split("\n## ")[0]
LINES, START, OPTIONS, _ = re.findall(r"```python.*?\n(.*?)```", PAGE, re.DOTALL)
(VALUE,) = re.findall(r"^    (--parallelism\.\S+ RRFP)$", PAGE, re.MULTILINE)


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
@pytest.mark.long
@pytest.mark.timeout(150)
def test_the_script_trains(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import integrations.titan_on_cpu\n" + LINES + OPTIONS + START)
    chosen = ["--module", "integrations.titan_parts", "--config", "interleaved", *VALUE.split()]
    ended = run(script, *chosen, "--dump_folder", str(tmp_path), ranks=2, timeout_s=140)
    assert [each.code for each in ended] == [0, 0], "\n".join(map(str, ended))
    for each in ended:
        printed = each.output + each.errors
        assert "Using pipeline schedule RRFP with 8 microbatches and 4 stages." in printed
        assert re.findall(r"step:.*?(\d)", re.sub("\x1b.*?m", "", printed))[-1] == "3"
        assert "Training completed" in printed
