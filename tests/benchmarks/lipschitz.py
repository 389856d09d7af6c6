"""Jacobians of attention in closed form, against torch's general ways to differentiate.

Shapes: B sequence, N token, D width, E width as input.
"""

import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.func import jacrev
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.config import BenchConfig
from benchmarks.timing import medians, paired, spread
from rankbench.measures.attention_layer import AttentionLayer, attend, fresh_layer, rows_of_token
from rankbench.measures.jacobian_ascent import random_starts
from rankbench.runs.machine import Machine
from rankbench.seeds import generator_for

SIZES = ((100, 1, 1), (300, 1, 1), (1000, 1, 1), (64, 64, 8))  # tokens, width, heads; Kim et al.'s figure has D = 1
LARGE = 1000  # number of outputs from which a Jacobian is timed only once: by torch it takes ten seconds or more
ONE_ROW, GENERAL = ("row", "jacrev_row"), {"jacrev": "jacrev", "jacobian": "autograd.functional.jacobian"}
ROWS_AT_A_TIME = 8  # of jacrev: all at once would need N^3 numbers; 4 to 16 are fastest at 300 tokens


def table(cfg: BenchConfig, machine: Machine) -> pd.DataFrame:
    """Seconds and peak memory of ||J||_inf of a fresh L2 attention with tied keys, in float64.

    row: the rows of one token in closed form; those of any token have the same supremum, because the layer is
    permutation equivariant. all_rows: the same for every token. jacrev, jacobian: the whole Jacobian by
    torch.func.jacrev and torch.autograd.functional.jacobian. jacrev_row: the rows of one token by jacrev.
    largest_difference: between any entry by torch and in closed form.
    """
    rows = []
    for tokens, width, heads in SIZES:
        num_tokens = min(tokens, cfg.sequences)  # few in a smoke test
        generator = generator_for(cfg.seed, "lipschitz")
        layer = fresh_layer("l2", width, heads, 1.0, generator).to(machine.device)
        x_1ND = random_starts(1, num_tokens, width, 1.0, generator).to(machine.device)
        alternatives = alternatives_of(layer, x_1ND)
        peaks, entries = zip(*map(peak_bytes, alternatives.values()), strict=True)
        peak_of, entries_of = dict(zip(alternatives, peaks, strict=True)), dict(zip(alternatives, entries, strict=True))
        whole_ND = entries_of["all_rows"].reshape(num_tokens, width, num_tokens, width)
        difference = max((whole_ND - entries_of[name]).abs().max().item() for name in GENERAL)
        difference = max(difference, *((whole_ND[0] - entries_of[name]).abs().max().item() for name in ONE_ROW))
        repeats = cfg.repeats if num_tokens * width < LARGE else 1
        seconds = paired(machine, repeats, alternatives, is_warm=True)  # peak_bytes has run each of them once
        case: dict[str, float] = {"num_tokens": num_tokens, "width": width, "heads": heads, "repeats": repeats}
        case |= medians({name: seconds[name] for name in (*ONE_ROW, "all_rows")})
        case |= {f"megabytes_{name}": peak_of[name] / 1e6 for name in (*ONE_ROW, "all_rows")}
        of_1000 = "_of_1000" if num_tokens == 1000 else ""  # these ratios have a goal
        for name, function in GENERAL.items():
            memory = np.array([peak_of[name] / peak_of["row"]])
            rows.append(
                {"against": function, **case, "seconds_whole": float(np.median(seconds[name]))}
                | {"megabytes_whole": peak_of[name] / 1e6, "largest_difference": difference}
                | spread(f"ratio_jacobian_to_row{of_1000}", seconds[name] / seconds["row"])
                | spread("ratio_jacobian_to_all_rows", seconds[name] / seconds["all_rows"])
                | spread(f"ratio_memory_jacobian_to_row{of_1000}", memory)
            )
    return pd.DataFrame(rows).assign(device=machine.device.type).set_index(["against", "num_tokens", "width", "heads"])


def alternatives_of(layer: AttentionLayer, x_1ND: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Ways to compute the Jacobian's rows of one token's outputs, (D, N, E), or of all outputs, (N, D, N, E)."""

    def function(x_ND: Tensor) -> Tensor:
        return attend(layer, x_ND[None])[0]

    x_ND, tokens = x_1ND[0], range(x_1ND.shape[1])
    return {
        "row": lambda: rows_of_token(layer, x_1ND, 0)[0],
        "all_rows": lambda: torch.stack([rows_of_token(layer, x_1ND, token)[0] for token in tokens]),
        "jacrev_row": lambda: jacrev(lambda x_ND: function(x_ND)[0])(x_ND),
        "jacrev": partial(jacrev(function, chunk_size=ROWS_AT_A_TIME), x_ND),
        "jacobian": lambda: torch.autograd.functional.jacobian(function, x_ND),
    }


class _Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that operations return, and the most that are alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.living: set[int] = set()
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        outputs = operation(*arguments, **(keywords or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.living:
                self.living.add(storage._cdata)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.bytes)
        return outputs

    def _free(self, key: int, size: int) -> None:
        self.living.discard(key)
        self.bytes -= size


def peak_bytes(work: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """The most bytes of tensors that are alive at one time during the work, and the work's result."""
    with _Peak() as counts:
        result = work()
    return counts.peak, result
