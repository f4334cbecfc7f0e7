"""A folder of the Hub into the stages of a model on the meta device: each reads its own entries, and no more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import long
from fork_server import fork_server, printed
from integrations.decoders import FAMILIES, build, config, draw, loaded, skeleton, train_whole
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import rrfp

__all__ = ["fork_server"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def values(*modules: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, those too that no folder has."""
    return {
        name: each
        for module in modules
        for named in (module.named_parameters(remove_duplicate=False), module.named_buffers())
        for name, each in named
    }


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the entries of a folder with one file."""
    entries = load_file(folder / "model.safetensors")
    change(entries)
    save_file(entries, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", [name if name in ("gpt2", "mixtral") else long(name) for name in FAMILIES])
def test_each_stage_has_the_bits_that_from_pretrained_has(family: str, is_tied: bool, tmp_path: Path) -> None:
    """As under torchrun: each rank has a skeleton of its own. Of a tied head the folder has one name only."""
    whole = build(family, tie_word_embeddings=is_tied)
    folder = saved(whole, tmp_path / "saved", max_shard_size="20KB")
    wanted, stages = values(loaded(folder)), []
    for index in range(3):
        stage = rrfp.split(skeleton(family, tie_word_embeddings=is_tied), 3)[index]
        stage.load_pretrained(folder)
        stages.append(stage)
    for stage in stages:
        for name, each in values(*stage.chunks).items():
            assert each.dtype == wanted[name].dtype
            assert torch.equal(each, wanted[name]), name
    assert len({name for stage in stages for name in values(*stage.chunks)}) == len(wanted)
    assert [len(stage.ties) for stage in stages] == ([1, 0, 1] if is_tied else [0, 0, 0])
    batch = draw(2)
    given: dict[str, Any] = {"ties": [stage.ties for stage in stages]} if is_tied else {}
    with rrfp.local([stage.chunks for stage in stages], loss_fn=stages[-1].loss_fn, **given).blocking() as pipe:
        result = pipe.step(batch.inputs, batch.labels)
    assert result.losses == pytest.approx(train_whole(whole, batch).losses, rel=1e-12)


def test_a_stage_opens_only_the_files_of_its_own_entries(tmp_path: Path) -> None:
    folder = saved(build("llama"), tmp_path, max_shard_size="10KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    stage = rrfp.split(skeleton("llama"), 4)[1]
    needed = {index[name] for name in stage.state_dict()}
    for file in set(index.values()) - needed:
        (folder / file).unlink()
    stage.load_pretrained(folder)
    assert len(needed) < len(set(index.values()))


def test_the_whole_model_is_loaded_with_its_stages_and_learns_with_them(tmp_path: Path) -> None:
    folder, model = (
        saved(build("llama", tie_word_embeddings=True), tmp_path),
        skeleton("llama", tie_word_embeddings=True),
    )
    stages = rrfp.split(model, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    stages.load_pretrained(folder)
    assert stages[0].ties["model.embed_tokens.weight"] is stages[1].ties["model.embed_tokens.weight"]
    assert stages[0].ties["model.embed_tokens.weight"] is model.lm_head.weight
    batch, before = draw(2), loaded(folder)
    with stages.local().blocking() as pipe:
        pipe.step(batch.inputs, batch.labels)
    optimizer.step()
    wanted = before.state_dict()
    assert [name for name, each in model.state_dict().items() if torch.equal(each, wanted[name])] == []


def test_a_checkpoint_of_the_bare_decoder_loads_into_the_model_with_a_head_that_is_tied(tmp_path: Path) -> None:
    """Its names lack the prefix ``model.``."""
    whole = build("llama", tie_word_embeddings=True)
    saved(whole.model, tmp_path)
    for index in range(2):
        stage = rrfp.split(skeleton("llama", tie_word_embeddings=True), 2)[index]
        stage.load_pretrained(tmp_path)
        for name, each in stage.state_dict().items():
            assert torch.equal(each, whole.state_dict()[name])


def test_values_take_the_dtypes_of_the_model(tmp_path: Path) -> None:
    folder = saved(build("llama").bfloat16(), tmp_path)
    stage = rrfp.split(skeleton("llama"), 2)[0]
    stage.load_pretrained(folder)
    assert {each.dtype for each in stage.parameters()} == {torch.float64}


def test_a_stage_that_has_values_is_loaded_in_place(tmp_path: Path) -> None:
    folder = saved(build("llama"), tmp_path)
    stage = rrfp.split(build("llama").half().float(), 2)[1]
    before = stage.parameters()
    stage.load_pretrained(folder)
    assert all(each is other for each, other in zip(stage.parameters(), before, strict=True))
    assert torch.equal(stage.state_dict()["lm_head.weight"], loaded(folder).lm_head.weight.float())


def test_a_chain_of_blocks_is_loaded_too(tmp_path: Path) -> None:
    chain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    save_file(chain.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    stages = rrfp.split(other, 2)
    stages.load_pretrained(tmp_path)
    assert torch.equal(other(torch.ones(2, 3)), chain(torch.ones(2, 3)))


def test_memory_without_values_has_them_once_it_is_loaded(tmp_path: Path) -> None:
    """Statistics of a norm too, which `to_empty` has noted as without."""
    chain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    save_file(chain.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        stages = rrfp.split(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 1)
    stages[0].chunks[0].to_empty(device="cpu")
    stages.load_pretrained(tmp_path)
    assert all(torch.equal(each, chain.state_dict()[name]) for name, each in stages[0].state_dict().items())


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


def meta_chain() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(Rotated(), nn.Linear(3, 3))


def chain_folder(folder: Path) -> Path:
    save_file(nn.Sequential(Rotated(), nn.Linear(3, 3)).state_dict(), folder / "model.safetensors")
    return folder


def test_a_buffer_that_nothing_tells_how_to_compute_is_refused_by_name(tmp_path: Path) -> None:
    stages = rrfp.split(meta_chain(), 2)
    with pytest.raises(rrfp.ConfigError, match=r"^'0\.angles' of SequentialPart is a buffer from to_empty\(\) that"):
        stages[0].load_pretrained(chain_folder(tmp_path))
    stages[1].load_pretrained(tmp_path)
    with torch.device("meta"):
        chain = nn.Sequential(Rotated(), nn.Linear(3, 3))
    chain[0].angles = torch.arange(3.0)
    rrfp.split(chain, 2)[0].load_pretrained(tmp_path)


def test_what_has_no_values_is_refused_when_a_pipeline_is_made(tmp_path: Path) -> None:
    """Without a word it would compute with whatever the memory held."""
    stages = rrfp.split(meta_chain(), 2)
    with pytest.raises(rrfp.ConfigError, match=r"^'0\.linear\.weight' of virtual stage 0 is on the meta"):
        stages.local(loss_fn=nn.functional.mse_loss)
    state = nn.Sequential(Rotated(), nn.Linear(3, 3)).state_dict()
    for stage in stages:
        stage.chunks[0].to_empty(device="cpu")
        stage.load_state_dict(state)
        stage.chunks[0].double()  # as a move to a device: a buffer stays without values
    wanted = r"^'0\.angles' of virtual stage 0 is a buffer from to_empty\(\) that nothing has written"
    with pytest.raises(rrfp.ConfigError, match=wanted):
        stages.local(loss_fn=nn.functional.mse_loss)
    with torch.no_grad():
        stages[0].chunks[0].get_buffer("0.angles").copy_(torch.arange(3.0))
    stages.local(loss_fn=nn.functional.mse_loss)
    with torch.device("meta"):
        left = nn.Linear(3, 3)
    with pytest.raises(rrfp.ConfigError, match=r"^'weight' of virtual stage 1 is on the meta device, must have"):
        rrfp.local([nn.Linear(3, 3), left], loss_fn=nn.functional.mse_loss)


@pytest.mark.parametrize("placement", ["looped", "v"])
def test_a_state_is_assigned_and_ties_are_kept(placement: Any) -> None:
    """In a V embedding and head are one object of the first stage."""
    whole = build("llama", tie_word_embeddings=True)
    state = {name: each.clone() for name, each in whole.state_dict().items() if name != "lm_head.weight"}
    stages = rrfp.split(skeleton("llama", tie_word_embeddings=True), 2, placement=placement)
    for stage in stages:
        stage.load_state_dict(state, assign=True)
        assert stage.state_dict().keys() & state.keys()
        for name, each in stage.state_dict().items():
            assert each.data_ptr() == state[name if name in state else "model.embed_tokens.weight"].data_ptr()
    ties = [stage.ties for stage in stages if stage.ties]
    assert len(ties) == (1 if placement == "v" else 2)
    if placement == "v":
        first, last = stages[0].chunks
        assert first.get_parameter("model.embed_tokens.weight") is last.get_parameter("lm_head.weight")
    batch = draw(2)
    with stages.local().blocking() as pipe:
        result = pipe.step(batch.inputs, batch.labels)
    assert result.losses == pytest.approx(train_whole(whole, batch).losses, rel=1e-12)


def bad_folders() -> Iterator[tuple[str, Callable[[Path], object], str]]:
    def changed(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], object]:
        return lambda folder: rewrite(folder, change)

    name = "model.layers.0.mlp.up_proj.weight"
    yield "empty", lambda folder: (folder / "model.safetensors").unlink(), "must have model.safetensors, or"
    yield "lacking", changed(lambda entries: entries.__delitem__(name)), f"lacks '{name}', must have all entries of"
    yield "shape", changed(lambda entries: entries.update({name: torch.zeros(2)})), f"'{name}' is of shape (2,) in"
    scaled = torch.zeros(48, 32, dtype=torch.float8_e4m3fn)
    yield "quantized", changed(lambda entries: entries.update({name: scaled})), "float8_e4m3fn in the folder, must be"
    two = {"lm_head.weight": torch.ones(64, 32, dtype=torch.float64)}
    yield "tied", changed(lambda entries: entries.update(two)), "has two values of 'model.embed_tokens.weight' and"
    yield "cut off", lambda folder: (folder / "model.safetensors").write_bytes(b"1234567890"), "must be a complete"

    def shifted(folder: Path) -> None:
        """One entry says that it lies where another one does."""
        path = folder / "model.safetensors"
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header[name]["data_offsets"] = header[name.replace("up", "gate")]["data_offsets"]
        path.write_bytes(
            data[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(length) + data[8 + length :]
        )

    yield "overlap", shifted, "must be a complete safetensors file: its entries overlap, or leave bytes between"

    def indexed(text: str) -> Callable[[Path], object]:
        def spoil(folder: Path) -> None:
            (folder / "model.safetensors").rename(folder / "weights.safetensors")
            (folder / "model.safetensors.index.json").write_text(text)

        return spoil

    yield "outside", indexed(json.dumps({"weight_map": {name: "../weights"}})), "names a file outside of its folder"
    yield "no index", indexed("[]"), "cannot be read, must have a weight_map"
    wrong = json.dumps({"weight_map": dict.fromkeys(skeleton("llama").state_dict(), "weights.safetensors")})
    yield "wrong index", indexed(wrong), "lacks 'lm_head.weight', must have it"


@pytest.mark.parametrize("case", range(10))
def test_a_folder_that_does_not_fit_is_refused(case: int, tmp_path: Path) -> None:
    _, spoil, message = list(bad_folders())[case]
    saved(build("llama", tie_word_embeddings=True), tmp_path)
    spoil(tmp_path)
    stages = rrfp.split(skeleton("llama", tie_word_embeddings=True), 2)
    with pytest.raises(rrfp.ConfigError) as refusal:
        stages.load_pretrained(tmp_path)
    assert message in str(refusal.value)


@pytest.mark.parametrize("folder", [None, 3, "a\0b"])
def test_a_folder_that_is_no_path_is_refused(folder: Any) -> None:
    with pytest.raises(rrfp.ConfigError, match=r"^folder is .*, must be a path$"):
        rrfp.split([nn.Linear(1, 1)], 1).load_pretrained(folder)


@pytest.mark.long
@pytest.mark.parametrize("index", range(4))
def test_a_rank_holds_its_part_and_a_skeleton(index: int, tmp_path: Path) -> None:
    """At its peak, measured as the resident memory of the process, no more than 1.3 times its part."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 8192}
    tiny, large = saved(build("llama"), tmp_path / "tiny"), tmp_path / "large"
    config("llama", dtype="float32", **sizes).save_pretrained(large)
    entries = {name: torch.zeros(each.shape) for name, each in skeleton("llama", **sizes).state_dict().items()}
    save_file(entries, large / "model.safetensors", {"format": "pt"})
    line = json.loads(printed(Path(__file__).with_name("peak_of_a_rank.py"), str(tiny), str(large), str(index)))
    assert line["part"] < sum(each.nbytes for each in entries.values()) / 2
    assert line["peak"] < 1.3 * line["part"], line
