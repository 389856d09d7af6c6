"""The walls between the rooms of the package, read from its imports: those inside of functions count, too."""

import ast
import functools
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rankbench

PACKAGE = Path(rankbench.__file__).parent

# From the top to the bottom. A room imports from the rooms below it, never from its own floor or from above.
FLOORS = [
    {"__main__", "api"},
    {"commands"},
    {"report", "observing"},
    {"analysing", "training", "papers"},
    {"analyses"},
    {"judging", "plots"},
    {"measures", "runs"},
    {"model"},
    {"tape"},
    {"tasks", "progress"},
    {"config", "seeds"},
]
# Libraries that one room alone knows, the rooms that papers know, and the modules of measures that are formulas alone.
OWN_ROOM = {"hydra": "commands", "matplotlib": "plots", "jinja2": "report"}
KNOWN_TO_PAPERS = {"judging", "measures", "model", "config", "runs"}
FORMULAS = ["norms", "states", "attention_matrices", "dependence", "dong_theory", "amsel_theory"]


@functools.cache
def imports_of(package):
    """Pairs (module, imported module) of all Python files of a package, with the names of rankbench in full."""
    pairs = []
    for file in sorted(package.rglob("*.py")):
        module = ".".join((package.name, *file.relative_to(package).with_suffix("").parts)).removesuffix(".__init__")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                pairs += [(module, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: a relative import"
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    of_module = package.joinpath(*name.split(".")[1:])
                    is_module = of_module.with_suffix(".py").exists() or of_module.is_dir()
                    pairs.append((module, name if is_module or node.module == package.name else node.module))
    return pairs


def room(module):
    """The room of a module of rankbench; None for the package itself and what stands in its __init__."""
    name, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    return first if name == "rankbench" and first not in ("", "__version__") else None


def upward(pairs):
    """The imports that do not run downward."""
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    for module, imported in pairs:
        room_of_module, room_of_import = room(module), room(imported)
        if None in (room_of_module, room_of_import) or room_of_module == room_of_import:
            continue
        if floor[room_of_module] >= floor[room_of_import]:
            yield module, imported


def circular(pairs):
    """A chain of imports inside a room that leads back to where it begins, if there is one."""
    inside = defaultdict(set)
    for module, imported in pairs:
        if room(module) is not None and room(module) == room(imported) and module != imported:
            inside[module].add(imported)
    try:
        TopologicalSorter(inside).prepare()
    except CycleError as circle:
        yield circle.args[1]


def trespassing(pairs):
    """The imports of a library outside of its room."""
    for module, imported in pairs:
        allowed = OWN_ROOM.get(imported.partition(".")[0])
        if allowed not in (None, room(module)):
            yield module, imported


def about_papers(pairs):
    """The imports of papers from elsewhere, and those by papers of rooms, or other papers, that they do not know."""
    for module, imported in pairs:
        into = room(imported)
        if room(module) != "papers":
            if into == "papers":
                yield module, imported
        elif into == "papers":
            if module.split(".")[2] != imported.split(".")[2]:
                yield module, imported
        elif into is not None and into not in KNOWN_TO_PAPERS:
            yield module, imported


def test_every_room_has_its_floor():
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules - {"__init__"} == set().union(*FLOORS)


def test_imports_run_downward():
    assert list(upward(imports_of(PACKAGE))) == []


def test_no_room_has_a_circle():
    assert list(circular(imports_of(PACKAGE))) == []


def test_tests_stand_in_the_room_of_what_they_test():
    rooms = {folder.name for folder in Path(__file__).parent.iterdir() if any(folder.glob("test_*.py"))}
    assert rooms <= set().union(*FLOORS)
    assert len(rooms) > 10


def test_a_library_stays_in_its_room():
    pairs = imports_of(PACKAGE)
    assert list(trespassing(pairs)) == []
    assert {imported.partition(".")[0] for _, imported in pairs} >= set(OWN_ROOM)


def test_nothing_imports_a_paper_and_papers_know_little():
    pairs = imports_of(PACKAGE)
    assert list(about_papers(pairs)) == []
    assert len([module for module, _ in pairs if room(module) == "papers"]) > 100


@pytest.mark.slow
def test_a_paper_goes_with_its_folder(tmp_path):
    """The package with one paper alone, in a process of its own."""
    kept = "joseph_2024"
    others = shutil.ignore_patterns("__pycache__", *(path.parent.name for path in PACKAGE.glob("papers/*/__init__.py")))
    shutil.copytree(PACKAGE, tmp_path / "rankbench", ignore=others)
    shutil.copytree(PACKAGE / "papers" / kept, tmp_path / "rankbench" / "papers" / kept)
    (tmp_path / "conf").symlink_to(PACKAGE.parent / "conf")
    lines = [
        "import rankbench",
        "from rankbench.judging import CLAIMS, PAPERS, figures_published",
        "from rankbench.measures.law import LAWS",
        "tables = rankbench.analyze(['model=san', 'model.layers=1'], 'residual', 'attention', sequences=2)",
        "print(rankbench.__file__, *CLAIMS, *PAPERS, *figures_published(), *LAWS, *tables, sep=chr(10))",
    ]
    command, process = [sys.executable, "-c", "; ".join(lines)], {"cwd": tmp_path, "text": True, "capture_output": True}
    told = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, **process)
    assert told.returncode == 0, told.stderr
    file, *names = told.stdout.split("\n")[:-1]
    assert Path(file).is_relative_to(tmp_path)
    assert names == ["knob_lambda_skip", "knob_lambda_skip_enough", "Joseph et al. 2024", "residual", "attention"]


def test_a_circle_is_found(tmp_path):
    for file, line in {"plots/a.py": "import rankbench.plots.b", "plots/b.py": "from rankbench.plots import a"}.items():
        (tmp_path / "rankbench" / "plots").mkdir(parents=True, exist_ok=True)
        (tmp_path / "rankbench" / file).write_text(line)
    assert len(list(circular(imports_of(tmp_path / "rankbench")))) == 1


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_know_no_model(name):
    pairs = [imported for module, imported in imports_of(PACKAGE) if module == f"rankbench.measures.{name}"]
    assert pairs
    assert not [imported for imported in pairs if room(imported) not in (None, "measures")]


@pytest.mark.parametrize(
    "file, line, find",
    [
        ("measures/norms.py", "from rankbench.analyses import residual", upward),
        ("model/linear.py", "def late():\n    from rankbench import report", upward),
        ("judging/claim.py", "import matplotlib.pyplot as plt", trespassing),
        ("analyses/paths.py", "def late():\n    import hydra", trespassing),
        ("report/results.py", "def late():\n    from rankbench import papers", about_papers),
        ("papers/blog/claims.py", "from rankbench.papers.dong_2021.paths import FIG3", about_papers),
        ("papers/blog/claims.py", "from rankbench.analyses import residual", about_papers),
    ],
)
def test_a_breach_is_found(tmp_path, file, line, find):
    path = tmp_path / "rankbench" / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    assert len(list(find(imports_of(tmp_path / "rankbench")))) == 1
