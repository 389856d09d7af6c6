"""One fused training step on a CPU: forward pass, backward pass, clipping and optimiser in one call of compiled code.

The arithmetic is in fused_step.cpp. This module decides which networks it covers, describes one to it, and keeps the
weights and moments of all seeds in the arrays that it works on.

Shapes: S seed, B batch, N token, D width, P all weights of a seed.
"""

import ctypes
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankbench.config.model import ModelConfig
from rankbench.config.schema import TrainConfig
from rankbench.model.attention import visible_keys
from rankbench.model.contraction import inverse_phi
from rankbench.model.dropout import largest_kept_bits
from rankbench.model.norm import Norm
from rankbench.model.sublayers import AnySublayer, MlpSublayer
from rankbench.model.transformer import Transformer, sinusoidal_positions
from rankbench.runs.machine import Machine
from rankbench.tasks import Batch, Corpus, Task
from rankbench.tasks.task import Score
from rankbench.training.library import NoLibraryError, Source, library

SOURCE = Source.read(Path(__file__).with_name("fused_step.cpp"))
# Tokens of a sequence, and numbers of a state, a hidden state, queries, keys and values, or an output. Beyond
# them most of the time is spent in large products, which need no fused step.
LONGEST, WIDEST = 512, 2048
# Of a map of few numbers to many, as to those of many heads. Arrays of so many rows lie on a thread's stack.
MOST_WEIGHTS, MOST_ROWS = 2**20, 2**14
# Of a chunk of sequences. With 0.5 to 1 MiB of second-level cache, 128 are fastest where a network's weights fit it as
# well. In wider networks each product has to fetch its weights, which more tokens repay.
TOKENS_AT_A_TIME, IN_WIDE_NETWORKS, WIDE = 128, 384, 192
ALIGNED = 16  # every parameter begins at a multiple of this many numbers, 64 bytes or more
EPSILON = 1e-8  # torch's, of Adam

# The values of the keys with which a network is covered.
COVERED: dict[str, list] = {"kind": ["transformer"], "attention": ["dot", "l2", "contractive_l2"]}
COVERED |= {"kv_groups": [None], "latent_width": [None], "exclusive": [False]}
COVERED |= {"mix_attention": [1.0], "mix_identity": [0.0], "mix_uniform": [0.0], "weight_norm": ["none"]}
COVERED |= {"value_residual": [0.0], "embedding_skip": [0.0], "hyper_connections": ["none"]}
COVERED |= {"positions": ["none", "learned", "sinusoidal"]}
RULES, GRADIENTS = {"sgd": 1, "adam": 2, "adamw": 3}, 0  # the latter: another optimiser moves the weights
NORMS = {"layernorm": 1, "rmsnorm": 2, "l2norm": 3}


def uncovered(cfg: TrainConfig, task: Task, machine: Machine) -> str | None:
    """The key and value because of which the fused step does not cover a training; None if it covers it."""
    for key, values in COVERED.items():
        if (value := getattr(cfg.model, key)) not in values:
            return f"model.{key}={value}"
    hidden = round(cfg.model.mlp_ratio * cfg.model.width)
    inner = cfg.model.heads * (2 * head_width(cfg.model) + value_width(cfg.model))
    widest, most = max(hidden, inner), max(WIDEST, min(MOST_ROWS, MOST_WEIGHTS // cfg.model.width))
    for is_other, name in (
        (machine.device.type != "cpu", f"device={machine.device.type}"),
        (machine.precision == "bf16", "precision=bf16"),
        (task.padded and cfg.model.mask == "others", f"model.mask=others with task.name={task.name}"),
        (cfg.model.shared_layers and cfg.model.attention != "dot", f"shared layers of {cfg.model.attention}"),
        (task.length > LONGEST, f"{task.length} tokens, more than {LONGEST}"),
        (cfg.model.width > WIDEST, f"states of {cfg.model.width} numbers, more than {WIDEST}"),
        (widest > most, f"a map to {widest} numbers, more than {most}"),
    ):
        if is_other:
            return name
    return f"{task.num_outputs} outputs, more than {most}" if task.num_outputs > most else None


def library_for(cfg: TrainConfig, task: Task, machine: Machine, length: int | None = None) -> ctypes.CDLL:
    """The compiled step of this training, for sequences of `length` tokens, or of any; NoLibraryError, saying why, if
    there is none."""
    if (reason := uncovered(cfg, task, machine)) is not None:
        raise NoLibraryError(f"it does not cover {reason}")
    model = cfg.model
    sizes = {
        "REAL": "double" if machine.dtype == torch.float64 else "float",
        "WIDTH": model.width,
        "HEADS": model.heads,
        "HEAD_WIDTH": head_width(model),
        "VALUE_WIDTH": value_width(model),
        "SHARED": int(model.tied_qk),
        "OUTPUTS": task.num_outputs,
        "HIDDEN": max(1, round(model.mlp_ratio * model.width)),
    }
    compiled = library(SOURCE, sizes if length is None else sizes | {"TOKENS": length})
    compiled.memory_of_step.restype = ctypes.c_int64
    compiled.step.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] + [ctypes.c_void_p] * 7
    return compiled


def usual_length(task: Task) -> int | None:
    """Number of tokens of all training sequences; None if batches differ in length: of a text, or of a curriculum."""
    return None if isinstance(task, Corpus) or hasattr(task, "sample_at") else task.length


def head_width(model: ModelConfig) -> int:
    """Width of a head's queries and keys."""
    return model.head_width or model.width // model.heads


def value_width(model: ModelConfig) -> int:
    """Width of a head's values."""
    return model.value_width or head_width(model)


class _Affine(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_int64), ("bias", ctypes.c_int64)]


