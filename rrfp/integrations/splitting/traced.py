"""`rrfp.split` for any other module: cut ahead of submodules that the caller names, as torch.fx follows its forward.

Only the forward of the model and of modules that have a named one inside is followed, with symbols in place of tensors.
All others are called as they are. So shapes may differ from microbatch to microbatch, modes and hooks of modules stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from rrfp.compute.without_values import NotesEmptyBuffers
from rrfp.errors import ConfigError
from rrfp.integrations.splitting.layered import Layered, Sample, evaluating

#: Functions of numbers; torch does not hand them to the tracer where these are symbols.
_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros")

#: How the value of a symbol decides what a forward does.
_ASKED: Mapping[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "len": len, "is_tensor": torch.is_tensor}

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

        for node in self._nodes[start:stop]:
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


class _Attribute(_Asked, fx.proxy.Attribute):
    """Stands for an attribute of one, or a method that is about to be called."""


class _Follower(fx.Tracer):
    """Follows a forward, with symbols for the arguments ``given``; notes where the submodules ``at`` begin."""

    def __init__(
        self, at: Sequence[str], given: Mapping[str, Any], has_values: bool, known: Sequence[Any] | None
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

    def follow(self, model: nn.Module) -> None:
        paths = {name[:end] for name in self._at for end, letter in enumerate(name) if letter == "."}
        before = {module: dict(vars(module)) for module in (model, *map(model.get_submodule, paths))}
        try:
            with _symbols_in_factories(self):
                self.trace(model)
        finally:
            after = {module: dict(vars(module)) for module in before}
            for module, attributes in before.items():
                vars(module).clear()
                vars(module).update(attributes)
        for module, attributes in after.items():
            for name in (name for name, value in attributes.items() if before[module].get(name, self) is not value):
                if module is not model or not name.startswith("_tensor_constant"):
                    raise TypeError(f"a {type(module).__name__} writes its attribute {name!r}")
                self.constants[name] = attributes[name]

    def create_args_for_root(self, root_fn: Callable[..., Any], *_: Any) -> tuple[Callable[[], Any], list[Any]]:
        symbols = {name: self.create_proxy("placeholder", name, (), {}) for name in self._given}
        return lambda: root_fn(self.root, **symbols), []

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
        if not self._has_values:
            raise ValueError("it depends on values of the inputs, and there is no sample= that has some")
        if self._values is None:
            self._values = fx.Interpreter(self.root, garbage_collect_values=False, graph=self.graph)
        values = self._values.env
        self._is_computing = True
        try:
            with torch.no_grad():
                for each in self.graph.nodes:
                    if each not in values:
                        is_input = each.op == "placeholder"
                        values[each] = self._given[str(each.target)] if is_input else self._values.run_node(each)
        finally:
            self._is_computing = False
        return values[node]


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
    if model._forward_hooks or model._forward_pre_hooks:
        raise ConfigError(f"model is a {type(model).__name__} with forward hooks of its own, which no part would call")
    return tuple(at)


def _followed(model: nn.Module, at: Sequence[str], sample: Sample | None) -> _Follower:
    """The forward, which must be the same in training and evaluation."""
    given = _given(model, sample)
    with torch.random.fork_rng(), evaluating(model):
        followed = _Follower(at, given, sample is not None, None)
        try:
            followed.follow(model)
            training = _Follower(at, given, sample is not None, followed.decisions)
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


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    for each in node.all_input_nodes:
        if _is_made_anew(each):
            yield from _sources(each)
        else:
            yield each


def _line_of(error: Exception) -> str:
    """Where in the user's code it was raised."""
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
