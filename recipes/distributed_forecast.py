"""The forecast of a run over several ranks: made by rank 0 in a process apart, and the same decisions for all.

One rank of many is simulated on a process group of its own (`ckpt/parallel/simulated.py`), which a process that has
joined the run's cannot have beside it. What is planned there, `auto`'s plan and the number of tiles, is applied by all.

    foreseen = foresee_over_ranks(cfg, run)

    python -m recipes.distributed_forecast < config.json         # the process apart
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

from recipes.config import Config, from_dict, to_dict
from recipes.distributed import ONE
from recipes.errors import RunStopped, is_mistake, one_line
from recipes.manifest import scrub

SHARE = 0.8
"""Of the time that the other ranks wait for rank 0: a forecast that takes longer is given up, not the run."""
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


def foresee_over_ranks(cfg: Config, run: Any) -> Any:
    """Predict what one rank of the run takes and return what to apply, the same on every rank.

    Raises as `foresee` does, on every rank.
    """
    from ckpt import strategies
    from ckpt.plan import Plan
    from recipes.forecast import Foreseen

    degrees = run.ranks.layout.degrees
    parallel = dataclasses.replace(
        cfg.parallel, replicate=degrees.replicate, shard=degrees.shard, tensor=degrees.tensor, sequence=degrees.sequence
    )

    def ask() -> dict[str, Any]:
        found = _ask(dataclasses.replace(cfg, parallel=parallel))
        for line in found["said"]:
            run.console.say(line)
        run.update(**found["summary"])
        run.describe(**found["manifest"])
        if found["error"] is not None:
            status, text = found["error"]
            raise ValueError(text) if status == "mistake" else RunStopped(status, text)
        return found

    found = run.ranks.from_main(ask)
    strategy = strategies.make(cfg.strategy.name, **cfg.strategy.fields)
    if found["plan"] is not None:
        strategy = Plan.from_dict(found["plan"])
    return Foreseen(strategy, found["tile_mlp"])


def _ask(cfg: Config) -> dict[str, Any]:
    """Run the process apart. A forecast that cannot be made is said, unless the run cannot do without."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    nothing = {"plan": None, "tile_mlp": cfg.tile_mlp, "summary": {}, "manifest": {}, "error": None}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "recipes.distributed_forecast"], input=json.dumps(scrub(to_dict(cfg))), text=True,
            capture_output=True, env=environment, timeout=SHARE * cfg.parallel.timeout_seconds, check=True,
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        reason = one_line(error)
    if cfg.strategy.name == "auto" or cfg.tile_mlp == "auto":
        raise RunStopped("failed", f"what one rank takes could not be predicted, and auto plans by that: {reason}")
    return nothing | {"said": [f"not predicted: {reason}"]}


class _Notes:
    """Stands for the run in the process apart: collects what would be printed and written."""

    def __init__(self) -> None:
        self.ranks, self.console = ONE, self
        self.said: list[str] = []
        self.summary: dict[str, Any] = {}
        self.manifest: dict[str, Any] = {}

    def say(self, line: str) -> None:
        self.said.append(line)

    def update(self, **fields: Any) -> None:
        self.summary |= fields

    def describe(self, **fields: Any) -> None:
        self.manifest |= fields


def main() -> None:
    """Answer one request."""
    from recipes.device import choose_device
    from recipes.forecast import foresee
    from recipes.model import load_config

    cfg = from_dict(json.loads(sys.stdin.read()))
    notes, plan, tiles, error = _Notes(), None, cfg.tile_mlp, None
    try:
        foreseen = foresee(cfg, load_config(cfg.model, cfg.seq_len), choose_device(cfg.device), notes)
        tiles = foreseen.tile_mlp
        plan = foreseen.strategy.to_dict() if cfg.strategy.name == "auto" else None
    except RunStopped as stopped:
        error = (stopped.status, str(stopped))
    except ValueError as mistake:
        if not is_mistake(mistake):
            raise
        error = ("mistake", str(mistake))
    answer = {"plan": plan, "tile_mlp": tiles, "said": notes.said, "error": error}
    print(json.dumps(scrub(answer | {"summary": notes.summary, "manifest": notes.manifest})))


if __name__ == "__main__":
    main()
