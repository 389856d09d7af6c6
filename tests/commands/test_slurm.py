"""Sweeps on a real Slurm, with all its daemons on this machine: `make test-slurm`, in five minutes or so."""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest
from campaigns.processes import differences, results
from command_line import succeeds
from test_launchers import TINY, needs, start

from rankbench.runs.run import Run

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None]
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons need root"),
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurm-wlm munge"),
]
CONFIGURATION = """
ClusterName=rankbench
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=100000
PartitionName=all Nodes=ALL Default=YES
"""
SECONDS = 400  # that anything may take here, on a machine that may be busy
SLURM = ["cluster=slurm", "hydra.launcher.mem_gb=1", "hydra.launcher.timeout_min=20"]
JOBS = [*TINY, "trainer.steps=1500", "trainer.eval_every=1", "trainer.compile=false", "seed=0,1"]
SAVES_AT_THE_END = "trainer.checkpoint_every=10000000"


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@pytest.fixture(scope="module", autouse=True)
def slurm(tmp_path_factory):
    """A cluster of this machine alone. Its jobs find it by SLURM_CONF."""
    needs("submitit")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    configuration = CONFIGURATION.format(folder=folder, host=host, ports=(free_port(), free_port()))
    (folder / "slurm.conf").write_text(configuration)
    files = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("key-file", "pid-file", "seed-file")]
    daemons = [["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]]
    daemons += [["slurmctld", "-D"], ["slurmd", "-D"]]
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/usr/sbin:/sbin", prepend=os.pathsep)
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        for words in daemons:
            errors = stack.enter_context((folder / f"{words[0]}.txt").open("w"))
            process = stack.enter_context(subprocess.Popen(words, stdout=errors, stderr=errors))
            stack.callback(process.terminate)
            time.sleep(1)
        until(lambda: "idle" in asked("sinfo", "-h"))
        stack.callback(asked, "scancel", f"--user={os.getuid()}", "--signal=KILL")
        yield


def asked(*words):
    return subprocess.run(words, capture_output=True, text=True).stdout


def until(holds):
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, asked("squeue", "--array", "--states=all")
        time.sleep(0.2)


def queued(at=None):
    """Numbers of the jobs in the queue. at: a sweep's folder; without it, of all."""
    jobs = asked("squeue", "--array", "--noheader", "--format=%i").split()
    return [job for job in jobs if at is None or (at / ".submitit" / job).exists()]


def release(job):
    """Have a job that was queued again begin now: Slurm would wait for two minutes."""
    until(lambda: "PENDING" in asked("squeue", "-h", "-j", job, "--format=%T"))
    asked("scontrol", "update", f"JobId={job}", "StartTime=now")


@contextmanager
def sweep(*words, at):
    """A sweep's command."""
    process = start("-m", *SLURM, *words, "out=sweep", at=at)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for job in queued(at / "sweep"):
            asked("scancel", "--signal=KILL", "--full", job), asked("scancel", job)


def rows(folder):
    """Whether both jobs of the sweep are training."""
    return len(list(folder.glob("*/metrics.csv"))) == 2


def ended(process):
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_by_one")
    succeeds("train", "-m", *JOBS, "out=sweep", at=folder)
    return results(folder / "sweep")


def test_two_sweeps_at_once_give_the_numbers_of_this_process(one_by_one, tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    with sweep(*JOBS, at=tmp_path / "a") as first, sweep(*JOBS, at=tmp_path / "b") as second:
        for process, folder in ((first, tmp_path / "a"), (second, tmp_path / "b")):
            code, out, err = ended(process)
            assert (code, err) == (0, "") and "2 jobs, 2 finished" in out
            assert differences(results(folder / "sweep"), one_by_one) is None


def test_a_requeued_job_continues_and_a_killed_command_is_repeated(one_by_one, tmp_path):
    with sweep(*JOBS, SAVES_AT_THE_END, at=tmp_path) as process:
        folder = tmp_path / "sweep"
        until(lambda: rows(folder))
        process.kill()
        process.communicate()
        job = next(job for job in queued(folder) if job.endswith("_0"))
        asked("scontrol", "requeue", job)
        release(job)
        with sweep(*JOBS, SAVES_AT_THE_END, at=tmp_path) as again:
            code, out, err = ended(again)
    assert (code, err) == (0, "") and out.startswith("waiting for ") and "2 jobs, 2 finished" in out
    assert "continuing" in (folder / "0_seed=0" / "train.log").read_text()
    assert differences(results(folder), one_by_one) is None


def test_a_job_at_its_time_limit_saves_and_a_cancelled_one_is_told(tmp_path):
    words = [*TINY, SAVES_AT_THE_END, "trainer.steps=10000000", "trainer.compile=false", "seed=0,1"]
    with sweep(*words, "hydra.launcher.timeout_min=2", "hydra.launcher.signal_delay_s=45", at=tmp_path) as process:
        folder = tmp_path / "sweep"
        until(lambda: rows(folder))
        jobs = queued(folder)
        for job in jobs:
            release(job)
        for run in map(Run, folder.glob("[01]_*")):
            saved = run.state()[1]["step"]
            line = f"continuing {run.folder.relative_to(tmp_path)} at step {saved}"
            assert saved > 0
            until(lambda log=run.folder / "train.log", line=line: line in log.read_text())
        for job in jobs:
            asked("scancel", job)
        code, out, err = ended(process)
    assert code == 1 and err.count("\n") == 1, err
    assert err.startswith("rankbench train: cluster=slurm: a job ended without a result: ") and "CANCELLED" in err
    assert "the same command continues" in err and "2 jobs, " in out


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("hydra.launcher.partition=nothing", "cluster=slurm: sbatch refused: "),
        ("hydra.launcher.signal_delay_s=1200", "hydra.launcher.signal_delay_s=1200: "),
    ],
)
def test_what_slurm_does_not_take_is_one_line(word, line, tmp_path):
    with sweep(*JOBS, word, at=tmp_path) as process:
        code, _, err = ended(process)
    assert code == 1 and err.splitlines()[-1].startswith(f"rankbench train: {line}") and "Traceback" not in err
