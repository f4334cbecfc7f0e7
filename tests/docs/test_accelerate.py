"""docs/how-to/trainer.md, accelerate: four stages print the losses of the loop without a pipeline."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked_shell import ForkedShell
from installed import ROOT, Installed

PAGE = (ROOT / "docs" / "how-to" / "trainer.md").read_text().split("\n## accelerate\n")[1].split("\n## ")[0]
FILES = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))
COMMANDS = re.findall(r"^    \$ (.+)$", PAGE, re.MULTILINE)


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^ *loss (\S+)$", text, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_four_stages_print_what_the_plain_loop_does(shell: ForkedShell | Installed, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    plain, ranks = (losses(shell.printed(command, tmp_path)) for command in COMMANDS)
    assert len(plain) == 6
    # In bfloat16 a product of fewer rows may be rounded otherwise.
    assert ranks == pytest.approx(plain, abs=1e-3)
    assert losses(PAGE) == pytest.approx([plain[0], ranks[0]], abs=1e-3)
