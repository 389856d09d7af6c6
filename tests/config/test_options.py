"""Options of tasks and analyses: what their keys rule out is refused in one line, from the files that conf/ ships."""

import dataclasses
import math
import re

import pytest
from shipped import options_of, shipped, task_of

from rankbench.analyses import ANALYSES
from rankbench.config.keys import ConfigError
from rankbench.tasks import TASKS


@pytest.mark.parametrize("name", ANALYSES)
def test_shipped_options_are_those_of_the_analysis(name):
    assert dataclasses.asdict(options_of(name)) == shipped(f"analysis/{name}")


@pytest.mark.parametrize("name", TASKS)
def test_shipped_keys_are_those_of_the_task(name):
    assert dataclasses.asdict(task_of(name)) == shipped(f"task/{name}")


OF_TASKS = {
    "char_lm": [
        ({"unk": "word"}, "unk=word: unknown; allowed are characters, symbol"),
        ({"held_out": 0.5}, "held_out=0.5"),
        ({"length_limit": 1}, "length_limit=1: out of range; allowed are values from 2"),
        ({"pad_to": 0}, "pad_to=0: out of range; allowed are values from 1"),
        ({"valid_size": 0}, "valid_size=0: out of range; allowed are values from 1"),
        ({"train_size": None}, "train_size=null: generated sentences have no end"),
        ({"path": "nowhere.txt"}, "path=nowhere.txt: no such file or folder"),
        ({"path": "n" * 300}, "path=nnn"),  # longer than file systems allow
        ({"path": "n/" * 5000}, "path=n/n/"),
    ],
    "circle_arcs": [
        ({"points": 1}, "points=1: out of range; allowed are values from 2"),
        ({"radius": 0.0}, "radius=0.0: out of range; allowed are values above 0"),
        ({"radius": math.inf}, "radius=inf:"),
        ({"train_size": 5}, "train_size: unknown key"),
    ],
    "convex_hull": [
        ({"points": 3}, "points=3: out of range; allowed are values from 4; fewer points are all vertices"),
        ({"scale": 0.0}, "scale=0.0: out of range; allowed are values above 0"),
        ({"scale": math.nan}, "scale=nan:"),
        ({"shift_sd": -1.0}, "shift_sd=-1.0: out of range; allowed are values from 0"),
        ({"train_size": 0}, "train_size=0: out of range; allowed are values from 1"),
        ({"test_size": 0}, "test_size=0: out of range; allowed are values from 1"),
        ({"test_size": None}, "test_size=null: null is not allowed"),
        ({"pointz": 3}, "pointz: unknown key, did you mean points?"),
    ],
    "linear_regression": [
        ({"dimension": 0}, "dimension=0: out of range"),
        ({"start_points": 42}, "start_points=42: more than task.points=41"),
        ({"noise": -1.0}, "noise=-1.0: out of range"),
        ({"curriculum_every": 0}, "curriculum_every=0: out of range"),
        ({"train_size": 10}, "curriculum_every=2000: only fresh sequences can grow"),
    ],
    "memorization": [
        ({"vocabulary": 1}, "vocabulary=1: out of range; allowed are values from 2"),
        ({"length": 1}, "length=1: out of range; allowed are values from 2"),
        ({"classes": 1}, "classes=1: out of range; allowed are values from 2"),
        ({"train_size": 0}, "train_size=0: out of range; allowed are values from 1"),
        ({"train_size": None}, "train_size=null: null is not allowed"),
        ({"zipf_exponent": -1.0}, "zipf_exponent=-1.0: out of range; allowed are values from 0"),
        ({"zipf_exponent": math.nan}, "zipf_exponent=nan:"),
        ({"test_size": 3}, "test_size: unknown key"),
    ],
    "nearest_neighbor": [
        ({"dimension": 1}, "dimension=1: out of range"),
        ({"points": 1}, "points=1: out of range"),
        ({"mode": "near"}, "mode=near: unknown, did you mean nearest?; allowed are nearest, farthest"),
        ({"queries": "none"}, "queries=none: unknown; allowed are self, separate"),
        ({"queries": "separate", "points": 17}, "points=17: no more than task.dimension=16"),
        ({"test_size": 0}, "test_size=0: out of range"),
    ],
    "sorting": [
        ({"length": 1}, "length=1: out of range; allowed are values from 2; a single letter is sorted"),
        ({"length": -3}, "length=-3: out of range; allowed are values from 2"),
        ({"alphabet": 1}, "alphabet=1: out of range; allowed are values from 2"),
        ({"label": "rank"}, "label=rank: unknown; allowed are position, value"),
        ({"train_size": 0}, "train_size=0: out of range; allowed are values from 1 (sequences)"),
        ({"test_size": 0}, "test_size=0: out of range; allowed are values from 1 (sequences)"),
        ({"test_size": None}, "test_size=null: null is not allowed"),
        ({"length": 2.5}, "length=2.5: wants an integer"),
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
    "bounds": [
        ({"variants": ["no_norms"]}, "variants=no_norms: unknown, did you mean no_norm?"),
        ({"variants": []}, "variants=[]: name at least one of full"),
        ({"sequences": 0}, "sequences=0: out of range; allowed are values from 1"),
    ],
    "collapse": [
        ({"variants": []}, "variants=[]: name at least one of full, "),
        ({"variants": ["no_skips"]}, "variants=no_skips: unknown, did you mean no_skip?"),
        ({"sequences": 0}, "sequences=0: out of range; allowed are values from 1"),
    ],
    "head_rank": [
        ({"heads": -1}, "heads=-1: out of range"),
        ({"spectrum": 0}, "spectrum=0: out of range"),
        ({"sequences": 0}, "sequences=0: out of range"),
    ],
    "histograms": [
        ({"bins": 1}, "bins=1: out of range; allowed are values from 2"),
        ({"ranges": []}, "ranges=[]: name at least one"),
        ({"ranges": [[2, 2]]}, "ranges=[[2.0, 2.0]]: wants pairs"),
    ],
    "independence": [
        ({"schemes": []}, "schemes=[]: name at least one of frozen, recomputed"),
        ({"schemes": ["frosen"]}, "schemes=frosen: unknown, did you mean frozen?"),
        ({"sequences": 29}, "sequences=29: out of range; allowed are values from 30"),
        ({"tokens": 0}, "tokens=0: out of range; allowed are values from 1"),
        ({"probes": 1}, "probes=1: out of range; allowed are values from 2"),
        ({"sequences": 30, "components": 15}, "components=15, neighbours=4: twice the components"),
    ],
    "invertibility": [
        ({"attentions": ["l3"]}, "attentions=l3: unknown; allowed are dot, l2, contractive_l2"),
        ({"coefficients": []}, "coefficients=[]: name at least one"),
        ({"iterations": 0}, "iterations=0: out of range; allowed are values from 1"),
        ({"gain": -1.0}, "gain=-1.0: out of range; allowed are values above 0"),
        ({"tokens": [1]}, "tokens=[1]: out of range; allowed are values from 2; attention needs"),
        ({"ranges": [[1, 0]]}, "ranges=[[1.0, 0.0]]: wants pairs [low,high]"),
        ({"widths": [5], "heads": 2}, "widths=[5]: 5 is not divisible by heads=2"),
        ({"attentions": ["l2"], "network": True}, "network=true: inverts the subject's model"),
    ],
    "laws": [
        ({"law": "cesar"}, "law=cesar: unknown, did you mean cesaro?"),
        ({"law": "cesaro", "width": 8}, "width=8: law=cesaro has no such size; its sizes are tokens, layers"),
        ({"tokens": 1}, "tokens=1: out of range"),
    ],
    "lipschitz": [
        ({"layer": "L2"}, "layer=L2: unknown; allowed are dot, l2, contractive_l2"),
        ({"mask": "window"}, "mask=window: unknown"),
        ({"norms": ["1"]}, "norms=1: unknown"),
        ({"norms": []}, "norms=[]: name at least one"),
        ({"tokens": [1]}, "tokens=[1]: out of range; allowed are values from 2; attention needs at least 2 tokens"),
        ({"steps": 0}, "steps=0: out of range; allowed are values from 1"),
        ({"gain": 0.0}, "gain=0.0: out of range; allowed are values above 0"),
        ({"width": 3, "heads": 2}, "width=3: not divisible"),
        ({"layer": "contractive_l2", "tied": False}, "tied=false: layer=contractive_l2"),
        ({"mirror": True}, "mirror=true: for layer=l2 of width=1"),
    ],
    "path_counts": [
        ({"architectures": ["GPT3"]}, "architectures=GPT3: unknown, did you mean GPT-3?"),
        ({"layers": 0}, "layers=0: out of range; allowed are values from 1 to 1024"),
        ({"heads": 10**6}, "heads=1000000: out of range"),
        ({"known": {"mine": [2, 0]}}, "known.mine: heads=0: out of range"),
        ({"known": {"mine": [2]}}, "known.mine=[2]: wants [layers,heads]"),
    ],
    "path_mass": [
        ({"mlp": "gates"}, "mlp=gates: unknown, did you mean gate?; allowed are gate, source"),
        ({"sequences": 0}, "sequences=0: out of range; allowed are values from 1"),
    ],
    "paths": [
        ({"schemes": ["frozen", "thawed"]}, "schemes=thawed: unknown; allowed are frozen, recomputed"),
        ({"readout": "pretty"}, "readout=pretty: unknown; allowed are normalised, raw"),
        ({"mlp": "skip"}, "mlp=skip: unknown; allowed are gate, source"),
        ({"repeats": 0}, "repeats=0: out of range; allowed are values from 1"),
        ({"sequences": 0}, "sequences=0: out of range; allowed are values from 1"),
        ({"max_paths": -1}, "max_paths=-1: out of range; allowed are values from 1"),
        ({"subset_sizes": [5, 0]}, "subset_sizes=[5,0]: out of range; allowed are values from 1"),
        ({"repeats": "many"}, "repeats=many: wants an integer"),
        ({"repeat": 3}, "repeat: unknown key, did you mean repeats?"),
        ({"max_paths": None}, "max_paths=null: null is not allowed here"),
        ({"schemes": []}, "schemes=[]: name at least one of frozen, recomputed"),
    ],
    "pruning": [
        ({"orders": []}, "orders=[]: name at least one of greedy, norm, random"),
        ({"orders": ["gredy"]}, "orders=gredy: unknown, did you mean greedy?"),
        ({"mlp": "none"}, "mlp=none: unknown; allowed are gate, source"),
        ({"counts": 0}, "counts=0: out of range; allowed are values from 1"),
    ],
    "rank_theory": [
        ({"dimensions": []}, "dimensions=[]: name at least one"),
        ({"ranks": [0]}, "ranks=[0]: out of range"),
        ({"errors": [0.6]}, "errors=[0.6]: out of range"),
        ({"samples": 1}, "samples=1: out of range"),
    ],
    "residual": [
        ({"variants": ["no_skips"]}, "variants=no_skips: unknown, did you mean no_skip?"),
        ({"variants": []}, "variants=[]: name at least one of full"),
        ({"sequences": 0}, "sequences=0: out of range; allowed are values from 1"),
        ({"sequences": None}, "sequences=null: null is not allowed here"),
    ],
    "rollout": [
        ({"steps": 0}, "steps=0: out of range; allowed are values from 1"),
        ({"every": 0}, "every=0: out of range; allowed are values from 1"),
        ({"every": None}, "every=null: null is not allowed"),
        ({"collapsed_below": 0.0}, "collapsed_below=0.0: out of range; allowed are values above 0 and below 1"),
        ({"collapsed_below": 1.0}, "collapsed_below=1.0: out of range; allowed are values above 0 and below 1"),
    ],
    "samples": [
        ({"number": 0}, "number=0: out of range"),
        ({"temperatures": []}, "temperatures=[]: name at least one"),
        ({"temperatures": [0.0]}, "temperatures=[0.0]: out of range; allowed are values above 0"),
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
        with pytest.raises(ConfigError, match=f"^{re.escape(said)}") as error:
            make(name, **changes)
        assert "\n" not in str(error.value)
