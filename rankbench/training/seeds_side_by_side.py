"""Training of a run's seeds side by side: their stacked weights, one step, and their evaluation.

Shapes: S seed (those still training), B batch, N token.
"""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rankbench.config.schema import TrainConfig
from rankbench.model import build_model, initial_model
from rankbench.model.initialise import maps_of_layers
from rankbench.model.transformer import Transformer
from rankbench.runs.machine import Machine
from rankbench.runs.run import Run
from rankbench.runs.summary import FORMAT
from rankbench.seeds import state_of, streams_of
from rankbench.tasks import Batch, Task
from rankbench.tasks.task import Score, is_scored
from rankbench.training.compiling import choose_step, difference, kernels_of
from rankbench.training.data import data_of
from rankbench.training.forward import seeds_at_a_time
from rankbench.training.fused_step import FusedStep
from rankbench.training.graph import Graphs
from rankbench.training.optimizers import build_optimizer, cap_singular_values, learning_rate
from rankbench.training.pieces import Piece, clipped, joined
from rankbench.training.state import Progress, check_progress, check_shapes

log = logging.getLogger(__name__)

METRICS = ["step", "seed", "split", "loss", "accuracy", "learning_rate", "seconds", "tokens_per_second"]
# Sums over the steps since the last evaluation, by seed. finite: number of these steps until the loss is not finite.
SUMS = ("loss", "accuracy", "tokens", "finite")


