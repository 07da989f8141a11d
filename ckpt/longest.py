"""The longest sequence whose step fits: few predictions, because peaks grow almost in proportion to tokens.

Owns the search. `longest` knows numbers only, whatever they come from: predictions, or steps measured under a limit.

    found = longest_that_fits(model, "selective", work, hardware="h100")
    found.seq_len, found.peak_bytes, found.is_capped
    longest(lambda seq_len: measured_peak(seq_len), budget_bytes, step=128)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.hardware import Device
from ckpt.predict import as_device, predict
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
    check_next: bool = True,
) -> Longest:
    """Find the longest seq_len, a multiple of `step` up to `most`, whose peak is at most `budget_bytes`.

    The result was tried and fits. peak_of: bytes for a number of tokens, never falling. known: peaks that are known
    already. check_next: also try the next longer one and see that it does not fit; without it, two lengths that were
    tried and the straight line through them may prove that, which is right where peaks grow at least in proportion.

    Raises ValueError for a step or a limit below 1.
    """
    if step < 1 or most < step:
        raise ValueError(f"longest: step={step} must be 1 or more, and most={most} at least one step")
    peaks = dict(known or {})

    def fits(tokens: int) -> bool:
        if tokens not in peaks:
            peaks[tokens] = peak_of(tokens)
        return peaks[tokens] <= budget_bytes

    top = most // step * step
    if not fits(step):
        return Longest(0, peaks[step], False, peaks)
    low = max(n for n in peaks if n % step == 0 and n <= top and fits(n))
    high = min((n for n in peaks if n > low and not fits(n)), default=None)
    wide = False  # whether the last guess left more than half of the interval

    def end() -> int:
        return top + step if high is None else min(high, top + step)

    while end() - low > step and (check_next or not _is_proven(peaks, low, step, budget_bytes)):
        before = end() - low
        guess = (low + end()) // 2 if wide and high is not None else _guess(peaks, low, high, budget_bytes)
        guess = min(max(guess // step * step, low + step), (end() - 1) // step * step)
        if fits(guess):
            low = guess
        else:
            high = guess
        wide = end() - low > before // 2
    return Longest(low, peaks[low], low == top, peaks)


def _guess(peaks: Mapping[int, int], low: int, high: int | None, budget_bytes: int) -> int:
    """Where the straight line through the nearest two lengths meets the budget; at most eight times the longest that
    fits while nothing too long is known."""
    other = high if high is not None else max((n for n in peaks if n < low), default=None)
    most = high or 8 * low
    if other is None or peaks[other] == peaks[low]:
        return most
    slope = (peaks[other] - peaks[low]) / (other - low)
    return min(most, low + int((budget_bytes - peaks[low]) / slope))


def _is_proven(peaks: Mapping[int, int], low: int, step: int, budget_bytes: int) -> bool:
    """Whether the line through the longest that fits and the one before exceeds the budget one step further."""
    before = max((n for n in peaks if n < low), default=None)
    if before is None:
        return False
    slope = (peaks[low] - peaks[before]) / (low - before)
    return peaks[low] + slope * step > budget_bytes


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

    Raises ValueError without either.
    """
    device = None if hardware is None else as_device(hardware, work.dtype)
    if budget_bytes is None and device is None:
        raise ValueError("longest_that_fits needs hardware, or a budget: budget_bytes=...")
    budget = device.usable_bytes if budget_bytes is None else budget_bytes
    return longest(
        predict_peak or (lambda n: predict(model, strategy, work.replace(seq_len=n), device).peak_bytes),
        budget,
        **search,
    )
