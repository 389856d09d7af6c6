"""Public corpora: their addresses, their checksums, and their folders on this machine. None is shipped."""

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from rankbench.config.keys import ConfigError, check_known

SPLITS = ("train", "valid", "test")
PATIENCE = 30  # seconds without an answer until a download fails


@dataclass(frozen=True)
class CorpusSource:
    """address: the web folder that holds <split>.txt; sha256: the checksum of each split; note: a hint for users."""

    address: str
    sha256: dict[str, str]
    note: str


CORPORA = {
    "ptb": CorpusSource(
        # the address of one commit, whose files cannot change
        "https://raw.githubusercontent.com/harvardnlp/TextFlow/0eb8552ae5b370f69e440bca6c6c226b1734c1ba/data/ptb",
        {
            "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
            "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
            "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
        },
        "Penn Treebank (Marcus, Marcinkiewicz and Santorini 1993), for research only: do not pass it on",
    )
}


def sentences_in(file: Path) -> list[str]:
    """The lines of a text that are not blank, without the blanks at their ends.

    ConfigError for a file that cannot be read or is no text, for a text without a sentence or larger than the machine's
    memory, and for a pipe or a device, where reading might never end.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise ConfigError(f"task.path: {file}: not a regular file; give a text file")
        if (size := file.stat().st_size) > memory:
            raise ConfigError(
                f"task.path: {file}: {size >> 30} GiB, and this machine has {memory >> 30} GiB of memory; "
                "give a smaller text, such as its beginning"
            )
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except OSError as error:
        raise ConfigError(f"task.path: {file}: {error.strerror}; give a text file, or null") from None
    except UnicodeDecodeError:
        raise ConfigError(f"task.path: {file}: not a text in UTF-8; give one sentence a line, or null") from None
    if not any(lines):
        raise ConfigError(f"task.path: {file}: no line with a sentence; give one sentence a line, or null")
    return [line for line in lines if line]


def folder_of(corpus: str) -> Path:
    """The cache folder of a corpus; it need not exist."""
    import pooch

    return Path(pooch.os_cache("rankbench")) / corpus


def check_files(corpus: str, folder: Path) -> None:
    """Raise ConfigError for a file of a corpus that changed since it was fetched; files that are missing pass."""
    for split, sha256 in CORPORA[corpus].sha256.items():
        file = folder / f"{split}.txt"
        if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
            raise ConfigError(
                f"{file}: changed since it was fetched; `rankbench data corpus={corpus}` fetches it again"
            )


def fetch(corpus: str, folder: Path) -> None:
    """Fetch those files of a corpus that `folder` lacks, and verify their checksums.

    ConfigError for an unknown corpus, a failing network or disk, or a wrong checksum; no partial or wrong file is kept.
    """
    import pooch

    check_known("corpus", [corpus], CORPORA)
    pooch.get_logger().setLevel(logging.WARNING)
    source, downloader = CORPORA[corpus], pooch.HTTPDownloader(timeout=PATIENCE)
    for split, sha256 in source.sha256.items():
        address = f"{source.address}/{split}.txt"
        try:
            pooch.retrieve(address, f"sha256:{sha256}", f"{split}.txt", folder, downloader=downloader)
        except OSError as error:  # includes the errors of requests, whose messages are long
            why = error.strerror or type(error).__name__
            raise ConfigError(
                f"{address}: could not be fetched into {folder} ({why}); with a network and a folder that can be "
                "written, the same command continues, or put train.txt, valid.txt and test.txt there yourself"
            ) from None
        except ValueError:
            raise ConfigError(
                f"{address}: not the file that was pinned, sha256 {sha256}; nothing of it is kept"
            ) from None
