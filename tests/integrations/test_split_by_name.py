"""`rrfp.split(at=)` of modules of any kind: losses and gradients of the whole, or a refusal that says why."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from installed import ROOT
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rrfp

PAGE = ROOT / "docs" / "models.md"

WIDTH, VOCABULARY, LONGEST = 8, 11, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = self.dropout(torch.tanh(self.linear(self.norm(x))))
        return x + y * mask[..., None], y.mean()


class Writer(nn.Module):
    """As people write them: positions by their number, a tied head, a sum of what the blocks return beside."""

    scale: Tensor

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        rows, length = tokens.shape
        assert length <= LONGEST, "too long"
        if mask is None:
            mask = torch.ones(rows, length, dtype=self.bias.dtype, device=tokens.device)
        x = self.tokens(tokens) + self.positions(torch.arange(0, length, device=tokens.device))
        total = torch.zeros((), dtype=x.dtype)
        for block in self.blocks:
            x, beside = block(x, mask)
            total = total + beside
        x = self.norm(x) * self.scale * torch.tensor(2.0)
        logits = nn.functional.linear(x.view(*x.shape[:-1], WIDTH), self.tokens.weight, self.bias)
        return {"logits": logits, "total": total}


AT = ["blocks.1", "blocks.2", "blocks.3"]


def build(model: Callable[[], nn.Module] = Writer) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model().double()


def draw(m: int) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(m)
    tokens, labels = torch.randint(VOCABULARY, (2, 2 + m % 3, 5 + m), generator=generator)
    return {"tokens": tokens, "mask": torch.rand(tokens.shape, generator=generator).double()}, labels


SAMPLE = draw(0)[0]
BATCH = [draw(m) for m in range(4)]


def loss_fn(output: Any, labels: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(output["logits"].flatten(0, 1), labels.flatten())
    total: Tensor = output["total"]
    return loss + total.square()


def whole(model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    losses = [loss_fn(model(**inputs), labels) for inputs, labels in BATCH]
    for loss in losses:
        torch.autograd.backward(loss / len(BATCH))
    return [loss.item() for loss in losses], gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    taken = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return taken


def trained(model: nn.Module, parts: Any) -> tuple[list[float], dict[str, Tensor]]:
    with parts.local(loss_fn=loss_fn, deterministic=True).blocking() as pipe:
        result = pipe.step([inputs for inputs, _ in BATCH], [labels for _, labels in BATCH])
    return list(result.losses), gradients(model)


def refusal(model: Any, at: Any = AT, **arguments: Any) -> str:
    with pytest.raises(rrfp.ConfigError) as refused:
        rrfp.split(model, 2, at=at, **arguments)
    return str(refused.value)


def test_the_example_of_the_page_prints_its_cuts(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r'```python title="by_name.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        exec(compile(program, "by_name.py", "exec"), names)
    assert re.match(
        r"Split\(Net of 7 layers, cut at \['blocks.\d', 'blocks.\d'\]; stage 0: .*\)\nloss \d", capsys.readouterr().out
    )


@pytest.mark.parametrize("layout", [{"stages": 4}, {"stages": 2, "placement": "v"}, {"stages": 3, "cuts": [1, 3]}])
def test_losses_and_gradients_are_the_whole_models(layout: dict[str, Any]) -> None:
    """To the bit, over rows and lengths that the sample has not; a tied weight but for the rounding of one sum."""
    model = build().eval()
    losses, wanted = whole(model)
    parts = rrfp.split(model, **layout, at=AT, sample=SAMPLE)
    actual_losses, actual = trained(model, parts)
    assert actual_losses == losses
    assert actual.keys() == wanted.keys()
    for name, gradient in wanted.items():
        rtol = 1e-12 if name == "tokens.weight" else 0.0
        torch.testing.assert_close(actual[name], gradient, rtol=rtol, atol=rtol, msg=name)


def test_parts_have_what_they_use_under_the_models_names() -> None:
    """Nothing is saved that the model does not save; the head's weight is on both ends."""
    model = build()
    state = model.state_dict()
    parts = rrfp.split(model, 4, at=AT, sample=SAMPLE)
    names = [list(stage.state_dict()) for stage in parts]
    assert [name for each in names for name in each if name.startswith("blocks.1")] == [
        name for name in state if name.startswith("blocks.1")
    ]
    assert {name for each in names for name in each} == state.keys()
    assert [list(stage.ties) for stage in parts] == [["tokens.weight"], [], [], ["tokens.weight"]]
    assert "bias" not in names[0]
    assert repr(parts).startswith("Split(Writer of 4 layers, cut at ['blocks.1', 'blocks.2', 'blocks.3']; stage 0: 0;")
    assert rrfp.merge_state_dict([stage.state_dict() for stage in parts], model).keys() == state.keys()
    assert vars(model).keys() == vars(Writer()).keys()
    assert torch.arange(3).tolist() == [0, 1, 2]


