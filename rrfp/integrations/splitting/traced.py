"""`rrfp.split` for any other module: cut ahead of submodules that the caller names, as torch.fx follows its forward.

Only the forward of the model and of modules that have a named one inside is followed, with symbols in place of tensors.
All others are called as they are. So shapes may differ from microbatch to microbatch, modes and hooks of modules stay.
"""

from __future__ import annotations

import inspect
import operator
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from rrfp.compute.without_values import NotesEmptyBuffers
from rrfp.errors import ConfigError
from rrfp.integrations.splitting.layered import Layered, Sample, check_hooks_and_forward, evaluating

#: Functions of numbers; torch does not hand them to the tracer where these are symbols.
_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros")

#: How the value of a symbol decides what a forward does.
_ASKED: Mapping[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "len": len, "is_tensor": torch.is_tensor}

#: Augmented assignments. torch.fx takes ``x += y`` for ``x = x + y``, which leaves other names of x as they are.
_ASSIGNMENTS = [
    name for name in operator.__all__ if name[0] == "i" and {name[1:], f"{name[1:]}_"} & {*operator.__all__}
]

#: Methods and functions whose result may be in the memory of their first argument.
_VIEWS = {
    *("chunk", "contiguous", "detach", "diagonal", "expand", "expand_as", "flatten", "getattr", "getitem", "movedim"),
    *("narrow", "permute", "reshape", "select", "split", "squeeze", "swapaxes", "t", "transpose", "unbind"),
    *("unflatten", "unsqueeze", "view", "view_as"),
}

#: Contexts that a part would leave out, and what a forward does there.
_CONTEXTS: Mapping[type, str] = {
    torch.autocast: "enters torch.autocast",
    saved_tensors_hooks: "checkpoints activations, or has other hooks for saved tensors",
}

_BY_HAND = "move that line into a submodule, or cut the model by hand"


class TracedPart(NotesEmptyBuffers, fx.GraphModule):
    """What a model's forward does between two cuts, under the names of the whole."""


class LayeredTraced(Layered):
    """A module whose layers begin with the submodules ``at``; the first one begins with its forward."""

    def __init__(self, model: nn.Module, at: Any, sample: Sample | None) -> None:
        self.model = model
        self._at = _checked(model, at)
        followed = _followed(model, self._at, sample)
        self._nodes, self._constants = list(followed.graph.nodes), followed.constants
        self._starts = [0, *(followed.starts[name] for name in self._at), len(self._nodes)]
        self.written = [_tensor_of(model, node) for node in _written(self._nodes)]
        self.before, self.after = (), ()
        self.layers = self.parts(range(1, len(self._at) + 1))

    def parts(self, cuts: Sequence[int]) -> list[nn.Module]:
        bounds = pairwise((0, *cuts, len(self._at) + 1))
        return [self._part(self._starts[first], self._starts[stop]) for first, stop in bounds]

    def call_layers(self, sample: Sample) -> None:
        sample.call(*self.layers)

    def sample(self) -> Sample | None:
        return None

    def named_cuts(self, cuts: Sequence[int]) -> list[Any]:
        return [self._at[cut - 1] for cut in cuts]

    def _part(self, start: int, stop: int) -> TracedPart:
        graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self._carried(start):
            made[node] = graph.placeholder(node.name)

        def copied(node: fx.Node) -> fx.Node:
            if node not in made:
                made[node] = graph.node_copy(node, copied)
            return made[node]

        own = self._nodes[start:stop]
        for node in own:
            if (target := _assigned(node)) in made:  # what another part sent must not be written
                made[target] = graph.call_function(owned, (made[target],))
        for node in own:
            if not _is_made_anew(node):
                copied(node)
        if stop < len(self._nodes):
            graph.output(tuple(copied(node) for node in self._carried(stop)))
        with _attributes(self.model, self._constants):
            part = TracedPart(self.model, graph, f"{type(self.model).__name__}Part")
        self._keep_out_of_states(part)
        return part

    def _carried(self, stop: int) -> list[fx.Node]:
        """What is computed ahead of node ``stop`` and used behind it, in order."""
        needed = {source for node in self._nodes[stop:] for source in _sources(node)}
        return [node for node in self._nodes[:stop] if node in needed]

    def _keep_out_of_states(self, part: TracedPart) -> None:
        """torch.fx makes saved buffers of all tensors that the forward uses by itself."""
        saved = self.model.state_dict().keys()
        for node in part.graph.nodes:
            path, _, name = str(node.target).rpartition(".")
            if node.op == "get_attr" and node.target not in saved:
                part.get_submodule(path).register_buffer(name, part.get_buffer(node.target), persistent=False)


