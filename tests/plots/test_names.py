"""rankbench.plots.names: what a paper would print in place of key=value."""

import pandas as pd
import pytest

from rankbench.config.schema import KEYS
from rankbench.plots.names import OF_KEYS, OF_VALUES, in_a_paper
from rankbench.plots.sweep import draw_sweep


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model.skip=false", "no skip"),
        ("trained weights · model.norm=pre", "trained weights · pre-norm"),
        ("model.layers=1, model.heads=4", "1 layer, 4 heads"),
        ("no skip, model.embedding_skip=0.0", "no skip, embedding skip 0"),
        ("optimizer.lr=0.001; averaged over model.value_residual", "learning rate 0.001; averaged over value residual"),
        ("model=san_skip, task=char_lm", "SAN skip, char lm"),
        ("model.weight_norm=none", "no weight norm"),
        ("model.layers=2 · analysis.lipschitz.layer=null · weights", "2 layers · layers of the network · weights"),
        ("optimizer.cap=null", "no cap"),
        ("analysis.residual.variants=, trainer.steps=5", "no variants, steps 5"),
        ("model.layers=2, run=6_model.layers=3,model=san · f=a", "2 layers, run=6_model.layers=3, model=san · f=a"),
        ("model.hyper_connections=doubly_stochastic", "doubly stochastic hyper-connections"),
        ("c=0.5, N=64, D=8 · f=a", "c=0.5, N=64, D=8 · f=a"),
        (r"residual $\|R\|_{1,\infty}$ of 1.5e-3", r"residual $\|R\|_{1,\infty}$ of 1.5e-3"),
    ],
)
def test_settings_have_the_words_of_a_paper(text, words):
    assert in_a_paper(text) == in_a_paper(in_a_paper(text)) == words


def test_the_words_are_of_keys_and_choices_that_exist():
    names = {key.rpartition(".")[2]: entry for key, entry in KEYS.items()}
    for key, words in OF_VALUES.items():
        if key != "layer":  # of an analysis, which is no key of a command
            assert set(words) <= {*names[key].choices, "true", "false"}
    assert set(OF_KEYS) <= set(names)


def test_different_choices_of_a_key_have_different_words():
    for key, entry in KEYS.items():
        if key.startswith("model.") and entry.choices:
            words = [in_a_paper(f"{key}={choice}") for choice in entry.choices]
            assert len(set(words)) == len(words), key


def test_a_sweeps_figure_says_no_key():
    rows = [{"model.norm": norm, "model.layers": n, "model.skip": skip, "seed": 0, "test_accuracy": 0.5}
            for norm in ("none", "pre") for n in (1, 2) for skip in ("true", "false")]  # fmt: skip
    figure = draw_sweep(pd.DataFrame(rows), "model.layers", "model.skip", "model.norm")
    assert [axes.get_title() for axes in figure.axes] == ["no norm", "pre-norm"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"layers"}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["skip", "no skip"]
    figure = draw_sweep(pd.DataFrame(rows), "model.norm")
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["no norm", "pre-norm"]
