"""The methods and sizes of the comparison; shared by its command and its workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from benchmarks.integrations import settings as integrations
from benchmarks.integrations.settings import Place, Way, megatron_way, rrfp_way, torch_way
from benchmarks.peers.orders import order_alone
from benchmarks.shared.comparison import Cell, Runtime, Turn
from benchmarks.shared.tables import Form
from rrfp.costs import CostTable
from rrfp.memory.admission import AUTO
from rrfp.pipeline.options import OptionArguments


def _pipeline(form: Form, *, has_sizes: bool = False, own_bytes: bool = False, **options: Any) -> Way:
    """`rrfp.Pipeline`."""
    if form.is_split:
        options["split"] = True
    if form is Form.V:
        options["placement"] = "v"
    return Way(Runtime.RRFP, form, cast("OptionArguments", options), has_sizes, own_bytes, place=Place.PIPELINE)


TORCH_GPIPE, TORCH_1F1B, TORCH_INTERLEAVED, TORCH_ZBV = "torch GPipe", "torch 1F1B", "torch interleaved", "torch ZBV"
MEGATRON_1F1B, MEGATRON_INTERLEAVED, DEEPSPEED_1F1B = "Megatron 1F1B", "Megatron interleaved", "DeepSpeed 1F1B"
STRICT_1F1B, V_N = "strict 1f1b", "V, n"
OWN_BYTES = "n by own bytes, sizes"

#: The other systems' schedules.
PEERS: Mapping[str, Way] = {
    TORCH_GPIPE: torch_way("ScheduleGPipe", Form.WHOLE),
    TORCH_1F1B: torch_way("Schedule1F1B", Form.WHOLE),
    TORCH_INTERLEAVED: torch_way("ScheduleInterleaved1F1B", Form.LOOPED),
    TORCH_ZBV: torch_way("ScheduleZBVZeroBubble", Form.V),
    MEGATRON_1F1B: megatron_way(Form.WHOLE),
    MEGATRON_INTERLEAVED: megatron_way(Form.LOOPED),
    DEEPSPEED_1F1B: Way(Runtime.DEEPSPEED, Form.WHOLE, place=Place.LAYERS),
}
#: Those that run 1F1B.
PEERS_OF_1F1B = (TORCH_1F1B, MEGATRON_1F1B, DEEPSPEED_1F1B)

#: RRFP's, with the default hint and a split backward where the name says nothing else; "on" names another's stages.
OWN: Mapping[str, Way] = {
    STRICT_1F1B: _pipeline(Form.WHOLE, strict="1f1b"),
    "bf, 2n": _pipeline(Form.WHOLE, hint="bf", limit="2n"),
    "bfw, 2n": _pipeline(Form.SPLIT, hint="bfw", limit="2n"),
    "1f1b": _pipeline(Form.SPLIT, limit="1f1b"),
    "n": _pipeline(Form.SPLIT, limit="n"),
    "2n": _pipeline(Form.SPLIT, limit="2n"),
    "auto": _pipeline(Form.SPLIT, limit=AUTO),
    "1f1b, sizes": _pipeline(Form.SPLIT, limit="1f1b", has_sizes=True),
    "n, sizes": _pipeline(Form.SPLIT, limit="n", has_sizes=True),
    "2n, sizes": _pipeline(Form.SPLIT, limit="2n", has_sizes=True),
    V_N: _pipeline(Form.V, limit="n"),
    "V, n, sizes": _pipeline(Form.V, limit="n", has_sizes=True),
    "on torch's stages, whole, 1f1b": rrfp_way(Form.WHOLE, "1f1b"),
    "on torch's stages, n": rrfp_way(Form.SPLIT, "n"),
    "on torch's stages, looped": rrfp_way(Form.LOOPED),
    "on torch's stages, V, n": rrfp_way(Form.V, "n"),
    "on Megatron's chunks, whole": rrfp_way(Form.WHOLE, place=Place.CHUNKS),
    "on Megatron's chunks, looped": rrfp_way(Form.LOOPED, place=Place.CHUNKS),
}

#: Measured only where they are asked for by name.
FURTHER: Mapping[str, Way] = {
    "strict gpipe": _pipeline(Form.WHOLE, strict="gpipe"),
    "strict zb-h1": _pipeline(Form.SPLIT, strict="zb-h1"),
    "strict zb-v": _pipeline(Form.V, strict="zb-v"),
    "bf, 1f1b": _pipeline(Form.WHOLE, hint="bf", limit="1f1b"),
    "bfw, 1f1b": _pipeline(Form.SPLIT, hint="bfw", limit="1f1b"),
    OWN_BYTES: _pipeline(Form.SPLIT, has_sizes=True, own_bytes=True),
    "V, 2n": _pipeline(Form.V, limit="2n"),
    "strict 1f1b, zmq": _pipeline(Form.WHOLE, strict="1f1b", transport="zmq"),
    "n, zmq": _pipeline(Form.SPLIT, limit="n", transport="zmq"),
}

METHODS: Mapping[str, Way] = {**PEERS, **OWN, **FURTHER}
FULL_METHODS = (*PEERS, *OWN)
HEADLINE_METHODS = (
    TORCH_1F1B,
    TORCH_ZBV,
    MEGATRON_1F1B,
    DEEPSPEED_1F1B,
    STRICT_1F1B,
    "bf, 2n",
    "1f1b",
    "n",
    "2n",
    "n, sizes",
    V_N,
)

#: Steps of ``limit="auto"`` that are not measured: it goes by the newest ones, at the table's own durations.
UNMEASURED = 3


def peer_in_time(way: Way) -> str:
    """The peer on the same stages, or else torch's, with tasks as long: the same time lost is the same share."""
    if way.place is Place.CHUNKS:
        return MEGATRON_1F1B if way.form.chunks == 1 else MEGATRON_INTERLEAVED
    return {Form.V: TORCH_ZBV, Form.LOOPED: TORCH_INTERLEAVED}.get(way.form, TORCH_1F1B)


