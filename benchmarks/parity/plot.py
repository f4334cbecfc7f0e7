"""The picture of the parity experiment: losses of all methods, and their differences beside those of seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.parity.figures import Outcome, differences_of, spread_of
from benchmarks.parity.settings import METHODS, ONE_PROCESS
from rrfp.hints.registry import DEFAULT_HINT
from rrfp.lab.traces.pictures import DARK, MUTED, method_looks, require_matplotlib, save_picture

#: The methods' names in other pictures.
_LABELS = {"default": f"{DEFAULT_HINT}, limit 2n", "bf": "bf, limit 2n", "strict 1f1b": "strict 1f1b"}
_SEEDS = (DARK, MUTED, "#a3abb7")
#: Stands for no difference on a logarithmic axis.
_NOTHING = 1e-9


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw two diagrams a model."""
    require_matplotlib()
    from matplotlib.figure import Figure

    models = [model for model in METHODS if any(each.model == model for each in outcomes)]
    figure = Figure(figsize=(11, 3.9 * len(models)))
    axes = figure.subplots(len(models), 2, squeeze=False)
    for (left, right), model in zip(axes, models, strict=True):
        own = [each for each in outcomes if each.model == model]
        _draw_losses(left, model, own)
        _draw_differences(right, model, own)
        for each in (left, right):
            each.spines[["top", "right"]].set_visible(False)
            each.set_xlabel("iteration")
    figure.tight_layout()
    save_picture(path, lambda: figure)


def _draw_losses(axes: Any, model: str, outcomes: Sequence[Outcome]) -> None:
    seeds = list(dict.fromkeys(each.seed for each in outcomes))
    for each in outcomes:
        colour = _SEEDS[seeds.index(each.seed)]
        is_reference = each.method == ONE_PROCESS
        style: dict[str, Any] = {"linewidth": 1.2} if is_reference else {"linestyle": "", "marker": "+"}
        label = f"seed {each.seed}" if is_reference else None
        axes.plot(*zip(*each.evaluations, strict=True), color=colour, label=label, **style)
    axes.set_title(f"{model}: evaluation loss; line: one process, +: every other method", fontsize=9, loc="left")
    axes.legend(fontsize=8, frameon=False)


def _draw_differences(axes: Any, model: str, outcomes: Sequence[Outcome]) -> None:
    references = {each.seed: each for each in outcomes if each.method == ONE_PROCESS}
    numbers = [number for number, _ in outcomes[0].evaluations]
    looks, labelled = method_looks(_LABELS.values()), set[str]()
    for each in outcomes:
        if not METHODS[model][each.method].fixes_bits and each.seed in references:
            values = [max(_NOTHING, one) for one in differences_of(each, references[each.seed])]
            name = _LABELS[each.method]
            axes.plot(numbers, values, markersize=3, label=None if name in labelled else name, **looks[name])
            labelled.add(name)
    if spread := spread_of(outcomes, model):
        axes.plot(numbers, spread, "k--", label="between seeds, one process")
    axes.set_yscale("log")
    title = f"{model}: difference of the evaluation loss from one process ({_NOTHING:g}: none)"
    axes.set_title(title, fontsize=9, loc="left")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)
