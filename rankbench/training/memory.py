"""Lower bound on the memory that a command needs, estimated before anything is allocated."""

from rankbench.config.keys import ConfigError
from rankbench.config.schema import BaseConfig, TrainConfig
from rankbench.model import skeleton
from rankbench.runs.machine import Machine, gib
from rankbench.tasks import Corpus, Finite, Task
from rankbench.training.forward import seeds_at_a_time

# Arrays of the weights' size in training: weights, gradients, the optimiser's moments.
COPIES = {"adam": 4, "adamw": 4, "sgd": 2, "muon": 3}
FEWEST_COPIES = 2  # of a plug-in's update rule: weights and gradients
INTEGER = 8  # bytes of a token or a class
SHORT_TEXT = 10  # characters; a corpus's sentences are at least this long on average


def check_memory(cfg: BaseConfig, task: Task, machine: Machine) -> None:
    """Raise ConfigError if the sizes in the config need more memory than the machine has, unless beyond_memory is set.

    The estimate is a lower bound: weights, data, and the states of one batch.
    """
    parts = estimate(cfg, task, machine)
    needed, memory = sum(parts.values()), machine.memory()
    if needed > memory and not cfg.beyond_memory:
        largest = max(parts, key=lambda name: parts[name])
        raise ConfigError(
            f"beyond_memory=false: needs at least {gib(needed)}, most of it for {largest}, and {machine.device} has "
            f"{gib(memory)}; give smaller sizes, or beyond_memory=true to continue regardless"
        )


def estimate(cfg: BaseConfig, task: Task, machine: Machine) -> dict[str, int]:
    """Lower bound on the bytes that a training or an analysis of fresh models needs, by what they hold."""
    is_corpus = isinstance(task, Corpus)
    number, tokens = machine.dtype.itemsize, min(task.length, SHORT_TEXT) if is_corpus else task.length
    network = skeleton(cfg.model, task)
    num_weights = sum(weight.numel() for weight in network.parameters())
    batch, copies = 1, 1
    if isinstance(cfg, TrainConfig):
        batch, copies = cfg.trainer.batch_size, COPIES.get(cfg.optimizer.name, FEWEST_COPIES)
    num_test = task.num_test if isinstance(task, Finite) else task.test_size or 0
    sequences = (task.train_size or (0 if is_corpus else batch)) + num_test
    per_token = task.num_inputs * number if task.input_kind == "coordinates" else INTEGER
    per_token += task.num_outputs * number if task.target_kind == "numbers" else INTEGER
    states = batch * tokens * cfg.model.width * number
    if isinstance(cfg, TrainConfig):  # the states of every layer are kept for the gradient
        at_a_time = seeds_at_a_time(cfg, task, network.vectorised, machine.device.type, compiles=True)
        states *= cfg.model.layers * min(cfg.replicas, at_a_time)
        states //= cfg.trainer.accumulate
    return {
        "weights": cfg.replicas * num_weights * number * copies,
        "data": (1 if is_corpus else cfg.replicas) * sequences * tokens * per_token,
        "states": states,
    }
