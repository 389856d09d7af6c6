"""Names as a paper prints them: `no skip` for model.skip=false, `4 heads` for model.heads=4.

Tables and captions keep the keys, which can be typed; the words are for figures.
"""

import re
from textwrap import wrap

import pandas as pd

OF_VALUES = {
    "exclusive": {"true": "exclusive heads", "false": "plain heads"},
    "hyper_connections": {"free": "hyper-connections", "doubly_stochastic": "doubly stochastic hyper-connections"},
    "layer": {"null": "layers of the network", "dot": "a fresh layer", "l2": "a fresh L2 layer"},
    "mlp": {"true": "MLP", "false": "no MLP"},
    "mlp_skip": {"true": "MLP with skip", "false": "MLP without skip"},
    "norm": {"none": "no norm", "pre": "pre-norm", "post": "post-norm", "peri": "peri-norm", "ngpt": "nGPT"},
    "skips": {"true": "skips", "false": "no skips"},
    "tied_qk": {"true": "tied keys", "false": "free keys"},
    "weight_norm": {"sigma": "sigma reparametrisation"},
}
OF_KEYS = {
    "hyper_connections": "hyper-connections",
    "lr": "learning rate",
    "mix_attention": "share of attention",
    "mix_identity": "share of the identity",
    "mix_uniform": "share of the average",
    "mlp": "MLP",
    "mlp_gain": "MLP gain",
    "mlp_ratio": "MLP ratio",
}
BETWEEN = " · "  # between the parts of a title
COUNTS = ("heads", "layers", "points", "streams")
CHOICES = ("experiment", "model", "network", "optimizer", "task")  # their values are names already
ABBREVIATIONS = {"l2": "L2", "lstm": "LSTM", "mlp": "MLP", "san": "SAN", "relu": "ReLU"}
# a key of the config, or one of a figure's own, and its value, which ends where the next one begins
KEY = r"\b(?:model|task|optimizer|trainer|analysis)\.[\w.]+"
SETTING = rf"({KEY}|\b(?:{'|'.join((*COUNTS, *CHOICES, 'rank'))}))=([^,;·\n]*?)(?=\s*(?:[,;·\n]|$))"
RUN = r"\brun=[^;·\n]*"  # folders of runs, whose names hold settings, too


def in_a_paper(text: str) -> str:
    """The text with words for each `key=value` of a config in it, except in names of runs, and for each key without a
    value."""

    def words(part: re.Match) -> str:
        run, key, value, bare = part.groups()
        return re.sub(r",(?=\S)", ", ", run) if run else (_setting(key, value) if key else key_in_words(bare))

    return re.sub(f"({RUN})|{SETTING}|({KEY})", words, text)


def key_in_words(key: str) -> str:
    """A key without its group, as words: `learning rate` of optimizer.lr."""
    name = key.rpartition(".")[2]
    return OF_KEYS.get(name, name.replace("_", " "))


def choice_in_words(name: str) -> str:
    """A model's or a task's name in words: `SAN skip` of san_skip."""
    return " ".join(ABBREVIATIONS.get(word, word) for word in name.split("_"))


def in_lines(text: str, letters: int) -> str:
    """Break a text into lines of at most this many letters: between the parts of a title where these are no longer, and
    within no formula."""
    lines = []
    for line in re.sub(r"\$[^$]*\$", lambda formula: formula[0].replace(" ", "\0"), text).split("\n"):
        parts = (part.replace(" ", "\0") if len(part) <= letters else part for part in line.split(BETWEEN))
        lines += wrap(BETWEEN.join(parts), max(1, letters), break_long_words="$" not in line, break_on_hyphens=False)
    return "\n".join(line.strip(BETWEEN) for line in lines).replace("\0", " ")


def settings_of(table: pd.DataFrame, keys: list[str]) -> pd.Series:
    """Each row's values of these keys as typed: `model.layers=2, model.norm=pre`."""
    parts = [f"{key}=" + table[key].astype(str) for key in keys]
    return parts[0].str.cat(parts[1:], sep=", ")


def _setting(key: str, value: str) -> str:
    name, words = key.rpartition(".")[2], key_in_words(key)
    value = value.removesuffix(".0")
    if name in OF_VALUES and value in OF_VALUES[name]:
        return OF_VALUES[name][value]
    if name in COUNTS and value.isdecimal():
        return f"{value} {words.removesuffix('s') if value == '1' else words}"
    if key in CHOICES:
        return choice_in_words(value)
    if value in ("true", "none", "false", "null", ""):
        return words if value == "true" else f"no {words}"
    return f"{words} {value.replace('_', ' ')}"
