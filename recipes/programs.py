"""Run the program that a config names in its run directory.

with open_run(cfg) as run:
    run_program(cfg, run)
"""

from __future__ import annotations

from recipes.config import Config
from recipes.limits import memory_limit
from recipes.rundir import RunDir


def run_program(cfg: Config, run: RunDir) -> None:
    """Run `cfg.recipe`, under the memory limit that `cfg` sets, if any."""
    from recipes import finetune, pretrain  # torch and transformers: after the config has been found right

    program = {"pretrain": pretrain.main, "finetune": finetune.main}[cfg.recipe]
    with memory_limit(cfg):
        program(cfg, run)
