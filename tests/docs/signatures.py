"""Shows ``**arguments: Unpack[...]`` in the API's reference as the keyword arguments that it stands for.

mkdocs.yml names this file as an extension of griffe. A `TypedDict` whose fields have no docstrings, such as that of the
pipeline's options, which have a page of their own, stays as it is.
"""

from __future__ import annotations

from typing import Any

import griffe


def fields(function: griffe.Function, variadic: griffe.Parameter) -> list[griffe.Attribute]:
    """The documented fields of the typed dict that a parameter unpacks, those of its bases first."""
    annotation = variadic.annotation
    if not isinstance(annotation, griffe.ExprSubscript) or annotation.canonical_path != "typing.Unpack":
        return []
    unpacked = function.modules_collection[annotation.slice.canonical_path]
    unpacked = unpacked.final_target if unpacked.is_alias else unpacked
    found = [each for owner in reversed([unpacked, *unpacked.mro()]) for each in owner.attributes.values()]
    return found if all(each.docstring for each in found) else []


class UnpackedArguments(griffe.Extension):
    """Replaces a variadic parameter, in the signature and in the docstring's table."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        for variadic in list(func.parameters):
            if variadic.kind is not griffe.ParameterKind.var_keyword or not (found := fields(func, variadic)):
                continue
            sections = func.docstring.parsed if func.docstring else []  # before its parameter goes: it is checked
            del func.parameters[variadic.name]
            for each in found:
                parameter = griffe.Parameter(
                    each.name, annotation=each.annotation, kind=griffe.ParameterKind.keyword_only, default="..."
                )
                func.parameters[each.name] = parameter
            for section in sections:
                if isinstance(section, griffe.DocstringSectionParameters):
                    section.value = [row for row in section.value if row.name.lstrip("*") != variadic.name]
                    section.value += [
                        griffe.DocstringParameter(each.name, description=each.docstring.value, annotation=each.annotation)
                        for each in found
                        if each.docstring
                    ]
