"""A user's own code and files: modules, plug-in analyses, inputs and checkpoints that raise, exit, lie or are vast."""

import json
import math
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import Result
from safetensors.torch import load_file, save_file

from campaigns.campaign import Campaign
from campaigns.hostile import Canary, damage
from campaigns.in_process import CRASHED, LONGEST_LINE, TOO_LONG, called
from rankbench.analyses import ANALYSES
from rankbench.config import plugins
from rankbench.config.schema import conf_dir

SHIPPED = conf_dir() / "analysis" / "path_counts.yaml"
SECONDS = 60  # of the processor, for one command
MODULE = """
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        y = self.encoder(x)
        {body}

def build():
    {start}
    return Mine()
"""
BODIES = {  # of forward; those of UNFIT cannot be measured
    "plain": "return y",
    "raises": "raise KeyError('x')",
    "raises later": "assert self.calls < 2\n        return y",
    "exits": "raise SystemExit",
    "exits later": "exit(0) if self.calls > 1 else None\n        return y",
    "none": "return None",
    "word": "return 'y'",
    "nan": "return y * float('nan')",
    "infinite": "return y / 0",
    "scalar": "return y.sum()",
    "empty": "return y[:0]",
    "sparse": "return y.to_sparse()",
    "complex": "return torch.complex(y, y)",
    "integers": "return y.long()",
    "booleans": "return y > 0",
    "half": "return y.half()",
    "numpy": "return torch.from_numpy(y.numpy())",
    "in place": "x.zero_()\n        return y",
    "in place on a state": "y.mul_(2)\n        return y",
    "changing": "return y * self.calls",
    "random": "return y + torch.rand_like(y)",
    "dropout": "return nn.functional.dropout(y, 0.5, True)",
    "loses sequences": "return y[:1]",
    "loses tokens": "return y[:, :1]",
    "transposed": "return y.transpose(0, 1)",
    "list": "return [y, y]",
    "dict": "return {'logits': y, 'more': None}",
    "deep": "return self.forward(x)",
    "vast": "return torch.zeros(10 ** 13)",
    "constant": "return torch.ones_like(y)",
    "huge": "return y * 1e300",
    "surrogate": "raise ValueError('a\\udc80\\x1b[31m\\nb')",
    "meta": "return y.to('meta')",
    "grad": "return torch.autograd.grad(y.sum(), x)[0]",
    "nan in one": "y[0, 0, 0] = float('nan')\n        return y",
    "drops its weights": "self.encoder = None\n        return y",
    "spoils its weights": "self.encoder.norm1.weight.data.fill_(float('nan'))\n        return y",
    "resizes its weights": "self.encoder.linear1.weight.data = torch.ones(1)\n        return y",
    "number type": "torch.set_default_dtype(torch.float64)\n        return y",
    "global seed": "torch.manual_seed(0)\n        return y + torch.rand(1)",
    "warns": "import warnings\n        warnings.warn('x' * 10 ** 5)\n        return y",
    "prints": "print('\\x1b[31m')\n        return y",
    "generator": "return (row for row in y)",
    "views": "return y.flip(1).mT.mT[..., ::2]",
    "double": "return y.double()",
    "quantised": "return torch.quantize_per_tensor(y, 0.1, 0, torch.qint8)",
    "nested": "return torch.nested.nested_tensor([y[0], y[1, :2]])",
    "subclass": "return y.as_subclass(type('Odd', (torch.Tensor,), {'__repr__': lambda _: 1 / 0}))",
    "another thread": "import threading\n        t = threading.Thread(target=self.encoder, args=(x,))\n"
    "        t.start(), t.join()\n        return y",
    "inference": "return torch.inference_mode()(lambda: y * 1)()",
    "interrupts itself": "raise RuntimeError('\\n' * 100 + 'x' * 10 ** 5)",
}
UNFIT = {"raises", "exits", "deep", "vast", "surrogate", "interrupts itself"}
STARTS = [*["pass"] * 12, "raise ValueError('x' * 10 ** 5)", "exit(0)", "return None", "return 3, 4, 5, 6"]
TABLES = {  # of a plug-in's analysis
    "none": "return None",
    "list": "return [1]",
    "empty": "return pd.DataFrame()",
    "own columns": "return pd.DataFrame({'seed': [1]})",
    "raises": "return subject.nothing",
    "exits": "raise SystemExit",
    "deep": "return table(subject, options)",
    "vast": "return np.zeros(10 ** 13)",
    "surrogate": "raise ValueError('a\\udc80\\x1b[31m')",
}
PLUGIN = """
from dataclasses import replace
import numpy as np
import pandas as pd
from rankbench.analyses import ANALYSES as OURS

def table(subject, options):
    {body}

ANALYSES = {{"{name}": replace(OURS["path_counts"], table=table)}}
"""


