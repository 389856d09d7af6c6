"""model.shared_layers against a network of as many layers of their own, all with copies of the one layer's weights."""

import dataclasses

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from rankbench.analyses import ANALYSES
from rankbench.analysing.runner import options_of
from rankbench.analysing.subjects import fresh_subjects
from rankbench.commands.compose import compose
from rankbench.measures.frozen_network import FrozenNetwork, sums_by_length
from rankbench.measures.paths import all_paths, sums_of_groups
from rankbench.measures.recomputed_network import RecomputedNetwork
from rankbench.model import initial_model
from rankbench.model.transformer import Transformer
from rankbench.runs.machine import Machine
from rankbench.tasks import build_task

# Float64, the same operations in the same order but for sums over layers: eps = 2.2e-16 times a few hundred terms.
EXACT = {"rtol": 1e-12, "atol": 1e-12}
LAYERS = 4
VARIANTS = [
    {},
    {"norm": "pre", "activation": "relu"},
    {"norm": "peri", "norm_kind": "rmsnorm", "mlp_ratio": 1.5},
    {"norm": "none", "mlp": False, "mlp_skip": False, "weight_norm": "sigma"},
    {"attention": "l2", "tied_qk": True, "mask": "causal"},
    {"norm": "pre", "hyper_connections": "doubly_stochastic", "streams": 2},
    {"embedding_skip": 0.5, "latent_width": 3},
]


def both(random_network, **changes):
    """A network of shared layers, one of layers of their own with copies of its weights, and a batch."""
    shared, batch = random_network(6, 1, layers=LAYERS, shared_layers=True, **changes)
    return shared, with_own_layers(shared), batch


def with_own_layers(shared):
    own = Transformer(dataclasses.replace(shared.cfg, shared_layers=False), **shared.sizes).to(shared.read_out.weight)
    weights = shared.state_dict()
    weights |= {
        name.replace("blocks.0.", f"blocks.{layer}."): weight.clone()
        for name, weight in weights.items()
        for layer in range(1, LAYERS)
        if name.startswith("blocks.0.")
    }
    own.load_state_dict(weights)
    return own.requires_grad_(False).eval()


@pytest.mark.parametrize("changes", VARIANTS)
def test_gradients_add_up_over_the_layers(random_network, changes):
    shared, own, batch = both(random_network, **changes)
    assert len(list(shared.blocks.parameters())) * LAYERS == len(list(own.blocks.parameters()))
    losses = []
    for model in (shared, own):
        outputs_BNC = model.requires_grad_(True)(batch.inputs)
        losses.append(F.cross_entropy(outputs_BNC.flatten(0, 1), batch.targets.flatten()))
        losses[-1].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-14)
    gradients = {name: weight.grad for name, weight in own.named_parameters()}
    for name, weight in shared.named_parameters():
        wanted = gradients[name]
        if name.startswith("blocks.0."):
            each = [gradients[name.replace("blocks.0.", f"blocks.{layer}.")] for layer in range(LAYERS)]
            assert name.endswith("norm.weight") or not torch.equal(each[0], each[-1])
            wanted = torch.stack(each).sum(0)
        torch.testing.assert_close(weight.grad, wanted, **EXACT)


@pytest.mark.parametrize("changes", VARIANTS)
@torch.no_grad()
def test_each_use_is_a_layer_of_paths(random_network, changes):
    shared, own, batch = both(random_network, **changes)
    sums, wanted = (sums_by_length(model, batch.inputs) for model in (shared, own))
    assert len(sums.by_length_KBND) == LAYERS + 1
    torch.testing.assert_close(sums.by_length_KBND, wanted.by_length_KBND, rtol=0, atol=0)
    torch.testing.assert_close(sums.bias_BND, wanted.bias_BND, rtol=0, atol=0)
    groups = [all_paths(LAYERS, 2, length) for length in range(LAYERS + 1)]
    kinds = (FrozenNetwork, RecomputedNetwork) if changes == {} else (FrozenNetwork,)
    for kind in kinds:
        alone = [sums_of_groups(kind(model, batch.inputs), groups) for model in (shared, own)]
        torch.testing.assert_close(*alone, rtol=0, atol=0)


ANALYSED = ["residual", "collapse", "path_mass", "spectrum", "attention", "pruning"]


@pytest.mark.further
def test_tables_are_those_of_layers_of_their_own():
    words = ["model.shared_layers=true", f"model.layers={LAYERS}", "model.width=6", "precision=fp64", "task.length=4"]
    words += ["task.train_size=8", "task.test_size=8", "analysis.pruning.selection_sequences=4"]
    words += ["analysis.pruning.random_orders=1", "analysis.spectrum.resamples=100", "analysis.spectrum.sequences=4"]
    cfg = compose("analyze", *words, f"analysis=[{','.join(ANALYSED)}]")
    (shared,) = fresh_subjects(cfg, Machine.prepare(cfg))
    own = dataclasses.replace(shared, networks={"initialised": with_own_layers(shared.network)})
    own.network.kinds = shared.network.kinds
    for name, options in options_of(cfg).items():
        tables = [ANALYSES[name].table(subject, options) for subject in (shared, own)]
        if name == "attention":  # a module that is called again has its one name
            tables = [table.drop(columns="submodule") for table in tables]
        if name == "spectrum":  # over all matrices, of which there are fewer
            tables = [table.drop(columns="weights_sd") for table in tables]
        pd.testing.assert_frame_equal(*tables, rtol=1e-9, obj=name)


def test_initial_weights_are_those_of_one_layer():
    """`scaled` divides by the number of layers, of which each use is one."""
    task = build_task(compose("train").task)
    words = ["model.init=scaled", "model.layers=4"]
    shared, own = (
        initial_model(compose("train", *words, f"model.shared_layers={is_shared}").model, task, 0)
        for is_shared in ("true", "false")
    )
    for name, weight in shared.blocks.named_parameters():
        torch.testing.assert_close(weight, own.blocks.get_parameter(name), rtol=0, atol=0)
