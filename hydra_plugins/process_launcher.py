"""Hydra launcher that runs every job of a sweep in a process of its own: `-m` uses it by default (conf/config.yaml).

A job that runs out of memory, exits or is killed cannot take the sweep with it, and leaves no memory behind; Hydra's
own launcher runs all jobs in one process. What a sweep is stands in recipes/sweep.py. Hydra 1.3.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher

ConfigStore.instance().store(
    group="hydra/launcher",
    name="process",
    provider="process_launcher",
    node={"_target_": "hydra_plugins.process_launcher.ProcessLauncher"},
)


class ProcessLauncher(Launcher):
    """Hands the jobs of one sweep to `recipes.sweep`."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        """Take what Hydra gives a launcher before the sweep."""
        self._loader = hydra_context.config_loader
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Check the configs of all jobs, then run them one after the other. Raises RunStopped if one did not end ok."""
        from recipes import cli, sweep

        configs = []
        for overrides in job_overrides:
            node = self._loader.load_sweep_config(self._config, list(overrides))
            configs.append(cli.to_config(cli.without_hydra(node)))
        command = [sys.executable, *sweep.by_torchrun(configs[0].sweep.ranks), sys.argv[0]]
        sweep.run(configs, job_overrides, command=command, first=initial_job_idx)
        return [JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED) for overrides in job_overrides]
