"""What transformers does to weights between a folder and a model: other names, merged experts, computed buffers.

Its names that are not public are used here alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_converters,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from rrfp.compute.without_values import is_empty
from rrfp.integrations.splitting.weights import Read, Recipe, Weights


class DecoderWeights(Weights):
    """Of a model of transformers, whose parts are copies of it with stand-ins."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._unsaved = frozenset(model._keys_to_ignore_on_save or ())
        #: What a save undoes, as that of a model from ``from_pretrained`` does; None if no folder was loaded.
        self._conversions: list[Any] | None = None
        # Of tied entries transformers saves the source.
        for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
            if source in (names := self.tied(target)):
                ordered = (source, *(name for name in names if name != source))
                self._tied |= dict.fromkeys(names, ordered)

    def recipes(self, stored: Sequence[str], part: Any) -> Iterator[Recipe]:
        """As the base; entries may have older names, one model's prefix more or less, or be parts of one."""
        model = part.library_model
        transforms = get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        sources: dict[str, list[tuple[str, str | None]]] = {}
        for key in sorted(stored, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, self.shapes)
            if target not in self.shapes and key in self.shapes:
                target, pattern = key, None
            if target in self.shapes:
                sources.setdefault(target, []).append((key, pattern))
        self._conversions = [each for each in transforms if each.was_used()]
        for target, found in sources.items():
            (key, pattern), *_ = found
            if pattern is None:
                yield Recipe.copy(target, key)
            else:
                converter = by_pattern[pattern]
                patterns = converter.target_patterns
                makes = tuple(target.replace(patterns[0], each) for each in patterns)
                yield Recipe(makes, _Conversion(converter, model, target, found))

    @property
    def stored_names(self) -> list[str]:
        return [name for name in super().stored_names if name not in self._unsaved]

    def groups(self, names: Iterable[str], part: Any) -> list[tuple[str, ...]]:
        """As the base; experts that are one tensor in the model, for example, are made apart with its others."""
        model = self._model_of(part)
        transforms = getattr(model, "_weight_conversions", None)
        if transforms is None:
            transforms = get_model_conversion_mapping(model, add_legacy=False)
        undoing = [each.reverse_transform() for each in transforms[::-1] if isinstance(each, WeightConverter)]
        together: dict[str, list[str]] = {}
        for name in names:
            together.setdefault(apply_converters(name, undoing)[0], []).append(name)
        return [tuple(group) for group in together.values()]

    def stored(self, entries: dict[str, Any], part: Any) -> Mapping[str, Any]:
        stored: dict[str, Any] = revert_weight_conversion(self._model_of(part), entries)
        return stored

    def write_configuration(self, folder: Path, part: Any) -> None:
        model = part.library_model
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)

    def _model_of(self, part: Any) -> Any:
        """The model of a part, which knows how it was loaded."""
        if self._conversions is not None:
            part.library_model._weight_conversions = self._conversions
        return part.library_model

    def fill_buffers(self, part: Any) -> None:
        """As the base: as ``from_pretrained`` does."""
        model = part.library_model
        for module in model.modules():
            module._is_hf_initialized = not any(map(is_empty, module.buffers(recurse=False)))
        for tensor in (*model.parameters(), *model.buffers()):
            tensor._is_hf_initialized = not is_empty(tensor)
        model.initialize_weights()


class _Conversion:
    def __init__(
        self, converter: Any, model: nn.Module, target: str, sources: Sequence[tuple[str, str | None]]
    ) -> None:
        self._converter, self._model, self._target, self._sources = converter, model, target, sources

    def __call__(self, read: Read) -> dict[str, Any]:
        converter = copy.deepcopy(self._converter)
        for key, pattern in self._sources:
            converter.add_tensor(self._target, key, pattern, lambda key=key: read(key))
        made = converter.convert(self._target, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
