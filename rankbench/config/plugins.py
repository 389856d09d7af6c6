"""Plug-ins and papers: modules that bring tasks, models, metrics, analyses, claims, published numbers and YAML files.

A plug-in lies outside of the package. It is imported if the user's own words name it, as in plugins=[mine], or if it is
installed with an entry point of the group `rankbench.plugins`; never because the folder of a run names it. The papers
of rankbench.papers are imported when a registry of what they bring is first read; nothing else here knows them.
"""

import functools
import hashlib
import os
import sys
import traceback
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from rankbench.config.keys import ConfigError, check_fields, in_one_line
from rankbench.config.schema import conf_dir

GROUP = "rankbench.plugins"
PAPERS = "rankbench.papers"
ALMOST = 0.85  # similarity of names from which one is taken for the other misspelt: TASK and TASKS
PUBLISHED = "published.csv"  # with the numbers that a paper prints
Brought = TypeVar("Brought")


class Plugin(NamedTuple):
    """A plug-in that was found, and perhaps not imported yet."""

    asked: str  # how it was named, for messages
    file: Path
    conf: Path | None  # the folder conf next to the file


FOUND: dict[str, Plugin] = {}  # by the module's name, in this process
LOADED: set[str] = set()
MODULES: set[Path] = set()  # files of code that the user named in other ways, as model=mine.py:build
OURS = (Path(__file__).parents[1], Path(os.__file__).parent)  # and Python's
LIBRARIES = {"site-packages", ".venv"}  # folders


def find(names: Iterable[str] = ()) -> None:
    """Find the plug-ins of these names and the installed ones; from now on their YAML files are choices, too.

    Imports none of them, only the parent packages of a dotted name. ConfigError for a name that is not a module.
    """
    asked = {name: f"plugins=[{name}]" for name in names}
    if asked and not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # where `python -m rankbench` looks, too
    for module, package in _installed(*(folder or os.getcwd() for folder in sys.path)):
        asked.setdefault(module, f"plug-in {module} of the installed {package}")
    for name, how in asked.items():
        if name not in FOUND:
            FOUND[name] = _find_one(name, how)


def named(words: Iterable[str]) -> list[str]:
    """The plug-ins that the words of a command line name, as plugins=[a,b] or plugins=a."""
    lists = (word.removeprefix("plugins=").strip("[]") for word in map(str, words) if word.startswith("plugins="))
    return [name.strip() for names in lists for name in names.split(",") if name.strip() not in ("", "null")]


@functools.cache
def _installed(*path: str) -> list[tuple[str, str]]:
    """The modules of installed plug-ins, each with the name of its package. path: sys.path, the cache's key."""
    folders = list(map(Path, path))
    records = (file for folder in folders for file in folder.glob("*.*-info/entry_points.txt"))
    # importlib.metadata takes longer to import than everything else that Tab completion needs, so it is imported only
    # for packages in archives, and where a package has such an entry point
    if not any(folder.is_file() for folder in folders) and not any(GROUP.encode() in x.read_bytes() for x in records):
        return []
    from importlib.metadata import entry_points

    return [(point.module, point.dist.name) for point in entry_points(group=GROUP) if point.dist is not None]


def _find_one(name: str, asked: str) -> Plugin:
    try:
        spec = find_spec(name) if all(part.isidentifier() for part in name.split(".")) else None
    except Exception as error:  # raised by a parent package
        raise ConfigError(f"{asked}: cannot be imported ({in_one_line(error)}); fix it, or leave it out") from None
    if spec is None or spec.origin is None:
        raise ConfigError(f"{asked}: no such module here; install it, or start from the folder that has its file")
    conf = Path(spec.origin).parent / "conf"
    if not conf.is_dir() or conf.resolve() == conf_dir().resolve():
        return Plugin(asked, Path(spec.origin), None)
    for file in sorted(conf.rglob("*.yaml")):
        if any((folder / file.relative_to(conf)).exists() for folder in folders()):
            raise ConfigError(f"{asked}: {file}: conf/{file.relative_to(conf)} exists already; give it another name")
    return Plugin(asked, Path(spec.origin), conf)


