"""What the way to a GPU can be held to on a CPU: aligned masks, no waiting for numbers, the benchmark's tiny shape."""

import json

import pytest
import torch
import torch.nn.functional as F
from chunks import entry, same
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import AutoModelForCausalLM

import kvreuse as kr
from benchmarks import gpu
from benchmarks.random_models import SHAPES, RandomModel, does_not_fit, random_prompt
from kvreuse import compat
from kvreuse.blend.cache import BlendLayer
from kvreuse.blend.index import Index
from kvreuse.blend.kernels import attention_kernels
from kvreuse.blend.rows import RowMask

CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [None, 7, 300])
@pytest.mark.parametrize("rows", [[1, 4], list(range(200)), list(range(0, 200, 3)), [198], [0]])
def test_masks_for_a_gpu_are_aligned_and_mask_the_same(rows, window):
    """A row stride that is a multiple of 8 is what PyTorch asks before it hands a mask to its kernel uncopied."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, len(rows), 8, generator=g)
    k, v = (torch.randn(1, 2, 200, 8, generator=g) for _ in range(2))
    mask = RowMask(torch.tensor(rows), 200, window)
    expected, stop = mask.weights(q, k, None) @ v, 0
    for block in mask.blocks(torch.float32, 64):
        assert block.rows.start == stop
        stop = block.rows.stop
        assert (block.mask.stride(0) % 8, block.mask.stride(1)) == (0, 1)
        seen = block.keys
        assert torch.equal(block.mask == 0, mask.visible(block.rows, seen))
        out = F.scaled_dot_product_attention(q[:, :, block.rows], k[:, :, seen], v[:, :, seen], block.mask)
        torch.testing.assert_close(out, expected[:, :, block.rows], atol=1e-5, rtol=1e-5)
    assert stop == len(rows)


def test_a_pass_keeps_cudnns_attention_out_and_lets_it_in_again():
    """PyTorch keeps these switches wherever it runs; on a CPU a pass leaves them alone."""
    switches = torch.backends.cuda
    before = switches.cudnn_sdp_enabled()
    with attention_kernels(CPU):
        assert switches.cudnn_sdp_enabled() == before
    switches.enable_cudnn_sdp(True)
    try:
        with attention_kernels(torch.device("cuda")):
            assert not switches.cudnn_sdp_enabled()
            assert switches.flash_sdp_enabled()
            assert switches.mem_efficient_sdp_enabled()
        assert switches.cudnn_sdp_enabled()
    finally:
        switches.enable_cudnn_sdp(before)


def test_rows_are_scattered_without_asking_the_gpu_for_a_number():
    """Fake tensors on a GPU have shapes and no numbers: asking for one, which is what waits, raises."""
    index = Index(torch.tensor([1, 4, 7]))
    assert index.run is None  # asked of the CPU, and kept
    with FakeTensorMode(allow_non_fake_inputs=True):
        held, fresh = (torch.zeros(1, 2, n, 8, device="cuda") for n in (20, 3))
        layer = BlendLayer()
        compat.fill_layer(layer, held, held.clone())
        layer.rows, layer.measure = index, "kv"
        keys, _ = layer.update(fresh, fresh)
        assert (keys.device.type, layer.deviation.device.type) == ("cuda", "cuda")
        with pytest.raises(DataDependentOutputException):
            layer.deviation.sum().item()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_page_locked_memory_needs_a_gpu():
    with pytest.raises(ValueError, match="pin_memory=True: page-locked memory is for a CUDA GPU"):
        kr.KVStore(pin_memory=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_entries_are_page_locked_and_not_together_with_compression():
    store = kr.KVStore(pin_memory=True)
    assert store.put("key", entry(0))
    held = store.get("key", entry(0).ids)
    assert same(held, entry(0))
    assert all(t.is_pinned() for t in (*held.keys, *held.values))
    with pytest.raises(ValueError, match="kv_dtype='int8'"):
        kr.KVStore(pin_memory=True, kv_dtype="int8")


def test_an_index_knows_its_gaps_and_is_copied_once():
    index = Index(torch.tensor([2, 3, 4]))
    assert index.run == slice(2, 5)
    assert Index(torch.tensor([2, 4])).run is None
    assert index.on(CPU) is index.on(CPU)
    torch.testing.assert_close(index.on(CPU), index.on_cpu)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shapes_parameters_are_those_of_the_model_made_of_it(name):
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(SHAPES[name].config(), dtype=torch.bfloat16)
    assert sum(p.numel() for p in hf.parameters()) == SHAPES[name].num_parameters


def test_published_sizes():
    billions = {name: round(shape.num_parameters / 1e9, 2) for name, shape in SHAPES.items() if name != "tiny"}
    assert billions == {"mistral-7b": 7.24, "llama-3-8b": 8.03, "yi-34b": 34.39}
    assert 69e9 < SHAPES["yi-34b"].needed_bytes(12352, 2) < 84e9


def test_random_models_are_made_in_their_type_and_known_by_what_they_are_made_of():
    model = RandomModel(SHAPES["tiny"], CPU, torch.bfloat16)
    assert model.dtype == torch.bfloat16
    again = RandomModel(SHAPES["tiny"], CPU, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(model.hf.parameters(), again.hf.parameters(), strict=True))
    assert model.fingerprint() == again.fingerprint()
    assert model.fingerprint() != RandomModel(SHAPES["tiny"], CPU, torch.float32).fingerprint()
    kr.check_model(model)


def test_a_longer_prompt_begins_with_the_chunks_of_a_shorter_one():
    short, long = (random_prompt(SHAPES["tiny"], n, 8, around=5) for n in (2, 3))
    assert all(torch.equal(a, b) for a, b in zip(short.chunks, long.chunks[:2], strict=True))
    assert torch.equal(short.question, long.question)
    assert long.num_tokens == 5 + 3 * 8 + 5


def test_nothing_is_too_large_where_no_gpu_is_asked():
    assert does_not_fit(SHAPES["yi-34b"], 12352, CPU, torch.bfloat16) is None


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    gpu.main(["--device", "cpu", "--chunks", "2,3", "--chunk-tokens", "16", "--repeats", "2", "--out", str(out)])
    return json.loads(out.read_text()), out.with_suffix(".md").read_text()


def test_the_tiny_shape_runs_on_a_cpu_and_says_so(on_cpu):
    saved, tables = on_cpu
    assert saved["header"]["note"] == gpu.ON_CPU
    assert gpu.ON_CPU in tables
    assert [(c["shape"], c["num_chunks"], len(c["rounds"])) for c in saved["cells"]] == [("tiny", 2, 2), ("tiny", 3, 2)]
    labels = [timed.label for timed in gpu.timed_methods(gpu.RATIOS, graphs=False)]
    for cell in saved["cells"]:
        assert not cell["not_run"]
        for done in cell["rounds"]:
            assert list(done) == labels
            for stages in done.values():
                assert stages["ttft_s"] == pytest.approx(sum(s for name, s in stages.items() if name != "ttft_s"))
        assert all(label in tables for label in labels)


def test_exact_methods_have_full_recomputes_logits(on_cpu):
    for cell in on_cpu[0]["cells"]:
        error = cell["logit_error"]
        exact = ("full recompute, flash", "prefix caching", "CacheBlend, ratio 1")
        assert max(error[label] for label in exact) < 1e-4 < error["full reuse"]


def test_what_the_time_does_not_allow_is_listed(tmp_path, capsys):
    gpu.main(["--device", "cpu", "--limit-s", "0", "--out", str(tmp_path / "gpu.json")])
    cells = json.loads((tmp_path / "gpu.json").read_text())["cells"]
    assert [c["not_run"] for c in cells] == [{"all": "the time limit of 0 s was reached"}] * 2
    assert "Not run: all: the time limit" in capsys.readouterr().out


def test_an_unknown_shape_names_those_there_are(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--shapes", "gpt-5"])
    assert "gpt-5: choose from mistral-7b, llama-3-8b, yi-34b, tiny" in capsys.readouterr().err
