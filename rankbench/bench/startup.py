"""Start-up: commands that compute nothing, against `import torch`."""

import subprocess
import sys

import pandas as pd

from rankbench.bench.timing import medians, paired, spread
from rankbench.config import BenchConfig
from rankbench.runs.machine import Machine

COMMANDS = {
    "rankbench --help": ("-m", "rankbench", "--help"),
    "rankbench train --help": ("-m", "rankbench", "train", "--help"),
    "rankbench train --cfg job": ("-m", "rankbench", "train", "--cfg", "job"),
}


def table(cfg: BenchConfig, machine: Machine) -> pd.DataFrame:
    """Wall-clock seconds of each command, which runs as a process of its own."""
    alternatives = {name: lambda words=words: run_python(*words) for name, words in COMMANDS.items()}
    seconds = paired(machine, cfg.repeats, **alternatives, import_torch=lambda: run_python("-c", "import torch"))
    import_torch = seconds["import_torch"]
    rows = [
        {"command": name}
        | medians({"command": seconds[name], "import_torch": import_torch})
        | spread("ratio_to_import_torch", seconds[name] / import_torch)
        for name in COMMANDS
    ]
    return pd.DataFrame(rows).assign(repeats=cfg.repeats).set_index("command")


def run_python(*words: str) -> None:
    """Run Python with these arguments, its output discarded; CalledProcessError if it fails."""
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