class Registry(UserDict[str, Brought]):
    """What papers, and then plug-ins, bring of one kind, by name. The papers are imported when it is first read.

    kind: the name of their dicts. type_: of the values.
    """

    def __init__(self, kind: str, type_: type[Brought]) -> None:
        self.kind, self.type = kind, type_

    @functools.cached_property
    def data(self) -> dict[str, Brought]:  # type: ignore[override]
        """The dict behind the registry, as UserDict names it."""
        ours: dict[str, Brought] = {}
        for module in papers():
            ours |= _brought(module, module.__name__, self.kind, ours, self.type)
        return ours


@functools.cache
def papers() -> list[ModuleType]:
    """The papers of the package, imported, in the order of their pages."""
    return [import_module(f"{PAPERS}.{file.parent.name}") for file in _files_of_papers()]


def _files_of_papers() -> list[Path]:
    """The file of each folder of rankbench/papers by which it is imported."""
    found = {file.parent.name: file for file in sorted((Path(__file__).parents[1] / "papers").glob("*/__init__.py"))}
    return [found[name] for name in dict.fromkeys([*import_module(PAPERS).ORDER, *found]) if name in found]


def published_files() -> list[Path]:
    """The files of published numbers next to the papers and the plug-ins that were found. Imports none of these."""
    files = [*_files_of_papers(), *(plugin.file for plugin in FOUND.values())]
    return [path for file in files if (path := file.with_name(PUBLISHED)).exists()]


def load(
    registries: Mapping[str, tuple[MutableMapping[str, Any], type]], check_metric: Callable[[str, Any], None]
) -> None:
    """Import the plug-ins that were found, and add what they bring to the registries.

    registries: by the name of a dict in the plug-in, such as TASKS: our dict and the type of its values. check_metric:
    raises ConfigError for what is none. Raises ConfigError, and adds nothing, for a plug-in that cannot be imported,
    brings a name that exists or a metric that is none, or brings nothing.
    """
    for name in [name for name in FOUND if name not in LOADED]:
        plugin = FOUND.pop(name)  # one that fails is not tried again
        try:
            module = import_module(name)
        except (Exception, SystemExit) as error:
            name_file(plugin.file)
            refusal = ConfigError(f"{plugin.asked}: cannot be imported ({in_one_line(error)}); fix it, or leave it out")
            refusal.frames = "".join(traceback.format_list(frames_of_user(error)))
            raise refusal from None
        for own in (own for own, value in vars(module).items() if isinstance(value, dict) and own.isupper()):
            if own not in registries and (near := get_close_matches(own, registries, 1, ALMOST)):
                raise ConfigError(f"{plugin.asked}: has a dict {own}, did you mean {near[0]}?; give it another name")
        brought = {kind: _brought(module, plugin.asked, kind, *ours) for kind, ours in registries.items()}
        files = plugin.conf is not None or plugin.file.with_name(PUBLISHED).exists()
        if not files and not any(brought.values()):
            *first, last = registries
            raise ConfigError(
                f"{plugin.asked}: not a plug-in; a plug-in has a dict {', '.join(first)} or {last}, or next to it a "
                f"folder conf or a file {PUBLISHED}"
            )
        for metric in brought["METRICS"].items():
            name_file(plugin.file)  # an error in the metric is the user's own
            check_metric(*metric)
        for kind, theirs in brought.items():
            registries[kind][0].update(theirs)
        FOUND[name] = plugin
        LOADED.add(name)


def _brought(module: ModuleType, asked: str, kind: str, ours: Mapping[str, Any], type_: type) -> dict[str, Any]:
    theirs = getattr(module, kind, {})
    if not isinstance(theirs, dict) or not all(_fits(kind, value, type_) for value in theirs.values()):
        values = "that are classes" if type_ is type else f"of type {type_.__name__}"
        raise ConfigError(f"{asked}: {kind} is not a dict with values {values}; fix it")
    if known := next((name for name in theirs if name in ours), None):
        raise ConfigError(f"{asked}: {kind} has {known}, which exists already; give it another name")
    for name, value in theirs.items():
        if not isinstance(name, str):
            raise ConfigError(f"{asked}: {kind} has the name {name!r}; give a text")
        if kind == "TASKS":
            check_fields(value, f"{asked}: {kind}: {name}")
    return theirs


