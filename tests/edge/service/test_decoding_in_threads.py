"""The first bodies of a kind may come in several threads at once."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading, types
from edgerun.edge.service.body_decoder import decode_body
SOURCE = '''
from __future__ import annotations
from typing import Annotated
import msgspec
class A(msgspec.Struct, tag="a", tag_field="t"):
    x: Annotated[int, msgspec.Meta(ge=1)] | None = None
class B(msgspec.Struct, tag="b", tag_field="t"):
    x: list[A | None] | None = None
class Body(msgspec.Struct):
    m: list[A | B]
    z: dict[str, B] | None = None
'''
sys.setswitchinterval(1e-6)
for number in range(100):
    module = sys.modules[f"bodies{number}"] = types.ModuleType(f"bodies{number}")
    exec(SOURCE, module.__dict__)
    begin, decoded = threading.Barrier(6), []
    def work():
        begin.wait()
        decoded.append(decode_body({"m": [{"t": "a", "x": 2}]}, module.Body))
    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(decoded) == 6
"""


def test_threads_decode_the_first_bodies_of_a_kind() -> None:
    # A process of its own: without the lock around the first use of a type, msgspec crashes.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=False, timeout=300)
    assert (done.returncode, done.stderr.decode()) == (0, "")