class _Norm(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("kind", "weight", "shift")] + [("factor", ctypes.c_double)]


class _Sublayer(ctypes.Structure):
    _fields_ = [("is_mlp", ctypes.c_int64), ("inwards", _Affine), ("outwards", _Affine)]
    _fields_ += [("before", _Norm), ("behind", _Norm), ("after", _Norm)]
    _fields_ += [("skip", ctypes.c_double), ("branch", ctypes.c_double)]


class _Network(ctypes.Structure):
    _fields_ = [("num_weights", ctypes.c_int64), ("num_sublayers", ctypes.c_int64)]
    _fields_ += [("sublayers", ctypes.POINTER(_Sublayer))]
    _fields_ += [(name, ctypes.c_int64) for name in ("reads_tokens", "num_inputs", "scores_classes", "is_padded")]
    _fields_ += [(name, _Affine) for name in ("read_in", "read_in_down", "read_out")] + [("position", ctypes.c_int64)]
    _fields_ += [("sines_ND", ctypes.c_void_p), ("embedding", _Norm), ("last", _Norm)]
    _fields_ += [("score_scale", ctypes.c_double), ("share", ctypes.c_double), ("is_l2", ctypes.c_int64)]
    _fields_ += [("contraction", ctypes.c_double), ("inverses", ctypes.c_void_p), ("hidden_NM", ctypes.c_void_p)]
    _fields_ += [("is_relu", ctypes.c_int64)]


class _Batch(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("num_seeds", "num_sequences", "num_tokens", "chunk")]
    _fields_ += [(name, ctypes.c_int64) for name in ("num_threads", "num_parts")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("inputs", "targets", "streams")]
    _fields_ += [("last_kept", ctypes.c_int64), ("kept_scale", ctypes.c_double)]


class _Rule(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int64), ("count", ctypes.c_int64)]
    _fields_ += [(name, ctypes.c_double) for name in ("rate", "weight_decay", "momentum", "beta1", "beta2")]
    _fields_ += [("epsilon", ctypes.c_double), ("clip", ctypes.c_double)]


class _Call(NamedTuple):
    """What a call of the compiled step needs for batches of one shape. memory: of its threads."""

    shape: torch.Size
    compiled: ctypes.CDLL
    batch: _Batch
    memory: Tensor