class _Asked(fx.Proxy):
    """Tells Python what the sample has in this place."""

    tracer: _Follower

    def __getattr__(self, k: str) -> _Attribute:
        return _Attribute(self, k)

    def __int__(self) -> int:
        return int(self.tracer.decided(self, "int"))

    __index__ = __int__

    def __len__(self) -> int:
        return int(self.tracer.decided(self, "len"))


class _Symbol(_Asked):
    """Stands for a tensor or a number."""


def _define_assignment(name: str) -> None:
    def assigned(self: _Symbol, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", assign, (name, self, other), {})

    setattr(_Symbol, f"__{name}__", assigned)


for _name in _ASSIGNMENTS:
    _define_assignment(_name)


class _Attribute(_Asked, fx.proxy.Attribute):
    """Stands for an attribute of one, or a method that is about to be called."""


@dataclass(frozen=True, slots=True)
class _Container:
    """A list, dict or set that a module holds, and what was in it."""

    module: nn.Module
    name: str
    value: Any
    items: Sequence[Any]

    @property
    def is_written(self) -> bool:
        now = _items(self.value)
        return len(now) != len(self.items) or any(map(is_not, chain(*now), chain(*self.items)))

    def restored(self) -> str:
        """Put back what was in it; returns what the forward does."""
        self.value.clear()
        if isinstance(self.value, list):
            self.value.extend(item for (item,) in self.items)
        else:
            self.value.update(self.items if isinstance(self.value, dict) else (item for (item,) in self.items))
        return f"a {type(self.module).__name__} writes into its attribute {self.name!r}"


def _items(value: Any) -> list[tuple[Any, ...]]:
    return [*value.items()] if isinstance(value, dict) else [(item,) for item in value]


def _containers(module: nn.Module) -> Iterator[_Container]:
    """Those that a forward may fill, buffers among them."""
    for name, value in vars(module).items():
        if isinstance(value, list | dict | set) and (name == "_buffers" or not name.startswith("_")):
            yield _Container(module, name, value, _items(value))


class _Follower(fx.Tracer):
    """Follows a forward, with symbols for the arguments ``given``; notes where the submodules ``at`` begin.

    ``copied`` names tensors that the forward makes of no symbol and writes: each call of it has to have its own.
    """

    # A buffer is a symbol too: what a forward computes of it changes when it is loaded.
    proxy_buffer_attributes = True

    def __init__(
        self,
        at: Sequence[str],
        given: Mapping[str, Any],
        has_values: bool,
        known: Sequence[Any] | None = None,
        copied: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._at, self._given, self._has_values = at, given, has_values
        self._values: fx.Interpreter | None = None
        self._is_computing = False
        #: By name, how many nodes were there when the submodule was first called.
        self.starts: dict[str, int] = {}
        #: What the sample decides, in order; known from an earlier time, or found.
        self.decisions: list[Any] = []
        self._known = None if known is None else iter(known)
        #: Tensors that the forward makes of no symbol, by the names that torch.fx gives them.
        self.constants: dict[str, Tensor] = {}
        self._copied: dict[str, fx.Node | None] = dict.fromkeys(copied)
        #: The tensors that it uses as they are, with torch's count of writes then.
        self._used: list[tuple[Tensor, int]] = []
        self._has_gradients = torch.is_grad_enabled()
        #: Whether the forward draws random numbers outside submodules that are called as they are.
        self.draws = False

    def follow(self, model: nn.Module) -> None:
        paths = {name[:end] for name in self._at for end, letter in enumerate(name) if letter == "."}
        before = {module: dict(vars(module)) for module in (model, *map(model.get_submodule, paths))}
        kept = [each for module in before for each in _containers(module)]
        states = _random_states()
        try:
            with _symbols_in_factories(self), _contexts_refused(self):
                self.trace(model)
                if any(used._version != version for used, version in self._used):
                    raise TypeError("it writes a tensor that depends on no input, after its first use")
        finally:
            after = {module: dict(vars(module)) for module in before}
            for module, attributes in before.items():
                vars(module).clear()
                vars(module).update(attributes)
            written = [each.restored() for each in kept if each.is_written]
        self.draws = _random_states() != states
        if written:
            raise TypeError(written[0])
        for module, attributes in after.items():
            for name in (name for name, value in attributes.items() if before[module].get(name, self) is not value):
                if module is not model or not name.startswith("_tensor_constant"):
                    raise TypeError(f"a {type(module).__name__} writes its attribute {name!r}")
                self.constants[name] = attributes[name]

    def create_args_for_root(self, root_fn: Callable[..., Any], *_: Any) -> tuple[Callable[[], Any], list[Any]]:
        symbols = {name: self.create_proxy("placeholder", name, (), {}) for name in self._given}
        return lambda: root_fn(self.root, **symbols), []

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if torch.is_grad_enabled() != self._has_gradients:
            raise TypeError("it computes something without gradients, or in an autograd.Function")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        made: Any = super().create_arg(a)
        if not isinstance(a, Tensor):
            return made
        self._used.append((a, a._version))
        name = str(made.target)
        if name in self._copied and self._copied[name] is None:
            self._copied[name] = self.create_node("call_function", owned, (made,), {})
        return self._copied.get(name) or made

    def refuse(self, what: str) -> None:
        """The forward does something that its parts would leave out."""
        if not self._is_computing:
            raise TypeError(f"it {what}")

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(name.startswith(f"{module_qualified_name}.") for name in self._at)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._is_computing:
            return forward(*args, **kwargs)
        self.starts.setdefault(self.path_of_module(m), len(self.graph.nodes))
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._is_computing:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> _Symbol:
        return _Symbol(node, self)

    def to_bool(self, obj: Any) -> bool:
        return bool(self.decided(obj, "bool"))

    def iter(self, obj: Any) -> Iterator[Any]:
        return iter([obj[index] for index in range(len(obj))])

    def decided(self, symbol: Any, asked: str) -> Any:
        """What the sample has there. A part refuses inputs for which it is otherwise."""
        known = _ASKED[asked](self._value(symbol.node)) if self._known is None else next(self._known, False)
        self.decisions.append(known)
        if asked != "is_tensor":
            self.create_proxy("call_function", check_decided, (symbol, asked, known), {})
        return known

    def _value(self, node: fx.Node) -> Any:
        needed = _ancestors(node)
        if not self._has_values and any(each.op == "placeholder" for each in needed):
            raise ValueError("it depends on values of the inputs, and there is no sample= that has some")
        if self._values is None:
            self._values = fx.Interpreter(self.root, garbage_collect_values=False, graph=self.graph)
        values = self._values.env
        self._is_computing = True
        own, numpys = random.getstate(), np.random.get_state()
        try:
            with torch.no_grad(), torch.random.fork_rng():
                for each in self.graph.nodes:
                    if each not in values and (self._has_values or each in needed):
                        is_input = each.op == "placeholder"
                        values[each] = self._given[str(each.target)] if is_input else self._values.run_node(each)
        finally:
            self._is_computing = False
            random.setstate(own)
            np.random.set_state(numpys)
        return values[node]


def assign(name: str, value: Any, other: Any) -> Any:
    """In a part: an augmented assignment, which writes tensors and nothing else."""
    return getattr(operator, name)(value, other)


def owned(value: Any) -> Any:
    """In a part: a copy of a tensor that it writes, and that came from another part or is used again."""
    return value.clone() if isinstance(value, Tensor) else value


def check_decided(value: Any, asked: str, decided: Any) -> None:
    """In a part: refuse inputs for which the model's forward would do something else than it did for the sample."""
    if (found := _ASKED[asked](value)) != decided:
        raise ConfigError(
            f"the model's forward depends on a value that is {found} here, must be {decided}, as in the sample with "
            f"which rrfp.split has cut it: {_BY_HAND}"
        )


def _checked(model: Any, at: Any) -> tuple[str, ...]:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}, must be an nn.Module where at= is given")
    if not isinstance(at, list | tuple) or not at or any(type(name) is not str for name in at):
        raise ConfigError(f"at is {at!r:.100}, must be a list of names of submodules, in the order in which they run")
    known = {name for name, _ in model.named_modules() if name}
    for index, name in enumerate(at):
        if name not in known or name in at[:index]:
            problem = "which is there twice" if name in known else f"which a {type(model).__name__} lacks"
            raise ConfigError(f"at[{index}] is {name!r}, {problem}: must be names of submodules, each once")
    check_hooks_and_forward(model)
    for name in at:
        parents = [name[:end] for end, letter in enumerate(name) if letter == "."]
        for parent in parents:
            check_hooks_and_forward(model.get_submodule(parent), only_backward=True)
    return tuple(at)


def _followed(model: nn.Module, at: Sequence[str], sample: Sample | None) -> _Follower:
    """The forward, which must be the same in training with gradients and in evaluation without."""
    given = _given(model, sample)
    with torch.random.fork_rng(), evaluating(model):
        try:
            with torch.no_grad():
                followed = _Follower(at, given, sample is not None)
                followed.follow(model)
                if copied := {str(node.target) for node in _written(followed.graph.nodes)} & followed.constants.keys():
                    followed = _Follower(at, given, sample is not None, followed.decisions, copied)
                    followed.follow(model)
            with torch.enable_grad():
                training = _Follower(at, given, sample is not None, followed.decisions, copied)
                model.train()
                training.follow(model)
        except Exception as error:
            text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}{_line_of(error)}"
            raise ConfigError(
                f"model is a {type(model).__name__} whose forward torch.fx cannot follow ({text}): {_BY_HAND}"
            ) from error
    _check_modes(model, followed, training)
    _check_order(model, at, followed)
    return followed