def test_modes_and_hooks_of_submodules_stay() -> None:
    model = build()
    first, _ = rrfp.split(model, 2, at=AT[:1], sample=SAMPLE)
    assert not torch.equal(*(first.chunks[0](**SAMPLE)[1] for _ in range(2)))
    first.eval()
    assert torch.equal(*(first.chunks[0](**SAMPLE)[1] for _ in range(2)))
    calls: list[Any] = []
    model.get_submodule("blocks.0.linear").register_forward_hook(lambda *_: calls.append(None))
    first.chunks[0](**SAMPLE)
    assert calls == [None]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        y: Tensor = self.second(factor * self.first(x))
        return y


def test_inputs_of_a_step_are_those_of_the_sample() -> None:
    """Without a sample they are those that have no default."""
    model, x = build(Plain), torch.ones(3, WIDTH).double()
    (part,) = rrfp.split(model, 2, at=["second"], check=False)[0].chunks
    assert torch.equal(part(x)[0], part(x=x)[0])
    with pytest.raises(TypeError, match="unexpected keyword argument 'factor'"):
        part(x, factor=3.0)
    first, second = (stage.chunks[0] for stage in rrfp.split(model, 2, at=["second"], sample=(x, 3.0)))
    assert torch.equal(second(*first(x, factor=4.0)), model(x, 4.0))


def test_what_the_sample_decided_is_decided_for_all() -> None:
    tokens = torch.zeros(1, LONGEST + 1, dtype=torch.long)
    wanted = "depends on a value that is False here, must be True, as in the sample with which rrfp.split has cut it"
    parts = rrfp.split(build(), 2, at=AT, sample=SAMPLE)
    with pytest.raises(rrfp.PipelineAborted, match=wanted), parts.local(loss_fn=loss_fn).blocking() as pipe:
        pipe.step([{"tokens": tokens, "mask": torch.ones(1, LONGEST + 1)}], [tokens])


def test_measured_times_balance_the_stages() -> None:
    model = build(lambda: Writer(6))
    with torch.no_grad():
        wide = nn.Sequential(nn.Linear(WIDTH, 20000), nn.Linear(20000, WIDTH)).double()
        model.get_submodule("blocks.0").linear = wide
    at = [f"blocks.{index}" for index in range(1, 6)]
    assert rrfp.split(model, 2, at=at, sample=SAMPLE, cuts="times", check=False).cuts == (1,)
    assert rrfp.split(build(lambda: Writer(6)), 2, at=at, sample=SAMPLE).cuts != (1,)


