"""Shows ``**arguments: Unpack[...]`` in the API's reference as the keyword arguments that it stands for.

mkdocs.yml names this file as an extension of griffe. A `TypedDict` whose fields have no docstrings, such as that of the
pipeline's options, which have a page of their own, stays as it is.
"""

from __future__ import annotations

from typing import Any

import griffe


def canonical(unpack: griffe.ExprSubscript) -> str:
    """The path of the typed dict in ``Unpack[...]``."""
    assert isinstance(unpack.slice, griffe.Expr)
    return unpack.slice.canonical_path


class UnpackedArguments(griffe.UnpackTypedDictExtension):
    """griffe's own extension, for typed dicts that explain each field."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Leave the typed dicts themselves as they are."""

    def on_function(self, *, func: griffe.Function, **more: Any) -> None:
        for parameter in func.parameters:
            annotation = parameter.annotation
            if isinstance(annotation, griffe.ExprSubscript) and annotation.canonical_path == "typing.Unpack":
                unpacked = func.modules_collection[canonical(annotation)]
                if not all(each.docstring for each in unpacked.attributes.values()):
                    return
        super().on_function(func=func, **more)