SOUND = np.random.default_rng(0).normal(size=(3, 4, 8))
ARRAYS = {
    "sound": SOUND,
    "narrow": SOUND[..., :3],
    "flat": SOUND[:, 0],
    "deep": SOUND[None, None],
    "one number": np.float64(1),
    "none": SOUND[:0],
    "no tokens": SOUND[:, :0],
    "one token": SOUND[:, :1],
    "nan": SOUND * np.nan,
    "infinite": np.full_like(SOUND, np.inf),
    "huge": SOUND * 1e300,
    "tiny": SOUND * 1e-320,
    "words": np.array(["a", "b"]),
    "integers": SOUND.astype(int),
    "unsigned": np.full((3, 4), 2**64 - 1, np.uint64),
    "booleans": SOUND > 0,
    "half": SOUND.astype(np.float16),
    "long": SOUND.astype(np.longdouble),
    "complex": SOUND + 1j,
    "dates": np.zeros((3, 4), "datetime64[s]"),
    "fields": np.zeros((3, 4), "f4,i8"),
    "objects": np.array([Canary()], object),
    "other end": SOUND.astype(">f8"),
    "columns": np.asfortranarray(SOUND),
}
ODD = [
    *(None, True, -1, 0, 0.5, 2**31, 2**63, 10**30, math.nan, math.inf),
    *("x", "", "../../x", [], {}, [1, "x"], "\udc80\n"),
]
REMOTE = "import os\nos.system('touch canary')\n"
CHECKPOINTS = Path("checkpoints")


def _module(numbers: random.Random, at: Path) -> tuple[str, list[str], bool]:
    body, start = numbers.choice(list(BODIES)), numbers.choice(STARTS)
    kind = numbers.choice(["sound"] * len(ARRAYS) + list(ARRAYS))
    (at / "mine.py").write_text(MODULE.format(body=BODIES[body], start=start))
    np.save(at / "x.npy", ARRAYS[kind])
    chosen = numbers.choice(["residual", "spectrum", "attention", "path_mass"])
    words = ["model=mine.py:build", "inputs=x.npy", f"analysis=[{chosen}]"]
    return f"{body}; {start}; inputs {kind}; {chosen}", words, body in UNFIT or start != "pass"


def _plug_in(numbers: random.Random, at: Path) -> tuple[str, list[str], bool]:
    table, name = numbers.choice(list(TABLES)), f"campaign_{numbers.getrandbits(64)}"
    (at / f"{name}.py").write_text(PLUGIN.format(body=TABLES[table], name=name))
    (at / "conf" / "analysis").mkdir(parents=True)
    options = SHIPPED.read_text().replace("analysis.path_counts", f"analysis.{name}")
    (at / "conf" / "analysis" / f"{name}.yaml").write_text(options)
    words = ["model.layers=1", "model.width=8", "task.length=4", f"plugins=[{name}]", f"analysis=[{name}]"]
    return f"table: {table}", words, True


def _file_of_inputs(numbers: random.Random, at: Path) -> tuple[str, list[str], bool]:
    (at / "mine.py").write_text(MODULE.format(body="return y", start="pass"))
    (at / "inputs").mkdir()
    kind, name = "sound", f"x.{numbers.choice(['npy', 'safetensors'])}"
    if name == "x.npy":
        kind = numbers.choice(["sound", *ARRAYS])
        np.save(at / "inputs" / name, ARRAYS[kind])
    else:
        save_file({numbers.choice(["inputs", "x", "targets", "y"]): torch.tensor(SOUND)}, at / "inputs" / name)
    what = damage(at / "inputs", numbers) if kind == "sound" else ""
    words = ["model=mine.py:build", f"inputs=inputs/{name}", "analysis=[residual]"]
    return f"inputs {kind}: {name} {what}", words, False


