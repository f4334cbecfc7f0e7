"""The one-process reference: the result that a pipeline must compute, in the plainest way.

It chains the modules of all virtual stages in one process and differentiates them by ordinary autograd, microbatches in
order. It shares with the pipeline the random forks, the arithmetic of weights and the memory format between virtual
stages, and nothing else.

Of a parameter that several modules share, every module has a copy: each copy's gradient is formed in microbatch order,
then the copies are added in the order of the modules. A pipeline does the same with copies on several stages. Autograd
itself would add both modules' shares microbatch by microbatch, which differs in the last bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rrfp.laboratory import PUBLIC
from rrfp.lazy_names import lazy_names

# For type checkers: `as` marks a public name.
if TYPE_CHECKING:
    from rrfp.lab.reference import ReferenceResult as ReferenceResult
    from rrfp.lab.reference import reference as reference

__all__, __getattr__, __dir__ = lazy_names(__name__, PUBLIC[__name__])
