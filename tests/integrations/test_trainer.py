"""`PipelineTrainer` is a `transformers.Trainer`: the same losses, norms, metrics, models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import TESTS, fork_server, run
from integrations.decoders import loaded
from integrations.trainers import STEPS, Rows, arguments, build, data, figures, with_adapters
from torch import Tensor
from torch.utils.data import Dataset

import rrfp
from rrfp import ConfigError, RrfpError

__all__ = ["fork_server"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def random_state() -> Iterator[None]:
    """The Trainer seeds everything."""
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """What a plain Trainer logs, and the best model, which it keeps."""
    from transformers import Trainer

    with torch.random.fork_rng(devices=[]):
        trainer = Trainer(build(), arguments(tmp_path_factory.mktemp("plain")), **data())
        trainer.train()
    return figures(trainer.state.log_history), trainer.model.state_dict()


def pipelined(model: Any, folder: Path, stages: int = 2, **further: Any) -> Any:
    from rrfp.integrations.transformers import PipelineTrainer

    options = {"deterministic": True}
    settings: dict[str, Any] = {"microbatches": 3, "options": options, **data(), **further}
    return PipelineTrainer(model, arguments(folder), stages=rrfp.split(model, stages), **settings)


def assert_equal(history: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [each.keys() for each in history] == [each.keys() for each in wanted]
    for row, other in zip(history, wanted, strict=True):
        assert row == pytest.approx(other, rel=1e-6, abs=1e-9)


def assert_same_weights(model: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """AdamW divides rounding errors by gradients that may be as small."""
    assert model.keys() == wanted.keys()
    for name, value in model.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.long
def test_one_process_trains_as_a_plain_trainer(plain: Any, tmp_path: Path) -> None:
    """20 steps of two batches: clipped, with warm-up, evaluations and metrics."""
    model = build()
    with pipelined(model, tmp_path, stages=4) as trainer:
        trainer.train()
    history = figures(trainer.state.log_history)
    assert sum("loss" in each for each in history) == STEPS
    assert sum("eval_hits" in each for each in history) == 2
    assert_equal(history, plain[0])
    assert_same_weights(model.state_dict(), plain[1])


def test_ranks_train_as_a_plain_trainer_and_resume_to_the_same_bits(plain: Any, tmp_path: Path) -> None:
    """What two ranks have saved goes on in one process, too, cut into other stages. Adapters are saved alone."""
    from safetensors.torch import load_file
    from transformers import Trainer

    ended = run(TESTS / "integrations" / "trainer_ranks.py", tmp_path, ranks=2, timeout_s=100)
    assert [each.code for each in ended] == [0, 0], "\n".join(map(str, ended))
    lines = [each.output.splitlines() for each in ended]
    assert len(lines[0]) > STEPS
    assert len(lines[1]) == 1, "rank 0 logs, no other"
    first, last = (json.loads(each[-1]) for each in lines)
    assert_equal(first["whole"], plain[0])
    assert last["whole"] == first["whole"]
    names = set(build().state_dict())
    assert {*first["held"], *last["held"]} == names
    assert {*first["held"]} & {*last["held"]} == {"model.embed_tokens.weight", "lm_head.weight"}
    whole, resumed = (loaded(tmp_path / name).state_dict() for name in ("whole", "resumed"))
    assert_same_weights(whole, plain[1])
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
    without_mean = [each for each in first["whole"] if "train_loss" not in each]
    assert [each for each in first["resumed"] if "train_loss" not in each] == without_mean
    model = build()
    with pipelined(model, tmp_path, stages=4) as trainer:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert_equal(figures(trainer.state.log_history)[:-1], without_mean)
    args = arguments(tmp_path, max_steps=2, save_strategy="no", load_best_model_at_end=False)
    alone = Trainer(with_adapters(build()), args, **data())
    alone.train()
    alone.save_model(str(tmp_path / "alone"))
    assert_same_weights(*(load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapters", "alone")))
    for rank in (first, last):
        assert "stages is a split into 3, must be into as many as there are ranks: 2" in rank["stages"]
        assert "the dataset gives other samples on other ranks" in rank["dataset"]


def test_stages_of_another_model_are_refused(tmp_path: Path) -> None:
    """The optimizer would have the parameters of the one, and the pipeline those of the other."""
    from rrfp.integrations.transformers import PipelineTrainer

    with pytest.raises(ConfigError, match="stages has parameters that are not model's, must be "):
        PipelineTrainer(build(), arguments(tmp_path), stages=rrfp.split(build(), 2), microbatches=2)


def test_what_it_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    from rrfp.integrations.transformers import REFUSED, PipelineTrainer

    model = build()
    for name in [name for names in REFUSED.values() for name in names]:
        args, further = arguments(tmp_path), dict[str, Any]()
        if hasattr(args, name):
            setattr(args, name, True)
        else:
            further[name] = build
        with pytest.raises(ConfigError, match=rf"^{name} is .*, must not be set with a PipelineTrainer: \w"):
            PipelineTrainer(model, args, stages=rrfp.split(model, 2), microbatches=2, **further)


@pytest.mark.parametrize("name", ["compute_loss", "compute_loss_context_manager"])
def test_methods_that_would_not_be_called_must_not_be_overridden(tmp_path: Path, name: str) -> None:
    from rrfp.integrations.transformers import PipelineTrainer

    model, own = build(), type("Own", (PipelineTrainer,), {name: lambda *_, **__: None})
    with pytest.raises(ConfigError, match=rf"^Own overrides {name}, which a PipelineTrainer does not call: "):
        own(model, arguments(tmp_path), stages=rrfp.split(model, 2), microbatches=2)


class NoTargets(Dataset[dict[str, Tensor]]):
    """Rows of which the first ones are prompts alone."""

    def __init__(self, empty: int, count: int) -> None:
        self._rows, self._empty = Rows(count), empty

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._rows[index]
        return row | {"labels": torch.full_like(row["labels"], -100)} if index < self._empty else row


def test_batches_without_a_target_add_nothing(tmp_path: Path) -> None:
    """One of an update of two, all of an update, one of an evaluation, whose loss a Trainer leaves out as it is nan."""
    from transformers import Trainer

    from rrfp.integrations.transformers import PipelineTrainer

    settings: dict[str, Any] = {"max_steps": 2, "train_sampling_strategy": "sequential", "learning_rate": 1e-3}
    settings |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "load_best_model_at_end": False}
    args = arguments(tmp_path, **settings)
    half: dict[str, Any] = {"train_dataset": NoTargets(4, 16), "eval_dataset": NoTargets(4, 8)}
    wanted = Trainer(build(), args, **half)
    wanted.train()
    for given in (half, {**half, "train_dataset": NoTargets(16, 16)}):
        model, before = build(), build().state_dict()
        stages = rrfp.split(model, 2)
        with PipelineTrainer(model, args, stages=stages, microbatches=2, **given) as trainer:
            trainer.train()
            evaluated = trainer.evaluate()
        if given is half:
            assert evaluated["eval_loss"] == pytest.approx(wanted.evaluate()["eval_loss"], rel=1e-5)
            assert_same_weights(model.state_dict(), wanted.model.state_dict())
        else:
            assert [each["loss"] for each in trainer.state.log_history if "loss" in each] == [0.0, 0.0]
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_was_trained_can_be_split_and_trained_again(tmp_path: Path) -> None:
    """accelerate would give it a forward of its own for bf16."""
    from rrfp.integrations.transformers import PipelineTrainer

    model = build()
    args = arguments(tmp_path, max_steps=1, bf16=True, eval_strategy="no", load_best_model_at_end=False)
    for _ in range(2):
        stages = rrfp.split(model, 2)
        with PipelineTrainer(model, args, stages=stages, microbatches=2, train_dataset=Rows(16)) as trainer:
            trainer.train()
        assert "forward" not in vars(model)


def test_one_that_is_not_entered_says_so(tmp_path: Path) -> None:
    trainer = pipelined(build(), tmp_path)
    for call in (trainer.train, trainer.evaluate):
        with pytest.raises(RrfpError, match=r"^this trainer is not entered: with PipelineTrainer\(...\) as trainer:"):
            call()
