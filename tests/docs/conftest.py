"""What the pages' commands run with: forked processes on the checkout, and in the long test run the built wheel."""

from __future__ import annotations

import pytest
from batches import long
from fork_server import fork_server
from forked_shell import ForkedShell
from installed import Installed, installed

__all__ = ["fork_server", "installed"]


@pytest.fixture(scope="session", params=["forked", long("wheel")])
def shell(request: pytest.FixtureRequest) -> ForkedShell | Installed:
    """Runs a page's command line in a folder."""
    if request.param == "forked":
        return ForkedShell()
    wheel: Installed = request.getfixturevalue("installed")
    return wheel
