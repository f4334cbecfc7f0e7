"""Stages into a folder of the Hub: as ``save_pretrained`` writes the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fork_server as forked
import pytest
import torch
from batches import long
from fork_server import fork_server, printed
from integrations.decoders import FAMILIES, build, config, loaded, skeleton
from safetensors.torch import load_file
from torch import Tensor, nn

import rrfp
from rrfp import checkpoint

__all__ = ["fork_server"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def entries(folder: Path) -> dict[str, Tensor]:
    """Of all files, as the library safetensors reads them; the index must be right."""
    found: dict[str, Tensor] = {}
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] if index.exists() else None
    for path in sorted(folder.glob("*.safetensors")):
        own = load_file(path)
        assert weight_map is None or {weight_map[name] for name in own} == {path.name}
        assert not own.keys() & found.keys()
        found |= own
    assert weight_map is None or found.keys() == weight_map.keys()
    return found


def assert_same(folder: Path, wanted: Path) -> None:
    """The same entries, to the bit, and the same configuration; nothing else lies there."""
    actual, expected = entries(folder), entries(wanted)
    assert actual.keys() == expected.keys()
    for name, each in actual.items():
        assert each.dtype == expected[name].dtype
        assert torch.equal(each, expected[name]), name
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text()) == json.loads((wanted / name).read_text())
    others = {path.name for path in folder.iterdir()} - {path.name for path in wanted.iterdir()}
    assert [name for name in others if not name.startswith("model")] == []


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", [name if name in ("gpt2", "mixtral") else long(name) for name in FAMILIES])
def test_stages_are_written_as_the_whole_model_is(family: str, is_tied: bool, tmp_path: Path) -> None:
    whole = build(family, tie_word_embeddings=is_tied)
    whole.save_pretrained(tmp_path / "wanted")
    checkpoint.save_pretrained(tmp_path / "trained", rrfp.split(whole, 3), max_shard_size=20_000)
    assert len(list((tmp_path / "trained").glob("*.safetensors"))) > 3
    assert_same(tmp_path / "trained", tmp_path / "wanted")
    wanted = whole.state_dict()
    assert all(torch.equal(each, wanted[name]) for name, each in loaded(tmp_path / "trained").state_dict().items())


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_what_was_loaded_from_a_folder_is_written_as_it_was(family: str, tmp_path: Path) -> None:
    whole = build(family)
    whole.save_pretrained(tmp_path / "wanted")
    stages = rrfp.split(skeleton(family), 2)
    stages.load_pretrained(tmp_path / "wanted")
    checkpoint.save_pretrained(tmp_path / "trained", stages)
    assert [path.name for path in (tmp_path / "trained").glob("model*")] == ["model.safetensors"]
    assert_same(tmp_path / "trained", tmp_path / "wanted")


@pytest.mark.parametrize("is_one", [False, True])
def test_a_checkpoint_is_written_with_a_skeleton_of_the_model(is_one: bool, tmp_path: Path) -> None:
    whole = build("mixtral", tie_word_embeddings=True)
    whole.save_pretrained(tmp_path / "wanted")
    checkpoint.save(tmp_path / "runs", rrfp.split(whole, 2), step=7)
    stages = rrfp.split(skeleton("mixtral", tie_word_embeddings=True), 1)
    source = checkpoint.latest(tmp_path / "runs") if is_one else tmp_path / "runs"
    checkpoint.save_pretrained(tmp_path / "trained", stages, checkpoint=source, max_shard_size="20KB")
    assert_same(tmp_path / "trained", tmp_path / "wanted")


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2])
def test_each_rank_writes_its_own_stage(replicas: int, tmp_path: Path) -> None:
    """What one rank refuses, all do."""
    build("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "wanted")
    arguments = (str(tmp_path / "trained"), str(replicas))
    refused = forked.reports("integrations/hub_rank.py", *arguments, ranks=2 * replicas, timeout_s=60)
    (reason,) = {text for each in refused for text in each["refused"]}
    folder = str(tmp_path / "trained")
    for each in refused:
        assert each["paths"] == {
            "folder": f"folder is '{folder}-0' on rank 0 and '{folder}-1' on rank 1, must be the same",
            "checkpoint": f"checkpoint is None on rank 0 and '{folder}' on rank 1, must be the same",
        }
    assert reason == "max_shard_size is '0GB', must be a whole number of bytes >= 1, or such as '5GB'"
    assert [path.name for path in sorted((tmp_path / "trained").glob("*.safetensors"))] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert_same(tmp_path / "trained", tmp_path / "wanted")


def test_an_older_model_in_the_folder_is_replaced(tmp_path: Path) -> None:
    """Otherwise ``from_pretrained`` reads the older one: a single file goes before an index."""
    old, new = build("llama"), build("llama", tie_word_embeddings=True)
    old.save_pretrained(tmp_path / "trained")
    new.save_pretrained(tmp_path / "wanted")
    (tmp_path / "trained" / "tokenizer.json").write_text("{}")
    for size in ("20KB", "1GB", "50 KB"):
        checkpoint.save_pretrained(tmp_path / "trained", rrfp.split(new, 2), max_shard_size=size)
        assert entries(tmp_path / "trained").keys() == entries(tmp_path / "wanted").keys()
        model = loaded(tmp_path / "trained")
        assert torch.equal(model.lm_head.weight, new.lm_head.weight)
    assert (tmp_path / "trained" / "tokenizer.json").exists()


def test_a_chain_of_blocks_is_written_in_files_of_the_same_form(tmp_path: Path) -> None:
    """There is no configuration; entries of no dimension, of none and of several dtypes are right."""
    chain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())
    chain.get_submodule("0").register_buffer("nothing", torch.empty(0, 2))
    checkpoint.save_pretrained(tmp_path, rrfp.split(chain, 2, cuts=[2]))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found, wanted = load_file(tmp_path / "model.safetensors"), chain.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(each, wanted[name]) and each.dtype == wanted[name].dtype for name, each in found.items())


def refusals() -> dict[str, tuple[Any, str]]:
    stages = rrfp.split(build("llama"), 2)
    meta = rrfp.split(skeleton("llama"), 2)
    shard = rrfp.split(build("llama"), 1)
    norm = shard[0].chunks[0].get_submodule("model.norm")
    norm.weight = nn.Parameter(torch.ones(16, dtype=torch.float64))
    return {
        "one stage": ((stages[0], {}), "no rank has 'model.layers.2.self_attn.q_proj.weight', the ranks must have all"),
        "no stage": ((nn.Linear(1, 1), {}), "modules is a Linear, must be a stage of rrfp.split, or all of them"),
        "meta": ((meta, {}), "'model.embed_tokens.weight' is on the meta device, must have values: load them, or"),
        "shard": ((shard, {}), "'model.norm.weight' is of shape (16,), must be (32,)"),
        "size": ((stages, {"max_shard_size": "5 pages"}), "max_shard_size is '5 pages', must be a whole number of"),
        "no checkpoint": ((stages, {"checkpoint": "nowhere"}), "checkpoint is 'nowhere', must be a complete"),
        "no path": ((stages, {"checkpoint": 3}), "checkpoint is 3, must be a path"),
    }


@pytest.mark.parametrize("case", ["one stage", "no stage", "meta", "shard", "size", "no checkpoint", "no path"])
def test_what_is_no_whole_model_is_refused(case: str, tmp_path: Path) -> None:
    (modules, options), message = refusals()[case]
    with pytest.raises(rrfp.ConfigError) as refusal:
        checkpoint.save_pretrained(tmp_path / "trained", modules, **options)
    assert message in str(refusal.value)
    assert not (tmp_path / "trained").exists()


@pytest.mark.parametrize("change", ["lacking", "shape"])
def test_a_checkpoint_of_another_model_is_refused(change: str, tmp_path: Path) -> None:
    further: dict[str, Any] = {"num_hidden_layers": 3} if change == "lacking" else {"intermediate_size": 64}
    other = build("llama", **further)
    checkpoint.save(tmp_path / "runs", other, step=1)
    message = {"lacking": "lacks 'model.layers.3.", "shape": "is of shape (64, 32) in checkpoint"}[change]
    with pytest.raises(rrfp.ConfigError, match="checkpoint") as refusal:
        checkpoint.save_pretrained(tmp_path / "new", rrfp.split(skeleton("llama"), 1), checkpoint=tmp_path / "runs")
    assert message in str(refusal.value)


def test_a_failed_save_leaves_the_older_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the format of the files has no such dtype."""
    whole = build("llama")
    whole.save_pretrained(tmp_path / "trained")
    before = entries(tmp_path / "trained")
    stages = rrfp.split(whole, 2)
    norm = stages[1].chunks[0].get_submodule("model.norm")
    norm.weight = nn.Parameter(norm.get_parameter("weight").detach().to(torch.complex128))
    with pytest.raises(rrfp.ConfigError, match=r"^'model.norm.weight' is of dtype torch.complex128, must be one of"):
        checkpoint.save_pretrained(tmp_path / "trained", stages, max_shard_size="20KB")
    assert entries(tmp_path / "trained").keys() == before.keys()
    assert not list((tmp_path / "trained").glob(".*"))


@pytest.mark.long
def test_a_checkpoint_is_written_with_a_file_in_memory_and_not_the_model(tmp_path: Path) -> None:
    """Measured as the resident memory of the process."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 8192}
    folders: list[str] = []
    for name, further in (("tiny", {}), ("large", sizes)):
        folders.append(str(tmp_path / name))
        config("llama", dtype="float32", **further).save_pretrained(folders[-1])
        stages = rrfp.split(skeleton("llama", **further).to_empty(device="cpu").float(), 1)
        checkpoint.save(tmp_path / name / "runs", stages, step=1)
    line = json.loads(printed(Path(__file__).with_name("peak_of_a_rank.py"), *folders, "save"))
    assert line["peak"] < line["part"] / 2, line
