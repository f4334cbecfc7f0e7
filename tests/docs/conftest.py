"""The wheel that the pages' commands run with, built once for all test processes."""

from __future__ import annotations

import os

import pytest
from installed import Installed, install_once


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    own = tmp_path_factory.getbasetemp()
    is_one_of_many = "PYTEST_XDIST_WORKER" in os.environ
    return install_once(own.parent if is_one_of_many else own)
