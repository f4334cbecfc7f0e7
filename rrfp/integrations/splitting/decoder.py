"""`rrfp.split` for the decoders of transformers: which of a model's children run before, in and after the layers.

The model's config names them (``base_model_pp_plan``), its head class the head (``_pp_plan``). A plan says nothing
about rotary embeddings, masks and caps of logits: those stay in the model's own forward, which every part runs.
Nothing here imports transformers; the caller has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from rrfp.errors import ConfigError
from rrfp.integrations.splitting.decoder_part import AbsentModule, DecoderPart, NoOffset, PassingLayer
from rrfp.integrations.splitting.layered import Layered, Sample

#: The families (``config.model_type``) whose parts RRFP's tests compare with the whole model.
TESTED = frozenset({"gemma2", "gpt2", "llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3", "qwen3_moe"})

#: What stands in a later part for a module that runs before the layers, called with nothing or returning its input.
_StandIn = Callable[[], nn.Module]


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The children of a base model, by name, in the order in which they run.

    Attributes:
        before: those ahead of the layers, with their stand-ins in parts that receive hidden states.
        layers: the list of layers.
        after: those behind the layers, which return what they receive in all parts but the last.
        head: the children of the model with the head that run behind the base model.
        first_inputs: keyword arguments that only the first part can take.
    """

    before: Mapping[str, _StandIn]
    layers: str
    after: tuple[str, ...]
    head: tuple[str, ...]
    first_inputs: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: Any) -> Anatomy:
        """That of ``model``; a ConfigError if nothing tells it."""
        kind = str(getattr(model.config, "model_type", None))
        if kind in _WITHOUT_PLAN:
            return _WITHOUT_PLAN[kind]
        plan = getattr(model.config, "base_model_pp_plan", None) or {}
        lists = [name for name in plan if isinstance(getattr(model.base_model, name, None), nn.ModuleList)]
        if getattr(model.config, "is_encoder_decoder", False) or len(lists) != 1:
            raise ConfigError(
                f"model is a {type(model).__name__} without a base_model_pp_plan for one chain of layers: must be a "
                "decoder that has one (Llama, Qwen3, Mistral, Gemma 2 and others), GPT-2, an nn.Sequential or a list "
                "of blocks"
            )
        names, (layers,) = list(plan), lists
        _check_plan(model, plan, layers)
        position = names.index(layers)
        # Whatever takes tokens is not called where hidden states come in; the rest, dropouts, must not run again.
        before = {name: AbsentModule if plan[name][0] == ["input_ids"] else PassingLayer for name in names[:position]}
        return cls(before, layers, tuple(names[position + 1 :]), tuple(getattr(type(model), "_pp_plan", None) or ()))


#: Families without a plan. GPT-2 adds positions to whatever it receives, hidden states included.
_WITHOUT_PLAN = {
    "gpt2": Anatomy(
        {"wte": AbsentModule, "wpe": NoOffset, "drop": PassingLayer},
        "h",
        ("ln_f",),
        ("lm_head",),
        frozenset({"token_type_ids"}),
    )
}

#: What layers may need by their plan; all else stays in the model's forward.
_LAYER_INPUTS = {"hidden_states", "attention_mask"}


def _check_plan(model: Any, plan: Mapping[str, Any], layers: str) -> None:
    inputs, outputs = plan[layers]
    if not _LAYER_INPUTS.issuperset(inputs) or outputs != ["hidden_states"]:
        raise ConfigError(
            f"base_model_pp_plan[{layers!r}] of a {type(model).__name__} is {plan[layers]}, must take "
            f"{' and '.join(sorted(_LAYER_INPUTS))} alone and return hidden_states"
        )
    absent = [index for index, layer in enumerate(getattr(model.base_model, layers)) if isinstance(layer, nn.Identity)]
    if absent:  # as transformers leaves them on the ranks of its own pipeline
        raise ConfigError(
            f"model is a {type(model).__name__} without its layers {absent}, must have all: load it without the "
            "pp_size of a DistributedConfig"
        )


def _is_of_library(model: Any) -> bool:
    """Whether the class is the library's own: a subclass may have another forward."""
    return type(model).__module__.startswith("transformers.models.")


