"""The methods and sizes of the comparison; shared by its command and its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from benchmarks.shared.comparison import Comparison, Method, Runtime
from benchmarks.shared.tables import Form
from rrfp.pipeline.options import OptionArguments


def _rrfp(form: Form, *, has_sizes: bool = False, own_bytes: bool = False, **options: Any) -> Method:
    if form is not Form.WHOLE:
        options["split"] = True
    if form is Form.V:
        options["placement"] = "v"
    return Method(Runtime.RRFP, form, cast("OptionArguments", options), has_sizes, own_bytes)


TORCH_1F1B, TORCH_ZBV, TORCH_GPIPE = "torch 1F1B", "torch ZBV", "torch GPipe"
STRICT_1F1B, V_N = "strict 1f1b", "V, n"
OWN_BYTES = "n by own bytes, sizes"

#: All methods by name. Those without another remark are RRFP's, with the default hint and a split backward.
METHODS: Mapping[str, Method] = {
    TORCH_1F1B: Method(Runtime.TORCH, Form.WHOLE),
    TORCH_ZBV: Method(Runtime.TORCH, Form.V),
    STRICT_1F1B: _rrfp(Form.WHOLE, strict="1f1b"),
    "strict zb-v": _rrfp(Form.V, strict="zb-v"),
    "1f1b": _rrfp(Form.SPLIT, limit="1f1b"),
    "n": _rrfp(Form.SPLIT, limit="n"),
    "2n": _rrfp(Form.SPLIT, limit="2n"),
    "1f1b, sizes": _rrfp(Form.SPLIT, limit="1f1b", has_sizes=True),
    "n, sizes": _rrfp(Form.SPLIT, limit="n", has_sizes=True),
    "2n, sizes": _rrfp(Form.SPLIT, limit="2n", has_sizes=True),
    OWN_BYTES: _rrfp(Form.SPLIT, has_sizes=True, own_bytes=True),
    V_N: _rrfp(Form.V, limit="n"),
    TORCH_GPIPE: Method(Runtime.TORCH, Form.WHOLE),
    "strict gpipe": _rrfp(Form.WHOLE, strict="gpipe"),
    "strict zb-h1": _rrfp(Form.SPLIT, strict="zb-h1"),
    "bf, 1f1b": _rrfp(Form.WHOLE, hint="bf", limit="1f1b"),
    "bf, 2n": _rrfp(Form.WHOLE, hint="bf", limit="2n"),
    "V, n, sizes": _rrfp(Form.V, limit="n", has_sizes=True),
    "V, 2n": _rrfp(Form.V, limit="2n"),
    "strict 1f1b, zmq": _rrfp(Form.WHOLE, strict="1f1b", transport="zmq"),
    "n, zmq": _rrfp(Form.SPLIT, limit="n", transport="zmq"),
}
#: Measured where no others are asked for: all up to V, n.
DEFAULT_METHODS = tuple(METHODS)[: list(METHODS).index(V_N) + 1]

PEERS = (TORCH_1F1B, TORCH_ZBV)


def peer_in_time(method: Method) -> str:
    """The peer whose stages' tasks are as long, so that the same time lost is the same share of a step."""
    return TORCH_ZBV if method.form is Form.V else TORCH_1F1B


def peer_in_cpu(method: Method) -> str:
    """The peer with as many messages a task: two for F and B, where backward is split two for F, B and W."""
    return TORCH_1F1B if method.form is Form.WHOLE else TORCH_ZBV


@dataclass(frozen=True, slots=True)
class Settings(Comparison):
    """See `Comparison`."""

    METHODS: ClassVar[Mapping[str, Method]] = METHODS
    PEERS: ClassVar[tuple[str, ...]] = PEERS