def peer_in_cpu(way: Way) -> str:
    """The same, with as many messages a task: two for F and B, where backward is split two for F, B and W."""
    return TORCH_ZBV if way.form.is_split else peer_in_time(way)


@dataclass(frozen=True, slots=True)
class Settings(integrations.Settings):
    """See `Comparison`.

    Attributes:
        plan: the rounds of each cell, as (profile, jitter, number), in place of ``rounds`` of all cells.
    """

    METHODS: ClassVar[Mapping[str, Way]] = METHODS
    PEERS: ClassVar[tuple[str, ...]] = tuple(PEERS)

    plan: tuple[tuple[str, str, int], ...] = ()

    def turns(self) -> Iterator[Turn]:
        """All steps in order: the methods alternate, and the first one changes from one round to the next."""
        for method in self.methods:
            profile, jitter, _ = self.plan[0]
            cell = Cell(self.stages, profile, jitter)
            yield Turn(cell, 0, method)
            if self.METHODS[method].options.get("limit") == AUTO:
                yield from (Turn(cell, -number, method) for number in range(1, 1 + UNMEASURED))
        for index, (profile, jitter, number) in enumerate(self.plan):
            first = index % len(self.methods)
            for method in (*self.methods[first:], *self.methods[:first]):
                if self.METHODS[method].runs(profile):
                    yield Turn(Cell(self.stages, profile, jitter), number, method)

    def last_turns(self) -> Iterator[Turn]:
        """The last step of each round."""
        measured = [turn for turn in self.turns() if turn.number > 0]
        rounds = {(turn.cell, turn.number): turn for turn in measured}
        return iter(rounds.values())

    def table(self, turn: Turn, form: Form | None = None) -> CostTable:
        """See `Comparison.table`; steps that are not measured have negative numbers."""
        return integrations.Settings.table(self, turn._replace(number=abs(turn.number)), form)

    def order_alone(self, turn: Turn) -> float | None:
        """See `Comparison.order_alone`."""
        return order_alone(self, turn)
