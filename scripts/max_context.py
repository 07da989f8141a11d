"""How long can a row be? The longest sequence for a model, strategy, device and budgets: predicted, then measured.

    python scripts/max_context.py +strategy=auto model=llama3_8b dtype=bf16 hardware=h100
    python scripts/max_context.py +strategy=offload model=llama3_8b hardware=h100 search.host_budget_gib=200
    python scripts/max_context.py +strategy=full hardware.memory_gib=0.5 search.step=256        # on this CPU, measured
    python scripts/max_context.py -m +strategy=none,full,selective hardware.memory_gib=0.5 search.step=256

Takes every key of train.py. Where the device asked for is at hand, the prediction is confirmed by real steps, each
length in a process that may allocate `hardware.memory_gib` and no more (search.confirm=yes or no says so otherwise).
Every length tried stands in runs/NAME/longest.json; a stopped search goes on with resume=true name=NAME.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

from recipes.cli import compose, main, report
from recipes.config import Config
from recipes.console import mib
from recipes.rundir import default_name, open_run

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
_SET_BY_THE_SEARCH = re.compile(
    r"\+*(name|runs_dir|resume|seq_len|steps|output|tracker|export|save_every|on_predicted_oom|eval\..*|sweep\..*)="
)


def max_context(cfg: Config) -> None:
    """Search in a run directory of its own and print what was found."""
    cfg = dataclasses.replace(cfg, name=cfg.name or name_of(cfg))
    with open_run(cfg) as run:
        from recipes.longest import find_longest  # torch: after the config has been found right

        found = find_longest(cfg, run, [sys.executable, str(TRAIN), *own_words(sys.argv[1:])])
    if cfg.output == "json":
        run.console.end(run.summary, run.path)
        return
    run.console.say(sentence(found))
    run.console.say(f"record: {run.path / 'longest.json'}")


def name_of(cfg: Config) -> str:
    """Name the search as runs are named, without a length."""
    return f"longest-{default_name(cfg).replace(f'-{cfg.seq_len}-', '-')}"


def own_words(argv: list[str]) -> list[str]:
    """Leave out of the command line what is not for the single tries: Hydra's own words, and names."""
    own = [word for word in argv if not word.startswith(("-", "hydra")) and "=" in word]
    return [word for word in own if not _SET_BY_THE_SEARCH.match(word)]


def with_budget(argv: list[str]) -> list[str]:
    """Give +strategy=auto what the device has, if no other budget is named."""
    bare = [word.lstrip("+") for word in argv]
    if "strategy=auto" not in bare or any(word.startswith("strategy.budget") for word in bare):
        return argv
    from ckpt.hardware import GIB
    from recipes.device import choose_device
    from recipes.planning import target_device

    others = [word for word in argv if not word.startswith("-") and not word.lstrip("+").startswith("strategy")]
    cfg = compose(others)
    return [*argv, f"strategy.budget_gib={target_device(cfg, choose_device(cfg.device)).usable_bytes / GIB!r}"]


def sentence(found: dict) -> str:
    """Say what was found in one or two lines."""
    capped = {"positions": " (all the positions of the model)", "search.most": " (search.most)", None: ""}
    host = (
        f", {mib(found['longest_predicted_host_bytes'])} on the host" if found["longest_predicted_host_bytes"] else ""
    )
    text = (
        f"longest predicted: {found['longest_predicted']:,} tokens{capped[found['capped_by']]}, "
        f"peak {mib(found['longest_predicted_peak_bytes'])} of {mib(found['budget_bytes'])}{host}"
    )
    if "longest_measured" in found:
        peak = found["longest_measured_peak_bytes"]
        text += f"\nlongest measured:  {found['longest_measured']:,} tokens" + (f", peak {mib(peak)}" if peak else "")
    return text


if __name__ == "__main__":
    try:
        sys.argv[1:] = with_budget(sys.argv[1:])
    except Exception as mistake:
        sys.exit(report(mistake, sys.argv[1:]))
    main(max_context)
