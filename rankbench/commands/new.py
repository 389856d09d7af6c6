"""`rankbench new plugin NAME`: the folder of a plug-in that works, to begin with."""

from collections.abc import Sequence
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path

from rankbench.config.keys import ConfigError

HELP = """Usage: rankbench new plugin NAME

Writes the folder NAME: a plug-in with a task, an attention, an analysis and a preset, and its test. Change what you
need, and delete the rest; docs/EXTENDING.md explains the parts."""
SKELETON = Path(__file__).with_name("skeleton")  # its files, with NAME in the place of the plug-in's name


def created(words: Sequence[str]) -> str:
    """Write the folder, and return what to do next. ConfigError for a name that is taken or cannot be a module's."""
    if len(words) != 2 or words[0] != "plugin":
        raise ConfigError(f"new {' '.join(words)}: not understood; use `rankbench new plugin NAME`")
    name = words[1]
    if iskeyword(name) or not (name.isidentifier() and name.islower()):
        of_python = "a word of Python" if iskeyword(name) else "not the name of a module"
        raise ConfigError(f"new plugin {name}: {of_python}; use small letters, digits and _, as in my_plugin")
    if (folder := Path(name)).exists():
        raise ConfigError(f"new plugin {name}: {folder.resolve()} exists already; give another name")
    if find_spec(name) is not None:
        raise ConfigError(f"new plugin {name}: a module of this name is installed; give another name")
    for file in (file for file in SKELETON.rglob("*") if file.is_file()):
        path = folder / str(file.relative_to(SKELETON)).replace("NAME", name).removesuffix(".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.read_text(encoding="utf-8").replace("NAME", name), encoding="utf-8")
    return (
        f"-> {folder}/: __init__.py, conf/ and test_{name}.py\n"
        f"try it: rankbench check plugins={name}; rankbench train plugins={name} experiment={name}"
    )
