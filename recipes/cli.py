"""From the command line to a checked Config: Hydra's grammar and multirun, our errors and exit codes.

Owns the spelling of overrides, the exit codes and how an error is shown. Exit codes: 0 ok, 2 a mistake in what was
asked, 1 the run failed, 130 interrupted.

    main(train)        # train(cfg: Config) -> None
"""

from __future__ import annotations

import difflib
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.allocator import keep_freed_memory
from recipes.config import Config, from_dict, to_dict
from recipes.distributed import PATIENCE_SECONDS, OtherRankFailed
from recipes.errors import RunStopped, is_disk_full, is_mistake, one_line
from recipes.resuming import continued
from recipes.schema import docs
from recipes.threads import spin_briefly

CONF = Path(__file__).resolve().parent.parent / "conf"
GROUPS = ("model", "data", "peft", "hardware", "recipe")
# Hydra's own, less --experimental-rerun, which unpickles a file.
FLAGS = {
    *("-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "--resolve", "-p", "--package", "-r", "--run"),
    *("-m", "--multirun", "-sc", "--shell-completion", "-cp", "--config-path", "-cn", "--config-name"),
    *("-cd", "--config-dir", "-i", "--info"),
}
USAGE_ERROR, RUN_FAILED, INTERRUPTED = 2, 1, 130


def main(task: Callable[[Config], None]) -> None:
    """Compose the config from sys.argv, check it and call `task`; with -m, once a job. Ends the process on an error."""
    argv = sys.argv[1:]
    words: list[str] = []
    spin_briefly()
    keep_freed_memory()
    failures: list[BaseException] = []

    def job(node: DictConfig) -> None:
        # Kept from Hydra, which would print a line of its own before it lets an exception through.
        try:
            task(to_config(node, words))
        except (Exception, KeyboardInterrupt) as error:
            failures.append(error)

    if {"-h", "--help"} & set(argv):
        print(help_text(sys.modules[task.__module__].__doc__ or ""))
        return
    try:
        signal.signal(signal.SIGTERM, raise_terminated)
        # Hydra would print its own multi-line report and exit with 1; with this it lets the exception through to us.
        os.environ["HYDRA_FULL_ERROR"] = "1"
        register_defaults()
        words += normalise(argv)
        with tempfile.TemporaryDirectory() as scratch:
            sys.argv[1:] = words + sweep_overrides(argv, scratch)
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    except (Exception, KeyboardInterrupt) as error:
        failures.append(error)
    if failures:
        leave_the_word_to_rank_0(failures[0])
        code = report(failures[0], argv)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            # Taking a process group down waits for the other ranks, and these may wait for us.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        sys.exit(code)


def leave_the_word_to_rank_0(error: BaseException) -> None:
    """On another rank, wait with a mistake: rank 0 makes the same one, says it, and the launcher ends us meanwhile."""
    if _is_usage_error(error) and os.environ.get("RANK", "0") != "0":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(USAGE_ERROR))
        time.sleep(PATIENCE_SECONDS)


def report(error: BaseException, argv: Sequence[str]) -> int:
    """Print an error in one line, with its traceback only if asked for, and return the exit code."""
    if os.environ.get("CKPT_TRACEBACK") == "1" or any(re.fullmatch(r"\+*debug=(true|True|1)", word) for word in argv):
        traceback.print_exception(error)
    # All ranks stop together, and one says it.
    if not isinstance(error, (OtherRankFailed, RunStopped)) or os.environ.get("RANK", "0") == "0":
        print(f"error: {describe(error)}", file=sys.stderr)
    return exit_code(error)


def compose(overrides: Sequence[str] = ()) -> Config:
    """Make the Config that `train.py OVERRIDES` would run, in this process: for scripts, tests and notebooks."""
    register_defaults()
    words = normalise(overrides)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return to_config(hydra.compose("config", overrides=words), words)


def without_hydra(node: DictConfig) -> DictConfig:
    """Return a composed node without Hydra's own part."""
    return OmegaConf.masked_copy(node, [key for key in node if key != "hydra"])


def to_config(node: DictConfig, words: Sequence[str] = ()) -> Config:
    """Check a composed Hydra node and make the Config of it.

    Where `words`, the overrides it was composed with, resume a run, it is that run's own config with what they change.
    """
    values = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    return from_dict(continued(values, words) if words and values.get("resume") else values)


def register_defaults() -> None:
    """Tell Hydra every key and its default, so that `--cfg job` shows them and conf/ holds differences only."""
    defaults = to_dict(Config())
    del defaults["strategy"]  # conf/strategy/none.yaml brings it, so that `+strategy=X` can add to it
    ConfigStore.instance().store(name="defaults_of_program", node=defaults)


