"""A graph that makes no sense is refused with one error that names the part and the allowed values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from graphs.graph_models import blocks

import rrfp
from rrfp.errors import ConfigError
from rrfp.model.model_graph import ModelGraph


def declare(build: Callable[[Any], Any]) -> rrfp.Graph:
    graph = rrfp.Graph()
    build(graph)
    return graph


def chain(graph: rrfp.Graph) -> object:
    first = graph.part("first", stages=[0])
    return graph.part("last", stages=[1], reads={"x": first})


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda g: g.part("", stages=[0]), "part name is '', must be a text without spaces"),
    (lambda g: g.part("a b", stages=[0]), "part name is 'a b', must be a text"),
    (lambda g: (chain(g), g.part("last", stages=[2])), "part 'last' is declared already, must have another name"),
    (lambda g: g.part("a", stages=[]), r"stages of part 'a' is \[\], must be a list of at least one stage number"),
    (lambda g: g.part("a", stages=[-1]), r"stages of part 'a' is \[-1\], must be a list"),
    (lambda g: g.part("a", stages=3), "stages of part 'a' is 3, must be a list"),
    (lambda g: g.part("a", stages="01"), "stages of part 'a' is '01', must be a list"),
    (lambda g: g.part("a", stages=[True]), r"stages of part 'a' is \[True\], must be a list"),
    (lambda g: g.part("a", stages=[0], optional=1), "optional of part 'a' is 1, must be True or False"),
    (lambda g: g.part("a", stages=[0], reads=["b"]), "reads of part 'a' is of type list, must be a dict"),
    (lambda g: g.part("a", stages=[0], reads={"x": "b"}), r"reads\['x'\] of part 'a' is 'b', must be a part of this"),
    (lambda g: g.part("a", stages=[0], reads={"not an argument": None}), "must name keyword arguments"),
    (
        lambda g: (p := g.part("p", stages=[0]), g.part("a", stages=[1], reads={"x": p}, reads_all={"x": p})),
        "part 'a' names 'x' in reads and in reads_all",
    ),
    (lambda g: g.part("a", stages=[0])[0], r"a\[0\] must have a text as key"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_wrong_declaration_names_the_part(build: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        declare(build)


def test_a_part_of_another_graph_cannot_be_read() -> None:
    other = rrfp.Graph().part("vision", stages=[0])
    graph = declare(chain)
    with pytest.raises(ConfigError, match="is part 'vision' of another graph, must be one of this graph: first, last"):
        graph.part("lm", stages=[2], reads={"image": other})


def skipped_middle(g: rrfp.Graph) -> None:
    first = g.part("first", stages=[0])
    middle = g.part("middle", stages=[1], reads={"x": first}, optional=True)
    g.part("last", stages=[2], reads={"x": middle})


WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (lambda g: None, "graph has no parts, must have at least one"),
    (lambda g: g.part("a", stages=[0, 2]), "stage 1 has no part, must have one: stages are numbered from 0 to 2"),
    (lambda g: g.part("a", stages=[0], optional=True), "part 'a' computes the loss, .* must not be optional"),
    (skipped_middle, "part 'middle' is optional, and where it is skipped nothing reads part 'first'"),
]


@pytest.mark.parametrize(("build", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_graph_that_cannot_run_is_refused_by_name(build: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelGraph.of(declare(build))


def test_a_graph_must_be_one() -> None:
    with pytest.raises(ConfigError, match=r"graph is of type dict, must be an rrfp\.Graph"):
        rrfp.local([{"a": blocks(1)}], graph={"a": [0]})  # type: ignore[arg-type]


def test_a_part_is_no_list_of_its_values() -> None:
    with pytest.raises(TypeError, match="part 'a' is not iterable"):
        list(rrfp.Graph().part("a", stages=[0]))


def test_a_graph_prints_what_was_declared() -> None:
    graph = rrfp.Graph()
    assert str(graph) == "no parts"
    down = graph.part("down", stages=[0, 1], optional=True)
    graph.part("up", stages=[2], reads={"x": down}, reads_all={"skip": down["skip"]})
    assert str(graph) == "down on stages 0, 1, optional; up on stage 2 reads x=down reads_all skip=down['skip']"


MODULES: list[tuple[list[Any], str]] = [
    ([blocks(1), blocks(1)], "module is of type list, must be a dict with the modules of stage 0 by part: 'first'"),
    ([{"last": blocks(1)}, {"last": blocks(1)}], "module has the parts 'last', must have those of stage 0: 'first'"),
    ([{"first": blocks(2)}, {"last": blocks(1)}], r"module\['first'\] has 2 modules, must have 1"),
    ([{"first": "x"}, {"last": blocks(1)}], r"module\['first'\] is of type str, must be an nn.Module"),
    ([{"first": blocks(1)}], "graph has 2 stages, must have 1, as the pipeline has"),
]


@pytest.mark.parametrize(("modules", "message"), MODULES, ids=[message for _, message in MODULES])
def test_modules_that_do_not_fit_the_graph_are_refused(modules: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rrfp.local(modules, graph=declare(chain))


def test_modules_by_part_need_a_graph() -> None:
    with pytest.raises(ConfigError, match=r"module is of type dict, .*; modules by part go with graph="):
        rrfp.local([{"first": blocks(1)}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": 1}, "chunks is 1, must be None with graph"),
        ({"placement": "v"}, "placement is 'v', must not be passed with graph"),
    ],
)
def test_options_that_place_a_chain_do_not_go_with_a_graph(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rrfp.local([{"first": blocks(1)}, {"last": blocks(1)}], graph=declare(chain), **options)