class Training:
    """The stacked weights of the seeds that are still training, with their optimiser.

    step: one of runs.run.STEPS; None to let trainer.compile decide. NoLibraryError if `fused` is not to be had.

    A seed that has reached its target or diverged leaves the stack; its weights are kept for the checkpoint.
    """

    def __init__(
        self, cfg: TrainConfig, task: Task, machine: Machine, seeds: list[int], step: str | None = None
    ) -> None:
        self.cfg, self.task, self.machine, self.seeds = cfg, task, machine, seeds
        self.model = model = build_model(cfg.model, task)
        self.progress = Progress(status=["training"] * len(seeds), last_step=[0] * len(seeds))
        self.saved_step: int | None = None  # of the last checkpoint
        self.finite_steps: dict[int, int] = {}  # per seed, at the last evaluation: steps until its loss is not finite
        self.data = data_of(task, machine, seeds, cfg.trainer.batch_size)
        steps, epochs = cfg.trainer.steps, cfg.trainer.epochs
        self.num_steps = steps if steps is not None else round((epochs or 0) * self.data.batches_per_epoch)
        step = choose_step(cfg, task, machine) if step is None else step
        self.fused = (
            FusedStep(cfg, task, machine, model) if step == "fused" and isinstance(model, Transformer) else None
        )
        self.graphs = Graphs(self._move) if step in ("graph", "compiled graph") else None
        compiles = step in ("torch.compile", "compiled graph")
        self.at_a_time = seeds_at_a_time(cfg, task, model.vectorised, machine.device.type, compiles)
        self.kernels = self.plain = kernels_of("plain", cfg, task, model)
        if compiles:
            self.kernels = kernels_of(step, cfg, task, model)
        self._checked: set[torch.Size] = set()
        initial = [dict(initial_model(cfg.model, task, seed).named_parameters()) for seed in seeds]
        self._stack({name: torch.stack([weights[name].detach() for weights in initial]) for name in initial[0]})
        self.retired: dict[int, dict[str, Tensor]] = {}

    def _stack(self, weights: dict[str, Tensor]) -> None:
        if self.fused is not None:
            self.parameters = self.fused.stack(weights)
        else:
            self.parameters = {
                name: weight.to(self.machine.device, self.machine.dtype).clone().requires_grad_()
                for name, weight in weights.items()
            }
        self.pieces = [Piece.of(self.parameters, seeds) for seeds in self._groups()]
        # by name of a parameter, for those that are matrices of a layer: number of rows of each map stacked in it
        self.matrices = maps_of_layers(self.model) if isinstance(self.model, Transformer) else {}
        rows = [self.matrices.get(name) for name in self.parameters]
        self.optimizer = build_optimizer(self.cfg.optimizer, list(self.parameters.values()), rows)
        if self.fused is not None:
            self.fused.adopt_state(self.optimizer)
        self.data.keep(self.progress.training)
        num_seeds = len(self.progress.training)
        self.sums_4S = torch.zeros(len(SUMS), num_seeds, dtype=torch.float64, device=self.machine.device)
        self.sums: dict[str, Any] = dict(zip(SUMS, self.sums_4S, strict=True))
        if self.graphs is not None:  # of the parameters and sums until now
            self.graphs.forget()
        self._forget()

    def _forget(self) -> None:
        self.sums_4S.zero_()
        self.sums |= {"steps": 0, "seconds": 0.0}
        self._since = time.perf_counter()

    def batch(self) -> Batch:
        """Sequences of the current step, for every seed that is training."""
        return self.data.batch(self.progress.step)

    def _streams(self) -> Tensor | None:
        """The streams of this step's dropout masks, (S, 2) on the device; None without dropout."""
        if self.cfg.model.dropout == 0:
            return None
        states = [state_of(self.seeds[index], "dropout", self.progress.step) for index in self.progress.training]
        return streams_of(states).to(self.machine.device, non_blocking=True)

    def update(self) -> None:
        """Move the weights of every seed that is training down the gradient of its loss on this step's batch, and add
        the scores before that to the sums."""
        batch, streams_S2 = self.batch(), self._streams()
        rate = learning_rate(self.cfg.optimizer, self.progress.step, self.num_steps)
        if self.kernels is not self.plain and batch.inputs.shape not in self._checked:
            self._check_compiled(batch, streams_S2)
        (self._move if self.graphs is None else self.graphs)(batch, streams_S2, rate)
        self.progress.step += 1
        self.sums["steps"] += 1

    def _check_compiled(self, batch: Batch, streams_S2: Tensor | None) -> None:
        """Compare the compiled gradients of the first batch of a shape with plain ones; go on with plain kernels if
        they differ by more than rounding."""
        self._checked.add(batch.inputs.shape)
        _, ours = self._scores_and_gradients(batch, streams_S2)
        compiled, self.kernels = self.kernels, self.plain
        _, theirs = self._scores_and_gradients(batch, streams_S2)
        if (reason := difference(ours, theirs, self.machine.precision)) is None:
            self.kernels = compiled
            return
        log.warning("trainer.compile=%s: this training goes on uncompiled: %s", self.cfg.trainer.compile, reason)
        if self.graphs is not None:  # they hold compiled kernels
            self.graphs.forget()

    def _move(self, batch: Batch, streams_S2: Tensor | None, rate: float | Tensor) -> None:
        cfg = self.cfg
        if self.fused is not None and self.fused.has_rule:
            assert isinstance(rate, float)
            self.fused.update(batch, streams_S2, rate, self.sums_4S)
        else:
            scores, gradients = self._scores_and_gradients(batch, streams_S2)
            if cfg.trainer.clip is not None:
                gradients = clipped(gradients, cfg.trainer.clip)
            for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
                parameter.grad = gradient.contiguous()
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            if self.graphs is not None:  # a graph's gradients leave their memory to the next graph's
                self.optimizer.zero_grad()
            self.sums["loss"] += scores.mean_loss
            self.sums["accuracy"] += scores.accuracy
            self.sums["tokens"] += scores.tokens
            # once nan or infinite, a sum stays so
            self.sums["finite"] += self.sums["loss"] < math.inf
        if cfg.optimizer.cap is not None:
            for name, rows in self.matrices.items():
                cap_singular_values(self.parameters[name], rows, cfg.optimizer.cap)

    def gradients(self, batch: Batch) -> tuple[Score, tuple[Tensor, ...]]:
        """Scores of every seed on a batch, and the gradients of its mean loss, each (S, ...)."""
        return self._scores_and_gradients(batch, self._streams())

    def _scores_and_gradients(self, batch: Batch, streams_S2: Tensor | None) -> tuple[Score, tuple[Tensor, ...]]:
        if self.fused is not None:
            return self.fused.gradients(batch, streams_S2)
        parts = []
        for piece in self.pieces:
            masks = None
            # piece by piece, so that compiled seeds in turn run the kernels of one seed: on a GPU, with masks drawn for
            # three at once, gradients of torch 2.11's compiler were wrong
            if streams_S2 is not None:
                num_sequences, num_tokens = batch.targets.shape[1:3]
                streams = streams_S2[piece.seeds]
                masks = self.kernels.masks(self.model, num_sequences, num_tokens, streams, self.machine.dtype)
            # the graph of one piece is freed before the next one's is made
            parts.append(self._gradients(piece, batch[piece.seeds], masks))
        if len(parts) == 1:
            return parts[0]
        scores, gradients = zip(*parts, strict=True)
        return joined(scores), tuple(map(torch.cat, zip(*gradients, strict=True)))

    def _groups(self) -> list[slice]:
        """The seeds of each forward pass, in groups whose sizes differ by one at most."""
        num_seeds = len(self.progress.training)
        num_groups = max(1, math.ceil(num_seeds / self.at_a_time))  # one, of no seeds, once all have ended
        bounds = [round(group * num_seeds / num_groups) for group in range(num_groups + 1)]
        return [slice(low, high) for low, high in pairwise(bounds)]

    def _gradients(
        self, piece: Piece, batch: Batch, dropout: dict[str, Tensor] | None
    ) -> tuple[Score, tuple[Tensor, ...]]:
        """Scores and gradients of the seeds of a piece, in trainer.accumulate passes."""
        weights, num_sequences = list(piece.weights.values()), batch.targets.shape[1]
        size = math.ceil(num_sequences / self.cfg.trainer.accumulate)
        tokens_S = is_scored(batch.targets).flatten(1).sum(1)
        scores: Score | None = None
        gradients: tuple[Tensor, ...] = ()
        for start in range(0, num_sequences, size):
            part = (slice(None), slice(start, start + size))
            masks = dropout if dropout is None else {name: mask[part] for name, mask in dropout.items()}
            with self.machine.autocast():
                part_scores = self.kernels.forward(piece.weights, batch.inputs[part], batch.targets[part], masks)
            # summed, not averaged: each seed's weights get the gradient of its own loss
            part_gradients = torch.autograd.grad((part_scores.loss / tokens_S).sum(), weights)
            part_scores = Score(*(value.detach() for value in part_scores))
            if scores is None:
                scores, gradients = part_scores, part_gradients
            else:
                scores = Score(*(so_far + more for so_far, more in zip(scores, part_scores, strict=True)))
                gradients = tuple(so_far + more for so_far, more in zip(gradients, part_gradients, strict=True))
        assert scores is not None  # a batch has sequences
        return scores, piece.stacked(gradients)

    def _seconds(self) -> float:
        """Seconds of training since the last evaluation, once the device has finished its work."""
        self.machine.finish()
        return self.sums["seconds"] + time.perf_counter() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out of the training's speed the time spent inside this context."""
        self.sums["seconds"] = self._seconds()
        yield
        self.machine.finish()
        self._since = time.perf_counter()

    @torch.no_grad()
    def evaluate(self) -> list[dict]:
        """Rows of metrics.csv: training means since the last evaluation, and current numbers on the test set. A corpus
        also has rows of its validation set."""
        alive, seconds, steps = self.progress.training, max(self._seconds(), 1e-9), self.sums["steps"]
        splits = self.data.splits
        on_device: dict[Any, Tensor] = {key: self.sums[key] for key in SUMS}
        for split in splits:
            scores = self._score(split)
            on_device |= {(split, "loss"): scores.mean_loss, (split, "accuracy"): scores.accuracy}
        # one copy from the device for all of them
        numbers = dict(zip(on_device, torch.stack(list(on_device.values())).cpu().tolist(), strict=True))
        speed = round(sum(numbers["tokens"]) / seconds)
        common = {"step": self.progress.step, "seconds": round(self.progress.seconds, 3)}
        rate = learning_rate(self.cfg.optimizer, max(self.progress.step - 1, 0), self.num_steps)
        rows = []
        for stack_index, index in enumerate(alive):
            common["seed"] = self.seeds[index]
            if steps:
                train = {key: numbers[key][stack_index] / steps for key in ("loss", "accuracy")}
                rows.append({**common, "split": "train", **train, "learning_rate": rate, "tokens_per_second": speed})
            for split in splits:
                test = {key: numbers[split, key][stack_index] for key in ("loss", "accuracy")}
                rows.append({**common, "split": split, **test})
            losses = {split: numbers[split, "loss"][stack_index] for split in splits}
            self._keep(index, losses, numbers["test", "accuracy"][stack_index])
            self.progress.last_step[index] = self.progress.step
            self.finite_steps[index] = self.progress.step - steps + round(numbers["finite"][stack_index])
        self._forget()
        return rows

    def _score(self, split: str) -> Score:
        """Scores on a split, of each seed that is training."""
        parts = []
        for chunk in self.data.chunks(split):
            with self.machine.autocast():
                scores = [
                    self.kernels.scoring(weights, chunk.inputs[seeds], chunk.targets[seeds], None)
                    for seeds, weights in self.pieces
                ]
            parts.append(torch.stack([sums_S.double() for sums_S in joined(scores)]))
        return Score(*torch.stack(parts).sum(0))

    def _keep(self, index: int, losses: dict[str, float], test_accuracy: float) -> None:
        """Keep a seed's numbers of this evaluation for summary.json. For a corpus, only if its validation loss is the
        smallest so far, and with the test loss also in bits."""
        test = losses["test"]
        if "valid" not in losses:
            self.progress.final[index] = {"test_loss": test, "test_accuracy": test_accuracy}
        elif index not in self.progress.final or losses["valid"] < self.progress.final[index]["valid_loss"]:
            best = {"best_step": self.progress.step, "valid_loss": losses["valid"]}
            self.progress.final[index] = best | {"test_loss": test, "test_bits": test / math.log(2)}

    def retire(self, rows: list[dict], last: bool = False) -> None:
        """Take out of the stack the seeds that these rows show as diverged or at their target; all seeds if `last`."""
        target = self.cfg.trainer.target_accuracy
        diverged = {row["seed"] for row in rows if not math.isfinite(row["loss"])}
        tested = [row for row in rows if row["split"] == "test"]
        reached = {row["seed"] for row in tested if target is not None and row["accuracy"] >= target}
        alive, staying = self.progress.training, []
        for stack_index, index in enumerate(alive):
            seed = self.seeds[index]
            if seed in diverged:
                self.progress.status[index] = "diverged"
                self.progress.final[index]["diverged_at"] = step = self.finite_steps[index]
                log.warning("seed %d diverged: its loss is not finite from step %d on", seed, step)
            elif last or seed in reached:
                self.progress.status[index] = "reached" if seed in reached else "finished"
            else:
                staying.append(stack_index)
                continue
            self.retired[index] = {name: p.detach()[stack_index].cpu().clone() for name, p in self.parameters.items()}
        if 0 < len(staying) < len(alive):
            state = self.optimizer.state_dict()["state"]
            self._stack({name: parameter.detach()[staying] for name, parameter in self.parameters.items()})
            state = {i: {k: v[staying] if v.ndim else v for k, v in kept.items()} for i, kept in state.items()}
            self._set_optimizer_state(state)

    def _set_optimizer_state(self, state: dict[int, dict[str, Tensor]]) -> None:
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        if self.fused is not None:
            self.fused.adopt_state(self.optimizer)

    def weights(self) -> dict[str, Tensor]:
        """Weights of all seeds, in the order of the seeds, whether they are still training or retired."""
        alive, stacked = self.progress.training, {name: p.detach().cpu() for name, p in self.parameters.items()}
        if not self.retired:
            return stacked
        for name, weight_S in stacked.items():
            of_seed = dict(zip(alive, weight_S, strict=False))  # the last seeds to leave do not shrink the stack
            of_seed |= {index: weights[name] for index, weights in self.retired.items()}
            stacked[name] = torch.stack([of_seed[index] for index in range(len(self.seeds))])
        return stacked

    def save(self, run: Run) -> None:
        """Save a checkpoint, while `paused`: the weights for analyses, and the training state."""
        weights = self.weights()
        tensors = {f"weights/{name}": weight for name, weight in weights.items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{number}/{key}": value for key, value in state.items() if value is not None}
        tensors |= {f"sums/{key}": self.sums[key] for key in SUMS}
        run.save_weights(weights)
        run.save_state(tensors, {**vars(self.progress), "sums": {key: self.sums[key] for key in ("steps", "seconds")}})
        self.saved_step = self.progress.step

    def restore(self, tensors: dict[str, Tensor], facts: dict) -> None:
        """Load what `save` saved. Raises one of NOT_A_STATE for anything else, such as another training's state."""
        facts = dict(facts)
        sums = {"steps": int(facts["sums"]["steps"]), "seconds": float(facts.pop("sums")["seconds"])}
        facts["final"] = {int(index): {**numbers} for index, numbers in facts["final"].items()}
        self.progress = Progress(**facts)
        check_progress(self.progress, len(self.seeds), self.num_steps)
        self.saved_step = self.progress.step
        alive = self.progress.training
        weights = {name: tensors[f"weights/{name}"] for name in self.parameters}
        check_shapes(weights, {name: weight.shape for name, weight in self.parameters.items()})
        self.retired = {
            index: {name: weight[index].clone() for name, weight in weights.items()}
            for index in range(len(self.seeds))
            if index not in alive
        }
        self._stack({name: weight[alive] for name, weight in weights.items()})
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer/"):
                _, at, key = name.split("/")
                state.setdefault(int(at), {})[key] = tensor
        for number, parameter in enumerate(self.parameters.values()):
            moments = {key: tensor for key, tensor in state.get(number, {}).items() if tensor.ndim}
            if alive:  # the last seeds to leave do not shrink the stack, so the moments keep their shape
                check_shapes(moments, dict.fromkeys(moments, parameter.shape))
        self._set_optimizer_state(state)
        own_sums = {key: tensors[f"sums/{key}"].to(self.machine.device) for key in SUMS}
        if alive:
            check_shapes(own_sums, dict.fromkeys(own_sums, (len(alive),)))
            self.sums_4S.copy_(torch.stack(list(own_sums.values())))
        self.sums |= sums

    def summary(self, status: str) -> dict:
        """Contents of summary.json."""
        progress = self.progress
        seeds = []
        for i, seed in enumerate(self.seeds):
            # a diverged seed can have a nan or an infinite loss, which JSON cannot express
            final = {key: x if math.isfinite(x) else None for key, x in progress.final.get(i, {}).items()}
            final |= self.data.baselines[i]
            seeds.append({"seed": seed, "status": progress.status[i], "steps": progress.last_step[i], **final})
        return {
            "format": FORMAT,
            "status": status,
            "step": progress.step,
            "seconds": round(progress.seconds, 3),
            "seeds": seeds,
        }
