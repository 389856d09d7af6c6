"""Rows of layers.csv: metrics of every layer during training."""

import torch

from rankbench.measures.attention_matrices import ATTENTION_FLOORS, ATTENTION_METRICS
from rankbench.measures.by_layer import metrics_by_layer, moments, on_cpu
from rankbench.measures.lipschitz_of_networks import HEAD_METRICS, LIPSCHITZ_METRICS, constants_by_layer
from rankbench.measures.states import STATE_FLOORS, STATE_METRICS
from rankbench.model import build_model
from rankbench.model.transformer import Transformer
from rankbench.seeds import generator_for
from rankbench.training.seeds_side_by_side import Training

DYNAMICS = ["step", "seed", "layer", "sublayer", "head", *STATE_METRICS, *ATTENTION_METRICS]
DYNAMICS += [*HEAD_METRICS, *LIPSCHITZ_METRICS, *STATE_FLOORS, *ATTENTION_FLOORS, "num_undefined"]


@torch.no_grad()
def dynamics(training: Training) -> list[dict]:
    """Rows of layers.csv: metrics of every layer of each seed in training, and the layer's constants. Metrics are means
    over the first test sequences; constants hold for inputs as long as the longest of these."""
    cfg, step = training.cfg, training.progress.step
    measured, model = [], build_model(cfg.model, training.task)
    assert isinstance(model, Transformer)  # the config has no dynamics of an LSTM
    copies = {name: parameter.detach().cpu() for name, parameter in training.parameters.items()}
    for stack_index, index in enumerate(training.progress.training):
        weights = {name: copy_S[stack_index] for name, copy_S in copies.items()}
        if not all(weight.isfinite().all() for weight in weights.values()):  # a diverged network has no metrics
            continue
        seed = training.seeds[index]
        inputs = training.data.test.inputs[index, : cfg.trainer.dynamics_sequences]
        longest = inputs.shape[1] if (lengths_B := model.lengths(inputs)) is None else int(lengths_B.max())
        model.load_state_dict(weights, assign=True)
        constants = constants_by_layer(model, longest)
        model.load_state_dict({name: p.detach()[stack_index] for name, p in training.parameters.items()}, assign=True)
        for axes, values in metrics_by_layer(model, inputs, generator_for(seed, "rounding", step)):
            known = constants.get((axes["layer"], axes["sublayer"], axes["head"]), {})
            measured.append(({"step": step, "seed": seed} | axes, values, known))
    rows = []
    for (axes, _, known), values in zip(measured, on_cpu([values for _, values, _ in measured]), strict=True):
        means = moments(values) | known
        rows.append(axes | {name: means[name] for name in DYNAMICS if name in means})
    return rows
