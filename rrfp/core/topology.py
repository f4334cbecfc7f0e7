"""Where virtual stages live, and which place of the pipeline a process has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from rrfp.errors import ConfigError

Layout = Literal["looped", "v"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The map between virtual stages and stages.

    Chunk r of stage i is virtual stage ``r * N + i`` when looped; with the V layout it is that for even r and
    ``r * N + (N - 1 - i)`` for odd r, so that consecutive chunks meet on the outer stages.

    Attributes:
        stages: N, at least 1.
        chunks: C, chunks a stage, at least 1.
        layout: ``"looped"`` or ``"v"``.

    Raises:
        ConfigError: on a count below 1 or an unknown layout.
    """

    stages: int
    chunks: int = 1
    layout: Layout = "looped"

    def __post_init__(self) -> None:
        for field, value in (("stages", self.stages), ("chunks", self.chunks)):
            if value < 1:
                raise ConfigError(f"{field} is {value}, must be at least 1")
        if self.layout not in get_args(Layout):
            raise ConfigError(f"placement is {self.layout!r}, must be one of: {', '.join(get_args(Layout))}")

    @property
    def num_virtual_stages(self) -> int:
        """V = N * C."""
        return self.stages * self.chunks

    def stage_of(self, virtual_stage: int) -> int:
        """The stage that holds ``virtual_stage``."""
        chunk, position = divmod(virtual_stage, self.stages)
        return self.stages - 1 - position if self.layout == "v" and chunk % 2 else position

    def chunk_of(self, virtual_stage: int) -> int:
        """The chunk index of ``virtual_stage`` on its stage."""
        return virtual_stage // self.stages

    def virtual_stages(self, stage: int) -> tuple[int, ...]:
        """The virtual stages of ``stage``, in chunk order (shallowest first)."""
        mirrored = self.stages - 1 - stage
        return tuple(
            chunk * self.stages + (mirrored if self.layout == "v" and chunk % 2 else stage)
            for chunk in range(self.chunks)
        )


@dataclass(frozen=True, slots=True)
class Topology:
    """The place of this process in the job.

    Attributes:
        stage: this process's stage, 0..stages-1.
        stages: N.
        run_id: identifies the job; endpoints are published under it.
        restart: how often the launcher restarted the job; a restarted job never talks to its predecessor.
        local_world_size: ranks on this host; equal to ``stages`` when the whole pipeline is on one host.

    Raises:
        ConfigError: if ``stage`` lies outside ``0..stages-1``.
    """

    stage: int
    stages: int
    run_id: str = "local"
    restart: int = 0
    local_world_size: int | None = None

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ConfigError(f"stages is {self.stages}, must be at least 1")
        if not 0 <= self.stage < self.stages:
            raise ConfigError(f"stage is {self.stage}, must be 0..{self.stages - 1}")

    @property
    def single_host(self) -> bool:
        """True when every rank runs on this host, as far as the launcher told."""
        return self.local_world_size is None or self.local_world_size == self.stages

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Topology:
        """Read torchrun's environment: one stage a rank, stage = RANK.

        Args:
            environ: the environment to read; the process's own by default.

        Raises:
            ConfigError: if a variable is missing or not a number; the message says how to launch.
        """
        if environ is None:
            import os

            environ = os.environ
        return cls(
            stage=_number(environ, "RANK"),
            stages=_number(environ, "WORLD_SIZE"),
            run_id=environ.get("TORCHELASTIC_RUN_ID", "local"),
            restart=_number(environ, "TORCHELASTIC_RESTART_COUNT", "0"),
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE", environ.get("WORLD_SIZE")),
        )


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name, default)
    if text is None:
        raise ConfigError(
            f"environment variable {name} is not set; launch with: "
            "torchrun --standalone --nproc-per-node STAGES script.py"
        )
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {name} is {text!r}, must be a whole number") from None
