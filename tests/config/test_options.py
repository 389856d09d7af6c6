"""Options of tasks and analyses: what their keys rule out is refused in one line, from the files that conf/ ships."""

import dataclasses
import re

import pytest
from refusals import refusal
from shipped import options_of, shipped, task_of

from rankbench.analyses import ANALYSES
from rankbench.config.keys import entries
from rankbench.tasks import TASKS


def test_shipped_values_are_those_of_all_keys():
    for group, make, names in (("analysis", options_of, ANALYSES), ("task", task_of, TASKS)):
        for name in names:
            assert dataclasses.asdict(make(name)) == shipped(f"{group}/{name}")


# lists of numbers of any size; each has a rule of its own, below
FREE = {"invertibility.coefficients", "invertibility.ranges", "histograms.ranges", "path_counts.known"}


@pytest.mark.parametrize("name, keys", [*TASKS.items(), *((name, kind.options) for name, kind in ANALYSES.items())])
def test_every_number_has_a_range(name, keys):
    for entry in entries(keys, f"{name}."):
        limits = (entry.key.at_least, entry.key.above, entry.key.at_most, entry.key.below)
        if re.search("int|float", str(entry.type)) and entry.name not in FREE:
            assert any(limit is not None for limit in limits), entry.name


# What a key's own range and choices cannot say; tests/config/test_schema.py refuses what those rule out
OF_TASKS = {
    "char_lm": [
        ({"train_size": None}, "train_size=null: generated sentences have no end"),
        ({"path": "nowhere.txt"}, "path=nowhere.txt: no such file or folder"),
        ({"path": "n" * 300}, "path=nnn"),  # longer than file systems allow
        ({"path": "n/" * 5000}, "path=n/n/"),
    ],
    "convex_hull": [
        ({"points": 3}, "points=3: out of range; allowed are values from 4; fewer points are all vertices")
    ],
    "linear_regression": [
        ({"start_points": 42}, "start_points=42: more than task.points=41"),
        ({"train_size": 10}, "curriculum_every=2000: only fresh sequences can grow"),
    ],
    "nearest_neighbor": [({"queries": "separate", "points": 17}, "points=17: no more than task.dimension=16")],
    "sorting": [
        ({"length": 1}, "length=1: out of range; allowed are values from 2; a single letter is sorted"),
        ({"lenght": 8}, "lenght: unknown key, did you mean length?"),
        (
            {"repeats": False, "length": 5, "alphabet": 4},
            "alphabet=4: too few letters for task.length=5 without repeats; use at least 5",
        ),
        ({"name": "sortin"}, "name=sortin: unknown, did you mean sorting?; allowed are "),
        ({"name": ["sorting"]}, "name=['sorting']: "),
        ({"name": None}, "name="),
    ],
}
OF_ANALYSES = {
    "dynamics": [
        ({"metrics": []}, "metrics=[]: name at least one"),
        ({"metrics": ["rank"]}, "metrics=rank: unknown"),
    ],
    "histograms": [
        ({"ranges": []}, "ranges=[]: name at least one"),
        ({"ranges": [[2, 2]]}, "ranges=[[2.0, 2.0]]: wants pairs"),
    ],
    "independence": [({"sequences": 30, "components": 15}, "components=15, neighbours=4: twice the components")],
    "invertibility": [
        ({"coefficients": []}, "coefficients=[]: name at least one"),
        ({"tokens": [1]}, "tokens=[1]: out of range; allowed are values from 2; attention needs"),
        ({"ranges": [[1, 0]]}, "ranges=[[1.0, 0.0]]: wants pairs [low,high]"),
        ({"widths": [5], "heads": 2}, "widths=[5]: 5 is not divisible by heads=2"),
        ({"attentions": ["l2"], "network": True}, "network=true: inverts the subject's model"),
    ],
    "laws": [({"law": "cesaro", "width": 8}, "width=8: law=cesaro has no such size; its sizes are tokens, layers")],
    "lipschitz": [
        ({"tokens": [1]}, "tokens=[1]: out of range; allowed are values from 2; attention needs at least 2 tokens"),
        ({"width": 3, "heads": 2}, "width=3: not divisible"),
        ({"layer": "contractive_l2", "tied": False}, "tied=false: layer=contractive_l2"),
        ({"mirror": True}, "mirror=true: for layer=l2 of width=1"),
        ({"radii": [0.1], "norms": ["inf"]}, "radii: needs layer=null and 2 in norms"),
    ],
    "path_counts": [
        ({"known": {"mine": [2, 0]}}, "known.mine: heads=0: out of range"),
        ({"known": {"mine": [2]}}, "known.mine=[2]: wants [layers,heads]"),
    ],
    "paths": [
        ({"schemes": ["frozen", "thawed"]}, "schemes=thawed: unknown; allowed are frozen, recomputed"),
        ({"subset_sizes": [5, 0]}, "subset_sizes=[5,0]: out of range; allowed are values from 1"),
        ({"repeats": "many"}, "repeats=many: wants an integer"),
        ({"max_paths": None}, "max_paths=null: null is not allowed here"),
        ({"schemes": []}, "schemes=[]: name at least one of frozen, recomputed"),
    ],
}
WRONG = [
    *((task_of, name, changes, f"task.{said}") for name, cases in OF_TASKS.items() for changes, said in cases),
    *(
        (options_of, name, changes, f"analysis.{name}.{said}")
        for name, cases in OF_ANALYSES.items()
        for changes, said in cases
    ),
]


def test_what_cannot_be_is_refused_in_one_line():
    for make, name, changes, said in WRONG:
        assert refusal(make, name, **changes).startswith(said)
