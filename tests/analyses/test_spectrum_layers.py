"""The lengths that the states after each layer need, against networks that end there."""

import copy
import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from drawn import generator, normal, randomised
from torch import nn

import rankbench
from rankbench.analyses import ANALYSES, Subject
from rankbench.analyses.spectrum import Options, digest
from rankbench.measures.module_reading import read_module
from rankbench.measures.module_states import layer_states, sums_after_layers
from rankbench.model.modules import Example

pytestmark = pytest.mark.usefixtures("rounded_once")

OPTIONS = Options(value_biases="head", sequences=None, resamples=100, each_layer=True)
NEEDED = {"k95": 0.05, "k99": 0.01, "k999": 0.001}
LAYERS = 4


def spectrum(network, batch, options=OPTIONS):
    return ANALYSES["spectrum"].table(Subject("fresh", 0, test=batch, networks={"trained": network}), options)


def of_layers(table):
    return table[table.part == "layer"].set_index("layer")


def needed(x, sums, counted=None):
    """k95, k99 and k999 of the sums of each length (B, N, D), mean over sequences, by their definition."""
    numbers = dict.fromkeys(NEEDED, 0.0)
    for b in range(len(x)):
        tokens = slice(None) if counted is None else counted[b]
        rest, errors = x[b][tokens].clone(), []
        for part in sums:
            rest -= part[b][tokens]
            errors.append((rest.norm() / x[b][tokens].norm()).item())
        for name, most in NEEDED.items():
            numbers[name] += next(k for k in range(len(errors)) if max(errors[k:]) < most) / len(x)
    return numbers


def needed_by_last_states(module, example):
    """The same of a module's last states."""
    read = read_module(module, example)
    kind, sums = next(read.kinds(read.record(read.example), "head", True))
    assert kind == "states"
    return needed(sums.state_BND, sums.by_length_KBND, read.counted(read.example))


def truncated(network, num_layers):
    """The network's first layers, without a norm behind them."""
    short = copy.deepcopy(network)
    short.blocks, short.cfg, short.last_norm = short.blocks[:num_layers], replace(short.cfg, layers=num_layers), None
    return short


@pytest.mark.further
@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "pre"},
        {"norm": "post"},
        {"norm": "none", "mlp": False, "padded": True},
        {"norm": "peri", "attention": "sigmoid"},
        {"norm": "pre", "hyper_connections": "free", "streams": 2},
        {"norm": "pre", "value_residual": 0.5},
    ],
)
def test_a_layer_needs_what_the_network_that_ends_there_needs(random_network, changes):
    network, batch = random_network(6, seed=3, layers=LAYERS, **changes)
    rows = of_layers(spectrum(network, batch))
    assert rows.index.tolist() == [1, 2, 3, 4] and rows.remainder.max() < 1e-12
    assert rows.measured.tolist() == [f"state after layer {number}" for number in (1, 2, 3, 4)]
    for number, row in rows.iterrows():
        short = truncated(network, int(number))
        example = Example((batch.inputs,), {"kernel": "table"}, batch.targets, short.lengths(batch.inputs))
        assert dict(row[list(NEEDED)]) == pytest.approx(needed_by_last_states(short, example), abs=1e-12)
        assert (row.k99_low <= row.k99 <= row.k99_high) and row.k95 <= row.k99 <= row.k999 <= number
    assert rows.k999.nunique() > 1


def test_the_other_rows_are_those_without_the_option(random_network):
    network, batch = random_network(6, seed=3, norm="pre")
    table, without = spectrum(network, batch), spectrum(network, batch, replace(OPTIONS, each_layer=False))
    assert table[table.part != "layer"].reset_index(drop=True).equals(without) and without.layer.isna().all()


def drawn(module):
    return randomised(module, generator(), 0.3).eval()


def checkpoint(family, num_layers=3):
    """A tiny model of the library with random weights, and its body."""
    transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'rankbench[pretrained]'")
    sizes = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": num_layers, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "max_position_embeddings": 16, "pad_token_id": 0, "attn_implementation": "eager"}
    if family == "bert":
        return drawn(transformers.BertForMaskedLM(transformers.BertConfig(**sizes)))
    return drawn(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=1)))


TOKENS = torch.randint(1, 13, (4, 7), generator=generator(5))
PRESENT = torch.ones_like(TOKENS)
PRESENT[1, 5:] = 0
TEXTS = {"input_ids": TOKENS * PRESENT, "attention_mask": PRESENT}


