"""Named workloads: how long each stage's layers take for each microbatch, relative to a plain stage.

The numbers are invented; they show how methods compare on workloads that vary in different ways. Where microbatches
vary in size, their mean is near 1.
"""

from statistics import NormalDist
from typing import Protocol

import numpy as np

from rrfp.costs.table import Matrix
from rrfp.lab.generators.streams import exp

#: The output layer and the loss, which the last virtual stage also computes, beside the layers of the last stage.
OUTPUT_LAYER = 0.2
#: The same of profile `head`, whose vocabulary is large.
LARGE_OUTPUT_LAYER = 0.8
#: A vision stage beside a language stage, for a microbatch of average size.
VISION_FACTOR = 1.3
#: The same for an audio stage.
AUDIO_FACTOR = 1.2
#: Limits of a microbatch's random factor, before it is multiplied by the constants above.
SMALLEST_FACTOR, LARGEST_FACTOR = 0.2, 5.0
#: Of `bimodal`: the share of long microbatches, and how much longer than the others they are.
LONG_SHARE, LONG_FACTOR = 0.25, 7.5
#: Of `zipf`: the number of ranks, all as likely, and the exponent of a rank's size.
RANKS, RANK_EXPONENT = 30, 0.8
#: Of `video`: how likely a burst begins and goes on with the next microbatch, and the factors in and between bursts.
BURST_BEGINS, BURST_GOES_ON, IN_BURST, BETWEEN_BURSTS = 0.08, 0.75, 2.5, 0.52
#: Of `moe`: the deviation of the logarithm of a stage's factor for a microbatch.
ROUTING_SIGMA = 0.2
#: Of `straggler`: the slow stage beside the others.
STRAGGLER_FACTOR = 1.5


class Profile(Protocol):
    """The cost of each stage's layers, relative to a plain stage."""

    def __call__(self, stages: int, microbatches: int, random: np.random.Generator, /) -> Matrix:
        """Factors > 0, N x M, without the output layer."""
        ...


def llm(stages: int, microbatches: int, random: np.random.Generator, /) -> Matrix:
    """Uniform stages and microbatches; with the output layer the last stage is 1.2x."""
    return np.ones((stages, microbatches))


def mllm(stages: int, microbatches: int, random: np.random.Generator, /) -> Matrix:
    """A vision encoder on the first max(1, N // 4) stages, a language model on the others.

    Images and text vary independently: the vision stages share the microbatch's factor exp(0.6 z - 0.18), times 1.3;
    the others share its length factor exp(0.25 z' - 0.03125). Both have mean 1 and are clipped to [0.2, 5]. With
    the output layer the last stage is 1.2x.
    """
    normal = random.standard_normal((microbatches, 2))
    factors = np.tile(lognormal(normal[:, 1], 0.25), (stages, 1))
    factors[: max(1, stages // 4)] = lognormal(normal[:, 0], 0.6) * VISION_FACTOR
    return factors


def modalities(stages: int, microbatches: int, random: np.random.Generator, /) -> Matrix:
    """`mllm` with an audio encoder behind the vision encoder, on as many stages: exp(0.6 z'' - 0.18), times 1.2."""
    normal = random.standard_normal((microbatches, 3))
    factors = np.tile(lognormal(normal[:, 2], 0.25), (stages, 1))
    share = max(1, stages // 4)
    factors[share : 2 * share] = lognormal(normal[:, 1], 0.6) * AUDIO_FACTOR
    factors[:share] = lognormal(normal[:, 0], 0.6) * VISION_FACTOR
    return factors


def video(stages: int, microbatches: int, random: np.random.Generator, /) -> Matrix:
    """`mllm` whose long vision parts come in bursts: 8% of the microbatches begin one, and it goes on with 75%.

    The vision stages take exp(0.3 z - 0.045), times 1.3, times 2.5 within a burst and 0.52 else; 24% are in bursts.
    """
    length, vision, changes = random.standard_normal((microbatches, 3)).T
    bursts = np.empty(microbatches)
    begins, goes_on = map(NormalDist().inv_cdf, (BURST_BEGINS, BURST_GOES_ON))
    inside = False
    for m, draw in enumerate(changes.tolist()):
        inside = draw < (goes_on if inside else begins)
        bursts[m] = IN_BURST if inside else BETWEEN_BURSTS
    factors = np.tile(lognormal(length, 0.25), (stages, 1))
    factors[: max(1, stages // 4)] = lognormal(vision, 0.3) * bursts * VISION_FACTOR
    return factors


def zipf(stages: int, microbatches: int, random: np.random.Generator, /) -> Matrix:
    """All stages take the microbatch's size: rank**-0.8, ranks drawn from 1 to 30, over the mean of the 30 sizes."""
    sizes = exp(-RANK_EXPONENT * np.log(np.arange(1.0, RANKS + 1)))
    ranks = (RANKS * random.random(microbatches)).astype(np.int64)
    return np.tile(sizes[ranks] / sizes.mean(), (stages, 1))


def bimodal(stages: int, microbatches: int, random: np.random.Generator, /) -> Matrix:
    """All stages take the microbatch's size: one in four is 7.5 times as long as the others."""
    short = 1 / (1 + LONG_SHARE * (LONG_FACTOR - 1))
    sizes = np.where(random.random(microbatches) < LONG_SHARE, LONG_FACTOR * short, short)
    return np.tile(sizes, (stages, 1))


def moe(stages: int, microbatches: int, random: np.random.Generator, /) -> Matrix:
    """Mixture of experts: each stage and microbatch has its own factor exp(0.2 z - 0.02), as routing loads experts."""
    return np.ascontiguousarray(lognormal(random.standard_normal((microbatches, stages)), ROUTING_SIGMA).T)


def head(stages: int, microbatches: int, random: np.random.Generator, /) -> Matrix:
    """A heavy head: uniform stages, lengths exp(0.25 z - 0.03125), and with the output layer the last is 1.8x."""
    return np.tile(lognormal(random.standard_normal(microbatches), 0.25), (stages, 1))


def straggler(stages: int, microbatches: int, random: np.random.Generator, /) -> Matrix:
    """Uniform layers and lengths exp(0.25 z - 0.03125), on machines of which one is slow: see `machine_factors`."""
    return head(stages, microbatches, random)


def lognormal(normal: Matrix, sigma: float) -> Matrix:
    """Factors of mean 1, clipped."""
    return np.clip(exp(sigma * normal - sigma * sigma / 2), SMALLEST_FACTOR, LARGEST_FACTOR)


#: The profiles by the names that `make_costs` and the command line accept.
PROFILES: dict[str, Profile] = {
    "llm": llm,
    "mllm": mllm,
    "modalities": modalities,
    "video": video,
    "zipf": zipf,
    "bimodal": bimodal,
    "moe": moe,
    "straggler": straggler,
    "head": head,
}


def output_layer(profile: str) -> float:
    """The output layer of a profile, relative to the last stage's layers."""
    return LARGE_OUTPUT_LAYER if profile == "head" else OUTPUT_LAYER


def machine_factors(profile: str, stages: int) -> Matrix:
    """How much longer each stage's machine takes, shape (N,)."""
    factors = np.ones(stages)
    if profile == "straggler":
        factors[stages // 2] = STRAGGLER_FACTOR
    return factors
