"""The walls between the rooms of the package, read from its imports: those inside of functions count, too."""

import ast
import functools
from pathlib import Path

import pytest

import rankbench

PACKAGE = Path(rankbench.__file__).parent

# From the top to the bottom. A room imports from the rooms below it, never from its own floor or from above.
FLOORS = [
    {"__main__", "api"},
    {"commands"},
    {"bench", "report", "observing"},
    {"analyses", "training"},
    {"claims", "plots"},
    {"measures", "runs"},
    {"model", "presets"},
    {"plugins"},
    {"compatibility"},
    {"tasks", "config", "progress"},
    {"keys", "seeds"},
]
# Libraries that one room alone knows, and the modules of measures that are formulas alone.
OWN_ROOM = {"hydra": "commands", "matplotlib": "plots", "jinja2": "report"}
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
                if node.module == package.name:  # from rankbench import plots
                    pairs += [(module, f"{package.name}.{alias.name}") for alias in node.names]
                else:
                    pairs.append((module, node.module))
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


def trespassing(pairs):
    """The imports of a library outside of its room."""
    for module, imported in pairs:
        allowed = OWN_ROOM.get(imported.partition(".")[0])
        if allowed not in (None, room(module)):
            yield module, imported


def test_every_room_has_its_floor():
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules - {"__init__"} == set().union(*FLOORS)


def test_imports_run_downward():
    assert list(upward(imports_of(PACKAGE))) == []


def test_a_library_stays_in_its_room():
    pairs = imports_of(PACKAGE)
    assert list(trespassing(pairs)) == []
    assert {imported.partition(".")[0] for _, imported in pairs} >= set(OWN_ROOM)


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
        ("claims/kim.py", "import matplotlib.pyplot as plt", trespassing),
        ("analyses/paths.py", "def late():\n    import hydra", trespassing),
    ],
)
def test_a_breach_is_found(tmp_path, file, line, find):
    path = tmp_path / "rankbench" / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    assert len(list(find(imports_of(tmp_path / "rankbench")))) == 1