def _given(model: nn.Module, sample: Sample | None) -> dict[str, Any]:
    """The arguments of the forward that are symbols: those of the sample, or those without a default."""
    signature = inspect.signature(model.forward)
    several = {
        name for name, each in signature.parameters.items() if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    if sample is None:
        needed = [name for name, each in signature.parameters.items() if each.default is each.empty]
        return {name: None for name in needed if name not in several}
    inputs = sample.inputs
    keywords = inputs if isinstance(inputs, Mapping) else {}
    values = () if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple) else (inputs,)
    try:
        bound = signature.bind(*values, **keywords).arguments
    except TypeError as error:
        raise ConfigError(f"sample does not fit the forward of a {type(model).__name__}: {error}") from None
    if names := sorted(several & bound.keys()):
        raise ConfigError(f"sample is for {names[0]!r} of the forward of a {type(model).__name__}, must be for others")
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    meta = {name: tree_map_only(Tensor, lambda each: each.to("meta"), value) for name, value in bound.items()}
    return {name: value for name, value in (meta if is_meta else bound).items() if value is not None}


def _check_modes(model: nn.Module, followed: _Follower, training: _Follower) -> None:
    lines, others = (
        [f"{node.target} of {node.args} {node.kwargs or ''}" for node in each.graph.nodes]
        for each in (followed, training)
    )
    if lines != others:
        differing = next((line for line, other in zip(lines, others, strict=False) if line != other), "its end")
        raise ConfigError(
            f"model is a {type(model).__name__} whose forward does something else in training than in evaluation "
            f"({differing:.100}): {_BY_HAND}"
        )
    for name, value in followed.constants.items():
        if not torch.equal(value, training.constants[name]):
            raise ConfigError(
                f"model is a {type(model).__name__} whose forward makes random numbers of its own, of a shape that "
                f"does not depend on its inputs: {_BY_HAND}"
            )

    if followed.draws or training.draws:
        raise ConfigError(
            f"model is a {type(model).__name__} whose forward draws random numbers by itself, which its parts would "
            f"have as they were drawn once: {_BY_HAND}"
        )


