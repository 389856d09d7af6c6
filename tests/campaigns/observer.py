"""Trainings of others that do odd things while rankbench.observe watches them: they must end as without it."""

import copy
import math
import os
import pickle
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from campaigns.campaign import Campaign
from rankbench.config.keys import ConfigError
from rankbench.observing.observer import Observer, observe

STEPS = 6


class Net(nn.Module):
    """A classifier of sequences with dropout. in_eval: what it does with its output when it is measured."""

    def __init__(self, in_eval: Callable[["Net", Tensor], object]) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.out, self.in_eval, self.calls = nn.Linear(8, 3), in_eval, 0

    def forward(self, x: Tensor) -> object:
        y = self.out(self.encoder(x))
        self.calls += not self.training
        return y if self.training else self.in_eval(self, y)


def _raised(error: BaseException) -> None:
    raise error


IN_EVAL: dict[str, Callable[[Net, Tensor], object]] = {
    "as it is": lambda net, y: y,
    "raises": lambda net, y: _raised(KeyError("x")),
    "raises later": lambda net, y: _raised(RuntimeError("\n\udc80" * 99)) if net.calls > 12 else y,
    "none": lambda net, y: None,
    "nan": lambda net, y: y * math.nan,
    "sparse": lambda net, y: y.to_sparse(),
    "complex": lambda net, y: torch.complex(y, y),
    "integers": lambda net, y: y.long(),
    "empty": lambda net, y: y[:0],
    "random": lambda net, y: y + torch.rand_like(y) + random.random() + np.random.rand(),
    "changing": lambda net, y: y * net.calls,
    "spoils its weights": lambda net, y: (net.out.weight.data.fill_(math.nan), y)[1],
    "drops a layer": lambda net, y: (setattr(net, "out", None), y)[1],
    "trains": lambda net, y: (net.train(), y)[1],
    "with gradients": lambda net, y: (torch.enable_grad()(lambda: net.out.weight.sum().requires_grad_(False))(), y)[1],
    "vast": lambda net, y: torch.zeros(10**13),
    "deep": lambda net, y: net(y),
}
MOMENTS: dict[str, Callable[[Net, Path, Observer | None], object]] = {  # between two steps
    "nothing": lambda net, out, watch: None,
    "weights are nan": lambda net, out, watch: net.out.weight.data.fill_(math.nan),
    "weights are huge": lambda net, out, watch: net.encoder.linear1.weight.data.mul_(1e30),
    "weights are frozen": lambda net, out, watch: net.requires_grad_(False) and net.out.requires_grad_(True),
    "eval": lambda net, out, watch: net.eval(),
    "folder gone": lambda net, out, watch: shutil.rmtree(out, ignore_errors=True),
    "folder is a file": lambda net, out, watch: (shutil.rmtree(out, ignore_errors=True), out.write_text("x")),
    "table is a folder": lambda net, out, watch: watch and (out / "observed_states.csv").unlink(missing_ok=True),
    "table is cut": lambda net, out, watch: watch and os.truncate(out / "observed_steps.csv", 3),
    "lock gone": lambda net, out, watch: (out / ".lock").unlink(missing_ok=True),
    "other folder": lambda net, out, watch: os.chdir("/"),
    "closed": lambda net, out, watch: watch and (watch.close(), watch.close()),
    "measured": lambda net, out, watch: watch and (watch.measure(), watch.measure(), watch.draw()),
    "copied": lambda net, out, watch: copy.deepcopy(net),
    "pickled": lambda net, out, watch: pickle.dumps(net.encoder),
    "measured by a thread": lambda net, out, watch: watch and _in_a_thread(watch.measure),
    "a layer more": lambda net, out, watch: setattr(net, "encoder", nn.Sequential(net.encoder, nn.Identity())),
    "a hook that raises": lambda net, out, watch: net.register_forward_hook(
        lambda module, *_: None if module.training else _raised(ValueError("hook"))
    ),
    "number type": lambda net, out, watch: torch.set_default_dtype(torch.float64),
    "forked": lambda net, out, watch: os.waitpid(pid, 0) if (pid := os.fork()) else os._exit(0),
}


def _in_a_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start(), thread.join()


def _train(in_eval: str, moment: str, at: int, out: Path, watched: bool) -> dict[str, bytes]:
    """The weights after a training, and the random numbers that would come next."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    net = Net(IN_EVAL[in_eval])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    x_BND, classes_B = torch.randn(4, 5, 8), torch.randint(3, (4,))
    watch = None
    if watched:
        watch = observe(net, x_BND, optimizer, every=1, out=out, sequences=2)
    for step in range(STEPS):
        if step == at:
            MOMENTS[moment](net, out, watch)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x_BND)[:, 0].float(), classes_B)
        loss.backward()
        optimizer.step()
    if watch is not None:
        watch.close()
    weights = {name: value.detach().numpy().tobytes() for name, value in net.state_dict().items()}
    return weights | {"random": torch.rand(3).numpy().tobytes() + repr((random.random(), np.random.rand())).encode()}


def _outcome(*words: object) -> tuple[dict[str, bytes] | None, BaseException | None]:
    dtype, place = torch.get_default_dtype(), Path.cwd()
    try:
        return _train(*words), None
    except BaseException as error:
        return None, error
    finally:
        torch.set_default_dtype(dtype)
        os.chdir(place)


def cases(numbers: random.Random, size: int, folder: Path) -> Generator[str | None, None, str]:
    """Train something odd with a watch and without."""
    ended, out = Counter(), folder / "out"
    for _ in range(size):
        in_eval, moment = numbers.choice(["as it is", *IN_EVAL]), numbers.choice(list(MOMENTS))
        odd = in_eval, moment, numbers.randrange(1, STEPS), out
        wanted, failed = _outcome(*odd, False)
        shutil.rmtree(out, ignore_errors=True), out.unlink(missing_ok=True) if out.is_file() else None
        weights, error = _outcome(*odd, True)
        line = None
        if isinstance(error, ConfigError):
            ended["refused"] += 1
        elif (error is None) != (failed is None):
            line = f"ended by {type(error).__name__}: {str(error)[:200]!r}, without a watch by {failed!r}"
        elif weights != wanted:
            line = "other weights or random numbers"
        else:
            ended["watched"] += 1
        shutil.rmtree(out, ignore_errors=True), out.unlink(missing_ok=True) if out.is_file() else None
        yield None if line is None else f"{in_eval}; {moment} at {odd[2]}: {line}"
    return ", ".join(f"{count} {how}" for how, count in ended.most_common())


CAMPAIGN = Campaign(
    about="A training of a user's own loop runs with rankbench.observe and without, while its model in eval mode "
    "raises, returns nothing, nan or odd kinds of numbers, spoils its weights or asks for terabytes, and while "
    "weights, layers, hooks, the folder, its files, threads, forks or torch's settings change between two steps.",
    wrong="another end of the training, other weights in a bit, or other random numbers afterwards.",
    full_size=300,
    cases=cases,
)
