"""The part of a decoder of transformers that a virtual stage runs: the model's own forward, with fewer layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rrfp.errors import ConfigError

#: What every part can take, from the caller or from the part before it.
OPTIONS = frozenset({"attention_mask", "position_ids", "output_router_logits"})

#: What only the first part takes; the first two exclude each other.
INPUTS = frozenset({"input_ids", "inputs_embeds"})


class PassingLayer(nn.Module):
    """Stands where another part has a layer, a dropout or a norm. The layers keep their places in their list."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return hidden_states


class NoOffset(nn.Module):
    """Stands where the first part has position embeddings that it has added already."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


class AbsentModule(nn.Module):
    """Stands for a module of another part that this part must not call."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("this part of the model has no such module: the whole model was not cut by a rule that fits")


class DecoderPart(nn.Module):
    """Some layers of a decoder, with the embedding in the first part and the head in the last.

    The first part is called as the model is: with ``input_ids``, or with keyword arguments. It returns the hidden
    states, and beside them all that later parts need: masks, positions, and the logits of routers, if they are wanted.
    A part that has keyword arguments of its own prefers those. The last part returns the model's own output.

    Parameters and submodules have the names that they have in the whole model.

    Args:
        model: the model, with stand-ins for what is not this part's.
        base: the name of its base model; empty if it is that.
        is_first: whether it receives tokens.
        is_last: whether it returns the model's output.
        first_inputs: further keyword arguments of the first part.
    """

    _model: Any

    def __init__(self, model: Any, base: str, is_first: bool, is_last: bool, first_inputs: frozenset[str]) -> None:
        super().__init__()
        self._base, self._is_first, self._is_last = base, is_first, is_last
        self._first_inputs = (INPUTS | first_inputs) if is_first else frozenset()
        # Not a submodule, which would prefix all names; its tables are this module's, so there is one set of children.
        self.__dict__["_model"] = model
        self.__dict__.update(_modules=model._modules, _parameters=model._parameters, _buffers=model._buffers)
        self.training = model.training

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        return self._model.config

    def train(self, mode: bool = True) -> DecoderPart:
        self._model.train(mode)
        return super().train(mode)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """See the class.

        Raises:
            ConfigError: for a keyword argument that a part cannot take.
        """
        self._check(arguments, options)
        routers: Sequence[Tensor] = ()
        if self._is_first:
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
        """The output of the model, or of its base model in all parts but the last."""
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
