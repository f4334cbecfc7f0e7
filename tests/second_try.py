"""Runs a test again that failed while the machine stood still, and says so at the end of the run.

Such a failure says nothing about the code. One in whose time the machine did not stand still counts at once, and so
does the third.
"""

from __future__ import annotations

import sys
from itertools import chain

import pytest
from _pytest.runner import runtestprotocol
from standstill import StandstillWatch

#: How often a test is run at most.
TRIES = 3

#: Under this name the reports of a test carry the standstills for which it ran again.
PROPERTY = "ran again, since the machine stood still"

#: The standstills of each try of a test that failed.
FOUND = pytest.StashKey[list[list[float]]]()


class SecondTry:
    """The plugin; the watch begins with the first test of a process, so a controller of xdist has none."""

    def __init__(self) -> None:
        self._watch: StandstillWatch | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        found = item.stash.setdefault(FOUND, [])
        if not found:
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        if self._watch is None:
            self._watch = StandstillWatch()
        self._watch.forget()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if len(found) + 1 < TRIES and any(report.failed for report in reports) and (late := self._watch.take()):
            found.append(late)
            item.session._setupstate.teardown_exact(None)  # a fixture that failed is set up anew
            # By the hook, so that every try has a time limit of its own.
            return item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        if found:
            seconds = ", ".join(f"{each:.2f} s" for each in chain(*found))
            for report in reports:
                report.user_properties = [*report.user_properties, (PROPERTY, seconds)]
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        reports = [each for every in terminalreporter.stats.values() for each in every]
        lines = {
            f"{report.nodeid}: {seconds}"
            for report in reports
            for name, seconds in getattr(report, "user_properties", ())
            if name == PROPERTY
        }
        if lines:
            terminalreporter.section(PROPERTY)
            for line in sorted(lines):
                terminalreporter.write_line(line)

    def pytest_unconfigure(self) -> None:
        if self._watch is not None:
            self._watch.close()


def register(config: pytest.Config) -> None:
    """Where the machine can be watched."""
    if sys.platform == "linux":
        config.pluginmanager.register(SecondTry())
