"""The list of models worth downloading: its numbers, and its order for a machine."""

from __future__ import annotations

import pytest

from edgerun.edge.app.models.model_endpoints import recommend, recommended_models
from edgerun.models.hub.downloaded_model import parse_hub_id
from edgerun.models.manifest import DeviceKind

GB = 1_000_000_000


def test_the_numbers_of_every_model_agree() -> None:
    models = recommended_models()
    assert len({model["repo"] for model in models}) == len(models) >= 8
    assert len({model["quality"] for model in models}) == len(models)
    for model in models:
        assert model["memory_bytes"] == model["disk_bytes"] + model["context"] * model["cache_bytes_per_token"]
        assert model["minimum_free_bytes"] == model["memory_bytes"] * 5 // 4
        # Between 2 and 12 bits a weight: what quantized files with an unquantized embedding have.
        assert 2 < 8 * model["disk_bytes"] / model["parameters"] < 14, model["title"]
        assert set(model["variants"]) <= {"cpu", "gpu", "npu"}
        for name in ("title", "licence", "languages", "good_for", "why"):
            assert model[name].strip() == model[name] != ""


def test_every_id_can_be_downloaded() -> None:
    for kind in DeviceKind:
        for each in recommend(64 * GB, kind, []):
            assert parse_hub_id(each["id"]).repo == each["repo"]


@pytest.mark.parametrize("free", [GB // 4, 2 * GB, 6 * GB, 64 * GB])
def test_what_fits_comes_first_with_its_reason(free: int) -> None:
    found = recommend(free, DeviceKind.CPU, ["onnx-community/Qwen2.5-0.5B-Instruct:int8"])
    assert [each["fits"] for each in found] == sorted((each["fits"] for each in found), reverse=True)
    for each in found:
        assert each["fits"] == (each["minimum_free_bytes"] <= free)
        assert each["reason"].startswith("Fits" if each["fits"] else "Too large now")
        assert each["downloaded"] == (each["repo"] == "onnx-community/Qwen2.5-0.5B-Instruct")
    small = [each for each in found if each["reason"].startswith("Fits: ")]
    qualities = [each["quality"] for each in small]
    assert qualities == sorted(qualities, reverse=True)
    assert found[: len(small)] == small


def test_a_graphics_card_moves_large_models_to_the_front() -> None:
    on_cpu, on_gpu = (recommend(64 * GB, kind, [])[0] for kind in (DeviceKind.CPU, DeviceKind.GPU))
    assert on_cpu["disk_bytes"] < 2 * GB < on_gpu["disk_bytes"]
