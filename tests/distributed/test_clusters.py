"""The scripts of examples/clusters as they stand: two hosts are two agents of torchrun on this machine, the commands of
SLURM are stand-ins on PATH, and Kubernetes' files are compared with what the scripts take.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import SIZES as KNOWN_SIZES
from tests.distributed.commands import quantshard
from tests.distributed.test_cli import ROOT, SECONDS, SIZES, ends, environment, losses, text, wait_for_steps  # noqa: F401

pytestmark = pytest.mark.distributed

SCRIPTS = ROOT / "examples" / "clusters"
TORCHRUN, SBATCH = SCRIPTS / "torchrun_two_hosts.sh", SCRIPTS / "slurm.sbatch"
STEPS = 150
NOT_DONE = 75

SRUN = """#!/usr/bin/env bash
# One copy of the command a node, here; SIGTERM is handed on, as srun does.
while [[ "$1" == --* ]]; do shift; done
pids=()
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do "$@" & pids+=($!); done
trap 'kill -TERM "${pids[@]}"' TERM
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
    while kill -0 "$pid" 2>/dev/null; do wait "$pid" || code=$?; done
done
exit "$code"
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show hostnames") printf 'localhost\\nlocalhost\\n' ;;
    requeue*) echo "$2" >> "$REQUEUED" ;;
    *) exit 1 ;;
