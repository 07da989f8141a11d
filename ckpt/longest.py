"""The longest sequence whose step fits: few predictions, because peaks grow almost in proportion to tokens.

Owns the search. `longest` knows numbers only, whatever they come from: predictions, or steps measured under a limit.

    found = longest_that_fits(model, "selective", work, hardware="h100")
    found.seq_len, found.peak_bytes, found.is_capped
    longest(lambda seq_len: measured_peak(seq_len), budget_bytes, step=128)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ckpt.hardware import Device
from ckpt.positions import learned_positions
from ckpt.predict import as_device, predict
from ckpt.simulate import Simulator
from ckpt.workload import Workload

MOST_TOKENS = 2**24


@dataclass(frozen=True)
class Longest:
    """seq_len: the longest, a multiple of `step`; 0 if not even one step of tokens fits. peak_bytes: its peak (of one
    step of tokens where none fits). is_capped: nothing longer was looked at. peaks: all lengths that were tried."""

    seq_len: int
    peak_bytes: int
    is_capped: bool
    peaks: Mapping[int, int]


def longest(
    peak_of: Callable[[int], int],
    budget_bytes: int,
    *,
    step: int = 1024,
    most: int = MOST_TOKENS,
    known: Mapping[int, int] | None = None,
    at_zero: int = 0,
    check_next: bool = True,
) -> Longest:
    """Find the longest seq_len, a multiple of `step` up to `most`, whose peak is at most `budget_bytes`.

    The result was tried and fits. peak_of: bytes for a number of tokens, never falling. known: peaks that are known
    already. at_zero: about what a step without tokens would take; a good guess saves tries. check_next: also try the
    next longer one and see that it does not fit; without it, the straight line through two lengths that were tried may
    prove that, which is right where peaks grow at least in proportion.

    Raises ValueError for a step or a limit below 1, and for a budget that is no number of bytes.
    """
    for name, value in (("step", step), ("most", most)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"longest: {name}={value!r} must be a whole number of tokens")
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, (int, float)) or not budget_bytes >= 0:
        raise ValueError(f"longest: budget_bytes={budget_bytes!r} must be bytes, a number from 0 on: 80 * 2**30")
    if step < 1 or most < step:
        raise ValueError(f"longest: step={step} must be 1 or more, and most={most} at least one step")
    peaks = dict(known or {})
    top = most // step * step

    def bounds() -> tuple[int, int]:
        """The longest multiple of `step` that fits, as far as is known, and the shortest length that does not."""
        low = max((n for n, peak in peaks.items() if peak <= budget_bytes and n <= top and n % step == 0), default=0)
        return low, min((n for n, peak in peaks.items() if peak > budget_bytes), default=top + step)

    low, high = bounds()
    stalled = 0  # tries in a row that left more than half of the range; lines mislead where peaks are no straight lines
    while min(high, top + step) - low > step and (check_next or not _is_proven(peaks, low + step, budget_bytes)):
        before = min(high, top + step) - low
        guess = (
            (low + min(high, top + step)) // 2 if stalled > 1 and high <= top else _guess(peaks, budget_bytes, at_zero)
        )
        guess = min(max(guess // step * step, low + step), (min(high, top + step) - 1) // step * step)
        peaks[guess] = peak_of(guess)
        low, high = bounds()
        stalled = stalled + 1 if min(high, top + step) - low > before // 2 else 0
    if not low and step not in peaks:
        peaks[step] = peak_of(step)
    return Longest(low, peaks[low or step], low == top, peaks)


def _guess(peaks: Mapping[int, int], budget_bytes: int, at_zero: int) -> int:
    """Where the straight line through the two lengths nearest to the budget meets it; at most eight times the longest
    that fits while nothing too long is known."""
    below = sorted(n for n, peak in peaks.items() if peak <= budget_bytes)
    above = sorted(n for n, peak in peaks.items() if peak > budget_bytes)
    most = above[0] if above else 8 * below[-1] if below else 8192
    points = dict(peaks)
    if below and above:
        a, b = below[-1], above[0]
    elif len(peaks) > 1:
        a, b = below[-2:] if below else above[:2]
    elif peaks:
        a, b = 0, next(iter(peaks))
        points[0] = at_zero
    else:
        return most
    if points[b] <= points[a]:
        return most
    return min(most, max(0, a + int((budget_bytes - points[a]) * (b - a) / (points[b] - points[a]))))


def _is_proven(peaks: Mapping[int, int], tokens: int, budget_bytes: int) -> bool:
    """Whether a line through two lengths on the same side of `tokens` is above the budget there. Peaks are the highest
    of a few straight lines, and such a function lies above all lines drawn on from it."""
    tried = sorted(peaks)
    for a, b in pairwise(tried):
        if not a < tokens < b:
            slope = (peaks[b] - peaks[a]) / (b - a)
            if peaks[a] + slope * (tokens - a) > budget_bytes:
                return True
    return False


def longest_that_fits(
    model: Any,
    strategy: Any,
    work: Workload,
    hardware: str | Device | None = None,
    *,
    budget_bytes: int | None = None,
    predict_peak: Callable[[int], int] | None = None,
    **search: Any,
) -> Longest:
    """Search by prediction: for what a device has, or for a budget. Other arguments are those of `longest`.

    model: anything that `predict` takes; one Simulator makes all predictions. Where the model's positions end in a
    table, so does the search.

    Raises ValueError without either.
    """
    device = None if hardware is None else as_device(hardware, work.dtype)
    if budget_bytes is None and device is None:
        raise ValueError("longest_that_fits needs hardware, or a budget: budget_bytes=...")
    budget = device.usable_bytes if budget_bytes is None else budget_bytes
    if predict_peak is not None:
        return longest(predict_peak, budget, **search)
    simulator = model if isinstance(model, Simulator) else Simulator(model, work)
    limit = learned_positions(simulator.model)
    if limit is not None:
        search["most"] = min(limit, search.get("most", limit))
        search["step"] = min(limit, search.get("step", 1024))
    try:
        return longest(lambda n: peak_at(simulator, n, strategy, device), budget, **search)
    finally:
        if simulator is not model:
            simulator.close()


def peak_at(simulator: Simulator, seq_len: int, strategy: Any, device: Device | None) -> int:
    """Return the predicted peak in bytes of a step with rows of `seq_len` tokens."""
    with simulator.at_length(seq_len):
        return predict(simulator, strategy, hardware=device).peak_bytes
