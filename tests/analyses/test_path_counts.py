"""rankbench.analyses.path_counts: the table against integers of any size, its figure, and the claims on Fig. 5."""

import functools
import math

import pandas as pd
import pytest
from shipped import options_of, shipped

from rankbench.analyses import ANALYSES, path_counts
from rankbench.judging import published
from rankbench.runs.tables import read_table, with_who, write_table

SHIPPED = shipped("analysis/path_counts")
NINE = list(SHIPPED["known"])
options = functools.partial(options_of, "path_counts")


@pytest.fixture(scope="module")
def make_subject(fresh_subject):
    return functools.partial(fresh_subject, name="small")


@pytest.fixture(scope="module")
def fig5(make_subject):
    subject = make_subject()
    return with_who(path_counts.table(subject, options(architectures=NINE)), **subject.who)


def test_every_row_of_the_nine_architectures_by_integers(fig5, tmp_path):
    write_table(fig5, tmp_path / "path_counts.csv")
    pd.testing.assert_frame_equal(read_table(tmp_path / "path_counts.csv"), fig5)
    assert list(fig5.architecture.unique()) == NINE
    for name, rows in fig5.groupby("architecture"):
        layers, heads = SHIPPED["known"][name]
        assert (rows.layers == layers).all() and (rows.heads == heads).all()
        assert rows.path_length.tolist() == list(range(layers + 1))
        below = 0
        for row in rows.itertuples():
            count = math.comb(layers, row.path_length) * heads**row.path_length
            below += count
            assert row.log10_count == math.log10(count)
            assert row.share == count / (heads + 1) ** layers  # Python divides integers exactly, then rounds once
            assert row.cumulative_share == below / (heads + 1) ** layers


def test_the_known_sizes_are_the_published_ones():
    table = published("dong_fig5_path_lengths")
    assert {row.series: [int(row.x), int(row.value)] for row in table.itertuples()} == SHIPPED["known"]
    products = [layers * heads for layers, heads in SHIPPED["known"].values()]
    assert products == sorted(products, reverse=True)  # "the legends are sorted by the total number of heads"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, [("small", 6, 2)]),
        ({"layers": 96, "heads": 96}, [("L=96 H=96", 96, 96)]),
        ({"layers": 4}, [("L=4 H=2", 4, 2)]),
        ({"heads": 5, "architectures": ["DeiT-T"]}, [("DeiT-T", 12, 3), ("L=6 H=5", 6, 5)]),
        ({"architectures": ["GPT-3"]}, [("GPT-3", 96, 96)]),
        ({"architectures": ["mine"], "known": {"mine": [2, 7]}}, [("mine", 2, 7)]),
    ],
    ids=str,
)
def test_which_networks_are_counted(make_subject, changes, wanted):
    table = path_counts.table(make_subject(), options(**changes))
    got = table[["architecture", "layers", "heads"]].drop_duplicates()
    assert list(got.itertuples(index=False, name=None)) == wanted
    assert len(table) == sum(layers + 1 for _, layers, _ in wanted)


def test_without_skips_all_paths_are_long(make_subject):
    table = path_counts.table(make_subject(skip=False, layers=3, heads=2), options())
    assert table.log10_count.tolist() == [-math.inf] * 3 + [math.log10(8)]
    assert table.share.tolist() == [0, 0, 0, 1] and table.cumulative_share.tolist() == [0, 0, 0, 1]


def test_the_digest_tells_number_and_moments(fig5):
    (gpt3,) = (line for line in path_counts.digest(fig5).splitlines() if "GPT-3" in line)
    # Binomial(L, p): mean L p and variance L p (1 - p), p = 96/97
    assert "10^190.7" in gpt3 and f"{96 * 96 / 97:.2f} of 96" in gpt3 and f"{math.sqrt(96 * 96) / 97:.2f}" in gpt3
    alone = path_counts.digest(fig5[fig5.architecture == "DeiT-T"])
    assert f"10^{math.log10(4**12):.1f}" in alone


def test_the_figure_has_a_line_for_each_architecture(fig5):
    figure = ANALYSES["path_counts"].figure(fig5, published("dong_fig5_path_lengths"), None)
    absolute, relative = figure.axes
    assert len(absolute.get_lines()) == len(relative.get_lines()) == 9
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in absolute.get_lines()}
    assert len(looks) == 9
    assert len({(line.get_marker(), line.get_markerfacecolor()) for line in absolute.get_lines()}) == 9
    for left, right, name in zip(absolute.get_lines(), relative.get_lines(), NINE, strict=True):
        rows = fig5[(fig5.architecture == name) & (fig5.share >= 1e-3)]
        assert left.get_label() == f"{name} (L={rows.layers.iloc[0]}, H={rows.heads.iloc[0]})"
        assert list(left.get_ydata()) == list(right.get_ydata()) == rows.share.tolist()
        assert list(left.get_xdata()) == rows.path_length.tolist()
        assert list(right.get_xdata()) == (rows.path_length / rows.layers).tolist()
    both = pd.concat([fig5, fig5.assign(seed=1)])
    assert len(ANALYSES["path_counts"].figure(both, None, "seed").axes) == 4
