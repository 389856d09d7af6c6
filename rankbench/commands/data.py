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
    folder = folder_of(cfg.corpus) if cfg.folder is None else Path(cfg.folder)
    fetch(cfg.corpus, folder)
    print(f"{CORPORA[cfg.corpus].note}\n-> {folder}; now task=char_lm task.path={cfg.folder or cfg.corpus}")
