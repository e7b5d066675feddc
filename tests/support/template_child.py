"""A process that renders the templates it is given, one a line, and reports how each went."""

from __future__ import annotations

import json
import resource
import sys
import time

from edgerun import TemplateError
from edgerun.runtime.text.chat_template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello <|end|> & welcome"},
    {"role": "assistant", "content": "<think>Hm.</think>Hi"},
    {"role": "user", "content": "Again\nand again"},
]


def main() -> None:
    """Answer each line, a JSON text, by a problem or null, seconds of the processor, and the peak memory in bytes."""
    for line in sys.stdin:
        started = time.process_time()
        problem = None
        try:
            ChatTemplate(json.loads(line)).render(MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}])
        except TemplateError as error:
            if "\n" in str(error) or len(str(error)) > 500:
                problem = f"not one short line: {error!s:.1000}"
        except BaseException as error:  # noqa: BLE001  any other exception is what the test looks for
            problem = f"{type(error).__name__}: {error!s:.1000}"
        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = usage if sys.platform == "darwin" else usage * 1024
        print(json.dumps([problem, time.process_time() - started, peak]), flush=True)


if __name__ == "__main__":
    main()