esac
"""


def flags(text, *more):  # noqa: F811
    given = ["--data", text, "--steps", STEPS, *SIZES.split(), "--layers", 1, "--save-every", 5, "--eval-every", 0]
    return [str(flag) for flag in (*given, "--device", "cpu", *more)]


def started(script, arguments, **variables):
    env = environment(
        **{name: str(value) for name, value in variables.items()}, PYTHON=sys.executable, PROCESSES="1", COLUMNS="10000"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(["bash", str(script), *arguments], env=env, text=True, **pipes)


def ended(process):
    """Its exit code and output."""
    out, _ = process.communicate(timeout=SECONDS)
    return process.returncode, out


def free_port():
    import socket

    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def alike(run, text, tmp_path, *parts):  # noqa: F811
    """Whether the losses of a run are those of some processes up to a step, then of others, and so on, to the bit."""
    whole, given = tmp_path / "whole", ["--decay-steps", STEPS]
    for number, (processes, step) in enumerate(parts):
        began = ["resume", whole] if number else ["train", "--run", whole, *flags(text), *given]
        result = quantshard(*began, "--nproc-per-node", processes, "--steps", step)
        assert result.returncode == 0, result.stderr
    found, expected = ([{k: v for k, v in r.items() if k != "heldout_loss"} for r in losses(r)] for r in (run, whole))
    return found == expected


def descendants(pid):
    """The processes that a process started, and those that they started."""
    told = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout.split("\n")
    parents = dict(map(int, line.split()) for line in told if line.strip())
    found, new = [], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


@pytest.mark.exhaustive
def test_slurm_puts_the_job_back_until_it_is_done(text, tmp_path):  # noqa: F811
    """SIGTERM in the middle, and again until all steps are done: the losses are those of one go, bit for bit."""
    commands, requeued, run = tmp_path / "bin", tmp_path / "requeued", tmp_path / "run"
    commands.mkdir()
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(content)
        (commands / name).chmod(stat.S_IRWXU)

    def job(count, *more):
        slurm = {"SLURM_JOB_ID": 7, "SLURM_JOB_NUM_NODES": 2, "SLURM_JOB_NODELIST": "n[0-1]", "PORT": free_port()}
        path = f"{commands}{os.pathsep}{os.environ['PATH']}"
        return started(
            SBATCH,
            flags(text, *more),
            RUN=run,
            RESTARTS=0,
            REQUEUED=requeued,
            PATH=path,
            SLURM_RESTART_COUNT=count,
            **slurm,
        )

    first = job(0)
    wait_for_steps(run, 7, first)
    first.send_signal(signal.SIGTERM)
    code, out = ended(first)
    assert code == 0 and requeued.read_text() == "7\n", out
    stopped = int(re.search(r"stopped at step (\d+), resume with", out)[1])
    assert 7 <= stopped < STEPS and f"not done, {stopped} of {STEPS} steps are saved" in out
    code, out = ended(job(1))
    assert code == 0 and requeued.read_text() == "7\n", out  # not again
    assert f"resumed after step {stopped}" in out and f"{run}: done, {STEPS} of {STEPS} steps are saved" in out
    assert alike(run, text, tmp_path, (2, STEPS))
    code, out = ended(job(2, "--lr", "0.5"))  # it is done, and these flags are wrong: not again
    assert "was started with lr = 0.001, but lr = 0.5 is given" in out and requeued.read_text() == "7\n", out


def started_on(run):
    """Processes of each start."""
    return [json.loads(line)["processes"] for line in (run / "starts.jsonl").read_text().splitlines()]


@pytest.mark.exhaustive
def test_hosts_that_come_and_go(text, tmp_path):  # noqa: F811
    """One agent begins, another joins it, and is killed with SIGKILL: the first goes on, from the last checkpoint."""
    run = tmp_path / "run"
    meeting = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    given = {"HEAD": "localhost", "PORT": free_port(), "RUN": run, "NODES": "1:2", "MEETING": meeting}
    first = started(TORCHRUN, flags(text), **given)
    wait_for_steps(run, 3, first)
    second = started(TORCHRUN, flags(text), **given)
    deadline = time.monotonic() + SECONDS
    while started_on(run) != [1, 2] and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.1)
    joined = len((run / "metrics.jsonl").read_text().splitlines())
    wait_for_steps(run, joined + 7, first)
    agent, *workers = descendants(second.pid)
    os.kill(agent, signal.SIGKILL)
    code, out = ended(second)
    assert code not in (0, NOT_DONE) and ends(workers), out  # no process is left behind
    code, out = ended(first)
    assert code == 0 and f"{run}: done, {STEPS} of {STEPS} steps are saved" in out, out
    assert [f"on {n} x cpu (dp_shard={n})" in out for n in (1, 2)] == [True, True] and started_on(run) == [1, 2, 1]
    met, left = (int(step) for step in re.findall(r"resumed after step (\d+)", out))
    assert 3 <= met < left < STEPS and left % 5 == 0
    assert f"stopped at step {met}, resume with" in out  # nothing was lost when the second came
    assert alike(run, text, tmp_path, (1, met), (2, left), (1, STEPS))


@pytest.mark.exhaustive
def test_hosts_that_are_stopped_and_started_again(text, tmp_path):  # noqa: F811
    """SIGTERM to both: they save and end, and each says that steps are left; then both go on to the end."""
    run, port = tmp_path / "run", free_port()
    given = {"HEAD": "localhost", "PORT": port, "RUN": run}
    hosts = [started(TORCHRUN, flags(text), **given) for _ in range(2)]
    wait_for_steps(run, 7, hosts[0])
    for host in hosts:
        host.send_signal(signal.SIGTERM)
    told = [ended(host) for host in hosts]
    assert [code for code, _ in told] == [NOT_DONE] * 2, told
    told = [ended(host) for host in [started(TORCHRUN, flags(text), **given) for _ in range(2)]]
    assert [code for code, _ in told] == [0, 0], told
    assert alike(run, text, tmp_path, (2, STEPS))


# What can be seen without starting anything


def test_the_shell_reads_the_scripts():
    for script in (TORCHRUN, SBATCH):
        told = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
        assert told.returncode == 0 and not told.stderr, told.stderr
        assert os.access(script, os.X_OK)
    if shellcheck := shutil.which("shellcheck"):
        told = subprocess.run([shellcheck, "-x", TORCHRUN, SBATCH], capture_output=True, text=True)
        assert told.returncode == 0, told.stdout
    without = subprocess.run(["bash", TORCHRUN], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert without.returncode != 0 and "HEAD: the name of one of the hosts" in without.stderr


TEMPLATES = {
    "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet", ["replicatedJobs", 0, "template", "spec", "template"]),
    "pytorchjob": ("kubeflow.org/v1", "PyTorchJob", ["pytorchReplicaSpecs", "Worker", "template"]),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_kubernetes_files_run_the_script(name):
    """Their fields were compared with the types of the two projects by hand; none was applied to a cluster."""
    version, kind, at = TEMPLATES[name]
    content = yaml.safe_load((SCRIPTS / "kubernetes" / f"{name}.yaml").read_text())
    assert (content["apiVersion"], content["kind"]) == (version, kind) and content["metadata"]["name"] == "quantshard"
    pod = content["spec"]
    for key in at:
        pod = pod[key]
    [container] = pod["spec"]["containers"]
    shell, script = container["command"]
    assert shell == "bash" and Path(script).relative_to("/opt/quantshard") == TORCHRUN.relative_to(ROOT)
    variables = {each["name"]: each["value"] for each in container["env"]}
    taken = set(re.findall(r'^: "\$\{(\w+)|^(\w+)="\$\{', TORCHRUN.read_text(), re.MULTILINE))
    assert set(variables) <= {first or second for first, second in taken}
    assert all(isinstance(value, str) for value in (*variables.values(), *container["args"]))
    assert pod["spec"]["terminationGracePeriodSeconds"] > int(variables["GRACE"])
    assert int(variables["PROCESSES"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in pod["spec"]["volumes"]}
    given = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
    settings = {flag.removeprefix("--"): value for flag, value in given.items()}
    assert set(settings) <= set(TrainSettings.__dataclass_fields__) and settings["model"] in KNOWN_SIZES
    head = {"jobset": "quantshard-hosts-0-0.quantshard", "pytorchjob": "quantshard-worker-0"}[name]
    assert variables["HEAD"] == head and json.dumps(content)
