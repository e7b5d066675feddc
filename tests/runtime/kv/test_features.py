"""Features by cache slot follow the slots: passes, accepted paths, rewinds, copies."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.runtime.kv.arena import InPlaceArena
from edgerun.runtime.kv.buffers import CacheTensorType
from edgerun.runtime.kv.features import FeatureSlots
from support.nightly import examples

SIZE = 3
TYPES = (CacheTensorType(np.dtype(np.float32), (1, 1, 0, 2), 2),)


def rows(values: list[float]) -> np.ndarray:
    """Rows of features that are recognised by their number."""
    return np.repeat(np.array(values, np.float32)[:, None], SIZE, axis=1)


def new_arena(window: int) -> tuple[InPlaceArena, FeatureSlots]:
    arena = InPlaceArena(TYPES, 4096)
    arena.features = features = FeatureSlots(SIZE, window)
    return arena, features


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_known_features_are_those_of_the_last_pass_over_their_slot(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 40))
    arena, features = new_arena(window)
    committed: list[float | None] = []
    """Number of every committed slot; None where a pass gave no features."""
    number = 0.0
    rewound = False
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(("prefill", "verify", "unknown", "rewind", "copy", "restore"))):
            case "rewind":
                del committed[data.draw(st.integers(0, len(committed))) :]
                arena.rewind_to(len(committed))
                rewound = True
                continue
            case "copy":
                source, (arena, features) = arena, new_arena(window)
                rewound = True
                del committed[data.draw(st.integers(0, len(committed))) :]
                arena.copy_from(source, len(committed))
            case "restore":
                snapshot, (arena, features) = arena.snapshot(), new_arena(window)
                arena.restore(snapshot)
                committed = [None] * len(committed)
            case action:
                width = data.draw(st.integers(1, 300 if action == "prefill" else 8))
                arena.reserve(width)
                new = [number + index for index in range(width)]
                number += width
                if action == "unknown":
                    features.forget(arena.length)
                else:
                    features.write(arena.length, rows(new))
                if action == "verify":
                    path = [0, *sorted(data.draw(st.sets(st.integers(1, width), max_size=width)) - {width})]
                    arena.compact(arena.length, path)
                    committed += [new[node] for node in path]
                else:
                    arena.commit(width)
                    committed += [None] * width if action == "unknown" else new
        last = min(features.end, arena.length)
        if features.start >= last:
            continue
        found = features.read(features.start, last)
        expected = committed[features.start : last]
        assert None not in expected
        np.testing.assert_array_equal(found, rows([each for each in expected if each is not None]))
    known = 0
    while known < len(committed) and committed[-1 - known] is not None:
        known += 1
    if known and not rewound:
        assert arena.length - features.start >= min(known, window)
        assert features.end >= arena.length


def test_the_buffer_does_not_grow_with_the_sequence() -> None:
    features = FeatureSlots(SIZE, window=64)
    for slot in range(0, 100_000, 50):
        features.write(slot, rows([float(slot)] * 50))
        assert features.end - features.start >= min(slot + 50, 64)
    assert features.nbytes <= 4 * SIZE * 512