@dataclass(frozen=True, slots=True)
class CausalLoss:
    """A causal language model's own loss, with the auxiliary loss of its routers where the output has one.

    Args:
        loss: the model's ``loss_function``.
        vocabulary: the number of tokens.
        auxiliary_weight: of the auxiliary loss.
    """

    loss: Callable[..., Tensor]
    vocabulary: int
    auxiliary_weight: float

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        """The mean over the labels that are not -100; each is predicted by the token before.

        Args:
            output: of the model's last part.
            labels: token numbers, of the shape of ``input_ids``.
        """
        loss = self.loss(logits=output.logits, labels=labels, vocab_size=self.vocabulary)
        auxiliary = getattr(output, "aux_loss", None)
        return loss if auxiliary is None else loss + self.auxiliary_weight * auxiliary.to(loss.device)


class LayeredDecoder(Layered):
    """A decoder of transformers: a bare one, or one with a head for causal language modelling.

    Args:
        model: a ``PreTrainedModel``.

    Raises:
        ConfigError: if its family has no plan, or it has parameters or options that no part could handle.
    """

    model: Any

    def __init__(self, model: Any) -> None:
        self._anatomy = anatomy = Anatomy.of(model)
        self.model, base = model, model.base_model
        self._base = next(name for name, module in model.named_modules() if module is base)
        head = [name for name in anatomy.head if self._base and hasattr(model, name)]
        self.before = [getattr(base, name) for name in anatomy.before]
        self.layers = list(getattr(base, anatomy.layers))
        self.after = [*(getattr(base, name) for name in anatomy.after), *(getattr(model, name) for name in head)]
        self._check_covered()
        for field in ("output_hidden_states", "output_attentions"):
            if getattr(model.config, field, False):
                raise ConfigError(f"config.{field} is True, must be False: the parts return no layer's own outputs")
        self.is_tested = model.config.model_type in TESTED and _is_of_library(model) and _is_of_library(base)
        if head:
            vocabulary = getattr(model, "vocab_size", None) or model.config.vocab_size
            auxiliary_weight = float(getattr(model, "router_aux_loss_coef", 0.0))
            self.loss_fn = CausalLoss(model.loss_function, vocabulary, auxiliary_weight)

    def parts(self, cuts: Sequence[int]) -> list[nn.Module]:
        return [self._part(start, stop) for start, stop in pairwise((0, *cuts, len(self.layers)))]

    def run(self, sample: Sample) -> tuple[Any, Tensor | None]:
        inputs = sample.inputs if isinstance(sample.inputs, Mapping) else {"input_ids": sample.inputs}
        labels = {} if self.loss_fn is None or sample.target is None else {"labels": sample.target}
        output = self.model(**inputs, **labels, use_cache=False)
        return {name: value for name, value in output.items() if name != "loss"}, output.get("loss")

    def sample(self) -> Sample | None:
        """Two rows of 8 tokens, the second padded; always the same."""
        weight = self.model.get_input_embeddings().weight
        tokens = (7 * torch.arange(16, device=weight.device).reshape(2, 8) + 3) % weight.shape[0]
        mask = torch.ones_like(tokens)
        mask[1, 5:] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        return Sample({"input_ids": tokens, "attention_mask": mask}, labels)

    def _part(self, start: int, stop: int) -> nn.Module:
        """A copy of the model that shares parameters and saved buffers, with stand-ins for what is not its own."""
        is_first, is_last = start == 0, stop == len(self.layers)
        memo: dict[int, Any] = {id(tensor): tensor for tensor in self.model.state_dict(keep_vars=True).values()}
        for index, layer in enumerate(self.layers):
            if not start <= index < stop:
                memo[id(layer)] = PassingLayer()
        if not is_first:
            stand_ins = self._anatomy.before.values()
            memo |= {id(module): stand_in() for module, stand_in in zip(self.before, stand_ins, strict=True)}
        if not is_last:
            norms = len(self._anatomy.after)
            memo |= {id(module): PassingLayer() for module in self.after[:norms]}
            memo |= {id(module): AbsentModule() for module in self.after[norms:]}
        part = copy.deepcopy(self.model, memo)
        return DecoderPart(part, self._base, is_first, is_last, self._anatomy.first_inputs)

    def _check_covered(self) -> None:
        """Raise a ConfigError for parameters that are in no layer and in nothing that the plan names."""
        pieces = [*self.before, *self.layers, *self.after]
        covered = {id(parameter) for piece in pieces for parameter in piece.parameters()}
        names = [name for name, parameter in self.model.named_parameters() if id(parameter) not in covered]
        if names:
            raise ConfigError(
                f"model is a {type(self.model).__name__} with parameters outside of its layers and its pp_plan: "
                f"{', '.join(names[:3])}; must be the bare decoder or its ForCausalLM class"
            )
