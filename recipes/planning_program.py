"""What plan.py does: predict, print, write plans/NAME/. The tables stand in planning_tables.py.

main(cfg)                       # no strategy: the table of all; +strategy=NAME: that one in full
diff(["plans/A", "runs/B/plan.json"])
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ckpt import strategies
from ckpt.auto import told
from ckpt.explain import explain, plan_of
from ckpt.plan import Plan
from ckpt.plan_diff import diff as diff_plans
from ckpt.simulate import Simulator
from recipes import planning_tables as tables
from recipes.config import Config
from recipes.console import Console
from recipes.device import choose_device
from recipes.model import load_config
from recipes.picture import draw_memory
from recipes.planning import (
    model_without_weights,
    refuse_what_is_not_predicted,
    strategy_of,
    target_device,
    with_known_shape,
)
from recipes.planning_rows import (
    Say,
    best,
    label_of,
    plan_rows,
    predicted,
    search_longest,
    smallest,
    what_holds_most,
    words_of,
)
from recipes.rundir import write_atomically
from recipes.workload import workload_of

# Overrides that say how to plan, and nothing about the run.
_HOW = re.compile(r"\+*(hardware|hardware\.\w+|output|plans_dir|strategy|strategy\.\w+|debug)=")


def main(cfg: Config, words: Sequence[str] | None = None) -> None:
    """Plan the run that `cfg` describes. words: the overrides that it came from, for the command to copy."""
    words = _overrides() if words is None else words
    console = Console(cfg.output)
    refuse_what_is_not_predicted(cfg)
    cfg = with_known_shape(cfg, console.say)
    config = load_config(cfg.model, cfg.seq_len)
    model = model_without_weights(cfg, config)
    device = target_device(cfg, choose_device(cfg.device))
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    folder = _folder(cfg)
    try:
        with _progress(console) as say:
            found = _all(cfg, model, device, say) if cfg.strategy.name == "none" else _one(cfg, model, device, say)
    except BaseException:
        with contextlib.suppress(OSError):  # not empty: an earlier plan stands there
            folder.rmdir()
        raise
    found |= {"device": device.name, "device_bytes": device.usable_bytes, "positions": positions}
    found["command"] = command(found["overrides"], words)
    _write(folder, found)
    if cfg.output == "json":
        console.results.print(json.dumps(_plain(found) | {"path": str(folder)}), markup=False)
    else:
        tables.show(console.results, found, cfg, folder)


def _all(cfg: Config, model: nn.Module, device: Any, say: Say) -> dict[str, Any]:
    rows = plan_rows(cfg, model, device, say)
    chosen = best(rows) or smallest(rows)
    if chosen is None:
        raise ValueError(f"no strategy fits this model: {rows[0].error}")
    note = None if chosen.fits else f"Nothing fits {device.name}. {what_holds_most(chosen)}"
    return {"rows": rows, "best": chosen, "overrides": chosen.words, "prediction": chosen.prediction, "note": note}


def _one(cfg: Config, model: nn.Module, device: Any, say: Say) -> dict[str, Any]:
    chosen = cfg.strategy
    strategy = strategy_of(cfg, device)
    simulator = Simulator(model, workload_of(cfg))
    if strategies.makes_plan(strategy):
        strategy = strategy.plan(simulator, simulator.work, progress=say)
    made = dict(getattr(strategy, "source", {}))
    say(f"predicting {label_of(chosen.name, chosen.fields)}")
    work, prediction = predicted(simulator, strategy, device)
    records = {}
    if len(prediction.programs) < prediction.num_layers:
        say("looking at the layers that are kept whole")
        records = {i: program.record for i, program in simulator.run("full", tile_mlp=1).programs.items()}
    say("looking for the longest sequence that fits")
    tokens = search_longest(simulator, strategy, work, device, prediction)
    asked = {"strategy": {"name": chosen.name, **chosen.fields}, "workload": work.to_dict()}
    return {
        "prediction": prediction,
        "kinds": explain(prediction, device=device, records=records),
        "plan": plan_of(prediction, made | asked),
        "longest_seq_len": tokens,
        "note": told(made),
        "overrides": words_of(chosen.name, chosen.fields),
        "label": label_of(chosen.name, chosen.fields),
    }


def diff(paths: Sequence[str]) -> None:
    """Print what two plans do differently. Raises ValueError unless there are two that can be read."""
    if len(paths) != 2:
        raise ValueError(f"plan.py diff takes two plans, got {len(paths)}: plan.py diff plans/A runs/B")
    a, b = (_load(path) for path in paths)
    tables.show_diff(Console().results, paths, diff_plans(a, b))


def command(overrides: Sequence[str], words: Sequence[str]) -> str:
    """The command that trains what was planned, to copy."""
    kept = [word for word in words if not _HOW.match(word)]
    start = ["python", "train.py"]
    if any(word.startswith("parallel.") for word in words):
        start = ["scripts/launch/torchrun.sh"]
    return shlex.join([*start, *overrides, *kept])


def _overrides() -> list[str]:
    """The words after plan.py, as they were typed: Hydra's spelling stands in sys.argv by now."""
    words = sys.orig_argv
    at = next((i for i, word in enumerate(words) if Path(word).name == "plan.py"), len(words))
    return words[at + 1 :]


def _load(path: str) -> Plan:
    file = Path(path)
    if file.is_dir():
        file = file / "plan.json"
    if not file.is_file():
        raise ValueError(f"{path} holds no plan: give a plan.json, or the folder of a run or of one strategy's plan.")
    return Plan.load(str(file))


def _folder(cfg: Config) -> Path:
    """plans/NAME; a plan of the same name is written over, since it says the same."""
    model = re.sub(r"[^\w.-]+", "_", Path(cfg.model.name or "model").name)
    what = "all" if cfg.strategy.name == "none" else cfg.strategy.name
    folder = Path(cfg.plans_dir) / (cfg.name or f"{what}-{model}-{cfg.seq_len}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make {folder}: {error.strerror}. Give another plans_dir=...") from None
    return folder


def _write(folder: Path, found: dict[str, Any]) -> None:
    write_atomically(folder / "prediction.json", json.dumps(_plain(found), indent=2) + "\n")
    if "plan" in found:
        found["plan"].save(str(folder / "plan.json"))
    prediction = found["prediction"]
    what = found["best"].label if "best" in found else found["label"]
    draw_memory(prediction, folder / "memory.png", title=f"One training step, predicted: {what}, {found['device']}")


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """What was found, for JSON."""
    values = {key: found[key] for key in ("device", "device_bytes", "positions", "command")}
    if "rows" in found:
        return values | {
            "best": found["best"].label if found["best"].fits else None,
            "note": found["note"],
            "rows": [row.to_dict() for row in found["rows"]],
        }
    mine = {"longest_seq_len": found["longest_seq_len"], "layers": [kind.to_dict() for kind in found["kinds"]]}
    return values | found["prediction"].to_dict() | mine | {"plan": found["plan"].to_dict()}


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Say]:
    """One line that changes on a terminal; elsewhere a line for each step."""
    if not console.rich.is_terminal:
        yield console.say
        return
    with console.rich.status("predicting") as status:
        yield lambda text: status.update(text)
