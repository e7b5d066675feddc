"""Work on the pieces of a tensor a little ahead of where they are used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

_WORKERS: Final = 2
_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


def in_order(work: Callable[[_Part], _Result], parts: Iterable[_Part]) -> Iterator[_Result]:
    """Results of `work` in the order of `parts`, made on two threads that keep a few parts ahead.

    File reads and NumPy release the interpreter's lock, so this uses two cores; a few results are in memory at a time.
    """
    with ThreadPoolExecutor(_WORKERS) as pool:
        ahead: deque[Future[_Result]] = deque()
        for part in parts:
            ahead.append(pool.submit(work, part))
            if len(ahead) > _WORKERS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
