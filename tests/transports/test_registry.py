"""Transports by name, from plugins and from factories."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
import transports.makers as makers

from rrfp.errors import ConfigError
from rrfp.lab.simulated_transport import SimulatedTransport
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.registry import TRANSPORTS, create_transport
from rrfp.transports.zmq.transport import ZmqTransport


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution that offers a transport, and one name of ours, which ours keeps."""
    points = EntryPoints(
        EntryPoint(name, "rrfp.transports.inproc:InprocTransport", "rrfp.transports")
        for name in ("carrier-pigeon", "zmq")
    )
    monkeypatch.setattr("rrfp.plugins.entry_points", lambda group: points.select(group=group))


def test_own_names() -> None:
    context, _ = makers.contexts()
    assert isinstance(create_transport("inproc", context), InprocTransport)
    assert isinstance(create_transport("zmq", context), ZmqTransport)
    assert isinstance(create_transport("simulated", context), SimulatedTransport)


@pytest.mark.usefixtures("plugin")
def test_plugins_are_found_and_do_not_replace_ours() -> None:
    context, _ = makers.contexts()
    built_in = ("auto", "inproc", "shm", "zmq", "cuda_ipc", "collective", "simulated")
    assert TRANSPORTS.names() == (*built_in, "carrier-pigeon")
    assert isinstance(create_transport("carrier-pigeon", context), InprocTransport)
    assert isinstance(create_transport("zmq", context), ZmqTransport)


def test_a_class_or_factory_instead_of_a_name() -> None:
    context, _ = makers.contexts()
    assert isinstance(create_transport(InprocTransport, context), InprocTransport)
    made = create_transport(lambda given: ZmqTransport(given, "127.0.0.1"), context)
    assert made.context is context


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tcp", "transport is 'tcp', must be one of: auto"),
        (3, "transport is 3, must be a factory or one of: auto"),
        (lambda context: "no transport", r"made an object of type str, must make an rrfp Transport"),
        (lambda: None, r"must be a factory that is called with \(TransportContext\): .* takes 0 positional arguments"),
        (object, r"transport <class 'object'> must be a factory that is called with \(TransportContext\)"),
    ],
    ids=["name", "number", "factory", "without arguments", "class"],
)
def test_what_is_no_transport_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_transport(spec, makers.contexts()[0])


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="transport is 'tcp', must be one of: auto, inproc, shm, zmq, cuda_ipc, collective, simulated"
    ):
        create_transport("tcp", makers.contexts()[0])


class Pigeon:
    """Carries messages, and is no transport."""


def test_an_object_that_is_no_transport_is_named_with_the_file_of_its_class() -> None:
    with pytest.raises(ConfigError, match=r"made an object of type Pigeon \(.*test_registry.py\), must make an rrfp"):
        create_transport(lambda context: Pigeon(), makers.contexts()[0])  # type: ignore[arg-type, return-value]
