"""The files of a checkpoint: damage is named, nothing in them is executed, and other programs can read them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import pickle
import random
import resource
import shutil
import subprocess
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import long
from torch import nn
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from rrfp import checkpoint
from rrfp.checkpoint import plain
from rrfp.errors import ConfigError, RrfpError

SIZE = 8


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module and its optimizer after a step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = nn.Linear(SIZE, SIZE)
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return module, optimizer


def state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of both."""
    values = dict(module.state_dict())
    for name, parameter in module.named_parameters():
        values |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return values


def is_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


def sum_up(path: Path) -> None:
    """As whoever changes files can."""
    sums = [(hashlib.sha256(file.read_bytes()).hexdigest(), file.name) for file in path.iterdir()]
    (path / "SHA256SUMS").write_text("".join(f"{sum_}  {name}\n" for sum_, name in sums if name != "SHA256SUMS"))


# --- Damage ------------------------------------------------------------------


def flip(data: bytes, draw: random.Random) -> bytes:
    index = draw.randrange(len(data))
    return data[:index] + bytes([data[index] ^ (1 << draw.randrange(8))]) + data[index + 1 :]


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def zero(data: bytes, draw: random.Random) -> bytes:
    index = draw.randrange(len(data))
    return data[:index] + bytes(min(512, len(data) - index)) + data[index + 512 :]


def empty(data: bytes, draw: random.Random) -> bytes:
    return b""


def loaded_or_error(path: Path, *into: Any) -> tuple[checkpoint.Loaded | None, str]:
    try:
        return checkpoint.load(path.parent / "none", *into, path=path), ""
    except RrfpError as error:
        return None, str(error)


@pytest.mark.parametrize("tries", [50, long(150)])
def test_damage_is_named_or_does_no_harm(tmp_path: Path, tries: int) -> None:
    module, optimizer = trained()
    whole = checkpoint.save(tmp_path / "runs", module, optimizer, step=1, extra=list(range(99)))
    names, draw, harmless = sorted(file.name for file in whole.iterdir()), random.Random(20261123), 0
    assert names == [".metadata", "SHA256SUMS", "__0_0.distcp"]
    for number in range(tries):
        path = shutil.copytree(whole, tmp_path / f"{number}")
        file, damage = path / draw.choice(names), draw.choice([flip, cut, zero, empty, None])
        if damage is None:
            file.unlink()
        else:
            file.write_bytes(damage(file.read_bytes(), draw))
        other, own = trained(1)
        loaded, text = loaded_or_error(path, other, own)
        if loaded is None:
            assert file.name in text, (damage, file.name, text)
            assert "\n" not in text
        else:
            assert is_same(state(other, own), state(module, optimizer)), (damage, file.name)
            assert loaded.extra == list(range(99))
            harmless += 1
        shutil.rmtree(path)
    assert harmless < tries / 10


def test_a_disk_that_is_full_in_the_middle_of_a_file_is_the_systems_own_word(tmp_path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))  # writing fails there, as on a full disk
    try:
        with pytest.raises(RrfpError, match=r"cannot be written: rank 0: OSError: \[Errno 27\] File too large"):
            checkpoint.save(tmp_path, nn.Linear(200, 200), step=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def test_an_error_names_the_remedy_of_lost_digests(tmp_path: Path) -> None:
    module, optimizer = trained()
    path = checkpoint.save(tmp_path, module, optimizer, step=1)
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=path, check=True)
    (path / "SHA256SUMS").unlink()
    with pytest.raises(
        RrfpError, match="SHA256SUMS is not there: sha256sum makes it anew, if you trust the other files"
    ):
        checkpoint.load(tmp_path, module, optimizer)
    sums = subprocess.run("sha256sum .metadata *.distcp", shell=True, cwd=path, check=True, capture_output=True)
    (path / "SHA256SUMS").write_bytes(sums.stdout)
    assert checkpoint.load(tmp_path, module, optimizer) is not None


def test_only_the_files_that_are_read_must_be_whole(tmp_path: Path) -> None:
    """As where a part of a checkpoint was copied."""
    module, optimizer = trained()
    path = checkpoint.save(tmp_path, module, optimizer, step=1)
    text = (path / "SHA256SUMS").read_text()
    (path / "SHA256SUMS").write_text(text + f"{'0' * 64}  __1_0.distcp\n")
    assert checkpoint.load(tmp_path, module, optimizer) is not None