def test_a_model_on_meta_is_cut_and_loaded(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = build().eval()
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    with torch.device("meta"):
        skeleton = Writer().double().eval()
    skeleton.scale = torch.tensor(0.5).double()
    parts = rrfp.split(skeleton, 3, at=AT, sample=SAMPLE, check=False)
    parts.load_pretrained(tmp_path)
    value: Any = SAMPLE
    for stage in parts:
        value = stage.chunks[0](**value) if isinstance(value, dict) else stage.chunks[0](*value)
    assert torch.equal(value["logits"], model(**SAMPLE)["logits"])


class Alternating(Writer):
    def forward(self, tokens: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        output = super().forward(tokens, mask)
        return output["logits"] if self.training else output


class Asking(Writer):
    """In training it looks at its input."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        output = super().forward(tokens, mask)
        return output["logits"] if self.training and tokens.shape[0] > 1 else output


class Remembering(Writer):
    def forward(self, tokens: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        self.last = super().forward(tokens, mask)
        return self.last


class Noisy(Writer):
    def forward(self, tokens: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        output = super().forward(tokens, mask)
        return output | {"total": output["total"] + torch.randn(())}


class Dropping(Writer):
    """Of its drawn layers all are in the parts, if none was left out when it was followed."""

    draw: Callable[[], float] = random.random

    def forward(self, tokens: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        output = super().forward(tokens, mask)
        return output["logits"] if self.training and type(self).draw() < 0 else output


class DroppingByNumpy(Dropping):
    draw = np.random.uniform


class DroppingByTorch(Dropping):
    draw = staticmethod(lambda: torch.rand(1).item())


class WithoutGradients(Writer):
    def forward(self, tokens: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        output = super().forward(tokens, mask)
        return output if torch.is_grad_enabled() else output["logits"]


class Checked(Writer):
    """Its masks are wrong without an error where torch.fx follows it: a symbol is no Tensor."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        return super().forward(tokens, mask if isinstance(mask, Tensor) else None)


class Written(Writer):
    def forward(self, tokens: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        output = super().forward(tokens, mask)
        output["logits"][0, 0, 0] = 1
        return output


class Open(Writer):
    def forward(self, tokens: Tensor, *others: Any, **named: Any) -> Any:
        return super().forward(tokens, *others, **named)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Alternating, "model is a Alternating whose forward does something else in training than in evaluation ("),
        (Asking, "model is a Asking whose forward does something else in training than in evaluation ("),
        (
            Remembering,
            "model is a Remembering whose forward torch.fx cannot follow (TypeError: a Remembering writes its ",
        ),
        *(
            (model, f"model is a {model.__name__} whose forward draws random numbers by itself, which its parts would")
            for model in (Dropping, DroppingByNumpy, DroppingByTorch)
        ),
        (
            WithoutGradients,
            "model is a WithoutGradients whose forward does something else in training than in evaluation (",
        ),
        (Noisy, "model is a Noisy whose forward makes random numbers of its own, of a shape that does not depend on"),
        (
            Checked,
            "model is a Checked whose parts do not compute what the whole computes: the gradient of blocks.0",
        ),
        (Written, "model is a Written whose forward torch.fx cannot follow (TypeError: '_Symbol' object does not "),
        (Open, "sample is for 'named' of the forward of a Open, must be for others"),
    ],
)
def test_a_forward_that_cannot_be_cut_is_refused(model: type[Writer], message: str) -> None:
    assert refusal(build(model), sample=SAMPLE).startswith(message)


def test_a_refusal_names_the_line_and_leaves_torch_as_it_was() -> None:
    arange = torch.arange
    message = refusal(build(), check=False, sample={**SAMPLE, "tokens": [SAMPLE["tokens"]]})
    assert f", in {__file__}:" in message
    assert torch.arange is arange
    model = build(Remembering)
    refusal(model, sample=SAMPLE)
    assert "last" not in vars(model)
    value = refusal(build(), at=[*AT, "norm.weight"])
    assert value == "at[3] is 'norm.weight', which a Writer lacks: must be names of submodules, each once"


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("blocks.1", "at is 'blocks.1', must be a list of names of submodules, in the order in which they run"),
        ([], "at is [], must be a list of names of submodules, in the order in which they run"),
        (["blocks.7"], "at[0] is 'blocks.7', which a Writer lacks: must be names of submodules, each once"),
        (["norm", "norm"], "at[1] is 'norm', which is there twice: must be names of submodules, each once"),
        (
            ["blocks"],
            "at[0] is 'blocks', which the forward of a Writer does not call, must be submodules that it ",
        ),
        (
            ["blocks.2", "blocks.1"],
            "at is ['blocks.2', 'blocks.1'], must be in the order in which they run, some",
        ),
    ],
)
def test_names_that_do_not_fit_are_refused(at: Any, message: str) -> None:
    assert refusal(build(), at, sample=SAMPLE).startswith(message)


class Nested(Plain):
    """What a hook on the container does to gradients torch.fx does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()

    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        y: Tensor = self.inner(self.first(x))
        return y


def test_hooks_that_no_part_would_call_are_refused() -> None:
    model = build()
    model.register_forward_hook(lambda *_: None)
    assert refusal(model).startswith("model has forward hooks on a Writer that is cut, must have them on modules withi")
    nested = build(Nested)
    nested.get_submodule("inner").register_full_backward_hook(lambda *_: None)
    assert refusal(nested, ["inner.second"], check=False).startswith("model has backward hooks on a Plain that is cut")


class Half(Plain):
    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = self.second(torch.mm(self.first(x), self.first.weight))
        return y


class Whole(Plain):
    """In the caller's autocast only one part of it is to run in full precision."""

    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y: Tensor = torch.mm(self.first(x), self.first.weight)
        return self.second(y)  # type: ignore[no-any-return]


