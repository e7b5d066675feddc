"""Writes runtime/arguments/option_keywords.py from the option records: `python tests/support/option_keywords.py`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from edgerun.runtime.arguments.load_options import LoadOptions
from edgerun.runtime.options import GenerateOptions

MODULE = Path(__file__).resolve().parents[2] / "runtime" / "arguments" / "option_keywords.py"
_HEAD = '''\
"""Options by name, which type checkers and editors read; written by tests/support/option_keywords.py."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ..speculation.choice import DraftSampling, Speculation
from ..structure.response_format import ResponseFormat
'''


def keywords(name: str, record: type[Any]) -> str:
    """The class of the keywords of a record's options."""
    lines = [f"    {each.name}: {each.type}" for each in dataclasses.fields(record)]
    head = f'class {name}(TypedDict, total=False):\n    """The options of `{record.__name__}` by name."""'
    return f"\n\n{head}\n\n" + "\n".join(lines) + "\n"


def module_text() -> str:
    """The text of the module."""
    return _HEAD + keywords("LoadKeywords", LoadOptions) + keywords("GenerateKeywords", GenerateOptions)


if __name__ == "__main__":
    MODULE.write_text(module_text(), encoding="utf-8")
