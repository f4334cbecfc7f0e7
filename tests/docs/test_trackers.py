"""docs/how-to/metrics.md, trackers: its callbacks log what the run's files have, by what each tracker wrote."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from forked_shell import ForkedShell
from installed import ROOT
from long_site import long_site

from rrfp.callbacks import Callback, Prometheus, StepEnded

__all__ = ["long_site"]

PAGE = (ROOT / "docs" / "how-to" / "metrics.md").read_text()
FILES = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))

#: Prints the rows of the only run in ./wandb. Its file is a log as LevelDB writes it: blocks of 32 KiB with parts of
#: records, each behind seven bytes, the last three of which are length and type; 1 and 2 begin, 1 and 4 end a record.
READ_WANDB = """
import json
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

(path,) = Path("wandb").glob("offline-run-*/*.wandb")
data, place, part, rows = path.read_bytes(), 7, b"", []
while place + 7 < len(data):
    if 32768 - place % 32768 < 7:
        place += 32768 - place % 32768
    length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
    part = (b"" if kind in (1, 2) else part) + data[place + 7 : place + 7 + length]
    place += 7 + length
    if kind in (1, 4):
        record = Record.FromString(part)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
print(json.dumps(rows))
"""

#: Prints the values of three metrics of the only run, by step.
READ_MLFLOW = """
import json
import mlflow

client = mlflow.MlflowClient()
(run,) = client.search_runs(["0"])
names = ("loss", "compute/stage3", "evaluation/loss")
rows = {name: [[each.step, each.value] for each in client.get_metric_history(run.info.run_id, name)] for name in names}
print(json.dumps({"status": run.info.status, "name": run.info.run_name, **rows}))
"""


class Losses(Callback):
    """What the callbacks beside it were told, and for each step what ``look`` returns then."""

    def __init__(self, look: Any = None) -> None:
        self.losses: list[float | None] = []
        self.seen: list[Any] = []
        self.look = look

    def step_ended(self, event: StepEnded) -> None:
        self.losses.append(event.loss)
        if self.look is not None:
            self.seen.append(self.look())


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The page's training, from its files in the present folder."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        exec(compile(FILES["training.py"], "training.py", "exec"), names)
        yield names["train"]


def rows(program: str, reader: str, site: Path, folder: Path) -> Any:
    """What the last line of a reader of a program's results has."""
    shell = ForkedShell(
        site,
        variables={
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "MLFLOW_TRACKING_URI": str(folder / "runs"),
        },
    )
    shell.printed(f"python {program}", folder)
    (folder / "reader.py").write_text(reader)
    return json.loads(shell.printed("python reader.py", folder).splitlines()[-1])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_wandb_has_every_step(train: Any, long_site: Path, tmp_path: Path) -> None:
    train(losses := Losses())
    logged = rows("with_wandb.py", READ_WANDB, long_site, tmp_path)
    steps = [row for row in logged if "loss" in row]
    assert [row["completed"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in steps] == losses.losses
    assert all(0 <= row["compute/stage3"] <= 1 for row in steps)
    assert [row["completed"] for row in logged if "evaluation/loss" in row] == [6]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_mlflow_has_every_step(train: Any, long_site: Path, tmp_path: Path) -> None:
    train(losses := Losses())
    run = rows("with_mlflow.py", READ_MLFLOW, long_site, tmp_path)
    assert (run["status"], run["name"]) == ("FINISHED", "pipeline")
    assert run["loss"] == [[step, loss] for step, loss in enumerate(losses.losses, 1)]
    assert [step for step, _ in run["compute/stage3"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in run["evaluation/loss"]] == [6]


def test_prometheus_finds_the_newest_step(train: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def look() -> dict[str, str]:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return dict(line.rsplit(" ", 1) for line in lines)

    watched = Losses(look)
    names = {
        "train": lambda served: train(served, watched),
        "Prometheus": lambda number, **how: Prometheus(port, **how),
    }
    exec(FILES["with_prometheus.py"].split("\n\n", 1)[1], names)
    assert [float(each["rrfp_loss"]) for each in watched.seen] == watched.losses
    shown = re.findall(r"^    (rrfp_\S+) ", PAGE, re.MULTILINE)
    listed = re.findall(r"`(rrfp_\w+)[`{]", PAGE)
    last = {name.partition("{")[0] for name in watched.seen[-1]}
    assert set(shown) <= set(watched.seen[-1])
    assert {name for name in listed if not name.startswith("rrfp_evaluation")} <= last
