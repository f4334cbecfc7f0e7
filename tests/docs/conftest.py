"""What the pages' commands run with: forked processes on the checkout, and in the long test run the built wheel."""

from __future__ import annotations

import os

import pytest
from batches import long
from fork_server import fork_server
from forked_shell import ForkedShell
from installed import Installed, install_once

__all__ = ["fork_server"]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A fresh environment with the wheel, made once for all test processes."""
    own = tmp_path_factory.getbasetemp()
    is_one_of_many = "PYTEST_XDIST_WORKER" in os.environ
    return install_once(own.parent if is_one_of_many else own)


@pytest.fixture(scope="session", params=["forked", long("wheel")])
def shell(request: pytest.FixtureRequest) -> ForkedShell | Installed:
    """Runs a page's command line in a folder."""
    if request.param == "forked":
        return ForkedShell()
    installed: Installed = request.getfixturevalue("installed")
    return installed
