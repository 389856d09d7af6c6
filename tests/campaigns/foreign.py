"""A user's own code and files: modules, plug-in analyses and inputs that raise, exit, lie, change or are vast."""

import random
import shutil
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from command_line import Result

from campaigns.campaign import Campaign
from campaigns.in_process import CRASHED, LONGEST_LINE, TOO_LONG, called
from rankbench import plugins
from rankbench.analyses import ANALYSES
from rankbench.config import conf_dir

SHIPPED = conf_dir() / "analysis" / "path_counts.yaml"
SECONDS = 60  # of one command, on a machine that may be busy
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


def _inputs(numbers: random.Random) -> tuple[str, bytes | np.ndarray]:
    sound = np.random.default_rng(numbers.randrange(1000)).normal(size=(3, 4, 8))
    arrays = {
        "sound": sound,
        "narrow": sound[..., :3],
        "flat": sound[:, 0],
        "one number": np.float64(1),
        "none": sound[:0],
        "nan": sound * np.nan,
        "words": np.array(["a", "b"]),
        "integers": sound.astype(int),
    }
    name = numbers.choice(["sound"] * 24 + list(arrays))
    return name, arrays[name]


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
    """Measure a random module on random inputs, or run a random plug-in's analysis."""
    ended, at = Counter(), folder / "case"
    for number in range(size):
        at.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", [*sys.path])
            if numbers.random() < 0.25:
                table, name = numbers.choice(list(TABLES)), f"campaign_{number}"
                (at / f"{name}.py").write_text(PLUGIN.format(body=TABLES[table], name=name))
                (at / "conf" / "analysis").mkdir(parents=True)
                options = SHIPPED.read_text().replace("analysis.path_counts", f"analysis.{name}")
                (at / "conf" / "analysis" / f"{name}.yaml").write_text(options)
                words = ["model.layers=1", "model.width=8", "task.length=4", f"plugins=[{name}]", f"analysis=[{name}]"]
                what, must_fail = f"table: {table}", True
            else:
                body, start, (kind, array) = numbers.choice(list(BODIES)), numbers.choice(STARTS), _inputs(numbers)
                (at / "mine.py").write_text(MODULE.format(body=BODIES[body], start=start))
                np.save(at / "x.npy", array)
                chosen = numbers.choice(["residual", "spectrum", "attention", "path_mass"])
                words = ["model=mine.py:build", "inputs=x.npy", f"analysis=[{chosen}]"]
                what, must_fail = f"{body}; {start}; inputs {kind}; {chosen}", body in UNFIT or start != "pass"
            result = called("analyze", *words, "out=out", at=at, seconds=SECONDS)
        for held in (plugins.FOUND, ANALYSES):
            held.pop(f"campaign_{number}", None)
        plugins.LOADED.discard(f"campaign_{number}")
        ended["measured" if result.code == 0 else "refused"] += 1
        line = _wrong(result, must_fail)
        shutil.rmtree(at)
        yield None if line is None else f"{what}: {line}"
    return ", ".join(f"{count} {how}" for how, count in ended.most_common())


CAMPAIGN = Campaign(
    about="A user's module that raises, exits, returns nothing, nan, integers, complex or sparse numbers, loses "
    "sequences, is random, changes from call to call, works in place, recurs without end or asks for terabytes is "
    "measured, on sound and odd inputs; or the analysis of a plug-in that does the like is run.",
    wrong="a traceback of ours, no line or more than one next to the frames of the user's code, a control character in "
    "it, 60 seconds, or a success with code that cannot be measured.",
    full_size=300,
    cases=cases,
)
