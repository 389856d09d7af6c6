"""python -m benchmarks [name ...] [repeats=7] [sequences=2000] [record=docs] [key=value of `rankbench train` ...]

Without a name: paths, training and startup. With record=docs the ratios are added to docs/BENCHMARKS.md.
"""

import sys
from pathlib import Path

from benchmarks import DEFAULTS, bench, check
from benchmarks.config import config_of
from rankbench.commands import train
from rankbench.commands.failures import refusing
from rankbench.runs.files import write_json
from rankbench.runs.machine import Machine


def main(words: list[str]) -> None:
    names = [word for word in words if "=" not in word] or DEFAULTS
    cfg = config_of([word for word in words if "=" in word])
    train.check(cfg)
    check(names, cfg)
    machine = Machine.prepare(cfg)
    machine.log_threads(cfg.threads)
    Path(cfg.out).mkdir(parents=True, exist_ok=True)
    write_json(Path(cfg.out) / "environment.json", machine.record())
    bench(names, cfg, machine)


if __name__ == "__main__":
    with refusing("bench"):
        main(sys.argv[1:])
