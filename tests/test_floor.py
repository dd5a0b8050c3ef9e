"""The benchmarks' own arithmetic: rounds, fractions of the floor, tables, the picture of growth, peak memory."""

import json
from dataclasses import replace

import pytest
from tiny import rag_prompt, tiny_model

import kvreuse as kr
from benchmarks import floor, growth
from benchmarks.flops import Costs, Work
from benchmarks.growth_plot import draw
from benchmarks.measured import Measured, Round, measure
from benchmarks.peak import MIB, Peak, high_water_mib
from benchmarks.rates import Meter, Rates
from kvreuse.intervals import Interval

FULL, BLEND = kr.FullRecompute(), kr.CacheBlend(ratio=0.3)
RATES = Rates(gemm=100.0, attention=50.0, copy=10.0)


def rounds(*pairs):
    """A reference and a blend of half its work, that take so long, and a machine that slows down twofold by round."""
    work = {
        repr(FULL): Work(linear=800, attention=100, weight_bytes=20, kv_bytes=0),
        repr(BLEND): Work(linear=400, attention=25, weight_bytes=20, kv_bytes=5),
    }
    slower = [Rates(RATES.gemm / 2**i, RATES.attention / 2**i, RATES.copy / 2**i) for i in range(len(pairs))]
    seconds = [
        {repr(FULL): {"ttft_s": 2 * a, "taken_s": a}, repr(BLEND): {"ttft_s": b, "taken_s": b, "load_s": b / 4}}
        for a, b in pairs
    ]
    return Measured(work, [Round(r, s) for r, s in zip(slower, seconds, strict=True)])


def test_fractions_are_taken_within_a_round():
    """Floors 10 and 5 s in the first round, 20 and 10 in the second, 40 and 20 in the third."""
    measured = rounds((20, 10), (40, 25), (100, 40))
    full, blend = repr(FULL), repr(BLEND)
    assert measured.floor_s(full) == 20
    assert measured.floor_s(blend) == 10
    assert measured.reached(full) == 0.5
    assert measured.reached(blend) == 0.5
    assert measured.relative(blend, full) == Interval(1.0, 0.8, 1.25)
    assert measured.speed_up(blend, full) == Interval(2.0, 1.6, 2.5)
    assert measured.stage_share(blend, ["load_s", "rotate_s"]) == 0.25
    again = Measured.from_json(json.loads(json.dumps(measured.as_json())))
    assert again == measured
    row = floor.floor_table([full, blend], measured).splitlines()[-1]
    assert [cell.strip() for cell in row.split("|")][2:-1] == [
        *("25000", "25000", "0.0", "0.0", "0", "10000", "50%", "1.00 [0.80, 1.25]", "8500", "2.00 [1.60, 2.50]"),
        *("2.00", "25.0%"),
    ]


@pytest.fixture(scope="module")
def real():
    model, prompt, store = tiny_model(), rag_prompt(), kr.KVStore()
    BLEND.encode(model, prompt, store)
    costs, meter = Costs.of(model), Meter(model, prompt.num_tokens)
    noted = []
    found = measure([FULL, BLEND], lambda m: m.prefill(model, prompt, store), costs, meter, 3, note=noted.append)
    return found, noted


def test_rounds_hold_all_methods_and_the_rates(real):
    measured, noted = real
    assert noted == [0, 1, 2]
    assert all(set(r.seconds) == {repr(FULL), repr(BLEND)} for r in measured.rounds)
    assert all(value > 0 for r in measured.rounds for value in (r.rates.gemm, r.rates.attention, r.rates.copy))
    assert all(0 < measured.reached(name) < 1 for name in measured.work)  # a tiny model is all overhead
    assert measured.work[repr(BLEND)].flops < measured.work[repr(FULL)].flops


def test_a_budget_ends_the_rounds(real):
    model, prompt, store = tiny_model(), rag_prompt(), kr.KVStore()
    meter = Meter(model, 8)
    found = measure([FULL], lambda m: m.prefill(model, prompt, store), Costs.of(model), meter, 9, budget_s=0.0)
    assert len(found.rounds) == 1


def test_growth_is_drawn_and_continued(tmp_path):
    header = {"methods": [repr(m) for m in growth.methods([0.1, 0.3])], "model": "tiny", "device": "cpu"}
    header |= {
        "dtype": "float32",
        "threads": 1,
        "clock": "process_time",
        "date": "today",
        "command": "a",
        "commit": "b",
    }
    points = []
    for tokens in (600, 1200):
        work = {name: Work(tokens * 10**9, tokens**2, 10, 10) for name in header["methods"]}
        seconds = {name: {"taken_s": tokens / 500 / (i + 1)} for i, name in enumerate(header["methods"])}
        measured = Measured(work, [Round(Rates(1e12, 1e9, 1e9), seconds)])
        points.append({"chunks": tokens // 512, "tokens": tokens, **measured.as_json()})
    data = {"header": header, "points": points}
    figure = draw(data)
    figure.savefig(tmp_path / "growth.png")
    assert [len(axes.get_lines()) for axes in figure.axes] == [2 * 5, 2 * 4]  # per length two lines and two marks
    assert growth.table(data).splitlines()[-1].startswith("| 1200 | 1 | 2.4 (")
    growth._write(tmp_path / "growth.json", data)
    assert growth._known(tmp_path / "growth.json", {**header, "date": "tomorrow"}) == points
    assert growth._known(tmp_path / "growth.json", {**header, "threads": 2}) == []
    assert growth._known(tmp_path / "none.json", header) == []


def test_peak_is_over_what_is_needed_without_the_libraries():
    peak = Peak("m", weights=100, prompt_kv=20, store=30, libraries=400, before=560, peak=580)
    assert (peak.needed, peak.ratio) == (150, 1.2)
    assert replace(peak, peak=610).ratio == 1.4


def test_the_high_water_mark_is_that_of_this_process():
    before = high_water_mib()
    block = bytearray(64 * MIB)
    assert high_water_mib() >= before
    assert len(block) / MIB <= high_water_mib()
