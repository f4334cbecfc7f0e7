"""Latency models: the time between the end of a task and the arrival of its output at the next virtual stage.

Every message draws independently, by (seed, step, direction, edge, microbatch), and the same numbers in every model.
`spike` and `bimodal` delay some messages beyond their wire time. A tensor that stays on its stage arrives at once in
every model.

The paper publishes two statistics of its messages, (p95 - p5) / p50 = 58.74 and (p75 - p25) / p50 = 50.80. `spike` has
about the first (48.8) and not the second (1.2), `bimodal` has both (58.6 and 50.7).
"""

import math
from dataclasses import replace

import numpy as np

from rrfp.costs.table import CostTable, Matrix
from rrfp.errors import ConfigError
from rrfp.lab.generators.streams import RandomStream, exp, generator
from rrfp.plain import whole

#: The names of the models, for help texts and errors.
LATENCY_MODELS = ("none", "constant", "constant:SECONDS", "wire", "spike", "bimodal")

#: Seconds of `constant` without a number.
CONSTANT_DEFAULT = 0.001
#: Seconds: the median of the lognormal wire time, and the deviation of its logarithm.
WIRE_MEDIAN, WIRE_SIGMA = 0.0004, 0.5
#: The probability of a spike, and its most seconds (uniform from 0).
SPIKE_PROBABILITY, SPIKE_LONGEST = 0.21, 0.030
#: `bimodal`. For the paper's two statistics between a quarter and a half of the messages must be slow: this is the
#: middle. The times follow from it, the statistics, and the paper's longest message of 30 ms.
BIMODAL_WIRE_FACTOR, BIMODAL_PROBABILITY, BIMODAL_SHORTEST, BIMODAL_LONGEST = 0.8, 0.375, 0.0223, 0.0293


def with_latency(table: CostTable, model: str, *, seed: int = 0, step: int = 0) -> CostTable:
    """The same step with its latencies replaced. Every step has its own draws.

    Args:
        table: costs; their latencies are ignored.
        model: none, constant (1 ms), constant:SECONDS, wire (lognormal, median 0.4 ms, sigma 0.5), spike (wire, and
            with probability 0.21 another 0 to 30 ms) or bimodal (0.8 times wire, and with probability 0.375 another
            22.3 to 29.3 ms).
        seed: >= 0.
        step: >= 0.

    Raises:
        ConfigError: if the model is unknown, its seconds are no finite number >= 0, or seed or step is negative.
    """
    seed, step = whole("seed", seed, 0), whole("step", step, 0)
    shape = table.latency_forward.shape
    name, seconds = _parse(model)
    if name in ("none", "constant"):
        forward = backward = np.full(shape, seconds)
    else:
        forward = _wire(RandomStream.WIRE_FORWARD, shape, seed, step)
        backward = _wire(RandomStream.WIRE_BACKWARD, shape, seed, step)
    if name == "spike":
        longer = (SPIKE_PROBABILITY, 0.0, SPIKE_LONGEST)
        forward = forward + _delays(RandomStream.SPIKE_FORWARD, shape, seed, step, *longer)
        backward = backward + _delays(RandomStream.SPIKE_BACKWARD, shape, seed, step, *longer)
    if name == "bimodal":
        longer = (BIMODAL_PROBABILITY, BIMODAL_SHORTEST, BIMODAL_LONGEST)
        forward = BIMODAL_WIRE_FACTOR * forward + _delays(RandomStream.SPIKE_FORWARD, shape, seed, step, *longer)
        backward = BIMODAL_WIRE_FACTOR * backward + _delays(RandomStream.SPIKE_BACKWARD, shape, seed, step, *longer)
    forward, backward = replace(table, latency_forward=forward, latency_backward=backward).acting_latencies()
    return replace(table, latency_forward=forward, latency_backward=backward)


def _parse(model: str) -> tuple[str, float]:
    """The model's bare name, and the seconds of a constant one."""
    name, colon, argument = model.partition(":")
    if not colon and name in LATENCY_MODELS:
        return name, CONSTANT_DEFAULT if name == "constant" else 0.0
    if name != "constant":
        raise ConfigError(f"latency is {model!r}, must be one of {', '.join(LATENCY_MODELS)}")
    try:
        seconds = float(argument)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ConfigError(f"latency is {model!r}, its seconds must be a finite number >= 0")
    return name, seconds


def _wire(stream: RandomStream, shape: tuple[int, ...], seed: int, step: int) -> Matrix:
    """Lognormal travel times in seconds."""
    rows = [generator(stream, seed, step, v).standard_normal(shape[1]) for v in range(shape[0])]
    return WIRE_MEDIAN * exp(WIRE_SIGMA * np.array(rows, dtype=np.float64).reshape(shape))


def _delays(
    stream: RandomStream,
    shape: tuple[int, ...],
    seed: int,
    step: int,
    probability: float,
    shortest: float,
    longest: float,
) -> Matrix:
    """Seconds of some messages beyond their wire time; 0 for others."""
    rows = [generator(stream, seed, step, v).random((shape[1], 2)) for v in range(shape[0])]
    uniform = np.array(rows, dtype=np.float64).reshape(*shape, 2)
    return np.where(uniform[..., 0] < probability, shortest + (longest - shortest) * uniform[..., 1], 0.0)
