"""Backoff: waits that double after every failed trial."""

from __future__ import annotations

from typing import Final


class Backoff:
    """Rounds to wait before something that did not pay is tried again; each wait is twice as long as the one before.

    Args:
        first_wait: rounds of the first wait.
        max_wait: rounds of the longest wait.
    """

    def __init__(self, first_wait: int, max_wait: int) -> None:
        self.left = 0
        """Rounds left of the current wait; 0 when not waiting."""
        self._first = self._next = first_wait
        self._max = max_wait

    def start(self, min_wait: int = 0) -> None:
        """Start a wait of at least `min_wait` rounds."""
        self.left = max(self._next, min_wait)
        self._next = min(2 * self.left, self._max)

    def count_down(self) -> None:
        """Count one round of the wait."""
        self.left -= 1

    def shorten(self, longest: int) -> None:
        """Wait for at most `longest` further rounds."""
        self.left = min(self.left, longest)

    def cancel(self) -> None:
        """End the current wait now."""
        self.left = 0

    def reset(self) -> None:
        """Make the next wait as short as the first one; called after a success."""
        self._next = self._first


class DraftingBalance:
    """Stops drafting for a while when it costs more than it gains.

    Keeps a running mean of the tokens a round gains by drafting, less the tokens that plain decoding would have
    produced in the time that drafting takes. When the mean is negative after a trial of several rounds, `backoff`
    starts.
    """

    _FIRST_WAIT: Final = 32
    _MAX_WAIT: Final = 4096
    _TRIAL_ROUNDS: Final = 8
    _HOPELESS: Final = -0.1
    """Mean below which a trial ends early and the wait is long: the model is so small that a lookup takes a
    considerable part of a pass."""
    _HOPELESS_TRIAL_ROUNDS: Final = 3
    _HOPELESS_MIN_WAIT: Final = 8 * _FIRST_WAIT
    _CHEAP_TRIAL_ROUNDS: Final = 24

    def __init__(self) -> None:
        self.backoff: Final = Backoff(self._FIRST_WAIT, self._MAX_WAIT)
        self.mean = 0.0
        """Running mean of the tokens gained per round of drafting."""
        self._rounds = 0

    def resume(self) -> None:
        """End the wait and start a new trial."""
        self.backoff.cancel()
        self._rounds = 0

    def observe(self, balance: float, *, cheap: bool = False) -> None:
        """Add the balance of one round of drafting.

        Args:
            balance: tokens gained less tokens spent.
            cheap: whether drafting costs so little that it is given a longer trial.
        """
        self._rounds += 1
        self.mean += (balance - self.mean) * max(1 / self._rounds, 0.02)
        hopeless = self.mean < self._HOPELESS and self._rounds >= self._HOPELESS_TRIAL_ROUNDS
        trial = self._CHEAP_TRIAL_ROUNDS if cheap else self._TRIAL_ROUNDS
        if not hopeless and (self._rounds < trial or self.mean >= 0):
            if self._rounds > 4 * self._TRIAL_ROUNDS:
                self.backoff.reset()
            return
        self.backoff.start(self._HOPELESS_MIN_WAIT if hopeless else 0)
        self._rounds = 0