def _random_states() -> tuple[Any, ...]:
    """Of Python, numpy and torch, to be compared."""
    numpys: Any = np.random.get_state()
    return random.getstate(), numpys[1].tobytes(), numpys[2:], torch.get_rng_state().numpy().tobytes()


def _check_order(model: nn.Module, at: Sequence[str], followed: _Follower) -> None:
    called = list(followed.starts)
    for index, name in enumerate(at):
        if name not in called:
            raise ConfigError(
                f"at[{index}] is {name!r}, which the forward of a {type(model).__name__} does not call, must be "
                f"submodules that it calls: {', '.join(called[:9])}{', ...' if len(called) > 9 else ''}"
            )
    inputs = sum(node.op == "placeholder" for node in followed.graph.nodes)
    starts = [inputs, *(followed.starts[name] for name in at)]
    for name, (start, stop) in zip(at, pairwise(starts), strict=True):
        if start >= stop:
            wanted = "must be in the order in which they run, something ahead of each"
            raise ConfigError(f"at is {list(at)}, {wanted}: nothing runs between {name!r} and what is ahead of it")


def _is_made_anew(node: fx.Node) -> bool:
    """Whether each part that uses it makes it by itself: parameters, and what no message carries."""
    return node.op == "get_attr" or (node.target is getattr and node.args[1] in ("device", "dtype"))


