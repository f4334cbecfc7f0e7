"""The figures of a run as Prometheus fetches them."""

from __future__ import annotations

import re
import socket
import sys
from typing import Any
from urllib.request import urlopen

import pytest
from callbacks.steps import RUN_ENDED, begun, ended

from rrfp import Topology
from rrfp.callbacks import Prometheus, Stall
from rrfp.errors import ConfigError
from rrfp.model.tasks import Mode


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number: int = server.getsockname()[1]
        return number


def fetched(port: int) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in samples if not name.endswith("_created")}


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"needs the package prometheus_client: pip install 'rrfp\[prometheus\]'"):
        Prometheus(9400)


def test_it_serves_the_newest_step_and_sums_what_was_moved(port: int) -> None:
    callback = Prometheus(port, tokens=10)
    callback.check(Topology(0, 2))
    callback.run_begun(begun())
    assert fetched(port) == {"rrfp_stalls_total": 0.0}
    for step, loss in enumerate((4.0, 3.0)):
        callback.step_ended(ended(step, loss=loss))
    callback.evaluation_ended(ended(2, loss=0.5, mode=Mode.FORWARD))
    callback.stall(Stall(1000.0, 2, "rank 1"))
    figures = fetched(port)
    assert figures["rrfp_loss"] == 3.0
    assert figures["rrfp_evaluation_loss"] == 0.5
    assert figures["rrfp_completed"] == 2.0
    assert figures["rrfp_tokens_per_second"] == figures["rrfp_evaluation_tokens_per_second"] == 320.0
    assert figures['rrfp_blocked_input{stage="1"}'] == 0.25
    assert figures['rrfp_sent_bytes_total{stage="0"}'] == 2 << 20
    assert figures["rrfp_stalls_total"] == 1.0
    assert not [name for name in figures if re.match("rrfp_(time|mode|step$|held_bytes_limit)", name)]
    callback.run_ended(RUN_ENDED)
    with pytest.raises(OSError, match="refused"):
        fetched(port)


def test_another_run_serves_its_own_figures(port: int) -> None:
    callback = Prometheus(port)
    for loss in (2.0, 1.0):
        callback.run_begun(begun())
        assert "rrfp_loss" not in fetched(port)
        callback.step_ended(ended(loss=loss))
        assert fetched(port)["rrfp_loss"] == loss
        callback.run_ended(RUN_ENDED)


def test_another_rank_serves_nothing(port: int) -> None:
    callback = Prometheus(port)
    callback.check(Topology(1, 2))
    callback.run_begun(begun(rank=1))
    callback.step_ended(ended())
    with pytest.raises(OSError, match="refused"):
        fetched(port)
    callback.run_ended(RUN_ENDED)


def test_a_port_that_is_taken_or_impossible_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on port {port} of '127.0.0.1': .*in use; pass another"):
            Prometheus(port).check(Topology(0, 2))
    with pytest.raises(ConfigError, match=r"port is 70000, must be a whole number 0\.\.65535"):
        Prometheus(70000)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (3, "address is 3, must be a string that is not empty"),
        (None, "address is None, must be"),
        ("\ud800", "cannot listen on port 0 of"),
    ],
)
def test_an_impossible_address_is_refused(address: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Prometheus(0, address=address).check(Topology(0, 1))