@pytest.mark.further
@pytest.mark.parametrize(
    ("family", "body", "last_norm", "rounding"),
    [
        ("bert", "bert.encoder.layer", None, 1e-12),
        ("llama", "model.layers", "norm", 1e-6),  # its norms compute in float32
    ],
)
def test_layers_of_a_checkpoint(family, body, last_norm, rounding):
    whole = checkpoint(family)
    read = read_module(whole, Example((), TEXTS))
    hidden = whole(**TEXTS, output_hidden_states=True).hidden_states[1:]
    layers = layer_states(read)
    assert [layer.name for layer in layers] == [f"result of {body}.{number}" for number in range(3)]
    for number, sums in sums_after_layers(read.record(read.example), layers, "head", True):
        state = sums.by_length_KBND.sum(0)
        if last_norm and number == 2:  # the library returns it behind the last norm
            state = getattr(whole.base_model, last_norm)(state)
        torch.testing.assert_close(state, hidden[number], rtol=0, atol=rounding * hidden[number].abs().max().item())
        assert len(sums.by_length_KBND) == number + 2

    rows = of_layers(rankbench.analyze(whole, TEXTS, "spectrum", resamples=100, each_layer=True)["spectrum"])
    for number in rows.index:
        short = checkpoint(family, int(number))
        short.load_state_dict({name: whole.state_dict()[name] for name in short.state_dict()})
        if last_norm:
            setattr(short.base_model, last_norm, nn.Identity())
        wanted = needed_by_last_states(short, Example((), TEXTS, lengths_B=PRESENT.sum(1)))
        assert dict(rows.loc[number, list(NEEDED)]) == pytest.approx(wanted, abs=1e-12)
    assert rows.index.tolist() == [1, 2, 3] and rows.k99.nunique() > 1


class Mixing(nn.Module):
    """Tokens that are compared with themselves, beside a skip."""

    def forward(self, x):
        return x + 0.5 * F.scaled_dot_product_attention(x, x, x)


class Repeated(nn.Module):
    """One layer that runs three times."""

    def __init__(self):
        super().__init__()
        self.layers, self.out = nn.ModuleList([Mixing()]), nn.Linear(6, 3)

    def forward(self, x):
        for _ in range(3):
            x = self.layers[0](x)
        return self.out(x)


class Bare(nn.Module):
    """Attention without a submodule of its own."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        for _ in range(2):
            x = x + F.scaled_dot_product_attention(x, x, x)
        return self.out(x)


STATES = normal(1, 4, 5, 6)


def test_a_layer_that_runs_several_times_has_a_row_for_each():
    """With P frozen, S_k is the sum over all choices of k of the runs; here by hand."""
    tables = rankbench.analyze(drawn(Repeated()), STATES, "spectrum", resamples=100, each_layer=True)
    rows = of_layers(tables["spectrum"])
    assert rows.measured.tolist() == [f"result of layers.0{run}" for run in ("", ", run 2", ", run 3")]
    sums, x = [STATES], STATES
    for number in rows.index:
        P = torch.softmax(x @ x.mT / 6**0.5, -1)
        moved = [0.5 * P @ part for part in sums]
        sums = [first + second for first, second in zip([*sums, 0 * x], [0 * x, *moved], strict=True)]
        x = x + 0.5 * P @ x
        assert dict(rows.loc[number, list(NEEDED)]) == pytest.approx(needed(x, sums), abs=1e-12)


def test_a_module_without_layers_has_no_such_rows_and_a_line_says_so(caplog):
    """The part of its output that depends on no input is the bias of its last map."""
    module = drawn(Bare())
    with caplog.at_level(logging.WARNING):
        table = rankbench.analyze(module, STATES, "spectrum", resamples=100, each_layer=True)["spectrum"]
    said = [line for line in caplog.messages if "no rows of layers" in line]
    assert len(said) == 1 and "put each layer into a submodule" in said[0]
    assert set(table.part) == {"length", "constant"} and "states after layers" not in digest(table)
    (row,) = table[(table.part == "constant") & (table.of == "output")].itertuples()
    output = module(STATES).detach().flatten(1)
    constant, size_B = module.out.bias.detach().repeat(5), output.norm(dim=1)
    assert row.mass == pytest.approx((constant.norm() / size_B).mean().item(), rel=1e-12)
    assert row.share == pytest.approx((output @ constant / size_B**2).mean().item(), rel=1e-12)


def test_the_digest_has_a_line_on_the_layers(random_network):
    network, batch = random_network(6, seed=3, layers=LAYERS, norm="post")
    table = spectrum(network, batch)
    (line,) = [line for line in digest(table).split("\n") if "states after layers" in line]
    k99 = " ".join(f"{number:.3g}" for number in of_layers(table).k99)
    assert line.endswith(f"layers 1, 2, 3, 4: trained {k99}")
