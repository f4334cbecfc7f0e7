"""docs/how-to/accelerate.md: four stages print the losses of the loop without a pipeline."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked_shell import ForkedShell
from installed import ROOT, Installed

PAGE_PATH = ROOT / "docs" / "how-to" / "accelerate.md"
PAGE = PAGE_PATH.read_text()
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


def test_every_link_leads_to_a_page() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", PAGE):
        assert (PAGE_PATH.parent / target).exists(), target