def _assigned(node: fx.Node) -> Any:
    return node.args[1] if node.target is assign else None


_WRITERS = {"__setitem__", *(f"__{name}__" for name in _ASSIGNMENTS)}


def _written(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The tensors of no input that a forward writes by itself, as far as names of operations tell."""
    for node in nodes:
        name = _name_of(node)
        writes = name in _WRITERS or (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("inplace")
        source = _assigned(node) or node.kwargs.get("out") or (node.args[0] if writes and node.args else None)
        while isinstance(source, fx.Node) and source.args and _name_of(source) in _VIEWS:
            source = source.args[0]
        if isinstance(source, fx.Node) and source.op == "get_attr":
            yield source


def _tensor_of(model: nn.Module, node: fx.Node) -> Any:
    path, _, name = str(node.target).rpartition(".")
    return getattr(model.get_submodule(path), name)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """A node, and all that it is computed of."""
    found, waiting = {node}, [node]
    while waiting:
        new = {*waiting.pop().all_input_nodes} - found
        found |= new
        waiting += new
    return found


def _name_of(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    for each in node.all_input_nodes:
        if _is_made_anew(each):
            yield from _sources(each)
        else:
            yield each


def _line_of(error: Exception) -> str:
    trace, place = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/torch/" not in file and file != __file__:
            place = f", in {file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


@contextmanager
def _attributes(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    vars(model).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(model)[name]


@contextmanager
def _contexts_refused(tracer: _Follower) -> Iterator[None]:
    """Within, a forward that enters one of `_CONTEXTS` is refused: symbols have no values to compute there."""
    enter = "__enter__"
    own = {context: getattr(context, enter) for context in _CONTEXTS}

    def refusing(context: type) -> Callable[[Any], Any]:
        def entered(self: Any) -> Any:
            tracer.refuse(_CONTEXTS[context])
            return own[context](self)

        return entered

    try:
        for context in own:
            setattr(context, enter, refusing(context))
        yield
    finally:
        for context, entered in own.items():
            setattr(context, enter, entered)


@contextmanager
def _symbols_in_factories(tracer: _Follower) -> Iterator[None]:
    def followed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(each, fx.Proxy) for each in tree_leaves((args, kwargs))):
                return function(*args, **kwargs)
            if name == "is_tensor":
                return tracer.decided(args[0], name)
            return tracer.create_proxy("call_function", function, args, kwargs)

        return made

    own = {name: getattr(torch, name) for name in (*_FACTORIES, "is_tensor")}
    try:
        for name, function in own.items():
            setattr(torch, name, followed(name, function))
        yield
    finally:
        for name, function in own.items():
            setattr(torch, name, function)
