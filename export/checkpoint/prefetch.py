"""Processing parts of a tensor ahead of their use, on two threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

_WORKERS: Final = 2
_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


def in_order(work: Callable[[_Part], _Result], parts: Iterable[_Part]) -> Iterator[_Result]:
    """Yield the results of `work` in the order of `parts`; two threads work a few parts ahead.

    File reads and NumPy release the interpreter lock, so this uses two cores. Only a few results are in memory at once.
    """
    with ThreadPoolExecutor(_WORKERS) as pool:
        ahead: deque[Future[_Result]] = deque()
        for part in parts:
            ahead.append(pool.submit(work, part))
            if len(ahead) > _WORKERS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
