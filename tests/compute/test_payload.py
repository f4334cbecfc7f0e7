"""What may travel between stages, how it arrives, and what is refused in words that help."""

from __future__ import annotations

import importlib.util
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from rrfp.compute.payload import Payload
from rrfp.compute.read_only import ReadOnly
from rrfp.errors import ProtocolError, StageError


class Hidden(NamedTuple):
    h: Tensor
    c: Any = None


class Outer:
    class Inner(NamedTuple):
        x: Tensor


Odd = namedtuple("AnotherName", ["x"])  # type: ignore[name-match]


def arrived(value: Any) -> Any:
    """``value`` as another rank gets it."""
    payload = Payload.pack(value)
    return Payload(payload.tensors, msgpack.unpackb(msgpack.packb(payload.structure))).unpack()


def test_a_named_tuple_arrives_as_the_class_that_it_was() -> None:
    x = torch.ones(2)
    found = arrived({"state": [Hidden(x, Outer.Inner(x)), (x, 3)]})["state"]
    assert type(found[0]) is Hidden
    assert found[0].h is x
    assert type(found[0].c) is Outer.Inner
    assert type(found[1]) is tuple


@pytest.mark.parametrize(
    "structure",
    [
        [],
        ["t"],
        ["t", 1],
        ["t", -1],
        ["t", True],
        ["t", "0"],
        ["v"],
        ["{", 5],
        ["{", ["a", "b"], ["t", 0]],
        ["{", [[]], ["t", 0]],
        ["(", 5],
        ["n", "x:y"],
        5,
    ],
)
def test_a_nesting_that_is_none_is_refused(structure: Any) -> None:
    with pytest.raises(ProtocolError, match="the nesting of 1 tensors that arrived cannot be read"):
        Payload((torch.ones(2),), structure).unpack()


def test_a_packed_sequence_arrives_as_one() -> None:
    packed = pack_padded_sequence(torch.randn(3, 4, 2), torch.tensor([2, 4, 1]), batch_first=True, enforce_sorted=False)
    found = arrived(packed)
    assert type(found) is PackedSequence
    for left, right in zip(pad_packed_sequence(found), pad_packed_sequence(packed), strict=True):
        assert torch.equal(left, right)


def test_other_derived_classes_arrive_as_plain_ones() -> None:
    assert type(arrived(OrderedDict(x=1))) is dict
    assert type(arrived(torch.ones(2, 2).max(1))) is tuple


def test_a_write_into_a_named_tuple_is_told_by_the_field() -> None:
    payload = Payload.pack((1, Hidden(torch.ones(1), [torch.ones(1)])))
    watch = ReadOnly([payload], "received", [1])
    payload.unpack()[1].c[0].add_(1)
    assert watch.written() == "tensor [1].c[0] received from virtual stage 1"


def test_a_class_that_others_cannot_find_is_refused_before_anything_is_sent() -> None:
    class Local(NamedTuple):
        x: Tensor

    for value in (Local(torch.ones(1)), Odd(torch.ones(1))):
        with pytest.raises(StageError, match=r"output\[0\] is a named tuple .*top level .*, or return a tuple"):
            Payload.pack([value])


class Fewer(NamedTuple):
    h: Tensor


ATTACKS: dict[str, tuple[Any, str]] = {
    "a module that is not loaded": ("antigravity:Hidden", "not loaded"),
    "no named tuple": ("os:system", "not loaded"),
    "a plain tuple": ("builtins:tuple", "not loaded"),
    "an attribute of an instance": (f"{__name__}:ATTACKS.x", "not loaded"),
    "no name": (None, "not loaded"),
    "nothing": ("", "not loaded"),
    "other fields": (f"{__name__}:Fewer", r"arrived with the fields \['h', 'c'\], here it has \['h'\]"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_name_from_the_wire_loads_nothing_and_calls_nothing(name: str) -> None:
    claim, message = ATTACKS[name]
    before = set(sys.modules)
    with pytest.raises(StageError, match=message):
        Payload((), ["n", claim, ["h", "c"], ["v", 1], ["v", 2]]).unpack()
    assert set(sys.modules) == before


def test_fields_and_items_must_agree() -> None:
    for fields, items in ((["h", "c"], [["v", 1]]), (["h"], [["v", 1]]), (7, [["v", 1], ["v", 2]])):
        with pytest.raises(StageError, match="arrived with the fields"):
            Payload((), ["n", f"{__name__}:Hidden", fields, *items]).unpack()


def test_a_lazy_module_stays_unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeper.py").write_text("raise RuntimeError('woken')")
    spec = importlib.util.spec_from_file_location("sleeper", tmp_path / "sleeper.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "sleeper", module)
    with pytest.raises(StageError, match="not loaded"):
        Payload((), ["n", "sleeper:Hidden", ["h"], ["v", 1]]).unpack()


def test_a_constructor_of_its_own_is_not_called() -> None:
    found = arrived(Checked(torch.ones(1), None))
    assert type(found) is Checked


class Checked(Hidden):
    __slots__ = ()

    def __new__(cls, h: Tensor, *rest: Any) -> Checked:
        assert rest, "called as its own class wants it"
        return tuple.__new__(cls, (h, *rest))


@dataclass
class Record:
    x: Tensor


class Scaled(Tensor):
    """A tensor with an attribute, which no message carries."""

    scale: float


NOT_DENSE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "coo": (lambda x: x.to_sparse(), r"output is a torch.sparse_coo tensor; .* return output.to_dense\(\)"),
    "nested": (lambda x: {"y": torch.nested.as_nested_tensor([x, x])}, r"output\['y'\] is a nested tensor; .*unbind"),
    "quantized": (lambda x: [torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)], r"output\[0\] is a quantized tensor"),
    "in a named tuple": (lambda x: Hidden(x, x.to_sparse()), r"output\.c is a torch.sparse_coo tensor"),
    "a derived class": (
        lambda x: [x.as_subclass(Scaled)],
        rf"output\[0\] is a {__name__}\.Scaled, a class .*: return output\[0\]\.as_subclass\(torch\.Tensor\)",
    ),
    "no tensor": (Record, "output is of type Record; between stages may travel tensors"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", NOT_DENSE)
def test_what_cannot_travel_is_refused_by_its_path_with_the_remedy(name: str) -> None:
    make, message = NOT_DENSE[name]
    with pytest.raises(StageError, match=message):
        Payload.pack(make(torch.eye(2)))


def test_a_parameter_and_a_buffer_are_ordinary_tensors() -> None:
    for value in (torch.nn.Parameter(torch.ones(1)), torch.nn.Buffer(torch.ones(1))):
        assert Payload.pack(value).tensors == (value,)
