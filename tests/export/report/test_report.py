"""The report of an export: compared plans, figures, page and JSON."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.export.allocation.choices import Sensitivity
from edgerun.export.allocation.format_candidates import BASE_FORMATS
from edgerun.export.allocation.linear_times import LinearTimes, linear_kind, timed_format
from edgerun.export.allocation.plan_costs import BYTES_READ, Budget, Measure, plan_cost, weight_count
from edgerun.export.checkpoint.config import DecoderConfig, read_config
from edgerun.export.checkpoint.layout import fused_linears
from edgerun.export.report.compared_plans import PlanComparison, rule_linears, rule_plans, uniform_plan
from edgerun.export.report.figures import PlanFigures, PlanKind, linear_figures, log_line, plan_figures
from edgerun.export.report.page import as_values, axis_for, page, write_report
from edgerun.export.report.tables import megabytes, perplexities, tables_of
from edgerun.models.bundle import holds_only_bundle_files
from edgerun.models.manifest import Method, WeightFormat
from support.export_reports import plan, whole_report
from support.tiny_models import write_checkpoint

VOID = {"meta", "line", "circle", "rect", "polyline", "br"}


class Structure(HTMLParser):
    """Checks that elements are closed, and records what the page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in {"src", "href"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def structure_of(text: str) -> Structure:
    parser = Structure()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


@pytest.mark.parametrize("layers", [1, 24, 130])
def test_a_page_is_self_contained_and_complete(layers: int) -> None:
    report = whole_report(layers)
    text = page(report)
    found = structure_of(text)
    assert found.fetched == []
    assert "url(" not in text
    assert "None" not in text
    words = " ".join(html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", text, flags=re.DOTALL)).split())
    assert "nan" not in words
    expected = ["50% less than uniform plans of its size", "Size against quality", "Time against quality"]
    expected += ["1.69x", "text sampled from the model itself", "tokens/s at 25 GB/s"]
    assert [part for part in expected if part not in words] == []
    assert text.count("<tr") > len(report.linears)
    assert len(re.findall(r'class="fill bits\d', text)) == len(report.linears)


def test_labels_end_within_their_plot() -> None:
    report = whole_report(1)
    near = [plan("rtn", PlanKind.NEAREST, bits, 0.5) for bits in (3.5, 4.5)]
    text = page(dataclasses.replace(report, plans=[*report.plans, *near]))
    for plot in re.findall(r"<svg .*?</svg>", text):
        width = float(re.findall(r'viewBox="0 0 ([\d.]+)', plot)[0])
        for x, words in re.findall(r'<text class="tick" x="([\d.]+)"[^>]*>([^<]*)<', plot):
            assert float(x) + 5.0 * len(words) <= width, words


def test_markup_in_names_is_escaped() -> None:
    report = dataclasses.replace(whole_report(1), model="<b>model</b>", notes=["<script>x</script>"])
    plans = [dataclasses.replace(each, name="<i>odd</i>") for each in report.plans]
    text = page(dataclasses.replace(report, plans=plans))
    assert "<b>model" not in text
    assert "<script" not in text
    assert "<i>" not in text


def test_files_are_part_of_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "edge.json").write_text("{}", encoding="utf-8")
    write_report(tmp_path, whole_report(2))
    assert holds_only_bundle_files(tmp_path)
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert data == as_values(whole_report(2))
    assert data["kl_against_uniform"] == pytest.approx(0.5, rel=1e-3)
    assert data["kl_against_rule"] == pytest.approx(2 / 3, rel=1e-3)
    assert data["bits_per_weight_read"] == 3.5
    assert data["quality"]["p99_kl"] == 0.913
    assert data["linears"][1]["weight_format"] == {"format": "int2/128", "bits": 2, "block": 128, "method": "gptq"}
    assert data["plans"][0] | {"kl": 0} == {
        "name": "this model",
        "kind": "chosen",
        "bytes_read": 216125000,
        "bits_per_weight": 3.5,
        "kl": 0,
        "milliseconds": {"1": 8.645, "4": 13.5078},
    }


@given(st.floats(2.5, 10))
def test_interpolation_between_uniform_plans_is_linear_in_log_kl(bits: float) -> None:
    report = whole_report(1)
    uniform = [each for each in report.plans if each.kind is PlanKind.UNIFORM]
    read = bits * 494e6 / 8
    assert log_line(read, uniform) == pytest.approx(0.5 * 10 ** (-(bits - 2.5) / 2), rel=1e-6)
    worse = PlanFigures("worse", PlanKind.UNIFORM, round(read), bits, 1.0, {})
    assert log_line(read, [*uniform, worse]) == pytest.approx(0.5 * 10 ** (-(bits - 2.5) / 2), rel=1e-6)


def test_no_interpolation_beyond_the_uniform_plans() -> None:
    uniform = [plan("a", PlanKind.UNIFORM, 4.0, 0.1), plan("b", PlanKind.UNIFORM, 5.0, 0.05)]
    low, high = uniform[0].bytes_read, uniform[1].bytes_read
    assert log_line(low - 1, uniform) is None
    assert log_line(high + 1, uniform) is None
    assert log_line(low, uniform[:1]) == 0.1
    assert log_line((low + high) / 2, uniform) == pytest.approx(math.sqrt(0.1 * 0.05))
    exact = [*uniform, plan("exact", PlanKind.UNIFORM, 32.0, 0.0)]
    assert log_line(high, exact) == pytest.approx(0.05)


def test_the_rule_is_compared_where_it_has_about_the_same_bytes() -> None:
    report = whole_report(1)
    (chosen,) = [each for each in report.plans if each.kind is PlanKind.CHOSEN]
    near = [plan("by rule", PlanKind.RULE, 3.5 * share, kl) for share, kl in ((0.98, 0.2), (1.02, 0.16))]
    far = plan("by rule", PlanKind.RULE, 3.5 * 0.96, 0.01)
    kl = chosen.kl
    for plans, expected in (((near[0],), kl / 0.2), (near, kl / 0.16), ((*near, far), kl / 0.16), ((far,), None)):
        assert dataclasses.replace(report, plans=[chosen, *plans]).against(PlanKind.RULE) == expected


def test_rounding_to_nearest_is_measured_once_for_bits_and_blocks(tmp_path: Path) -> None:
    config = read_config(write_checkpoint(tmp_path))
    formats = [WeightFormat(4, 64, method=Method.GPTQ), WeightFormat(4, 64, zero_points=True), WeightFormat(8, 32)]
    measured: list[set[tuple[str, Method | None]]] = []

    def divergence(plan: dict[str, WeightFormat]) -> float:
        measured.append({(str(weight_format), weight_format.method) for weight_format in plan.values()})
        return 0.5

    plans = [uniform_plan(config, each) for each in formats]
    found = PlanComparison(config, divergence).round_to_nearest([*plans, plans[0] | {"head": formats[2]}])
    assert [each.name for each in found] == ["int4/64 rtn", "int8/32 rtn", "int4/64 int8/32 rtn"]
    both = {("int4/64", Method.RTN), ("int8/32", Method.RTN)}
    assert measured == [{("int4/64", Method.RTN)}, {("int8/32", Method.RTN)}, both]
    assert {each.kind for each in found} == {PlanKind.NEAREST}
    report = whole_report(1)
    assert report.against(PlanKind.NEAREST) is None
    near = [plan("rtn", PlanKind.NEAREST, bits, 2 * report.chosen.kl) for bits in (3.5, 4.5)]
    report = dataclasses.replace(report, plans=[*report.plans, *near])
    assert report.against(PlanKind.NEAREST) == pytest.approx(0.5)
    assert "50% less than that of round-to-nearest at the same bytes" in page(report)
    assert as_values(report)["kl_against_nearest"] == 0.5
    assert near[0] not in report.compared


positive = st.floats(1e-9, 1e9)


@given(st.lists(positive, min_size=1, max_size=5), st.booleans())
def test_axes_hold_every_value_and_have_ticks(values: list[float], log: bool) -> None:
    axis = axis_for(values, 300, 20, log=log)
    for value in values:
        assert 20 <= axis.at(value) <= 300
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 20
    assert all(20 - 1e-6 <= axis.at(tick) <= 300 + 1e-6 for tick in ticks)
    assert axis.at(max(values)) <= axis.at(min(values))


@pytest.mark.parametrize("tied", [True, False])
def test_figures_are_gathered_from_a_plan(tied: bool, tmp_path: Path) -> None:
    config = read_config(write_checkpoint(tmp_path, tie_word_embeddings=tied))
    plan = {linear.name: WeightFormat(4, 32) for linear in fused_linears(config)}
    plan["head"] = plan["embedding"] = WeightFormat(8, 32)
    by_gptq = WeightFormat(4, 32, method=Method.GPTQ)
    sensitivities = {
        name: (Sensitivity(by_gptq, 9.0), Sensitivity(each, 0.5)) for name, each in plan.items() if name != "layers.1.o"
    }
    times = LinearTimes(
        config,
        {(linear_kind(name), timed_format(weight_format)): {1: 2.0, 4: 3.0} for name, weight_format in plan.items()},
        {1: 10.0, 4: 20.0},
    )
    linears = linear_figures(config, plan, sensitivities, times)
    whole = plan_figures(config, plan, "this", PlanKind.CHOSEN, 0.25, times)
    assert [linear.name for linear in linears] == [name for name in plan if not (tied and name == "embedding")]
    assert sum(linear.bytes_read for linear in linears) == whole.bytes_read
    assert sum(linear.rows * linear.columns for linear in linears) == weight_count(config)
    assert {linear.name: linear.kl_alone for linear in linears}["layers.1.o"] is None
    assert linears[-1].bits_per_weight == 10.0
    assert linears[1].kl_alone == 0.5
    timed = [linear.milliseconds for linear in linears if linear.name != "embedding"]
    assert whole.milliseconds[1] == pytest.approx(10.0 + sum(filter(None, timed)))
    assert whole.milliseconds[4] == pytest.approx(20.0 + 3.0 * len(timed))
    assert whole.bits_per_weight == 8 * whole.bytes_read / weight_count(config)
    odd = plan | {"layers.0.qkv": WeightFormat(2, 64)}
    assert plan_figures(config, odd, "odd", PlanKind.RULE, 0.5, times).milliseconds == {}
    timed = {linear.name: linear.milliseconds for linear in linear_figures(config, odd, times=times)}
    assert (timed["layers.0.qkv"], timed["layers.0.o"]) == (None, 2.0)


def test_plans_are_compared_at_the_chosen_ones_bytes(tmp_path: Path) -> None:
    config = read_config(write_checkpoint(tmp_path, num_hidden_layers=4, hidden_size=64, intermediate_size=128))
    formats = [WeightFormat(bits, 64, method=Method.K_QUANT) for bits in (2, 4, 8)]
    better = WeightFormat(4, 64, zero_points=True, method=Method.GPTQ)
    measured: list[dict[str, WeightFormat]] = []
    reported: list[float] = []

    def divergence(plan: dict[str, WeightFormat]) -> float:
        measured.append(plan)
        return sum((1 - 0.1 * weight_format.zero_points) / weight_format.bits for weight_format in plan.values())

    limit = plan_figures(config, uniform_plan(config, formats[1]), "", PlanKind.CHOSEN, 0.0).bytes_read
    comparison = PlanComparison(config, divergence, progress=lambda _, fraction: reported.append(fraction))
    found = comparison.baselines([*formats, better], limit, [uniform_plan(config, formats[0])])
    uniform, rule, other = found[:3], found[3], found[4]
    assert [each.name for each in uniform] == ["int2/64", str(better), "int8/64"]
    assert uniform[1].bytes_read == limit
    assert (rule.kind, other.kind) == (PlanKind.RULE, PlanKind.SEARCHED)
    assert rule.bytes_read <= limit
    ruled = [plan for plan in measured if len(set(plan.values())) > 1]
    assert better in {weight_format for plan in ruled for weight_format in plan.values()}
    assert all(
        weight_format.zero_points for plan in ruled for weight_format in plan.values() if weight_format.bits == 4
    )
    assert rule.kl == min(map(divergence, ruled))
    assert reported[-1] == 1.0
    assert max(reported) == 1.0
    least = PlanComparison(config, divergence).baselines(formats, uniform[0].bytes_read)
    assert [each.kind for each in least] == [PlanKind.UNIFORM] * 3


def test_columns_without_figures_are_left_out() -> None:
    report = whole_report(2)
    unpredicted = dataclasses.replace(report, speed=dataclasses.replace(report.speed, predicted={}))
    speed = {table.title: table for table in tables_of(report)}["Speed on this machine"]
    assert "predicted, ms" in speed.columns
    for table in tables_of(unpredicted):
        for number in range(1, len(table.columns)):
            assert {row[number] for row in table.rows} != {"-"}, (table.title, table.columns[number])
    speed = {table.title: table for table in tables_of(unpredicted)}["Speed on this machine"]
    assert speed.columns == ("tokens in a pass", "measured, ms", "passes per second")
    assert set(map(len, speed.rows)) == {3}


def test_numbers_have_the_digits_that_tell_them_apart() -> None:
    sizes = (85_123, 1_234_567, 12_345_678, 123_456_789, 1_234_567_890)
    assert [megabytes(size) for size in sizes] == ["0.0851", "1.23", "12.3", "123.5", "1234.6"]
    assert perplexities(9.13, 8.7654) == ("9.130", "8.765")
    assert perplexities(158.4312, 158.4498) == ("158.43", "158.45")
    assert perplexities(7.654321, 7.654321) == ("7.654321", "7.654321")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DecoderConfig:
    return read_config(write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", "qwen2", hidden_size=96))


def test_the_rule_favours_head_and_outer_layers(config: DecoderConfig) -> None:
    favoured = rule_linears(dataclasses.replace(config, layers=24))
    assert favoured[:3] == ["head", "layers.0.qkv", "layers.0.down"]
    assert {"layers.23.down", "layers.5.qkv", "layers.8.qkv"} <= set(favoured)
    assert not {"layers.3.qkv", "layers.4.down"} & set(favoured)


@settings(max_examples=20)
@given(st.floats(2.0, 12.0))
def test_rule_plans_are_within_the_limit(config: DecoderConfig, bits: float) -> None:
    limit = Budget(bits, Measure.BITS).limit(config)
    for by_rule in rule_plans(config, BASE_FORMATS, BYTES_READ, limit):
        assert plan_cost(by_rule, BYTES_READ, config) <= limit
        assert by_rule["head"].bits >= max(each.bits for each in by_rule.values())
