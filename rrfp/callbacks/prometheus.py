"""The figures of a run for Prometheus, which fetches them from rank 0."""

from __future__ import annotations

import socket
from contextlib import closing
from threading import Thread
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIServer

from rrfp.callbacks.base import Callback, RunBegun, RunEnded, Stall, StepEnded
from rrfp.callbacks.step_metrics import Tokens, checked_tokens, metrics
from rrfp.errors import ConfigError
from rrfp.log import get_logger
from rrfp.model.topology import Topology
from rrfp.plain import text, whole

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge

logger = get_logger(__name__)

#: Prometheus has the time of each sample itself, and ``completed`` is the number of the step.
_LEFT_OUT = ("time", "mode", "step")

#: Figures that Prometheus adds up.
_MOVED = ("sent_bytes", "received_bytes")


class Prometheus(Callback):
    """Serves the figures of the newest step to Prometheus: ``http://address:port/metrics``, from rank 0's host.

    The names are those of `rrfp.callbacks.metrics` with ``rrfp_`` in front, those of a stage with the label ``stage``:
    ``rrfp_loss``, ``rrfp_completed``, ``rrfp_blocked_input{stage="1"}``. Of an evaluation there are
    ``rrfp_evaluation_loss`` and its seconds and tokens. Counters are ``rrfp_sent_bytes_total`` and
    ``rrfp_received_bytes_total`` by stage, and ``rrfp_stalls_total``. A figure that does not exist is left out.

    The server runs from the start of the run to its end. It answers anyone who reaches it, in plain text.

    Args:
        port: of the server, 0..65535. 0 takes a free one, which the log names.
        address: on which it listens; "" is every address of the host.
        tokens: as in `JsonLines`.

    Raises:
        ConfigError: if the package ``prometheus_client`` is not installed, or for an impossible ``port`` or ``tokens``;
            by the pipeline on rank 0, where it cannot listen.
    """

    def __init__(self, port: int, *, address: str = "127.0.0.1", tokens: Tokens = None) -> None:
        try:
            import prometheus_client  # noqa: F401 - better now than in the middle of a run
        except ImportError:
            raise ConfigError(
                "rrfp.callbacks.Prometheus needs the package prometheus_client: pip install 'rrfp[prometheus]'"
            ) from None
        self._port: int = whole("port", port, 0, 65535)
        self._address = address if address == "" else text("address", address)
        self._tokens = checked_tokens(tokens)
        self._server: tuple[WSGIServer, Thread] | None = None

    def check(self, topology: Topology) -> None:
        """See `Callback`."""
        if topology.rank != 0:
            return
        try:
            places = socket.getaddrinfo(
                self._address or None, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, _, _, _, place = places[0]
            with closing(socket.create_server(place, family=family)):
                pass
        except (OSError, UnicodeError) as error:  # UnicodeError: what can be no host's name
            reason = str(getattr(error, "strerror", error)).partition(" (")[0]
            raise ConfigError(
                f"rrfp.callbacks.Prometheus cannot listen on port {self._port} of {self._address or 'this host'!r}: "
                f"{reason}; pass another port= or address="
            ) from None

    def run_begun(self, event: RunBegun) -> None:
        """See `Callback`."""
        if event.topology.rank != 0:
            return
        from prometheus_client import CollectorRegistry, Counter, start_http_server

        # One for each run: that of the whole process refuses a second pipeline's figures.
        self._registry: CollectorRegistry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._moved: dict[str, Counter] = {
            name: Counter(f"rrfp_{name}", f"Tensor bytes: {name}", ["stage"], registry=self._registry)
            for name in _MOVED
        }
        self._stalls: Counter = Counter("rrfp_stalls", "Reports of stalls", registry=self._registry)
        self._server = start_http_server(self._port, self._address, self._registry)
        logger.info("Prometheus finds this run's figures at port %d", self._server[0].server_port)

    def step_ended(self, event: StepEnded) -> None:
        """See `Callback`."""
        if self._server is not None:
            for name, value in metrics(event, self._tokens).items():
                self._show(name, value)

    def evaluation_ended(self, event: StepEnded) -> None:
        """See `Callback`."""
        if self._server is not None:
            for name, value in metrics(event, self._tokens).items():
                if name in ("loss", "seconds", "tokens_per_second"):
                    self._show(f"evaluation_{name}", value)

    def stall(self, event: Stall) -> None:
        """See `Callback`."""
        if self._server is not None:
            self._stalls.inc()

    def run_ended(self, event: RunEnded) -> None:
        """See `Callback`."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()

    def _show(self, name: str, value: float | str | None) -> None:
        from prometheus_client import Gauge

        figure, of_stage, stage = name.partition("/stage")
        if not isinstance(value, int | float) or figure in _LEFT_OUT:
            return
        if figure in _MOVED:
            self._moved[figure].labels(stage).inc(value)
            return
        if figure not in self._gauges:
            text = f"{figure.replace('_', ' ')}, of the newest {'evaluation' if 'evaluation' in figure else 'step'}"
            self._gauges[figure] = Gauge(f"rrfp_{figure}", text, ["stage"] if of_stage else [], registry=self._registry)
        gauge = self._gauges[figure]
        (gauge.labels(stage) if of_stage else gauge).set(value)
