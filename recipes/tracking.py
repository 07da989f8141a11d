"""Where metrics go besides metrics.jsonl: Weights & Biases, or nowhere. One tracker a run, on rank 0.

W&B is online with an API key and offline without one; it never stops a training run. `facts` go into the manifest, and
`notice` is the one line for the console.

    tracker = open_tracker(cfg, run_path, config)
    tracker.log({"step": 1, "loss": 5.9})
    tracker.finish({"status": "ok"})
"""

from __future__ import annotations

import contextlib
import netrc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from recipes.config import Config
from recipes.manifest import scrub


class Tracker(Protocol):
    """What a run asks of a tracker."""

    facts: dict[str, str]
    notice: str

    def log(self, metrics: Mapping[str, Any]) -> None: ...
    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None: ...
    def picture(self, name: str, path: Path) -> None: ...
    def finish(self, summary: Mapping[str, Any]) -> None: ...


class NoTracker:
    """Tracks nothing: `tracker=none`, and every rank but the first."""

    facts: dict[str, str] = {}
    notice = ""

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Do nothing."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Do nothing."""

    def picture(self, name: str, path: Path) -> None:
        """Do nothing."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Do nothing."""


class WandbTracker:
    """One W&B run of its own, also when a process makes several."""

    def __init__(self, run: Any):
        self._run = run
        self.offline = run.settings.mode == "offline"
        self.facts = {"kind": "wandb", "id": run.id, "mode": "offline" if self.offline else "online"}
        if self.offline:
            self.notice = f"W&B: offline. Upload with: wandb sync {os.path.relpath(Path(run.dir).parent)}"
        else:
            self.facts["url"] = run.url
            self.notice = f"W&B: {run.url}"

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Log one step. `step` is a value like the others: see `define_metric` in `_start`."""
        self._run.log(dict(metrics))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table, such as the plan in force."""
        import wandb

        self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def picture(self, name: str, path: Path) -> None:
        """Log a picture file."""
        import wandb

        self._run.log({name: wandb.Image(str(path))})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary and end the W&B run: finished if its status is ok, else failed."""
        for name, value in summary.items():
            if value is not None:
                self._run.summary[name] = value
        self._run.finish(exit_code=0 if summary["status"] == "ok" else 1)


def open_tracker(
    cfg: Config, path: Path, config: Mapping[str, Any], earlier_id: str | None = None, kind: str | None = None
) -> Tracker:
    """Start the tracker that the config asks for; `earlier_id` continues the W&B run of a resumed run.

    kind: W&B's job type; None: the recipe.

    If W&B cannot start online (no network, a refused key) it starts offline; if not even that, the run goes on without,
    and `notice` says so.
    """
    if cfg.tracker == "none":
        return NoTracker()
    import wandb

    mode = _mode(cfg)
    if mode == "disabled":
        return NoTracker()
    try:
        return _start(cfg, path, config, mode, earlier_id, kind)
    except (wandb.errors.Error, OSError) as error:
        problem = " ".join(str(error).split())
    if mode == "online":
        try:
            tracker = _start(cfg, path, config, "offline", earlier_id, kind)
            tracker.notice = f"W&B could not go online ({problem}). {tracker.notice}"
            return tracker
        except (wandb.errors.Error, OSError) as error:
            problem = " ".join(str(error).split())
    tracker = NoTracker()
    tracker.notice = f"W&B could not start ({problem}): metrics go to metrics.jsonl alone."
    return tracker


def has_api_key() -> bool:
    """Tell whether W&B would find credentials: WANDB_API_KEY, an identity token, or the host's entry in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        try:
            if path and netrc.netrc(os.path.expanduser(path)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _mode(cfg: Config) -> str:
    """Resolve `wandb.mode=auto`: WANDB_MODE if set, as every W&B user expects, else by the presence of a key."""
    if cfg.wandb.mode != "auto":
        return cfg.wandb.mode
    said = os.environ.get("WANDB_MODE", "")
    if said in ("online", "offline", "disabled"):
        return said
    return "online" if has_api_key() else "offline"


def _start(
    cfg: Config, path: Path, config: Mapping[str, Any], mode: str, earlier_id: str | None, kind: str | None
) -> WandbTracker:
    import wandb

    # create_new: a second init in one process would return the first run. console=off: W&B must not capture the
    # progress bar. resume is for online runs only: offline it is ignored with a warning.
    settings = wandb.Settings(silent=True, console="off", init_timeout=30)
    resume = "allow" if earlier_id and mode == "online" else None
    with _scrubbed_command_line():
        run = wandb.init(
            project=cfg.wandb.project,
            entity=cfg.wandb.entity,
            group=cfg.wandb.group or cfg.sweep.name,
            name=path.name,
            config=dict(config),
            dir=str(path.resolve()),  # its service keeps the working directory that it was started in
            mode=mode,
            reinit="create_new",
            settings=settings,
            id=earlier_id,
            resume=resume,
            job_type=kind or cfg.recipe,
        )
    # Our own step is the x axis: W&B's internal one only counts calls and cannot go back.
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    return WandbTracker(run)


@contextlib.contextmanager
def _scrubbed_command_line() -> Iterator[None]:
    """Hide secrets in sys.argv while W&B starts: it writes the command line into its log (0.31, `Settings._args`)."""
    words = sys.argv
    sys.argv = scrub(words)
    try:
        yield
    finally:
        sys.argv = words