def normalise(argv: Sequence[str]) -> list[str]:
    """Rewrite overrides so that every usual spelling means the same to Hydra.

    `strategy=X` and `++strategy=X` become `+strategy=X`, as the group stands outside the defaults list (see
    conf/config.yaml); `+model=X` becomes `model=X`; and a plain key gets `++`: then an unknown one reaches our own
    check, which names the nearest, and not Hydra's advice to add a `+`. -m may stand anywhere; Hydra wants it first.
    """
    for word in argv:
        if word.startswith("-") and word.partition("=")[0] not in FLAGS:
            raise ValueError(f"{word} is no flag: a key is written key=value, without dashes. --help lists them.")
    multirun = [word for word in argv if word in ("-m", "--multirun")]
    out = multirun[:1]
    for word in (word for word in argv if word not in multirun):
        found = re.match(r"^(\+{0,2})([A-Za-z_][\w.]*)(@[\w.]+)?=", word)
        if not found or found[3] or found[2].split(".")[0] == "hydra":
            out.append(word)
            continue
        name, rest = found[2], word[found.end(2) :]
        prefix = "+" if name == "strategy" else "" if name in GROUPS else "++"
        out.append(prefix + name + rest)
    return out


def sweep_overrides(argv: Sequence[str], scratch: str) -> list[str]:
    """Add what a multirun needs: a name for all its jobs, and a folder that Hydra's own files vanish with."""
    if not {"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(argv):
        return []
    if "RANK" in os.environ:
        raise ValueError("-m starts its jobs itself: put torchrun in front of single runs only.")
    named = any(word.lstrip("+").startswith("sweep.name=") for word in argv)
    name = [] if named else [f"++sweep.name=sweep-{time.strftime('%Y%m%d-%H%M%S')}"]
    return [f"hydra.sweep.dir='{scratch}'", *name]


def describe(error: BaseException) -> str:
    """Say in one line what went wrong and, where it is known, what to change."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return _describe_hydra(error)
    clear = is_mistake(error) or is_disk_full(error) or isinstance(error, RunStopped)
    return one_line(error) + ("" if clear else " (CKPT_TRACEBACK=1 or debug=true shows where)")


def exit_code(error: BaseException) -> int:
    """Choose the exit code of an error."""
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, RunStopped) and error.status == "interrupted"):
        return INTERRUPTED
    return USAGE_ERROR if _is_usage_error(error) else RUN_FAILED


def _is_usage_error(error: BaseException) -> bool:
    """Tell whether the command line or the config is wrong. Rank 0's mistake, seen from another rank, is one too: which
    of them the launcher sees first is chance."""
    told = isinstance(error, OtherRankFailed) and error.is_mistake
    return told or is_mistake(error) or isinstance(error, (HydraException, OmegaConfBaseException))


def help_text(docstring: str) -> str:
    """Write what --help shows: the program's docstring, the choices of every group, and every key."""
    lines = [docstring.strip(), "", "Choices:"]
    lines += [
        f"    {'+' if group == 'strategy' else ''}{group}={'|'.join(options(group))}" for group in ("strategy", *GROUPS)
    ]
    lines += ["", "Keys (type; default):"]
    for path, type_, default, doc in docs(Config):
        if path != "strategy.fields":
            lines.append(f"    {path:<28} {doc} ({type_}; {default})")
    lines += ["", "Fields of a strategy: conf/strategy/NAME.yaml. Hydra's own flags: --hydra-help."]
    return "\n".join(lines)


def options(group: str) -> list[str]:
    """List the choices of a config group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _describe_hydra(error: Exception) -> str:
    missing = getattr(error, "missing_cfg_file", None)
    if missing and "/" in str(missing):
        group, name = str(missing).rsplit("/", 1)
        near = difflib.get_close_matches(name, options(group), n=1)
        did_you_mean = f" Did you mean {near[0]}?" if near else ""
        return f"{group}={name} is unknown.{did_you_mean} Choose {', '.join(options(group))}."
    override = getattr(error, "override", None)
    if isinstance(error, OverrideParseException) and override:
        return (
            f"cannot read {override!r}: write key=value, with quotes around a value that holds , = or spaces "
            f"(\"key='a,b'\"), and a + between members of a keep-list."
        )
    text = " ".join(str(error).split())
    ambiguous = re.match(r"Ambiguous value for argument '\+*(.+?)'", text)
    if ambiguous:
        return (
            f"{ambiguous[1]} holds a comma: add -m to run one job for each value, or write [a,b] for a list "
            f"(keep-lists are spelled a+b)."
        )
    return text


class Terminated(KeyboardInterrupt):
    """SIGTERM, as the exception that Ctrl-C raises too, so that both record the run's status."""

    signum = signal.SIGTERM


def raise_terminated(signum: int, frame: Any) -> None:
    """Handle SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
    raise Terminated
