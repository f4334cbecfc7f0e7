"""What the paper reports (arXiv 2605.18750, section 7), as data. Nothing here is ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Which cost profile stands for a workload: uniform language model, or vision encoder and language model.
Family = Literal["llm", "mllm"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the paper's Tables 1 and 2.

    Attributes:
        workload: as the paper names it.
        family: what stands for it here.
        tp: ranks of a tensor-parallel group.
        pp: stages.
        dp: replicas.
        batch: microbatches a step, over all replicas.
        seconds: iteration time of 1F1B, ZB, BF and BFW.
    """

    workload: str
    family: Family
    tp: int
    pp: int
    dp: int
    batch: int
    seconds: tuple[float, float, float, float]

    @property
    def name(self) -> str:
        """For a row's head."""
        return f"{self.workload} {self.tp}/{self.pp}" + (f"/{self.dp}" if self.dp > 1 else "")

    @property
    def spelled_out(self) -> str:
        """For a picture, which has no head that explains the numbers."""
        return f"{self.workload}, TP {self.tp}, PP {self.pp}" + (f", DP {self.dp}" if self.dp > 1 else "")

    @property
    def speedups(self) -> tuple[float, float, float]:
        """ZB, BF and BFW over 1F1B."""
        base, *others = self.seconds
        zb, bf, bfw = (base / other for other in others)
        return zb, bf, bfw


_GPT, _SMALL, _MIDDLE = "GPT3-Large", "Qwen3-1.7B+ViT-H", "Qwen3-4B+ViT-Big"
_LLAMA8, _QWEN32, _LLAMA70 = "LLaMA3-8B+ViT-5B", "Qwen3-32B+InternViT", "LLaMA3-70B+ViT-22B"

TABLE_1 = (
    Setting(_GPT, "llm", 1, 8, 1, 64, (3.28, 2.97, 2.29, 2.10)),
    Setting(_GPT, "llm", 1, 16, 1, 64, (2.09, 1.74, 1.26, 1.18)),
    Setting(_GPT, "llm", 2, 8, 1, 64, (3.66, 3.27, 3.03, 2.81)),
    Setting(_GPT, "llm", 2, 16, 1, 64, (2.34, 2.03, 1.63, 1.57)),
    Setting(_SMALL, "mllm", 1, 8, 1, 192, (11.49, 9.91, 5.98, 5.68)),
    Setting(_SMALL, "mllm", 1, 16, 1, 192, (9.04, 7.40, 4.50, 4.33)),
    Setting(_SMALL, "mllm", 2, 8, 1, 192, (12.94, 11.86, 7.66, 7.41)),
    Setting(_SMALL, "mllm", 2, 16, 1, 192, (12.54, 11.95, 7.07, 6.74)),
    Setting(_MIDDLE, "mllm", 1, 8, 1, 192, (14.05, 12.61, 7.84, 7.52)),
    Setting(_MIDDLE, "mllm", 1, 16, 1, 192, (11.01, 9.98, 5.02, 4.81)),
    Setting(_MIDDLE, "mllm", 2, 8, 1, 96, (7.19, 6.60, 4.45, 4.19)),
    Setting(_MIDDLE, "mllm", 2, 16, 1, 96, (6.29, 5.99, 2.94, 2.81)),
)

TABLE_2 = (
    Setting(_LLAMA8, "mllm", 1, 32, 1, 64, (7.62, 6.58, 3.38, 2.75)),
    Setting(_LLAMA8, "mllm", 2, 16, 1, 64, (8.30, 7.84, 3.52, 3.04)),
    Setting(_LLAMA8, "mllm", 2, 8, 2, 64, (4.90, 4.44, 3.02, 2.77)),
    Setting(_QWEN32, "mllm", 1, 64, 1, 64, (8.03, 7.35, 4.46, 4.37)),
    Setting(_QWEN32, "mllm", 2, 32, 1, 64, (8.39, 7.66, 5.19, 4.66)),
    Setting(_QWEN32, "mllm", 2, 16, 2, 64, (5.14, 4.90, 4.06, 3.74)),
    Setting(_LLAMA70, "mllm", 2, 64, 1, 64, (8.72, 7.94, 5.16, 4.76)),
    Setting(_LLAMA70, "mllm", 2, 32, 2, 64, (7.23, 6.67, 4.71, 4.63)),
)


@dataclass(frozen=True, slots=True)
class Parts:
    """A row of Table 3: where an iteration's seconds go."""

    iteration: float
    compute: float
    blocking: float
    coordination: float


