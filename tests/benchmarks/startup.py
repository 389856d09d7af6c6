"""Start-up: commands that compute nothing, and a training of one step, against `import torch`."""

import subprocess
import sys
import tempfile
import time
from functools import partial

import pandas as pd

from benchmarks.config import BenchConfig
from benchmarks.timing import medians, paired, spread
from rankbench.runs.machine import Machine

TRAIN = ("-m", "rankbench", "train")
COMMANDS = {
    "rankbench --help": ("-m", "rankbench", "--help"),
    "rankbench train --help": (*TRAIN, "--help"),
    "rankbench train --cfg job": (*TRAIN, "--cfg", "job"),
    # evaluates before and after its step, and draws the curves
    "rankbench train trainer.steps=1": (*TRAIN, "trainer.steps=1", "analysis=[]", "out={folder}/run"),
}


def table(cfg: BenchConfig, machine: Machine) -> pd.DataFrame:
    """Wall-clock seconds of each command, which runs as a process of its own."""
    alternatives = {name: partial(run_python, *words) for name, words in COMMANDS.items()}
    alternatives["import_torch"] = partial(run_python, "-c", "import torch")
    seconds = paired(machine, cfg.repeats, alternatives, clock=time.perf_counter)
    import_torch = seconds["import_torch"]
    rows = [
        {
            "command": name,
            **medians({"command": seconds[name], "import_torch": import_torch}),
            **spread("ratio_to_import_torch", seconds[name] / import_torch),
        }
        for name in COMMANDS
    ]
    return pd.DataFrame(rows).assign(repeats=cfg.repeats).set_index("command")


def run_python(*words: str) -> None:
    """Run Python with these arguments, {folder} replaced by an empty folder, and discard its output. Raises
    CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *(word.replace("{folder}", folder) for word in words)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
