"""The one-process reference: the result that a pipeline must compute, in the plainest way.

It chains the modules of all virtual stages in one process and differentiates them by ordinary autograd, microbatches in
order. It shares with the pipeline the random forks, the arithmetic of weights and the memory format between virtual
stages, and nothing else.

Of a parameter that several modules share, every module has a copy: each copy's gradient is formed in microbatch order,
then the copies are added in the order of the modules. A pipeline does the same with copies on several stages. Autograd
itself would add both modules' shares microbatch by microbatch, which differs in the last bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rrfp.laboratory import PUBLIC, public_name

# For type checkers, which do not run __getattr__: `as` marks a public name.
if TYPE_CHECKING:
    from rrfp.lab.reference import ReferenceResult as ReferenceResult
    from rrfp.lab.reference import reference as reference

__all__ = sorted(PUBLIC[__name__])


def __getattr__(name: str) -> Any:
    return public_name(__name__, name)


def __dir__() -> list[str]:
    return list(__all__)