class FusedStep:
    """The step of stacked seeds. Their weights and moments lie in arrays (S, P), of which `parameters` and the
    optimiser's state are views. has_rule: whether it moves the weights, too. If not, an optimiser moves tensors of its
    own, as torch's compiled optimisers do not heed the strides of a view, and the arrays are copies of them."""

    def __init__(self, cfg: TrainConfig, task: Task, machine: Machine, model: Transformer) -> None:
        self.cfg, self.task, self.machine = cfg, task, machine
        self.usual_length = usual_length(task)
        self.compiled = library_for(cfg, task, machine, self.usual_length)
        self.has_rule = cfg.optimizer.name in RULES
        self.places, self.num_weights = {}, 0  # by name of a parameter: where it begins in a seed's weights, and shape
        for name, parameter in model.named_parameters():
            self.places[name] = self.num_weights, parameter.shape
            self.num_weights += -(-parameter.numel() // ALIGNED) * ALIGNED
        self._attention = model.attentions[0]
        self._hidden_of: dict[int, Tensor | None] = {}  # by number of tokens
        self._call: _Call | None = None  # the last one
        self.rule = self._described_rule()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.network = self._described(model, task)

    def _described(self, model: Transformer, task: Task) -> _Network:
        attention, cfg = self._attention, self.cfg.model
        sines_ND = None
        if cfg.positions == "sinusoidal":
            sines_ND = sinusoidal_positions(task.length, cfg.width).to(self.machine.dtype)
        sublayers = (_Sublayer * len(model.sublayers))(*map(self._sublayer, model.sublayers))
        read_in = model.read_in if cfg.read_in == "mlp" else (model.read_in, nn.Identity())
        inverses = None
        if cfg.attention == "contractive_l2":
            numbers = range(1, task.length + 1)
            keys = [cfg.contraction_keys or attention.num_keys(number) for number in numbers]
            inverses = torch.tensor([inverse_phi(number) for number in keys], dtype=self.machine.dtype)
        self._kept_alive = sines_ND, sublayers, inverses
        return _Network(
            num_weights=self.num_weights,
            num_sublayers=len(sublayers),
            sublayers=sublayers,
            reads_tokens=task.input_kind == "tokens",
            num_inputs=task.num_inputs,
            scores_classes=task.target_kind == "classes",
            is_padded=task.padded,
            read_in=self._affine(read_in[0]),
            read_in_down=self._affine(read_in[-1]),
            read_out=self._affine(model.read_out),
            position=self._place(None if model.position is None else model.position.weight),
            sines_ND=_address(sines_ND),
            embedding=self._norm(model.embedding_norm),
            last=self._norm(model.last_norm),
            score_scale=(2 if attention.is_l2 else 1) * attention.head_width**-0.5 / attention.temperature,
            share=attention.mix["attention"] if inverses is None else 1.0,  # it is a factor of the bound, too
            is_l2=attention.is_l2,
            contraction=0.0 if inverses is None else attention.contraction,
            inverses=_address(inverses),
            is_relu=cfg.activation == "relu",
        )

    def _described_rule(self) -> _Rule:
        optimizer, clip = self.cfg.optimizer, self.cfg.trainer.clip
        numbers = {name: getattr(optimizer, name) for name in ("weight_decay", "momentum", "beta1", "beta2")}
        numbers |= {"epsilon": EPSILON, "clip": math.inf if clip is None else clip}
        return _Rule(kind=RULES.get(optimizer.name, GRADIENTS), **numbers)

    def _call_for(self, shape: torch.Size) -> _Call:
        """What a call needs for batches of inputs of this shape."""
        num_seeds, num_sequences, num_tokens = shape[:3]
        compiled, threads = self.compiled, self.machine.threads
        if self.usual_length not in (None, num_tokens):  # of a plug-in's task
            compiled = library_for(self.cfg, self.task, self.machine)
        num_parts = max(1, min(threads // num_seeds, num_sequences))
        num_threads = min(threads, num_seeds * num_parts)
        tokens_at_a_time = TOKENS_AT_A_TIME if self.cfg.model.width < WIDE else IN_WIDE_NETWORKS
        chunk = max(1, min(-(-num_sequences // num_parts), tokens_at_a_time // num_tokens))
        keep = 1 - self.cfg.model.dropout
        batch = _Batch(num_seeds, num_sequences, num_tokens, chunk, num_threads, num_parts)
        batch.last_kept, batch.kept_scale = largest_kept_bits(keep), 1 / keep
        needed = compiled.memory_of_step(ctypes.byref(self.network), ctypes.byref(batch))
        return _Call(shape, compiled, batch, self.weights_SP.new_empty(num_threads * needed))

    def _hidden(self, num_tokens: int) -> Tensor | None:
        """0, or -infinity for a key that the query does not see, (N, N); None if all are seen. ConfigError for more
        keys than model.contraction_keys."""
        if num_tokens not in self._hidden_of:
            self._attention.num_keys(num_tokens)  # refuses too many
            seen_NM = visible_keys(self.cfg.model.mask, self.cfg.model.window, num_tokens)
            hidden_NM = None if seen_NM is None else torch.where(seen_NM, 0.0, -math.inf).to(self.machine.dtype)
            self._hidden_of[num_tokens] = hidden_NM
        return self._hidden_of[num_tokens]

    def _place(self, parameter: Tensor | None) -> int:
        return -1 if parameter is None else self.places[self._names[id(parameter)]][0]

    def _affine(self, part: Any) -> _Affine:
        if next(part.parameters(), None) is None:
            return _Affine(-1, -1)
        return _Affine(self._place(part.weight), self._place(getattr(part, "bias", None)))

    def _norm(self, norm: Norm | None) -> _Norm:
        if norm is None:
            return _Norm()
        return _Norm(NORMS[norm.kind], self._place(norm.weight), self._place(norm.shift), norm.factor)

    def _sublayer(self, sublayer: AnySublayer) -> _Sublayer:
        part: Any = sublayer.part  # of a Transformer
        place, is_mlp = sublayer.place, isinstance(sublayer, MlpSublayer)
        maps = (part.up, part.down) if is_mlp else (part.qkv, part.out)
        norms = (
            self._norm(sublayer.norm if place in ("pre", "peri") else None),
            self._norm(sublayer.branch_norm),
            self._norm(sublayer.norm if place in ("post", "ngpt") else None),
        )
        return _Sublayer(is_mlp, *map(self._affine, maps), *norms, sublayer.skip, sublayer.branch)

    def stack(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy stacked weights, each (S, ...), into the array of all weights; returns the parameters by name."""
        num_seeds = len(next(iter(weights.values())))
        self.weights_SP = torch.zeros(num_seeds, self.num_weights, dtype=self.machine.dtype)
        self.moments = {key: torch.zeros_like(self.weights_SP) for key in self._moment_names()}
        self.count = torch.zeros(())  # of steps, as torch keeps it
        views = self.views(self.weights_SP)
        self._copy(weights, views)
        self.parameters = views
        if not self.has_rule:
            self.parameters = {name: view.clone(memory_format=torch.contiguous_format) for name, view in views.items()}
        return self.parameters

    def _copy(self, weights: dict[str, Tensor], views: dict[str, Tensor]) -> None:
        for name, view in views.items():
            view.copy_(weights[name])

    def views(self, numbers_SP: Tensor) -> dict[str, Tensor]:
        """The part of each parameter in an array of all weights, gradients or moments; each (S, ...)."""
        return {
            name: numbers_SP[:, place : place + shape.numel()].unflatten(1, shape)
            for name, (place, shape) in self.places.items()
        }

    def _moment_names(self) -> tuple[str, ...]:
        if not self.has_rule:
            return ()
        if self.cfg.optimizer.name == "sgd":
            return ("momentum_buffer",) if self.cfg.optimizer.momentum else ()
        return "exp_avg", "exp_avg_sq"

    def adopt_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the moments of an optimiser of the parameters, if it has any, and make its state views of ours, so
        that it is saved, restored and divided among seeds like any other."""
        parameters = optimizer.param_groups[0]["params"]
        for key, moments_SP in self.moments.items():
            for parameter, view in zip(parameters, self.views(moments_SP).values(), strict=True):
                state = optimizer.state[parameter]
                if state.get(key) is not None:
                    view.copy_(state[key])
                state[key] = view
        if "exp_avg" in self.moments:
            states = [optimizer.state[parameter] for parameter in parameters]
            self.count = states[0].get("step", self.count)
            for state in states:
                state["step"] = self.count

    def update(self, batch: Batch, streams_S2: Tensor | None, rate: float, sums_4S: Tensor) -> None:
        """Take a step with every seed, each on its own sequences, and add its scores to the sums: mean loss, accuracy,
        tokens, and 1 as long as the sum of losses is finite. streams_S2: of dropout's bits; None: no dropout."""
        self.count += 1
        self.rule.count, self.rule.rate = int(self.count), rate
        self._run(batch, streams_S2, self.rule, sums_4S)

    def gradients(self, batch: Batch, streams_S2: Tensor | None) -> tuple[Score, tuple[Tensor, ...]]:
        """Scores of every seed on a batch, and the gradients of its mean loss, each (S, ...)."""
        if not self.has_rule:
            self._copy(self.parameters, self.views(self.weights_SP))
        scores, gradients_SP = self._run(batch, streams_S2, _Rule(), None)
        return scores, tuple(self.views(gradients_SP).values())

    def _run(
        self, batch: Batch, streams_S2: Tensor | None, rule: _Rule, sums_4S: Tensor | None
    ) -> tuple[Score, Tensor]:
        """Scores of every seed; the gradients (S, P) come first in the tensor of those of its parts, or are lost if
        there is a rule."""
        inputs, targets = batch.inputs.contiguous(), batch.targets.contiguous()
        if self._call is None or self._call.shape != inputs.shape:
            self._call = self._call_for(inputs.shape)
        _, compiled, described, memory = self._call
        described.inputs, described.targets, described.streams = map(_address, (inputs, targets, streams_S2))
        self.network.hidden_NM = _address(self._hidden(described.num_tokens))
        num_seeds, num_parts, num_threads = described.num_seeds, described.num_parts, described.num_threads
        of_threads = rule.kind != GRADIENTS and num_parts == 1  # a thread's next seed takes the place of the last one
        gradients = self.weights_SP.new_empty(num_threads if of_threads else num_parts * num_seeds, self.num_weights)
        scores_3S = torch.empty(3, num_seeds, dtype=torch.float64)
        first, second = [*self.moments.values(), None, None][:2]
        arrays = map(_address, (self.weights_SP, gradients, first, second, scores_3S, sums_4S, memory))
        compiled.step(*map(ctypes.byref, (self.network, described, rule)), of_threads, *arrays)
        return Score(*scores_3S), gradients[:num_seeds]


def _address(numbers: Tensor | None) -> int | None:
    return None if numbers is None else numbers.data_ptr()
