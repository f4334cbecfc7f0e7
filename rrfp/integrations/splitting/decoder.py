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

from rrfp.compute.without_values import NotesEmptyBuffers
from rrfp.errors import ConfigError
from rrfp.integrations.splitting.layered import Layered, Sample, check_hooks_and_forward
from rrfp.integrations.splitting.weights import Weights
from rrfp.log import get_logger

logger = get_logger(__name__)

#: What every part can take, from the caller or from the part before it.
OPTIONS = frozenset({"attention_mask", "position_ids", "output_router_logits"})

#: What only the first part takes; the first two exclude each other.
INPUTS = frozenset({"input_ids", "inputs_embeds"})


class PassingLayer(nn.Module):
    """Stands for another part's layer, dropout or norm, in its place."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return hidden_states


class NoOffset(nn.Module):
    """Stands for position embeddings that the first part has added."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


class AbsentModule(nn.Module):
    """Stands for a module that this part must not call."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("this part of the model has no such module: the whole model was not cut by a rule that fits")


class DecoderPart(NotesEmptyBuffers):
    """Some layers of a decoder, with the embedding in the first part and the head in the last.

    The first part is called as the model is: with ``input_ids``, or with keyword arguments. It returns the hidden
    states, and beside them all that later parts need: masks, positions, and the logits of routers, if they are wanted.
    A part that has keyword arguments of its own prefers those. The last part returns the model's own output.

    Parameters and submodules have the names that they have in the whole model.
    """

    _model: Any

    def __init__(self, model: Any, base: str, is_first: bool, is_last: bool, first_inputs: frozenset[str]) -> None:
        super().__init__()
        self._base, self._is_first, self._is_last = base, is_first, is_last
        self._first_inputs = (INPUTS | first_inputs) if is_first else frozenset()
        self._has_told_of_packing = False
        # Not a submodule, which would prefix all names; its tables are this module's, so there is one set of children.
        self.__dict__["_model"] = model
        self.__dict__.update(_modules=model._modules, _parameters=model._parameters, _buffers=model._buffers)
        self.training = model.training

    @property
    def config(self) -> Any:
        return self._model.config

    @property
    def library_model(self) -> Any:
        """The copy of the whole model, with stand-ins for other parts."""
        return self._model

    def train(self, mode: bool = True) -> DecoderPart:
        self._model.train(mode)
        return super().train(mode)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        self._check(arguments, options)
        routers: Sequence[Tensor] = ()
        if self._is_first:
            self._tell_of_packing(options)
            inputs = {"input_ids": arguments[0]} if arguments else {}
            inputs |= {name: options.pop(name) for name in self._first_inputs & options.keys()}
        else:
            hidden, carried, routers = arguments
            inputs, options = {"inputs_embeds": hidden}, {**carried, **options}
        output = self._run(routers, **inputs, **options)
        if self._is_last:
            return output
        return output.last_hidden_state, options, list(output.get("router_logits") or ())

    def _run(self, routers: Sequence[Tensor], **options: Any) -> Any:
        base = self._model.get_submodule(self._base)

        def with_earlier(module: nn.Module, arguments: Any, output: Any) -> Any:
            output["router_logits"] = (*routers, *output["router_logits"])
            return output

        # The head is given the routers of all parts through the output of its base model.
        handle = base.register_forward_hook(with_earlier) if routers else None
        # Not through the head in other parts: what it does to logits (a cap, say) it would do to hidden states.
        called: Callable[..., Any] = self._model if self._is_last else base
        try:
            return called(use_cache=False, return_dict=True, **options)
        finally:
            if handle is not None:
                handle.remove()

    def _tell_of_packing(self, options: Mapping[str, Any]) -> None:
        """Say once that packed sequences are masked from each other."""
        if self._has_told_of_packing or options.get("attention_mask") is not None:
            return
        positions = options.get("position_ids")
        if not isinstance(positions, Tensor) or not bool((positions.diff(dim=-1) != 1).any()):
            return
        self._has_told_of_packing = True
        logger.warning(
            "position_ids begin again and there is no attention_mask: packed sequences do not attend to each other, as "
            "in model(**inputs, use_cache=False); model(**inputs), which has a cache by default, lets them attend "
            "(docs/how-to/transformers.md)"
        )

    def _check(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        if "labels" in options:
            raise ConfigError("labels are given with the inputs, must be the targets of the step")
        allowed = OPTIONS | self._first_inputs
        if unknown := sorted(options.keys() - allowed):
            raise ConfigError(
                f"a part of a {type(self._model).__name__} is given {unknown[0]!r}, must be one of: "
                f"{', '.join(sorted(allowed))}"
            )
        if self._is_first and len(arguments) + len(INPUTS & options.keys()) != 1:
            raise ConfigError(
                f"inputs have {len(arguments)} positional arguments and the keywords {sorted(options)}, must have one "
                "of input_ids, as a tensor or by keyword, and inputs_embeds; masks and positions by keyword"
            )


#: The families (``config.model_type``) whose parts RRFP's tests compare with the whole model.
TESTED = frozenset({"gemma2", "gpt2", "llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3", "qwen3_moe"})

#: What stands in a later part for a module that runs before the layers, called with nothing or returning its input.
_StandIn = Callable[[], nn.Module]


@dataclass(frozen=True, slots=True)
class DecoderLayout:
    """The children of a base model by name, as they run."""

    #: Those ahead of the layers, with their stand-ins in parts that receive hidden states.
    before: Mapping[str, _StandIn]
    layers: str
    #: Those behind the layers, which return what they receive in all parts but the last.
    after: tuple[str, ...]
    #: The children of the model with the head that run behind the base model.
    head: tuple[str, ...]
    #: Keyword arguments that only the first part can take.
    first_inputs: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: Any) -> DecoderLayout:
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
    "gpt2": DecoderLayout(
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
    """Whether the class is the library's own, not a subclass."""
    return type(model).__module__.startswith("transformers.models.")


