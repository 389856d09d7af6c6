"""What a power cut could leave of a run's folder, at every operation of the disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rankbench.training.journal
from rankbench.runs.files import append

Files = dict[str, bytes]


@contextmanager
def power_cuts(folder: Path) -> Iterator[list[Files]]:
    """Yield a list that is filled with the folder's possible contents, file by file, while it is written to."""
    disk = _Disk(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", disk.sync)
        for name in ("replace", "unlink"):
            patch.setattr(os, name, disk.noting(getattr(os, name)))
        patch.setattr(rankbench.training.journal, "append", disk.noting(append))
        yield disk.left
    for handle in disk.handles.values():
        os.close(handle)


def restore(files: Files, folder: Path) -> None:
    """Make a folder with these files."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


class _Disk:
    """What a power cut could leave of a folder, noted at every operation on it.

    Names of files and their contents reach the disk at a sync at the latest. Until then each may be there or not, and
    rows may be there in part.
    """

    def __init__(self, folder):
        self.folder, self.left = folder, []
        self.handles = {}  # by inode; they keep an inode from being used again
        self.synced_contents, self.synced_names = {}, {}

    def names(self):
        names = {path.name: path.stat().st_ino for path in self.folder.iterdir() if path.name != ".lock"}
        for name, inode in names.items():
            if inode not in self.handles:
                self.handles[inode] = os.open(self.folder / name, os.O_RDONLY)
        return names

    def content(self, inode):
        return os.pread(self.handles[inode], 1 << 20, 0)

    def half_synced(self, inode):
        synced, whole = self.synced_contents.get(inode, b""), self.content(inode)
        return whole[: (len(synced) + len(whole)) // 2]

    def note(self):
        for names in (self.names(), self.synced_names):
            for content in (self.content, self.half_synced, lambda inode: self.synced_contents.get(inode, b"")):
                folder = {name: content(inode) for name, inode in names.items()}
                if folder not in self.left:
                    self.left.append(folder)

    def sync(self, handle):
        self.note()
        names, inode = self.names(), os.fstat(handle).st_ino
        if inode == self.folder.stat().st_ino:
            self.synced_names = names
        else:
            self.synced_contents[inode] = self.content(inode)
        self.note()

    def noting(self, operation):
        """The operation, with a note before it and after it."""

        def noted(*arguments, **options):
            self.note()
            result = operation(*arguments, **options)
            self.note()
            return result

        return noted
