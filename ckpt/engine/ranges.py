"""Names for profilers: a replay shows up as "layer 3 (...) replay" in a trace. Costs nothing without a profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

_NOTHING = nullcontext()


def named(layer: str, what: str) -> AbstractContextManager:
    """Return a profiler range, or nothing if no profiler runs (asking takes well under a microsecond)."""
    return record_function(f"{layer} {what}") if torch.autograd._profiler_enabled() else _NOTHING
