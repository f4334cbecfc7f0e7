"""docs/how-to/several-hosts.md, SLURM, Kubernetes: their commands train over two hosts, network namespaces."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from hosts.network import Network, obstacle
from installed import ROOT

from rrfp import checkpoint

PAGE_PATH = ROOT / "docs" / "how-to" / "several-hosts.md"
PAGE = PAGE_PATH.read_text()
PAGES = {name: PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0] for name in ("SLURM", "Kubernetes")}
((_, JOB),) = re.findall(r'```bash title="([^"]+)"\n(.*?)```', PAGES["SLURM"], re.DOTALL)
((_, MANIFEST),) = re.findall(r'```yaml title="([^"]+)"\n(.*?)```', PAGES["Kubernetes"], re.DOTALL)

#: A stand-in: runs its command at once on each of NODES, which are pairs of a namespace and an address.
SRUN = """#!{python}
import os, subprocess, sys
from hosts.network import enter

assert sys.argv[1] == "--kill-on-bad-exit=1", sys.argv
nodes = [node.split("=") for node in os.environ["NODES"].split()]
tasks = [
    subprocess.Popen(
        sys.argv[2:],
        env={{**os.environ, "SLURM_NODEID": str(number), "SLURMD_NODENAME": address}},
        preexec_fn=lambda: enter(namespace),
    )
    for number, (namespace, address) in enumerate(nodes)
]
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/bash
[ "$1 $2 $3" = "show hostnames nodes-[1-2]" ] && for node in $NODES; do echo "${node#*=}"; done
"""

#: So little that only the connections take time.
SMALL = ("--steps", "2", "--microbatches", "4", "--evaluate-every", "0")


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := obstacle():
        pytest.skip(reason)
    with Network(2) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the examples, a stand-in for each of SLURM's programs, and the real torchrun and rrfp."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "bin").mkdir()
    programs = {"srun": SRUN.format(python=sys.executable), "scontrol": SCONTROL}
    programs["torchrun"] = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    programs["rrfp"] = f'#!/bin/bash\nexec {sys.executable} -m rrfp "$@"\n'
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def environment(folder: Path, **variables: str) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    return {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "wire0",
        **variables,
    }


def printed(command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def commands(page: str) -> list[str]:
    return re.findall(r"^    \$ (.+)$", PAGES[page], re.MULTILINE)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_slurm_job_trains_over_two_nodes_and_a_requeued_one_goes_on(network: Network, folder: Path) -> None:
    secret, submit = commands("SLURM")
    printed(["bash", "-c", secret], folder, environment(folder))
    (folder / "job.sh").write_text(JOB)
    arguments = submit.removeprefix("sbatch job.sh ").split()
    variables = {
        "NODES": " ".join(f"{host.namespace}={host.ipv4}" for host in network.hosts),
        "SLURM_JOB_NODELIST": "nodes-[1-2]",
        "SLURM_JOB_ID": "4711",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "2",
    }
    job = ["bash", "job.sh", *arguments, *SMALL]
    first = printed(job, folder, environment(folder, **variables))
    assert re.findall(r"^step +(\d+) +loss", first, re.MULTILINE) == ["1", "2"]
    again = environment(folder, **variables, SLURM_RESTART_COUNT="1")
    second = printed([*job, "--steps", "3"], folder, again)
    assert "resumed after step 2 from" in second
    assert re.findall(r"^step +(\d+) +loss", second, re.MULTILINE) == ["3"]
    assert checkpoint.latest(folder / "runs" / "gpt") is not None


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_pods_of_the_kubernetes_job_train_together(network: Network, folder: Path) -> None:
    make_secret, create_secret, apply = commands("Kubernetes")
    printed(["bash", "-c", make_secret], folder, environment(folder))
    service, job = yaml.safe_load_all(MANIFEST)
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {each["name"]: each for each in container["env"]}
    assert service["metadata"]["name"] == pod["subdomain"] == name
    assert list(service["spec"]["selector"].values()) == [name]
    assert int(given["PODS"]["value"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(given["RANKS"]["value"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert given["HEAD"]["value"] == f"{name}-0.{name}"
    key = given["RRFP_SECRET"]["valueFrom"]["secretKeyRef"]
    assert create_secret == f"kubectl create secret generic {key['name']} --from-file={key['key']}"
    assert apply == "kubectl apply -f job.yaml"
    assert [each["mountPath"] for each in container["volumeMounts"]] == ["/runs"]
    program, flag, script = container["command"]
    script = f"{script.replace('/runs', str(folder / 'runs'))} {' '.join(SMALL)}"
    values = {"PODS": "2", "RANKS": "2", "HEAD": network.hosts[0].ipv4, "RUN_ID": "uid", "RRFP_SECRET": ""}
    values["RRFP_SECRET"] = (folder / key["key"]).read_text()
    assert {*values, "POD_IP"} == set(given)
    running = []
    for host in network.hosts:
        environ = environment(folder, **values, POD_IP=host.ipv4, JOB_COMPLETION_INDEX=str(host.index))
        with (folder / f"pod-{host.index}").open("w") as log:
            running.append(
                subprocess.Popen(
                    [program, flag, script], cwd=folder, env=environ, stdout=log, stderr=log, preexec_fn=host.enter
                )
            )
    codes = [process.wait(200) for process in running]
    logs = [(folder / f"pod-{host.index}").read_text() for host in network.hosts]
    assert codes == [0, 0], "\n".join(logs)
    assert re.findall(r"^step +(\d+) +loss", logs[0], re.MULTILINE) == ["1", "2"]


def test_every_link_leads_to_a_page() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", PAGE):
        assert (PAGE_PATH.parent / target).exists(), target