@dataclass(frozen=True, slots=True)
class CausalLoss:
    """A causal language model's own loss, with its routers' if any."""

    loss: Callable[..., Tensor]
    vocabulary: int
    auxiliary_weight: float

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        """The mean over labels that are not -100."""
        loss = self.loss(logits=output.logits, labels=labels, vocab_size=self.vocabulary)
        auxiliary = getattr(output, "aux_loss", None)
        return loss if auxiliary is None else loss + self.auxiliary_weight * auxiliary.to(loss.device)


class LayeredDecoder(Layered):
    """A decoder of transformers, bare or for causal language modelling."""

    model: Any

    def __init__(self, model: Any) -> None:
        self._layout = layout = DecoderLayout.of(model)
        self.model, base = model, model.base_model
        for each in (model, base):
            check_hooks_and_forward(each)
        self._base = next(name for name, module in model.named_modules() if module is base)
        head = [name for name in layout.head if self._base and hasattr(model, name)]
        self.before = [getattr(base, name) for name in layout.before]
        self.layers = list(getattr(base, layout.layers))
        self.after = [*(getattr(base, name) for name in layout.after), *(getattr(model, name) for name in head)]
        self._check_covered()
        self._check_positions()
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

    def weights(self) -> Weights:
        from rrfp.integrations.splitting.decoder_weights import DecoderWeights

        return DecoderWeights(self.model)

    def sample(self) -> Sample | None:
        """Two rows of 8 tokens, the second padded; always the same."""
        weight = self.model.get_input_embeddings().weight
        tokens = (7 * torch.arange(16, device=weight.device).reshape(2, 8) + 3) % weight.shape[0]
        mask = torch.ones_like(tokens)
        mask[1, 5:] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        return Sample({"input_ids": tokens, "attention_mask": mask}, labels)

    def _part(self, start: int, stop: int) -> nn.Module:
        """A copy that shares parameters, with stand-ins for other parts."""
        is_first, is_last = start == 0, stop == len(self.layers)
        memo: dict[int, Any] = {id(tensor): tensor for tensor in self.model.state_dict(keep_vars=True).values()}
        for index, layer in enumerate(self.layers):
            if not start <= index < stop:
                memo[id(layer)] = PassingLayer()
        if not is_first:
            stand_ins = self._layout.before.values()
            memo |= {id(module): stand_in() for module, stand_in in zip(self.before, stand_ins, strict=True)}
        if not is_last:
            norms = len(self._layout.after)
            memo |= {id(module): PassingLayer() for module in self.after[:norms]}
            memo |= {id(module): AbsentModule() for module in self.after[norms:]}
        part = copy.deepcopy(self.model, memo)
        return DecoderPart(part, self._base, is_first, is_last, self._layout.first_inputs)

    def _check_positions(self) -> None:
        """Raise a ConfigError for rotary embeddings whose frequencies depend on earlier microbatches."""
        for name, module in self.model.named_modules():
            kinds = vars(module).get("rope_type")  # one, or one for each type of layer
            for kind in kinds.values() if isinstance(kinds, Mapping) else [kinds]:
                if isinstance(kind, str) and "dynamic" in kind:
                    raise ConfigError(
                        f"rope_type is {kind!r} in {name} of a {type(self.model).__name__}, must be another: its "
                        "frequencies depend on the longest sequence so far, so each stage would have its own; where no "
                        "sequence is longer than max_position_embeddings "
                        f"({getattr(self.model.config, 'max_position_embeddings', None)}), a model that is built with "
                        "'default' has the same"
                    )

    def _check_covered(self) -> None:
        """Refuse parameters outside the layers and the plan."""
        pieces = [*self.before, *self.layers, *self.after]
        covered = {id(parameter) for piece in pieces for parameter in piece.parameters()}
        names = [name for name, parameter in self.model.named_parameters() if id(parameter) not in covered]
        if names:
            raise ConfigError(
                f"model is a {type(self.model).__name__} with parameters outside of its layers and its pp_plan: "
                f"{', '.join(names[:3])}; must be the bare decoder or its ForCausalLM class"
            )
