"""`LoadingController`: exact arithmetic on a hand-made profile, its checks, and `CacheBlend(ratio="auto")`."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ids, rag_prompt, tiny_model

import kvreuse as kr
from kvreuse.store.controller import pipelined_s
from kvreuse.store.profile import DeviceProfile, ModelProfile, Work, interpolate, per_token

# Seconds that can be worked out by hand. Full prefill: n/100 + n^2/10^6. Full reuse: 1 s, whatever the length.
# Layer 0 and the check: n/1000. Behind: ratio * n/100.
LENGTHS = (1000, 2000, 4000)
RATIOS = (0.1, 0.5)
MODEL = ModelProfile(
    model="hand-made",
    fingerprint="f" * 64,
    device="cpu",
    dtype="float32",
    threads=1,
    num_layers=10,
    token_bytes=1000.0,
    num_question=50,
    lengths=LENGTHS,
    ratios=RATIOS,
    prefill_s=tuple(n / 100 + n * n / 1e6 for n in LENGTHS),
    reuse_s=(1.0, 1.0, 1.0),
    first_s=tuple(n / 1000 for n in LENGTHS),
    blend_s=tuple(tuple(1.0 + n / 1000 + r * n / 100 for n in LENGTHS) for r in RATIOS),
)
DEVICES = (
    DeviceProfile("memory", 1e9, price_per_gb_month=4.0, in_memory=True),
    DeviceProfile("ssd", 1e6, price_per_gb_month=0.5),
    DeviceProfile("hdd", 2e5, open_s=0.25, price_per_gb_month=0.1, throttle_bytes_per_s=2e5),
    DeviceProfile("tape", 2e4, price_per_gb_month=0.01),
)
CONTROLLER = kr.LoadingController(MODEL, DEVICES)


def test_delays_follow_both_formulas():
    c = CONTROLLER
    assert c.T_recompute(0.15, 2000, formula="paper") == pytest.approx(0.15 * 24)
    assert c.T_recompute(0.15, 2000, formula="paper", per_layer=True) == pytest.approx(0.015 * 24)
    assert c.T_recompute(0.2, 3000, formula="paper") == pytest.approx(0.2 * 39)  # exact between the points
    assert c.T_recompute(0.3, 3000) == pytest.approx(1 + 3 + 9)
    assert c.T_recompute(0.3, 500) == pytest.approx(1 + 0.5 + 1.5)
    assert c.T_recompute(1.0, 8000) == pytest.approx(1 + 8 + 80)  # beyond both grids
    assert c.T_recompute(0.0, 3000) == 1.0  # nothing is selected: no full layer 0
    assert c.T_recompute(0.3, 3000, per_layer=True) == pytest.approx(1.3)
    # 1950 tokens behind the question's 50; a blend reads nothing of layer 0
    assert c.T_load(2000, "ssd", formula="paper") == pytest.approx(1.95)
    assert c.T_load(2000, "ssd", formula="paper", per_layer=True) == pytest.approx(0.195)
    assert c.T_load(2000, "ssd") == pytest.approx(1.95 * 0.9)
    assert c.T_load(None, DEVICES[2], num_bytes=1e6) == pytest.approx(5.0)
    assert c.cost_per_month(2000, "ssd") == pytest.approx(1.95e-3 * 0.5)


def test_exact_tokens_are_neither_recomputed_nor_free_to_load():
    prompt = kr.RagPrompt(ids(100, 0), [ids(400, 1), ids(450, 2)], ids(50, 3))
    behind_prefix = CONTROLLER  # the first chunk is exact
    bare = replace(CONTROLLER, context="bare")
    # layer 0 and the rest are proportional to n here, so what is exact just drops out
    assert behind_prefix.T_recompute(0.5, prompt) == pytest.approx(1 + 0.5 + 0.5 * 5)
    assert bare.T_recompute(0.5, prompt) == pytest.approx(1 + 0.9 + 0.5 * 9)
    # of layer 0 the exact tokens alone are read
    assert behind_prefix.T_load(prompt, "ssd") == pytest.approx((0.95 * 9 + 0.5) / 10)
    assert bare.T_load(prompt, "ssd") == pytest.approx((0.95 * 9 + 0.1) / 10)


def test_attention_of_exact_tokens_is_seen_by_those_behind():
    """Rows e..n see 0..n: a n + b n^2 less a e + b e^2."""
    quadratic = replace(
        MODEL,
        first_s=tuple(n / 1000 + n * n / 1e7 for n in LENGTHS),
        blend_s=tuple(tuple(1.0 + n / 1000 + n * n / 1e7 + r * n / 100 for n in LENGTHS) for r in RATIOS),
    )
    work = Work(num_tokens=3000, num_question=50, num_exact=1500)
    assert quadratic.first(work) == pytest.approx(1.5 + (9e6 - 2.25e6) / 1e7)


def test_missing_chunks_and_long_questions_are_recomputed_besides():
    plain = MODEL.blend(Work(2000, 50), 0.1)
    missing = MODEL.blend(Work(2000, 50, num_missing=950), 0.1)  # 0.1 * 1000 + 950 rows of 1950
    assert plain == pytest.approx(1 + 2 + 0.1 * 20)
    assert missing == pytest.approx(1 + 2 + 20 * 1050 / 1950)
    assert MODEL.blend(Work(2000, 1050), 0.1) == pytest.approx(1 + 2 + 20 * (95 + 1000) / 1950)
    assert MODEL.blend(Work(1000, 50, num_exact=950), 0.5) == 1.0  # nothing is inexact
    assert MODEL.blend(Work(2000, 1), 0.0) == 1.0


def test_the_ratio_is_the_larger_of_r_star_and_equal_delay():
    c = CONTROLLER
    assert c.choose_ratio(2000, "ssd") == 0.15  # hidden behind r*
    assert c.choose_ratio(2000, None) == c.choose_ratio(2000, "memory") == 0.15
    # hdd: 1.95 MB at 0.2 MB/s
    assert c.choose_ratio(2000, "hdd", formula="paper") == pytest.approx(9.75 / 24)
    # measured: 8.775 s = 1 + 2 + r * 20
    assert c.choose_ratio(2000, "hdd") == pytest.approx((8.775 - 3) / 20)
    assert c.T_recompute(c.choose_ratio(2000, "hdd"), 2000) == pytest.approx(c.T_load(2000, "hdd"))
    assert c.choose_ratio(2000, "tape") == 1.0
    assert replace(c, min_ratio=0.3).choose_ratio(2000, "hdd") == 0.3
    assert replace(c, formula="paper").choose_ratio(2000, "hdd") == pytest.approx(9.75 / 24)
    # beside readers that slow it down, as much recompute takes longer
    slowed = replace(c, devices=(replace(DEVICES[2], slows=1.25),))
    assert slowed.choose_ratio(2000, "hdd") == pytest.approx((8.775 / 1.25 - 3) / 20)
    assert slowed.choose_ratio(2000, "hdd", formula="paper") == pytest.approx(9.75 / 24)
    assert slowed.hides("hdd", slowed.choose_ratio(2000, "hdd"), 2000)
    assert not slowed.hides("hdd", slowed.choose_ratio(2000, "hdd") - 0.01, 2000)


def test_the_device_is_the_cheapest_that_hides_its_load():
    c = CONTROLLER
    assert c.choose_device(0.15, 2000).name == "ssd"
    assert c.choose_device(length=2000).name == "ssd"
    assert c.choose_device(0.3, 2000).name == "hdd"
    assert c.choose_device(0.3).name == "ssd"  # at 4000 tokens hdd is not hidden: 17.8 s behind 17
    assert c.choose_device(0.35).name == "hdd"
    assert c.choose_device(0.05, 2000, formula="paper").name == "memory"  # 1.2 s hide no 1.95
    without_memory = replace(c, devices=DEVICES[2:])
    with pytest.warns(UserWarning, match="no device hides its load behind recompute at ratio 0.15: hdd is the fast"):
        assert without_memory.choose_device(length=2000).name == "hdd"
    same_price = (DeviceProfile("a", 1e7, price_per_gb_month=0.5), *DEVICES[:2])
    assert replace(c, devices=same_price).choose_device(0.15, 2000).name == "a"
    # just hidden counts as hidden
    just = DeviceProfile("just", 1755 / 6.0 * 1000)
    assert c.T_load(2000, "ssd") == pytest.approx(1.755)
    assert replace(c, devices=(just,)).hides("just", 0.15, 2000)


def test_ttft_is_predicted_layer_by_layer():
    c = CONTROLLER
    assert c.predict_ttft(2000, 0.15) == c.predict_ttft(2000, 0.15, "memory") == pytest.approx(6.0)
    assert c.predict_ttft(2000, 0.15, "hdd", pipelined=False) == pytest.approx(0.25 + 8.775 + 6.0)
    # load-bound: nine layers of 0.975 s, then the last layer: a tenth of the 1 s that ratio 0 takes, and its share of
    # the 3 s behind layer 0. Readers stop four layers ahead until layer 0 is taken, which is at once.
    for schedule, share in (("constant", 1.0), ("gradual", 0.5)):
        last = 0.1 + 3 * share / 9
        assert c.predict_ttft(2000, 0.15, "hdd", schedule=schedule) == pytest.approx(0.25 + 8.775 + last)
    assert c.predict_ttft(2000, 0.15, "hdd") < c.predict_ttft(2000, 0.15, "hdd", schedule="constant")
    with pytest.raises(ValueError, match="steep"):
        c.predict_ttft(2000, 0.15, "hdd", schedule="steep")
    # in balance: 3.9 s of recompute behind layer 0 hide 3.9 s of loading, but not if they all come first
    even = kr.LoadingController(MODEL, (DeviceProfile("even", 1.95e6 * 0.9 / 3.9),))
    assert even.predict_ttft(2000, 0.195, "even", schedule="constant") < even.predict_ttft(2000, 0.195, "even")
    # compute-bound
    assert c.predict_ttft(2000, 0.5, "ssd") == pytest.approx(c.T_recompute(0.5, 2000))
    slowed = replace(c, devices=(replace(DEVICES[1], slows=1.2),))
    assert slowed.predict_ttft(2000, 0.5, "ssd") == pytest.approx(1.2 * c.T_recompute(0.5, 2000))
    assert slowed.predict_ttft(2000, 0.5, "ssd", pipelined=False) == c.predict_ttft(2000, 0.5, "ssd", pipelined=False)


@pytest.mark.parametrize(
    ("reads", "compute", "ahead", "seconds"),
    [
        ([0, 1, 1, 1], [1, 1, 1, 1], 4, 4.0),  # hidden
        ([0, 2, 2, 2], [1, 1, 1, 1], 4, 7.0),  # load, then the last layer
        ([3, 0, 0, 0], [1, 1, 1, 1], 4, 7.0),  # the first read, then everything
        ([1, 1, 1, 1], [9, 1, 1, 1], 1, 13.0),  # one ahead: layer 1 is read while layer 0 runs
        ([1, 1, 1, 1], [9, 0, 0, 0], 1, 12.0),  # but 2 and 3 only afterwards
        ([1, 1, 1, 1], [9, 0, 0, 0], 4, 10.0),
        ([], [], 4, 0.0),
    ],
)
def test_the_pipeline(reads, compute, ahead, seconds):
    assert pipelined_s(reads, compute, ahead) == seconds


times = st.lists(st.floats(0, 10), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(times, st.lists(st.floats(0, 10), min_size=12, max_size=12), st.integers(1, 5))
def test_the_pipeline_is_never_faster_than_its_slower_half_nor_slower_than_both(reads, compute, ahead):
    compute = compute[: len(reads)]
    seconds = pipelined_s(reads, compute, ahead)
    assert seconds >= max(sum(reads), sum(compute)) - 1e-9
    assert seconds <= sum(reads) + sum(compute) + 1e-9
    assert pipelined_s(reads, compute, ahead + 1) <= seconds + 1e-9


def test_interpolation():
    assert [interpolate(x, (1, 3), (10, 20)) for x in (0, 1, 2, 3, 5)] == [5, 10, 15, 20, 30]
    assert interpolate(7, (1,), (4.0,)) == 4.0
    assert per_token(0, (10, 20), (1.0, 4.0)) == 0.0
    assert per_token(5, (10, 20), (1.0, 4.0)) == 0.5
    assert per_token(15, (10, 20), (1.0, 4.0)) == pytest.approx(15**2 / 100)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.T_recompute(1.5, 2000),
        lambda c: c.T_recompute(True, 2000),
        lambda c: c.T_recompute(0.1, 50),
        lambda c: c.T_recompute(0.1, 2000.5),
        lambda c: c.T_recompute(0.1, 2000, formula="mine"),
        lambda c: c.T_load(2000, "floppy"),
        lambda c: c.T_load(None, "ssd"),
        lambda c: c.T_load(2000, "ssd", num_bytes=5),
        lambda c: c.T_load(None, "ssd", num_bytes=-1),
        lambda c: c.choose_ratio(-3, "ssd"),
        lambda c: c.choose_device(-0.1),
        lambda c: c.predict_ttft(2000, 2),
        lambda c: replace(c, devices=()).choose_device(0.15),
        lambda c: replace(c, min_ratio=2),
        lambda c: replace(c, formula="mine"),
        lambda c: replace(c, context="mine"),
        lambda c: replace(c, devices=(*DEVICES, DEVICES[1])),
        lambda c: replace(MODEL, lengths=(2000, 1000, 4000)),
        lambda c: replace(MODEL, ratios=(0.1, 1.1)),
        lambda c: replace(MODEL, prefill_s=(1.0, 2.0)),
        lambda c: replace(MODEL, reuse_s=(0.0, 1.0, 1.0)),
        lambda c: replace(MODEL, blend_s=MODEL.blend_s[:1]),
        lambda c: DeviceProfile("x", 0.0),
        lambda c: DeviceProfile("x", math.inf),
        lambda c: DeviceProfile("x", 1.0, price_per_gb_month=-1.0),
        lambda c: DeviceProfile("x", 1.0, slows=0.9),
        lambda c: Work(10, 0),
        lambda c: Work(10, 5, 6),
    ],
)
def test_what_makes_no_sense_is_refused(call):
    with pytest.raises(ValueError, match=r"."):
        call(CONTROLLER)


# -- JSON and checks ------------------------------------------------------------------------------------------------


def test_json_round_trip(tmp_path):
    path = replace(CONTROLLER, min_ratio=0.2, formula="paper").save(tmp_path / "new folder" / "profile.json")
    loaded = kr.LoadingController.load(path)
    assert loaded == replace(CONTROLLER, min_ratio=0.2, formula="paper")
    assert hash(loaded) == hash(replace(CONTROLLER, min_ratio=0.2, formula="paper"))
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]
    data = loaded.to_json()
    del data["devices"][0]["slows"]  # a profile from before it was measured
    assert kr.LoadingController.from_json(data) == loaded


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(version=99),
        lambda data: data.pop("model"),
        lambda data: data["model"].pop("lengths"),
        lambda data: data["devices"][0].update(colour="red"),
        lambda data: data.update(devices=3),
        lambda data: data["model"].update(lengths=["many"]),
        lambda data: data["model"].update(reuse_s=5),
    ],
)
def test_a_file_that_is_no_profile_says_so(tmp_path, change):
    path = CONTROLLER.save(tmp_path / "profile.json")
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="profile.json"):
        kr.LoadingController.load(path)
    path.write_text("{cut o")
    with pytest.raises(ValueError, match="profile.json"):
        kr.LoadingController.load(path)


def test_the_repr_is_short_and_follows_the_content():
    other = replace(CONTROLLER, devices=(*DEVICES[:3], replace(DEVICES[3], bytes_per_s=3e4)))
    assert len({repr(CONTROLLER), repr(other), repr(replace(CONTROLLER, min_ratio=0.2))}) == 3
    assert len(repr(CONTROLLER)) < 80


def of(model, **settings):
    """The hand-made profile as one of this model, as it runs here."""
    measured = replace(MODEL, model=model.name, fingerprint=model.fingerprint(), threads=torch.get_num_threads())
    return replace(CONTROLLER, model=replace(measured, num_layers=model.num_layers, num_question=6), **settings)


@pytest.mark.parametrize("field", ["fingerprint", "device", "dtype", "threads"])
def test_another_model_or_machine_is_refused(field, tmp_path):
    model = tiny_model()
    own = of(model)
    own.check(model)
    other = replace(own, model=replace(own.model, **{field: 7 if field == "threads" else "other"}))
    with pytest.raises(kr.ProfileMismatchError, match=f"{field}.*profile again"):
        other.check(model)
    with pytest.raises(kr.ProfileMismatchError):
        kr.LoadingController.load(other.save(tmp_path / "p.json"), model)


def test_another_device_is_refused(tmp_path):
    c = CONTROLLER
    assert c.device(kr.StorageDevice(tmp_path, name="hdd", throttle_bytes_per_s=2e5)) == DEVICES[2]
    with pytest.raises(kr.ProfileMismatchError, match="'floppy' is not in the profile"):
        c.device(kr.StorageDevice(tmp_path, name="floppy"))
    with pytest.raises(kr.ProfileMismatchError, match="throttle_bytes_per_s=None"):
        c.device(kr.StorageDevice(tmp_path, name="hdd"))


# -- CacheBlend(ratio="auto") ---------------------------------------------------------------------------------------


@pytest.fixture
def model():
    return tiny_model()


PROMPT = rag_prompt()


def slow(model, load_s, folder):
    """A device on which a prompt's load takes ``load_s`` by the profile, and a controller that knows it.

    The real reads are not braked: what is chosen depends on the profile alone.
    """
    device = kr.StorageDevice(folder, name="slow")
    store = kr.KVStore(None, device)
    kr.CacheBlend().encode(model, PROMPT, store)
    total = store.stats().num_bytes
    return store, of(model, devices=(DeviceProfile("slow", total / load_s),)), device


def test_auto_recomputes_as_long_as_loading_takes(model, tmp_path):
    store, controller, _ = slow(model, 1.5, tmp_path)
    method = kr.CacheBlend(ratio="auto", controller=controller)
    trace = method.prefill(model, PROMPT, store).trace
    # by hand: of 5, 17, 13 and 19 tokens the first two are exact; of the others one layer of four is not read
    five, thirteen, seventeen, nineteen = sorted(e.stat().st_size for e in tmp_path.rglob("*.safetensors"))
    read = five + seventeen + 0.75 * (thirteen + nineteen)
    load_s = 1.5 * read / (five + thirteen + seventeen + nineteen)
    # 1 s, layer 0 of 38 tokens, ratio * 38 tokens behind
    assert 0.15 < trace.ratio < 1
    assert trace.ratio == pytest.approx((load_s - 1 - 0.038) / 0.38, abs=0.01)
    fixed = kr.CacheBlend(ratio=trace.ratio).prefill(model, PROMPT, store)
    auto = method.prefill(model, PROMPT, store)
    assert torch.equal(fixed.logits, auto.logits)
    assert len(trace.selected[1]) > len(kr.CacheBlend().prefill(model, PROMPT, store).trace.selected[1])


@pytest.mark.parametrize(("load_s", "ratio"), [(0.5, 0.15), (1e6, 1.0)])
def test_auto_stays_between_r_star_and_one(model, tmp_path, load_s, ratio):
    store, controller, _ = slow(model, load_s, tmp_path)
    result = kr.CacheBlend(ratio="auto", controller=controller).prefill(model, PROMPT, store)
    assert result.trace.ratio == ratio


def test_hits_in_memory_take_r_star(model, tmp_path):
    _, controller, device = slow(model, 1.5, tmp_path)
    store = kr.KVStore("1GiB", device)
    method = kr.CacheBlend(ratio="auto", controller=replace(controller, min_ratio=0.2))
    assert method.prefill(model, PROMPT, store).trace.ratio > 0.2  # from disk, and kept in memory
    assert method.prefill(model, PROMPT, store).trace.ratio == 0.2


def test_chunks_that_are_missing_count_as_recompute(model, tmp_path):
    store, controller, _ = slow(model, 1.5, tmp_path)
    method = kr.CacheBlend(ratio="auto", controller=controller)
    whole = method.prefill(model, PROMPT, store).trace.ratio
    store.delete_chunk(PROMPT.chunks[1])
    trace = method.prefill(model, PROMPT, store).trace
    assert (trace.misses, trace.ratio < whole) == (1, True)


def test_nothing_stored_is_a_full_recompute(model, tmp_path):
    store = kr.KVStore(None, tmp_path)
    trace = kr.CacheBlend(ratio="auto").prefill(model, PROMPT, store).trace
    assert (trace.hits, trace.ratio) == (0, None)


def test_auto_without_a_controller_serves_from_memory_alone(model, tmp_path):
    store = kr.KVStore()
    kr.CacheBlend().encode(model, PROMPT, store)
    assert kr.CacheBlend(ratio="auto").prefill(model, PROMPT, store).trace.ratio == 0.15
    disk, _, _ = slow(model, 1.5, tmp_path)
    with pytest.raises(ValueError, match="no controller="):
        kr.CacheBlend(ratio="auto").prefill(model, PROMPT, disk)


def test_auto_refuses_a_profile_of_something_else(model, tmp_path):
    store, controller, _ = slow(model, 1.5, tmp_path)
    for wrong in (
        replace(controller, devices=DEVICES),
        replace(controller, model=replace(controller.model, threads=64)),
    ):
        with pytest.raises(kr.ProfileMismatchError):
            kr.CacheBlend(ratio="auto", controller=wrong).prefill(model, PROMPT, store)
    # and has let go of the files: nothing is leased, so all can be evicted
    assert all(not record.leases for record in store._disks["slow"]._index.values())


def test_the_configuration_says_what_decides():
    assert "controller" not in repr(kr.CacheBlend())
    auto = kr.CacheBlend(ratio="auto", controller=CONTROLLER)
    assert "ratio='auto'" in repr(auto)
    assert repr(CONTROLLER) in repr(auto)
    with pytest.raises(ValueError, match="only for ratio='auto'"):
        kr.CacheBlend(controller=CONTROLLER)
    with pytest.raises(TypeError, match="kr.LoadingController"):
        kr.CacheBlend(ratio="auto", controller="profile.json")
    with pytest.raises(ValueError, match="ratio='manual'"):
        kr.CacheBlend(ratio="manual")


def test_the_trace_says_the_ratio_of_every_blend(model):
    store = kr.KVStore()
    kr.CacheBlend().encode(model, PROMPT, store)
    methods = [kr.CacheBlend(ratio=0.3), kr.FullReuse(), kr.LegoLink()]
    assert [m.prefill(model, PROMPT, store).trace.ratio for m in methods] == [0.3, 0.0, None]


# -- profiling ------------------------------------------------------------------------------------------------------


def test_a_real_profile_has_what_was_asked_for(model, tmp_path):
    devices = [
        kr.StorageDevice(tmp_path / "disk", name="disk", price_per_gb_month=0.1),
        kr.StorageDevice(tmp_path / "slow", name="slow", throttle_bytes_per_s=2e7),
    ]
    controller = kr.LoadingController.profile(
        model,
        devices,
        lengths=(40, 100, 9999),  # longer than the model's context: left out
        ratios=(0.2, 0.6),
        repeats=1,
        chunk_tokens=64,
        memory_price_per_gb_month=3.0,
        min_ratio=0.25,
    )
    measured = controller.model
    assert (measured.lengths, measured.ratios, measured.num_layers) == ((40, 100), (0.2, 0.6), 4)
    # two heads of 8 dimensions, K and V, fp32, four layers; ids
    assert measured.token_bytes == 2 * 2 * 8 * 4 * 4 + 8
    assert [d.name for d in controller.devices] == ["memory", "disk", "slow"]
    assert controller.min_ratio == 0.25
    assert controller.device("slow").bytes_per_s <= 2e7 * 1.01  # the bucket gives no more
    assert controller.device("disk").price_per_gb_month == 0.1
    assert "throttled" in controller.device("slow").label
    assert not list((tmp_path / "disk").iterdir())  # cleaned up
    controller.check(model, devices)


def test_a_profile_of_nothing_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match="lengths="):
        kr.LoadingController.profile(model, lengths=(9999,))
    with pytest.raises(ValueError, match="ratios="):
        kr.LoadingController.profile(model, ratios=())
    with pytest.raises(ValueError, match="repeats=0"):
        kr.LoadingController.profile(model, repeats=0)
    (tmp_path / "file").write_text("")
    device = kr.StorageDevice(tmp_path / "file")
    with pytest.raises(OSError, match="File exists"):
        kr.LoadingController.profile(model, [device], lengths=(40,), ratios=(0.2,), repeats=1)
