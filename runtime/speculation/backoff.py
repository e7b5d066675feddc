"""When drafting is laid to rest: trials, and waits that double as long as they fail."""

from __future__ import annotations

from typing import Final


class Backoff:
    """When to stop drafting for a while: it promises less than the time it takes is worth."""

    _FIRST: Final = 32
    _LONGEST: Final = 4096
    _TRIAL: Final = 8
    _HOPELESS: Final = -0.1
    """A balance at which a trial is cut short and the wait is long: a model so small that a look-up is a good part of a
    pass."""
    _SHORT_TRIAL: Final = 3
    _LIGHT_TRIAL: Final = 24

    def __init__(self) -> None:
        self.left = 0
        """Plain rounds to go."""
        self.balance = 0.0
        """Tokens a round that drafting promised, less those its time would have given: a running mean."""
        self._wait = self._FIRST
        self._rounds = 0

    def wake(self) -> None:
        """Draft again at once, for another trial."""
        self.left = self._rounds = 0

    def observe(self, balance: float, *, light: bool = False) -> None:
        """Take in a round of drafting; where that is `light`, it is tried for longer before it is given up."""
        self._rounds += 1
        self.balance += (balance - self.balance) * max(1 / self._rounds, 0.02)
        hopeless = self.balance < self._HOPELESS and self._rounds >= self._SHORT_TRIAL
        trial = self._LIGHT_TRIAL if light else self._TRIAL
        if not hopeless and (self._rounds < trial or self.balance >= 0):
            if self._rounds > 4 * self._TRIAL:
                self._wait = self._FIRST
            return
        if hopeless:
            self._wait = max(self._wait, 8 * self._FIRST)
        self.left, self._wait = self._wait, min(2 * self._wait, self._LONGEST)
        self._rounds = 0