def _fits(kind: str, value: Any, type_: type) -> bool:
    """Whether a value has the type; models are classes themselves."""
    return isinstance(value, type) and issubclass(value, type_) if kind == "MODELS" else isinstance(value, type_)


def name_file(file: Path) -> None:
    """Note a file of the user's own code that is no plug-in."""
    if not LIBRARIES & set(file.resolve().parts):
        MODULES.add(file.resolve())


def is_of_user(file: str) -> bool:
    """Whether this is a file of code that the user named, or is next to one and no library."""
    if file.startswith("<"):  # of no file
        return False
    path = Path(file).resolve()
    is_library = bool(LIBRARIES & set(path.parts)) or any(map(path.is_relative_to, OURS))
    named = {plugin.file.resolve() for plugin in FOUND.values()} | MODULES
    packages = [file.parent for file in named if not is_library or file.stem == "__init__"]
    return path in named or any(map(path.is_relative_to, packages))


def frames_of_user(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of code that the user named, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename is not None:
        frames.append(traceback.FrameSummary(error.filename, error.lineno, "<module>", line=error.text))
    return [frame for frame in frames if is_of_user(frame.filename)]


def brought(kind: str) -> list[str]:
    """The names that imported plug-ins have brought of one kind, such as TASKS."""
    return [name for module in sorted(LOADED) for name in getattr(sys.modules.get(module), kind, {})]


def require(names: Iterable[str], folder: Path) -> None:
    """Raise ConfigError if a run was made with a plug-in that the user has not named: only naming imports it."""
    if any(name not in LOADED for name in names):
        words = f"plugins=[{','.join(names)}]"
        raise ConfigError(
            f"run={folder}: this run needs {words}, whose code is imported only if you name it; if you trust it, add "
            f"{words}"
        )


def folders() -> list[Path]:
    """The folders of YAML files: the shipped one, and those of plug-ins."""
    return [conf_dir(), *(plugin.conf for plugin in FOUND.values() if plugin.conf is not None)]


def choices(group: str) -> dict[str, Path]:
    """The YAML files of a group by their names, which are its choices."""
    files = (path for folder in folders() for path in (folder / group).glob("*.yaml") if path.exists())
    return dict(sorted((path.stem, path) for path in files))  # without the locks of editors, links to nothing


def defaults_of(file: Path) -> list[str | dict[str, Any]]:
    """The defaults list of a YAML file; empty if it has none."""
    return content_of(file).get("defaults") or []


def groups_of(command: str) -> dict[str, str | list[str] | None]:
    """The config groups of a command, each with its default choice."""
    entries = (entry for entry in defaults_of(conf_dir() / f"{command}.yaml") if isinstance(entry, dict))
    return {name: choice for entry in entries for name, choice in entry.items() if "/" not in name}


def comments_in(file: Path) -> list[str]:
    """The comment lines of a YAML file, without the one that says where its keys go."""
    lines = _text_of(file).splitlines()
    return [line[1:].strip() for line in lines if line[:1] == "#" and "@package" not in line]


def keys_in(file: Path) -> list[str]:
    """The keys at the top level of a YAML file."""
    return [name for name in content_of(file) if name != "defaults"]


def content_of(file: Path) -> dict[str, Any]:
    """The content of a YAML file."""
    import yaml

    try:
        content = yaml.load(_text_of(file), getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}
    except yaml.YAMLError as error:
        raise ConfigError(unreadable(file, error)) from None
    if not isinstance(content, dict):
        raise ConfigError(unreadable(file, TypeError("it holds no keys")))
    return content


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(unreadable(file, error)) from None


def unreadable(file: Any, error: Exception) -> str:
    """The refusal of a YAML file that cannot be read because of this error."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    line = f", line {mark.line + 1}" if mark else ""
    return f"{file}{line}: not readable as YAML ({' '.join(problem.split())}); correct the file"


def digest() -> str:
    """Digest of the source of the plug-ins that were imported; empty if there are none."""
    files = (FOUND[name].file for name in sorted(LOADED))
    sources = (sorted(file.parent.rglob("*.py")) if file.stem == "__init__" else [file] for file in files)
    texts = [file.read_bytes() for source in sources for file in source]
    return hashlib.sha256(b"\0".join(texts)).hexdigest() if texts else ""