#: Table 3 (Qwen3-4B+ViT-Big, PP 16, batch 32): by TP degree, 1F1B and RRFP.
TABLE_3 = {
    1: (Parts(2.581, 0.859, 1.722, 0.0), Parts(1.788, 1.020, 0.768, 0.0)),
    2: (Parts(2.644, 0.946, 1.698, 0.0), Parts(1.824, 1.026, 0.788, 0.010)),
    4: (Parts(2.750, 0.938, 1.812, 0.0), Parts(1.942, 1.054, 0.873, 0.015)),
}

#: Tables 4 and 5: the range of RRFP BF's speed-up over the faster of DeepSpeed and Cornstarch.
TABLE_4, TABLE_5 = (1.07, 1.84), (1.01, 1.25)

#: Table 6 (`TABLE_6_SETTING`): by jitter level, slowdown in percent of 1F1B and of RRFP against their own J0, and
#: standard deviations in s.
TABLE_6_SETTING = Setting(_MIDDLE, "mllm", 2, 8, 1, 96, (7.19, 6.60, 4.45, 4.19))
TABLE_6 = {
    "J0": (0.0, 0.0, 0.339, 0.191),
    "J1": (2.82, 1.81, 0.325, 0.191),
    "J2": (11.27, 6.82, 0.410, 0.210),
    "J3": (18.06, 11.36, 0.390, 0.228),
}

#: Table 7 (Qwen3-1.7B+ViT-H, PP 8, 192 microbatches): percent over BF.
TABLE_7 = {"bf": 0.0, "fb": 0.45, "b-priority": 0.84, "f-priority": 4.92}


@dataclass(frozen=True, slots=True)
class Point:
    """A figure of Table 8: BF's speed-up over 1F1B.

    Attributes:
        series: the model and what stays as it is.
        varies: what differs from the series' other points.
        tp: ranks of a tensor-parallel group; 1 where the table names none.
        pp: stages.
        batch: microbatches a step.
        speedup: BF's.
        vision: how many smaller vision encoders the series has.
    """

    series: str
    varies: str
    tp: int
    pp: int
    batch: int
    speedup: float
    vision: int = 0


def _by_pp(series: str, tp: int, batch: int, speedups: dict[int, float]) -> tuple[Point, ...]:
    return tuple(Point(f"{series}, batch {batch}", f"PP {pp}", tp, pp, batch, gain) for pp, gain in speedups.items())


def _by_batch(series: str, tp: int, pp: int, speedups: dict[int, float]) -> tuple[Point, ...]:
    return tuple(Point(f"{series}, PP {pp}", f"batch {batch}", tp, pp, batch, gain) for batch, gain in speedups.items())


def _by_vision(series: str, pp: int, batch: int, speedups: dict[str, float]) -> tuple[Point, ...]:
    name = f"{series}, PP {pp}, batch {batch}"
    return tuple(Point(name, vit, 1, pp, batch, gain, place) for place, (vit, gain) in enumerate(speedups.items()))


#: Table 8: the pipeline, the batch or the vision encoder grows.
TABLE_8 = (
    *_by_pp("1.7B", 1, 192, {4: 1.07, 8: 1.94, 16: 2.01}),
    *_by_pp("8B", 1, 64, {8: 1.79, 16: 2.13, 32: 2.31}),
    *_by_pp("4B, TP 2", 2, 64, {4: 1.03, 8: 1.64, 16: 1.72}),
    *_by_batch("4B", 1, 16, {64: 1.98, 128: 2.14, 192: 2.18}),
    *_by_batch("8B, TP 2", 2, 32, {64: 2.62, 128: 2.72, 192: 2.82}),
    *_by_vision("1.7B", 16, 192, {"ViT-L": 1.73, "ViT-H": 1.89, "ViT-g": 2.04, "ViT-Big": 2.16}),
    *_by_vision("8B", 32, 64, {"ViT-5B": 1.32, "InternViT": 1.43, "ViT-22B": 1.78}),
)

#: Share of microbatches whose slowest stage is the last, in percent, and the largest p95 of F_i / F_last.
BOTTLENECK = {"llm": (96.8, 0.84), "mllm": (85.9, 1.14)}

#: (p95 - p5) / p50 over 300 repeats of one fixed 1F1B run, and (p75 - p25) / p50.
COMPUTE_SPREAD, MESSAGE_SPREAD = 0.73, 58.74
COMPUTE_MIDDLE, MESSAGE_MIDDLE = 0.35, 50.80
#: The limit beyond which the paper saw no gain (192 microbatches), and its default.
SATURATION, DEFAULT_LIMIT = 16, 32