def _checkpoint(numbers: random.Random, at: Path) -> tuple[str, list[str], bool]:
    name, chosen = numbers.choice(["bert", "gpt2"]), numbers.choice(["residual", "spectrum", "attention"])
    if not (at.parent / CHECKPOINTS).exists():
        _save_checkpoints(at.parent / CHECKPOINTS)
    folder = Path(shutil.copytree(at.parent / CHECKPOINTS / name, at / name))
    kind = numbers.choice(["config", "config", "file", "tensor", "code"])
    if kind in ("config", "code"):
        config = json.loads((folder / "config.json").read_text())
        key, value = numbers.choice(list(config)), numbers.choice(ODD)
        if kind == "code":
            (folder / "modeling.py").write_text(REMOTE)
            key, value = "auto_map", dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "modeling.X")
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        what = f"{key}={value!r}"
    elif kind == "tensor":
        tensors = load_file(folder / "model.safetensors")
        key, change = numbers.choice(sorted(tensors)), numbers.choice(list(TENSORS))
        if (changed := TENSORS[change](tensors.pop(key))) is not None:
            tensors["more" if change == "renamed" else key] = changed.contiguous()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        what = f"{key} {change}"
    else:
        what = damage(folder, numbers)
    np.save(at / "ids.npy", np.arange(12).reshape(3, 4))
    return (
        f"{name}: {what}",
        ["model=pretrained", f"model.path={name}", "inputs=ids.npy", f"analysis=[{chosen}]"],
        False,
    )


TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "gone": lambda tensor: None,
    "renamed": lambda tensor: tensor,
    "longer": lambda tensor: torch.cat([tensor, tensor]),
    "flat": lambda tensor: tensor.flatten(),
    "empty": lambda tensor: tensor[:0],
    "nan": lambda tensor: tensor * math.nan,
    "infinite": lambda tensor: tensor / 0,
    "integers": lambda tensor: tensor.long(),
    "booleans": lambda tensor: tensor > 0,
    "half": lambda tensor: tensor.half(),
    "double": lambda tensor: tensor.double(),
    "complex": lambda tensor: tensor + 0j,
    "bytes": lambda tensor: tensor.to(torch.float8_e4m3fn),
}


def _save_checkpoints(folder: Path) -> None:
    import transformers  # seconds

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 15}
    bert = transformers.BertConfig(**sizes, intermediate_size=8, max_position_embeddings=16)
    gpt2 = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=16, vocab_size=15)
    transformers.BertForMaskedLM(bert).save_pretrained(folder / "bert")
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt2")


KINDS = {"modules": _module, "plug-ins": _plug_in, "inputs": _file_of_inputs, "checkpoints": _checkpoint}
TURNS = [*["modules"] * 3, "plug-ins", "inputs", "checkpoints"]


def _wrong(result: Result, must_fail: bool) -> str | None:
    if result.code in (CRASHED, TOO_LONG) or "Traceback" in result.err:
        return f"traceback or too long: {result.err.strip()[-300:]}"
    if result.code == 0:
        return "ended well" if must_fail else None
    lines = [line for line in result.err.splitlines() if line.startswith("rankbench ")]
    if result.code != 1 or len(lines) != 1 or len(lines[0]) > LONGEST_LINE:
        return f"exit code {result.code}, {len(lines)} lines: {result.err[-300:]}"
    return None if lines[0].isprintable() else f"control characters: {lines[0]!r}"


def cases(numbers: random.Random, size: int, folder: Path) -> Generator[str | None, None, str]:
    """Measure something of a user's."""
    ended, kinds, at, dtype = Counter(), Counter(), folder / "case", torch.get_default_dtype()
    for number in range(size):
        kinds[kind := TURNS[number % len(TURNS)]] += 1
        at.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", [*sys.path])
            patch.setenv("HF_HUB_OFFLINE", "1")
            what, words, must_fail = KINDS[kind](numbers, at)
            result = called("analyze", *words, "out=out", at=at, seconds=SECONDS)
        torch.set_default_dtype(dtype)
        for held in (plugins.FOUND, ANALYSES):
            for name in [name for name in held if name.startswith("campaign_")]:
                del held[name]
        plugins.LOADED -= {name for name in plugins.LOADED if name.startswith("campaign_")}
        ended["measured" if result.code == 0 else "refused"] += 1
        line = "executed a file's content" if list(folder.rglob("canary")) else _wrong(result, must_fail)
        shutil.rmtree(at)
        yield None if line is None else f"{what}: {line}"
    return "; ".join(", ".join(f"{count} {what}" for what, count in counts.items()) for counts in (kinds, ended))


CAMPAIGN = Campaign(
    about="A user's module that raises, exits, returns nothing, nan, integers, complex or sparse numbers, loses "
    "sequences, is random, changes from call to call, works in place, spoils its weights, recurs without end or asks "
    "for terabytes is measured, on sound and odd inputs; or the analysis of a plug-in that does the like is run; or "
    "the file of the inputs is odd or damaged; or a public checkpoint has odd values in its config, other tensors, "
    "code, or damaged files.",
    wrong="a traceback of ours, no line or more than one next to the frames of the user's code, a control character in "
    "it, 60 seconds of the processor, an executed content, or a success with code that cannot be measured.",
    full_size=600,
    cases=cases,
)
