"""The largest size whose planned bytes fit a budget."""

from __future__ import annotations

from collections.abc import Callable

GIB = 2**30
_FURTHER = 8


def largest(total: Callable[[int], int], guess: int, budget: int, cap: int) -> int:
    """The largest n <= cap with ``total(n) <= budget``, 0 if there is none; ``total`` must not decrease.

    Bytes are nearly straight lines in every size, so interpolation takes a handful of evaluations.
    """
    if cap < 1 or (low_total := total(1)) > budget:
        return 0
    low, high = 1, max(2, min(guess, cap))
    while high < cap and (high_total := total(high)) <= budget:
        slope = (high_total - low_total) / (high - low)
        low, low_total = high, high_total
        further = cap if slope <= 0 else high + int((budget - high_total) / slope) + 1
        # What is far beyond the answer takes long to evaluate, and the line so far may be another part's.
        high = min(cap, max(further, high + 1), _FURTHER * high)
    if high >= cap:
        high = cap
        if total(cap) <= budget:
            return cap
    high_total = total(high)
    side = 0  # how often in a row a point fitted (or, negative, did not)
    while high - low > 1:
        middle = low + int((high - low) * (budget - low_total) / max(1, high_total - low_total))
        # The line is bent, and padding makes it a staircase: step over what one end would creep along.
        over = min(4 ** max(0, abs(side) - 1), (high - low) // 2)
        middle = max(middle, low + over) if side > 0 else min(middle, high - over)
        middle = min(high - 1, max(low + 1, middle))
        middle_total = total(middle)
        if middle_total <= budget:
            low, low_total, side = middle, middle_total, max(1, side + 1)
        else:
            high, high_total, side = middle, middle_total, min(-1, side - 1)
    return low