def test_torch_converts_a_checkpoint(tmp_path: Path) -> None:
    module, optimizer = trained()
    path = checkpoint.save(tmp_path / "runs", module, optimizer, step=3, extra={"epoch": 1})
    dcp_to_torch_save(path, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(found["model.weight"], module.get_parameter("weight"))
    assert found["step"] == 3
    assert found["optimizer.param_groups.weight.lr"] == optimizer.param_groups[0]["lr"]
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        part = _load_state_dict_from_keys({"model.bias"}, checkpoint_id=path)
    assert list(part) == ["model.bias"]


# --- Code --------------------------------------------------------------------


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self._made),)


class Thing:
    """Harmless, and no plain data."""

    def __init__(self) -> None:
        self.epoch = 3


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def with_item(path: Path, name: str, content: bytes) -> None:
    """Replace what the data file has for one entry; the other files follow."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    old, new = (path / "__0_0.distcp").read_bytes(), io.BytesIO()
    for index, place in metadata.storage_data.items():
        item = content if index.fqn == name else old[place.offset : place.offset + place.length]
        place.offset, place.length = new.tell(), new.write(item)
    (path / "__0_0.distcp").write_bytes(new.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    sum_up(path)


@pytest.mark.parametrize("write", [saved, pickle.dumps])
def test_no_entry_of_a_checkpoint_is_executed(write: Callable[[object], bytes], tmp_path: Path) -> None:
    module, optimizer = trained()
    whole = checkpoint.save(tmp_path / "runs", module, optimizer, step=1, extra=1)
    names = sorted(pickle.loads((whole / ".metadata").read_bytes()).state_dict_metadata)
    names.remove("SHA256SUMS")  # which is not read
    assert len(names) > 25
    for name in names:
        path = shutil.copytree(whole, tmp_path / name)
        with_item(path, name, write(Evil(tmp_path / "made")))
        with pytest.raises(RrfpError, match=r"cannot be read: rank 0: \w+: __0_0\.distcp "):
            checkpoint.load(tmp_path / "none", *trained(1), path=path)
        assert not (tmp_path / "made").exists(), name
    with_item(path, "step", write(Evil(tmp_path / "made")))
    with contextlib.suppress(RrfpError):
        checkpoint.load(tmp_path / "none", *trained(1), path=path, trust_pickles=True)
    assert (tmp_path / "made").exists(), "it was no attack"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_metadata_is_not_executed(protocol: int, tmp_path: Path) -> None:
    module, optimizer = trained()
    path, made = checkpoint.save(tmp_path, module, optimizer, step=1), tmp_path / "made"
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for evil in (
        Evil(made),
        {"state_dict_metadata": Evil(made)},
        metadata.__class__(Evil(made)),
        metadata.__class__({"model.weight": Evil(made)}, storage_data=metadata.storage_data),
        metadata.__class__(metadata.state_dict_metadata, storage_data=Evil(made)),
    ):
        (path / ".metadata").write_bytes(pickle.dumps(evil, protocol))
        sum_up(path)
        with pytest.raises(RrfpError, match=r"cannot be read: rank 0: \w+: \.metadata is damaged, or no metadata"):
            checkpoint.load(tmp_path, module, optimizer)
        assert not made.exists()
    if protocol < 2:  # in which no version of torch writes them
        return
    # What is not needed is not looked at.
    metadata.planner_data, metadata.storage_meta = {"model.weight": Evil(made)}, Evil(made)
    (path / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    sum_up(path)
    other = trained(1)
    assert checkpoint.load(tmp_path, *other) is not None
    assert is_same(state(*other), state(module, optimizer))
    assert not made.exists()


def test_metadata_leads_to_no_file_elsewhere(tmp_path: Path) -> None:
    module, optimizer = trained()
    path = checkpoint.save(tmp_path, module, optimizer, step=1)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../{path.name}/__0_0.distcp"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    sum_up(path)
    with pytest.raises(RrfpError, match=r"\.metadata is damaged, or no metadata .* \(ValueError\)"):
        checkpoint.load(tmp_path, module, optimizer)


def test_extra_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = trained()
    with monkeypatch.context() as patch:
        patch.setattr(plain, "check", lambda *_: None)
        checkpoint.save(tmp_path, module, optimizer, step=1, extra={"loader": Evil(tmp_path / "made")})
    text = r"__0_0\.distcp holds posix\.mkdir, which is no plain data and may run code: pass trust_pickles=True"
    with pytest.raises(RrfpError, match=text):
        checkpoint.load(tmp_path, module, optimizer)
    assert not (tmp_path / "made").exists()
    assert checkpoint.load(tmp_path, module, optimizer, trust_pickles=True) is not None
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize("is_plain", [True, False])
def test_an_older_checkpoint_loads_and_one_with_objects_if_it_is_trusted(
    is_plain: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As RRFP wrote them: without digests, with objects of any class in `extra`."""
    module, _ = trained()
    path = tmp_path / "runs" / "000001-step-7"
    packed = saved({"extra": 3 if is_plain else Thing(), "cpu": torch.get_rng_state(), "cuda": []})
    entries: dict[str, Any] = {f"model.{name}": value for name, value in module.state_dict().items()}
    entries |= {"step": 7, "ranks.0.0.0": torch.frombuffer(bytearray(packed), dtype=torch.uint8)}
    with pytest.warns(UserWarning, match=r"torch\.distributed is"):
        dcp.save(entries, checkpoint_id=path)
    other, _ = trained(1)
    if not is_plain:
        with pytest.raises(RrfpError, match=r"distcp holds [\w.]+\.Thing, which is no plain data and may run code"):
            checkpoint.load(tmp_path / "runs", other)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="rrfp"):
        loaded = checkpoint.load(tmp_path / "runs", other, trust_pickles=not is_plain)
    assert loaded is not None
    assert loaded.step == 7
    assert getattr(loaded.extra, "epoch", loaded.extra) == 3
    assert torch.equal(other.get_parameter("weight"), module.get_parameter("weight"))
    (record,) = caplog.records
    assert record.getMessage().startswith(f"checkpoint {path} was written without digests: damage to its files may not")


