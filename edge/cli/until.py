"""Samples answers until a command accepts one.

Source: Brown et al., "Large language monkeys" (2024): repeated sampling with a check from outside.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...errors import EdgeError, InputError
from ...runtime.decode import FinishReason
from ...runtime.engine import Engine
from ...runtime.options import GenerateOptions
from ...runtime.result import Chunk
from ...runtime.scheduling.answer_stream import AnswerStream


@dataclass
class CheckedAnswers:
    """The chunks of the first sampled answer that a command accepts; `cancel` may be called from a signal handler."""

    engine: Engine
    prompt: str
    options: GenerateOptions
    """Options of an answer; each further one has the next seed."""
    command: str
    """A command of the shell, which reads the answer on its standard input."""
    most: int
    """Largest number of answers to sample."""
    _stream: AnswerStream | None = None

    def __iter__(self) -> Iterator[Chunk]:
        """Sample, check, and give the chunks of the accepted answer.

        Raises:
            EdgeError: none was accepted.
            InputError: all answers would be equal, or several are wanted.
        """
        sampling = self.options.sampling(self.engine.defaults)
        if sampling.greedy or self.options.candidates > 1:
            raise InputError("--until samples one answer after the other", "add -t 0.8, and no --n or --best-of")
        for number in range(self.most):
            options = replace(self.options, seed=(sampling.seed + number) % (1 << 64))
            self._stream = self.engine.stream(self.prompt, options)
            chunks = list(self._stream)
            text = "".join(chunk.text for chunk in chunks).encode()
            if chunks[-1].finish_reason is FinishReason.CANCELLED or self._accepts(text):
                yield from chunks
                return
        raise EdgeError(f"none of {self.most} answers passes {self.command!r}", "give more --tries, or a higher -t")

    def _accepts(self, text: bytes) -> bool:
        # What the user types as a command is run by the shell, as in a terminal; nothing else can set it.
        checked = subprocess.run(self.command, shell=True, input=text, capture_output=True, check=False)  # noqa: S602
        return checked.returncode == 0

    def cancel(self) -> None:
        """End the sampling after the current pass."""
        if self._stream is not None:
            self._stream.cancel()

    close = cancel