class Frozen(Plain):
    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        with torch.no_grad():
            y: Tensor = self.first(x)
        return self.second(y)  # type: ignore[no-any-return]


class Rounded(torch.autograd.Function):
    """Passes gradients straight through, which torch.fx would not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Rounding(Plain):
    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        y: Tensor = self.second(Rounded.apply(self.first(x)))  # type: ignore[no-untyped-call]
        return y


class Recomputing(Plain):
    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        y: Tensor = checkpoint(self.first, x, use_reentrant=False)
        return self.second(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Half, "it enters torch.autocast"),
        (Whole, "it enters torch.autocast"),
        (Frozen, "it computes something without gradients, or in an autograd.Function"),
        (Rounding, "it computes something without gradients, or in an autograd.Function"),
        (Recomputing, "it checkpoints activations, or has other hooks for saved tensors"),
    ],
)
def test_contexts_that_parts_would_leave_out_are_refused(model: type[Plain], reason: str) -> None:
    """Also without a check, whose tolerance for bfloat16 would let a part in full precision pass."""
    enters = torch.autocast.__enter__
    message = refusal(build(model), ["second"], check=False)
    assert f"whose forward torch.fx cannot follow (TypeError: {reason}, in {__file__}:" in message
    assert torch.autocast.__enter__ is enters


class Around(nn.Module):
    """The same contexts within a submodule stay, where it is called as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.second = Half(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.inner(x).float())
        return y


def test_contexts_of_submodules_stay() -> None:
    with torch.random.fork_rng(devices=[]):
        model, x = Around(), torch.randn(3, WIDTH)
    first, _ = rrfp.split(model, 2, at=["second"], sample=x)
    assert torch.equal(first.chunks[0](x)[0], model.inner(x).float())


class Adding(Plain):
    """Augmented assignments write: what has another name for the tensor sees it."""

    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        length = x.shape[1]
        total = length
        total += 1
        y = z = self.first(x) * length
        y += total
        w = self.second(y * 2 + z)
        y -= 0.5
        return w * y  # type: ignore[no-any-return]


def test_augmented_assignments_write_as_in_the_whole() -> None:
    """On both sides of a cut, without a check that would refuse a difference."""
    model, x = build(Adding), torch.randn(3, WIDTH).double()
    parts = rrfp.split(model, 2, at=["second"], check=False)
    loss = model(x).square().mean()
    loss.backward()
    wanted = gradients(model)
    with parts.local(loss_fn=lambda output, _: output.square().mean()).blocking() as pipe:
        assert pipe.step([x], [None]).loss == pytest.approx(loss.item(), rel=1e-14)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-12, msg=name)


class Summing(Plain):
    """It adds to a tensor that depends on no input: another one in each call."""

    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        total = torch.zeros(WIDTH, dtype=torch.double)
        total += self.first(x).sum(0)
        y = self.second(x + total)
        total += 1
        return y * total  # type: ignore[no-any-return]


def test_a_tensor_that_each_call_makes_and_writes_is_made_by_each_call() -> None:
    model, batch = build(Summing), [torch.randn(3, WIDTH).double() for _ in range(3)]
    parts = rrfp.split(model, 2, at=["second"], sample=batch[0])
    losses = [model(x).square().mean() for x in batch]
    torch.autograd.backward([loss / len(batch) for loss in losses])
    wanted = gradients(model)
    for _ in range(2):
        with parts.local(loss_fn=lambda output, _: output.square().mean()).blocking() as pipe:
            assert pipe.step(batch, [None] * 3).losses == pytest.approx([loss.item() for loss in losses], rel=1e-14)
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-12, msg=name)


class Scaled(Plain):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        rows = torch.ones(self.scale.shape[0], dtype=x.dtype)
        y: Tensor = self.second(self.first(x) * (2 * self.scale)) * rows
        return y


def test_what_a_forward_computes_of_a_buffer_follows_the_buffer() -> None:
    """It is loaded, or moved, after the model was cut."""
    model, x = build(Scaled), torch.randn(3, WIDTH).double()
    first, second = rrfp.split(model, 2, at=["second"], check=False)
    model.get_buffer("scale").fill_(3.0)
    assert torch.equal(second.chunks[0](*first.chunks[0](x)), model(x))