# --- Plain data --------------------------------------------------------------


def test_plain_data_comes_back_as_it_was(tmp_path: Path) -> None:
    def plain_data() -> dict[Any, Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Linear(2, 2)
        return {
            "values": [None, True, 3, -(2**2000), 2.5, 1 + 2j, "text", b"bytes", b"", bytearray(b"more"), bytearray()],
            "torch": (torch.bfloat16, torch.device("cpu"), torch.Size([1, 2]), torch.ones(2, dtype=torch.bfloat16)),
            "python": random.Random(0).getstate(),
            "numpy": [np.random.RandomState(0).get_state(), np.random.default_rng(0).bit_generator.state],
            "numbers": [np.float64(3.5), np.int32(3), np.bool_(True), np.float16(1)],
            "arrays": [np.arange(6, dtype=code).reshape(2, 3).T for code in "bhilBHILefdFD"],
            "strings": np.array(["a", "bc"]),
            "ema": OrderedDict(model.state_dict()),
            "model": model.state_dict(),
            "counts": Counter("aab"),
            3: {1, 2},
            (1, None): nn.Parameter(torch.ones(1)),
        }

    checkpoint.save(tmp_path, nn.Linear(1, 1), step=0, extra=plain_data())
    known = set(map(str, torch.serialization.get_safe_globals()))
    loaded = checkpoint.load(tmp_path, nn.Linear(1, 1))
    assert loaded is not None
    assert repr(loaded.extra) == repr(plain_data())
    assert [type(value) for value in loaded.extra["numbers"]] == [np.float64, np.int32, np.bool_, np.float16]
    assert vars(loaded.extra["model"]) == vars(plain_data()["model"])
    assert set(map(str, torch.serialization.get_safe_globals())) == known, "what the program allows is its own affair"


def test_arrays_come_back_in_any_byte_order_and_shape_as_often_as_they_are_there(tmp_path: Path) -> None:
    """Also where the program lets torch's reader have numpy's own classes."""
    shared = np.arange(3.0)
    arrays = [
        np.arange(3, dtype=">f8"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        *(np.zeros((0, 4), dtype="i2"), np.array(3.5), np.array(["é", ""]), np.array([b"x"])),
    ]
    state: Any = OrderedDict(a=shared)
    state.kept = (1, shared)
    extra = {"arrays": arrays, "twice": [shared, (shared, {"again": shared})], "state": state}
    checkpoint.save(tmp_path, nn.Linear(1, 1), step=0, extra=extra)
    with torch.serialization.safe_globals([np.ndarray, np.dtype]):
        loaded = checkpoint.load(tmp_path, nn.Linear(1, 1))
    assert loaded is not None
    for ours, theirs in zip(loaded.extra["arrays"], arrays, strict=True):
        assert (type(ours), ours.dtype, ours.shape) == (np.ndarray, theirs.dtype, theirs.shape)
        assert ours.flags.f_contiguous == theirs.flags.f_contiguous
        assert (ours == theirs).all()
    first, (second, third) = loaded.extra["twice"]
    assert first is second is third["again"] is loaded.extra["state"]["a"] is loaded.extra["state"].kept[1]
    first[0] = 5.0  # it is the program's own


def cyclic() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def tagged() -> torch.Tensor:
    value = torch.ones(1)
    value.tag = 1  # type: ignore[attr-defined]
    return value


REFUSED: dict[str, tuple[Any, str]] = {
    "function": ({"scheduler": {"fn": lambda: 0}}, "extra['scheduler']['fn'] is a function, must be plain data"),
    "object": ([1, (Thing(),)], "extra[1][0] is a Thing, must be plain data"),
    "key": ({frozenset(): 1}, "a key of extra is a frozenset"),
    "subclass": ({"a": Counter(), "b": type("Mine", (dict,), {})()}, "extra['b'] is a Mine"),
    "generator": (torch.Generator(), "extra is a Generator"),
    "objects of numpy": (np.array([None]), "extra is a object ndarray"),
    "metadata of numpy": (np.zeros(1, np.dtype("f8", metadata={"a": 1})), "extra is a float64 ndarray"),
    "number": (2**3000, "extra is a int of 3001 bits"),
    "attributes": (tagged(), "extra.tag is a int"),
    "cycle": (cyclic(), "extra contains itself, or is nested too deep"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.async_save])
def test_extra_that_only_code_could_load_is_refused(save: Callable[..., Any], name: str, tmp_path: Path) -> None:
    extra, text = REFUSED[name]
    with pytest.raises(RrfpError) as caught:
        save(tmp_path / "run", nn.Linear(1, 1), step=1, extra=extra)
    assert str(caught.value).startswith(text)
    assert not (tmp_path / "run").exists()


def test_state_of_an_optimizer_that_only_code_could_load_is_refused(tmp_path: Path) -> None:
    module, optimizer = trained()
    optimizer.state[module.get_parameter("weight")]["history"] = {"made": [Thing()]}
    with pytest.raises(RrfpError, match=r"optimizer\.state\.weight\.history\['made'\]\[0\] is a Thing, must be plain"):
        checkpoint.save(tmp_path, module, optimizer, step=1)


class Counting(nn.Module):
    """Has extra state of its own, in a dict with tensors."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = {"count": count, "seen": [torch.full((2,), float(count))]}

    def get_extra_state(self) -> dict[str, Any]:
        return self.count

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count = state


@pytest.mark.parametrize("is_async", [True, False])
def test_lists_and_dicts_of_tensors_are_state_too(is_async: bool, tmp_path: Path) -> None:
    """Of modules, and of optimizers such as Shampoo."""
    module, optimizer = trained()
    factors = optimizer.state[module.get_parameter("weight")]["factors"] = [torch.eye(2), {"root": torch.ones(3)}]
    if is_async:
        checkpoint.async_save(tmp_path, nn.Sequential(module, Counting(3)), optimizer, step=1).result()
    else:
        checkpoint.save(tmp_path, nn.Sequential(module, Counting(3)), optimizer, step=1)
    other, own = trained(1)
    counting = Counting(0)
    assert checkpoint.load(tmp_path, nn.Sequential(other, counting), own) is not None
    assert repr(own.state[other.get_parameter("weight")]["factors"]) == repr(factors)
    assert repr(counting.count) == repr(Counting(3).count)


def test_an_optimizer_without_state_by_parameter_is_refused_and_its_state_is_plain_data(tmp_path: Path) -> None:
    module, _ = trained()
    optimizer: Any = torch.optim.LBFGS(module.parameters(), max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss: Any = module(torch.eye(SIZE)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    text = "optimizer is LBFGS, whose state is of all its parameters at once, must be one with state by parameter"
    with pytest.raises(ConfigError, match=text):
        checkpoint.save(tmp_path, module, optimizer, step=1)
    checkpoint.save(tmp_path, module, step=1, extra=optimizer.state_dict())
    with pytest.raises(ConfigError, match=text):
        checkpoint.load(tmp_path, module, optimizer)
    optimizer.step(closure)
    expected = state(module, optimizer)["weight"].clone()
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=3)
    loaded = checkpoint.load(tmp_path, module)
    assert loaded is not None
    optimizer.load_state_dict(loaded.extra)
    optimizer.step(closure)
    assert torch.equal(module.get_parameter("weight"), expected)
