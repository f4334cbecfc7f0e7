"""The values that ranks compare before they start, and the line that says what they agreed on."""

from __future__ import annotations

import platform
from typing import Literal, cast

import torch

from rrfp.compute.devices.base import Device
from rrfp.core.graph import Graph
from rrfp.core.topology import Topology
from rrfp.log import get_logger
from rrfp.pipeline.method import Method, name_of
from rrfp.pipeline.options import Options, common_options
from rrfp.pipeline.partition import Partition
from rrfp.runtime.handshake import Terms
from rrfp.version import __version__

logger = get_logger(__name__)


def common_terms(options: Options, method: Method, partition: Partition, topology: Topology) -> Terms:
    """The values that must be the same on all ranks of the job."""
    placement, dims, model = partition.graph.placement, _dims_text(topology), partition.model
    common = {name: options[cast("Literal['seed']", name)] for name in common_options()}
    return {
        "stages": placement.stages,
        "chunks": placement.chunks if model is None else None,
        "graph": "" if model is None else str(model.declared),
        "mesh": dims,
        "coordinate": ", ".join(topology.mesh.coordinate) if dims else "",
        **common,
        "hint": method.hint_name,
        "limit": method.limit_name,
        "transport": _transport_name(options),
        "version": __version__,
    }


def announce(options: Options, method: Method, graph: Graph, topology: Topology, device: Device | None) -> None:
    """Log one line: ranks, method, transport, this rank's device and versions."""
    dims = _dims_text(topology)
    logger.info(
        "%d rank(s)%s, %s, %s, backward %s, transport %s, rank 0 on %s; rrfp %s, torch %s, Python %s",
        topology.world,
        f" ({dims})" if dims else "",
        f"{graph.placement.chunks} chunk(s) each" if not graph.names else f"virtual stages {', '.join(graph.names)}",
        method,
        "split" if any(graph.split) else "whole",
        _transport_name(options),
        "cpu" if device is None else device.name,
        __version__,
        torch.__version__,
        platform.python_version(),
    )
    method.warn_unless_split()


def _transport_name(options: Options) -> str:
    transport = options["transport"]
    return transport if isinstance(transport, str) else name_of(transport)


def _dims_text(topology: Topology) -> str:
    """The dimensions of the mesh; empty where a stage has one rank."""
    dims = topology.mesh.dims
    return ", ".join(f"{name} {size}" for name, size in dims) if len(dims) > 1 else ""