class Collecting(Plain):
    """Its callers read beside its output what it has put into a list, or keep a table in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.beside: list[Any] = ["first"]
        self.tables: dict[str, Any] = {"first": 1}

    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        y = self.first(x)
        self.beside.append(y.mean())
        self.tables["rows"] = y.shape[0]
        return self.second(y)  # type: ignore[no-any-return]


class Replacing(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None)

    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        self.mask = torch.ones(WIDTH, dtype=torch.double)
        return self.second(self.first(x) * self.mask)  # type: ignore[no-any-return]


def test_what_a_forward_collects_in_its_model_is_refused_and_taken_out_again() -> None:
    model: Any = build(Collecting)
    assert "(TypeError: a Collecting writes into its attribute 'beside')" in refusal(model, ["second"], check=False)
    assert (model.beside, model.tables) == (["first"], {"first": 1})
    model = build(Replacing)
    assert "(TypeError: a Replacing writes into its attribute '_buffers')" in refusal(model, ["second"], check=False)
    assert model.mask is None


class Late(Plain):
    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        ones = torch.ones(WIDTH, dtype=torch.double)
        y = self.second(self.first(x) + ones)
        ones.fill_(2.0)
        return y * ones  # type: ignore[no-any-return]


def test_a_tensor_that_changes_behind_its_use_is_refused() -> None:
    message = refusal(build(Late), ["second"], check=False)
    assert "(TypeError: it writes a tensor that depends on no input, after its first use" in message


class Averaging(nn.Module):
    """Its second part reads what its first part has written."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.mean.view(-1).copy_(y.detach().mean(0))
        return self.second(y) - self.mean  # type: ignore[no-any-return]


class Counting(Averaging):
    """It writes in one part alone, by an assignment to a name of it."""

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean
        mean += self.first(x).detach().mean(0)
        return self.second(self.first(x) - mean)  # type: ignore[no-any-return]


def test_a_buffer_that_is_written_belongs_to_one_part() -> None:
    x = torch.randn(3, WIDTH).double()
    wanted = "model is a Averaging whose forward writes the buffer 'mean', which parts 0 and 1 both use: must be used"
    assert refusal(build(Averaging), ["second"], sample=x).startswith(wanted)
    model = build(Counting)
    first, _ = rrfp.split(model, 2, at=["second"], sample=x)
    assert not model.get_buffer("mean").any()  # the check has left no trace
    first.chunks[0](x)
    torch.testing.assert_close(model.get_buffer("mean"), model.get_submodule("first")(x).mean(0))


@pytest.mark.parametrize(("arguments", "needs"), [({}, "the check that check=F"), ({"cuts": "times"}, "cuts='times'")])
def test_what_needs_a_sample_says_so(arguments: dict[str, Any], needs: str) -> None:
    message = refusal(build(Plain), ["second"], **arguments)
    assert message.startswith(f"sample is missing, must be a tiny batch of inputs of this model: {needs}")
    wanted = "(ValueError: it depends on values of the inputs, and there is no sample= that has some, in "
    assert wanted in refusal(build(), check=False)


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("unet", ["down_blocks.2", "mid_block", "up_blocks.1"]),
        ("dit", ["transformer_blocks.1", "transformer_blocks.2"]),
        ("bert", ["bert.encoder.layer.1", "bert.encoder.layer.2", "cls"]),
        ("mamba", ["backbone.layers.1", "backbone.layers.2"]),
    ],
)
def test_models_of_libraries_by_the_names_of_their_blocks(name: str, at: list[str]) -> None:
    """Losses and all gradients of a step over microbatches of other shapes."""
    case = importlib.import_module(f"models.{name}").CASE
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = case.build().double().eval()
    generator = torch.Generator().manual_seed(0)
    batch = [case.draw(generator, m) for m in range(3)]
    inputs = [{key: value for key, value in each.whole.items() if key != "labels"} for each in batch]
    outputs = [each.whole.get("labels", each.target) for each in batch]

    def loss_of(output: Any, target: Any) -> Tensor:
        value: Tensor = output["logits" if "logits" in output else "sample"]
        return value.square().mean() + value[..., :1].mean()

    for each in inputs:
        torch.autograd.backward(loss_of(model(**each), None) / 3)
    wanted = gradients(model)
    parts = rrfp.split(model, len(at) + 1, at=at, sample=inputs[1])
    with parts.local(loss_fn=loss_of, deterministic=True).blocking() as pipe:
        pipe.step(inputs, outputs)
    actual = gradients(model)
    assert actual.keys() == wanted.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(actual[key], gradient, rtol=1e-9, atol=1e-11, msg=key)
