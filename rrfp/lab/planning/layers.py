"""What each layer of a model takes, as `rrfp.split(..., measure=True)` has measured it, and layouts of the layers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from rrfp.costs.table import CostTable, Matrix
from rrfp.errors import ConfigError
from rrfp.integrations.splitting.cuts import LayerCosts
from rrfp.model.placement import Placement
from rrfp.plain import Reader, fields_of, number, one_of, read_json, shown, text, whole


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """Where the layers of a model are."""

    where: Placement
    #: The first layer of each virtual stage but the first.
    cuts: tuple[int, ...]

    def bounds(self, layers: int) -> list[tuple[int, int]]:
        """For each virtual stage its first layer, and the first one behind it."""
        return [*pairwise((0, *self.cuts, layers))]

    def pieces(self, layers: int) -> list[range]:
        """For each virtual stage its pieces: layer n is piece n + 1; what is ahead of layer 0 is the first piece."""
        parts = [range(start + 1, stop + 1) for start, stop in self.bounds(layers)]
        first, *_ = parts
        parts[0] = range(0, first.stop)
        parts[-1] = range(parts[-1].start, layers + 2)
        return parts

    def counts(self, layers: int) -> str:
        """The numbers of layers of the virtual stages: ``5 4*14 3``."""
        groups = [(n, len([*same])) for n, same in groupby(stop - start for start, stop in self.bounds(layers))]
        return " ".join(f"{n}" if times == 1 else f"{n}*{times}" for n, times in groups)

    @property
    def placement(self) -> str:
        if self.where.chunks == 1:
            return "one chunk"
        return f"{self.where.chunks} chunks, {'V' if self.where.layout == 'v' else 'looped'}"


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """The pieces of a model, layers and what is ahead of and behind them; and how the recorded job had cut it."""

    layout: ModelLayout
    #: The names of each piece's modules in the whole model.
    names: tuple[tuple[str, ...], ...]
    #: Seconds and bytes of each piece, on the sample: one entry a piece.
    forward: Matrix
    backward: Matrix
    num_bytes: Matrix

    @property
    def count(self) -> int:
        return len(self.names) - 2

    def even(self, where: Placement) -> tuple[int, ...]:
        """Cuts into parts of equally many layers; the first parts have one more where they do not divide."""
        parts = where.num_virtual_stages
        return tuple(-(-part * self.count // parts) for part in range(1, parts))

    def costs(self, microbatches: int) -> CostTable:
        """A step of microbatches that are all like the sample, on the job's own layout; messages take no time."""
        where, parts = self.layout.where, self.layout.pieces(self.count)
        rows: Any = {
            name: np.repeat([[column[part].sum()] for part in parts], microbatches, axis=1)
            for name, column in (("forward", self.forward), ("backward", self.backward), ("held", self.num_bytes))
        }
        none = np.zeros((len(parts) - 1, microbatches))
        shape = where.stages, where.chunks, where.layout, microbatches
        return CostTable(*shape, weight=None, latency_forward=none, latency_backward=none, **rows)

    def megatron(self, layout: ModelLayout) -> str | None:
        """The argument ``--pipeline-model-parallel-layout``; None of a V, which it has no word for."""
        if layout.where.chunks > 1 and layout.where.layout == "v":
            return None
        counts = [stop - start for start, stop in layout.bounds(self.count)]
        parts = ["t" if count == 1 else f"t*{count}" for count in counts]
        parts[0], parts[-1] = f"E{parts[0]}", f"{parts[-1]}L"
        return "|".join(parts)

    def torchtitan(self, layout: ModelLayout) -> list[list[str]]:
        """The setting ``module_fqns_per_model_part``, with its names for a decoder's embedding, norm and head."""
        parts = [[f"layers.{n}" for n in range(start, stop)] for start, stop in layout.bounds(self.count)]
        parts[0].insert(0, "tok_embeddings")
        parts[-1] += ["norm", "lm_head"]
        return parts

    @property
    def is_decoder(self) -> bool:
        return bool(self.names[0] and self.names[-1])


def balanced(seconds: Sequence[float] | Matrix, where: Placement, slow: Sequence[float]) -> tuple[int, ...]:
    """The cuts whose slowest stage is fastest, by the seconds of each piece."""
    before, *layers, after = map(float, seconds)
    return LayerCosts(before, layers, after).balanced(where, slow)


def read_layers(path: str | os.PathLike[str]) -> Layers:
    """Read the file of `Split.save_layers`; a ConfigError names the file and the field."""
    name = os.fspath(path)
    document = read_json(path)
    if not isinstance(document, dict) or "layers" not in document:
        raise ConfigError(f"{name}: must be a JSON object with layers, as stages.save_layers of rrfp.split writes it")

    def fault(field: str, reason: str) -> ConfigError:
        return ConfigError(f"{name}: {field} {reason}")

    fields = fields_of(document, _FIELDS, error=fault)
    pieces = [fields["before"], *fields["layers"], fields["after"]]
    where = Placement(fields["stages"], fields["chunks"], fields["placement"])
    bounds = (0, *fields["cuts"], len(fields["layers"]))
    if len(bounds) != where.num_virtual_stages + 1 or any(start >= stop for start, stop in pairwise(bounds)):
        raise fault("cuts", f"is {shown(fields['cuts'])}, must leave {where.num_virtual_stages} parts a layer or more")
    columns: Any = {column: np.array([piece[column] for piece in pieces]) for column in ("forward", "backward")}
    num_bytes = np.array([float(piece["num_bytes"]) for piece in pieces])
    return Layers(
        ModelLayout(where, tuple(fields["cuts"])), tuple(p["names"] for p in pieces), num_bytes=num_bytes, **columns
    )


def _list(reader: Reader, field: str, value: object, *, error: Any) -> list[Any]:
    if not isinstance(value, list):
        raise error(field, f"is {shown(value)}, must be a list")
    return [reader(f"{field}[{index}]", each, error=error) for index, each in enumerate(value)]


def _piece(field: str, value: object, *, error: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise error(field, f"is {shown(value)}, must be an object")
    return fields_of(value, _PIECE, error=lambda name, reason: error(f"{field}.{name}", reason))


def _names(field: str, value: object, *, error: Any) -> tuple[str, ...]:
    def any_text(name: str, each: object, *, error: Any) -> str:
        return "" if each == "" else text(name, each, error=error)

    return tuple(_list(any_text, field, value, error=error))


_SECONDS = partial(number, least=0)
_PIECE: dict[str, Reader] = {"names": _names, "forward": _SECONDS, "backward": _SECONDS, "num_bytes": whole}
_COUNT = partial(whole, least=1)
_FIELDS: dict[str, Reader] = {
    "stages": _COUNT,
    "chunks": _COUNT,
    "placement": partial(one_of, ("looped", "v")),
    "cuts": partial(_list, _COUNT),
    "before": _piece,
    "layers": partial(_list, _piece),
    "after": _piece,
}
