"""A hint of your own, outside the package: a class with one method.

    python examples/custom_hint.py

A hint is called whenever the stage could start a task. It reads the ready set and a read-only view of the stage, and
returns one ready task. It cannot break correctness or the memory limit: readiness and admission are decided before.
"""

import rrfp
from rrfp.costs import make_costs, microbatch_sizes
from rrfp.hints.registry import HintSpec, hint_names
from rrfp.lab.simulation import simulate
from rrfp.schedules.registry import schedule_names


class DrainWhenFull(rrfp.Hint):
    """Forwards first while less than half of the memory is held, backwards first above that."""

    def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
        """The next task."""
        half_full = view.slots is not None and 2 * view.held >= view.slots
        kinds = (rrfp.Kind.B, rrfp.Kind.F) if half_full else (rrfp.Kind.F, rrfp.Kind.B)
        for kind in (*kinds, rrfp.Kind.W):
            if (task := ready.first(kind)) is not None:
                return task
        return None


def main() -> None:
    """Compare it with the built-in hints on one simulated step.

    To train with it: ``rrfp.Pipeline(module, hint=DrainWhenFull, ...)``. For a name that ``--hint`` knows, declare
    the entry point ``my-hint = "my_package:DrainWhenFull"`` in the group ``rrfp.hints`` of your own package.
    """
    costs = make_costs("mllm", 8, 64, seed=1, jitter="J2", latency="wire")
    sizes = microbatch_sizes("mllm", 8, 64, seed=1)
    print(f"{'hint':18} {'makespan':>10} {'/ bound':>8}   peak microbatches held")
    # A schedule is a hint, too, but some need split or chunked stages.
    built_in = [name for name in hint_names() if name not in schedule_names()]
    hints: dict[str, HintSpec] = {"DrainWhenFull": DrainWhenFull, **{name: name for name in built_in}}
    for name, hint in hints.items():
        simulation = simulate(costs, hint=hint, limit=8, sizes=sizes)
        peak = max(peak.held for peak in simulation.peaks)
        print(f"{name:18} {simulation.makespan * 1e3:7.0f} ms {simulation.ratio:8.3f}   {peak}")


if __name__ == "__main__":
    main()
