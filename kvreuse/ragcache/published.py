"""Costs on the hardware of RAGCache's evaluation, derived from its text and from model shapes; never measured here.

What the text says (arXiv:2404.12457) and what is presumed is said at every constant. All names carry
"published-hardware scale", so that figures show it.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30

# Figure 2's text: inference takes a second once a sequence has more than 4,000 tokens (presumed: LLaMA2-7B, A10G).
CALIBRATION_TOKENS, CALIBRATION_S = 4000, 1.0
# Figure 4's text: with its prefix cached a prefill is up to 11.5 times as fast, up to 3.9 times if the K/V come from
# host (presumed: both at that length, with a question of 100 tokens, the summary's example of a request).
HIT_SPEEDUP, HOST_HIT_SPEEDUP, QUESTION_TOKENS = 11.5, 3.9, 100


@dataclass(frozen=True)
class ModelShape:
    """What a model's costs follow from; numbers from its published configuration. fp16.

    ``parameters``: all; ``active_parameters``: those one token runs through; ``experts``, ``active_experts``: of a
    mixture, 1 and 1 of a dense model. ``kv_dim``: width of K (and of V) on a layer.
    """

    name: str
    num_layers: int
    hidden_size: int
    kv_dim: int
    parameters: float
    active_parameters: float
    experts: int = 1
    active_experts: int = 1

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V, two bytes a number."""
        return 2 * 2 * self.num_layers * self.kv_dim

    def prefill_flops(self, cached_tokens: int, new_tokens: int) -> float:
        """Two per parameter and token; attention's two products over the keys before each token."""
        keys = cached_tokens + new_tokens / 2
        return new_tokens * (2 * self.active_parameters + 4 * self.num_layers * self.hidden_size * keys)

    def weight_bytes(self, num_rows: int) -> float:
        """Weights that a step of ``num_rows`` tokens reads: of a mixture, the experts that any of them is sent to."""
        if self.experts == 1:
            return 2 * self.parameters
        expert = (self.parameters - self.active_parameters) / (self.experts - self.active_experts)
        shared = self.active_parameters - self.active_experts * expert
        touched = self.experts * (1 - (1 - self.active_experts / self.experts) ** num_rows)
        return 2 * (shared + touched * expert)


# Layers, hidden size, key/value heads x 128: the models' published config.json; parameters: their papers.
MISTRAL_7B = ModelShape("Mistral-7B", 32, 4096, 8 * 128, 7.24e9, 7.24e9)
LLAMA2_7B = ModelShape("LLaMA2-7B", 32, 4096, 32 * 128, 6.74e9, 6.74e9)
MIXTRAL_8X7B = ModelShape("Mixtral-8x7B", 32, 4096, 8 * 128, 46.7e9, 12.9e9, experts=8, active_experts=2)
LLAMA2_70B = ModelShape("LLaMA2-70B", 80, 8192, 8 * 128, 69.0e9, 69.0e9)


@dataclass(frozen=True)
class Hardware:
    """What is computed, read and moved per second; ``memory_bytes``: of all GPUs, ``host_bytes``: for cached K/V."""

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    swap_bytes_per_s: float
    prefill_overhead_s: float
    memory_bytes: int
    host_bytes: int


def _a10g() -> Hardware:
    bandwidth = 600e9  # NVIDIA's data sheet; reached in full, which favours decoding
    cached = (CALIBRATION_TOKENS - QUESTION_TOKENS) * LLAMA2_7B.kv_bytes_per_token
    # A hit reads the weights and the cached K/V; what is left of its 87 ms is the engine's.
    overhead_s = CALIBRATION_S / HIT_SPEEDUP - (LLAMA2_7B.weight_bytes(QUESTION_TOKENS) + cached) / bandwidth
    # The transfer is what lies between 11.5 and 3.9 times as fast: 12 GB/s, of PCIe 4.0 x16's 32.
    transfer_s = CALIBRATION_S * (1 / HOST_HIT_SPEEDUP - 1 / HIT_SPEEDUP)
    return Hardware(
        name="A10G",
        flops_per_s=LLAMA2_7B.prefill_flops(0, CALIBRATION_TOKENS) / (CALIBRATION_S - overhead_s),
        memory_bytes_per_s=bandwidth,
        swap_bytes_per_s=cached / transfer_s,
        prefill_overhead_s=overhead_s,
        memory_bytes=24 * GIB,  # the text's hardware section: g5.16xlarge, one A10G
        host_bytes=192 * GIB,  # the same
    )


A10G = _a10g()
# The text's hardware section: two H800 of 80 GB over NVLink, PCIe 5.0 x16, 384 GiB of host memory. It gives no times.
TWO_H800 = Hardware(
    name="2x H800",
    flops_per_s=2 * 0.5 * 989e12,  # data sheet, dense fp16; presumed: half of it is reached
    memory_bytes_per_s=2 * 3350e9,  # data sheet
    swap_bytes_per_s=2 * A10G.swap_bytes_per_s,  # presumed: the same share of a bus twice as fast
    prefill_overhead_s=A10G.prefill_overhead_s,  # presumed: the same engine
    memory_bytes=2 * 80 * 10**9,
    host_bytes=384 * GIB,
)


@dataclass(frozen=True)
class PublishedCosts:
    """A cost model at published-hardware scale.

    Args:
        model, hardware: see above.
        search_stage_s: of a search's stages. The text gives no search time: presumed 0.1 s each; figures vary it.
        contended_search, contention_s: the search has processors of its own.
    """

    model: ModelShape
    hardware: Hardware
    search_stage_s: tuple[float, ...] = (0.1, 0.1, 0.1, 0.1)
    contended_search: float = 1.0
    contention_s: float = 0.0

    @property
    def name(self) -> str:
        """Model and hardware; says that this is a scale, not a measurement."""
        return f"{self.model.name} on {self.hardware.name}, published-hardware scale"

    @property
    def bytes_per_token(self) -> int:
        """K/V in fp16."""
        return self.model.kv_bytes_per_token

    @property
    def cache_bytes(self) -> int:
        """GPU memory for K/V: 0.9 of all (vLLM's default) less the weights."""
        return int(0.9 * self.hardware.memory_bytes - 2 * self.model.parameters)

    def prefill_s(self, cached_tokens: int, new_tokens: int) -> float:
        """Computing, or reading the weights and the cached K/V, whichever takes longer; and the engine's overhead.

        The overhead is in here, not beside, for it is what T(alpha, beta) of the text's profiler includes.
        """
        read = self.model.weight_bytes(new_tokens) + cached_tokens * self.bytes_per_token
        computing_s = self.model.prefill_flops(cached_tokens, new_tokens) / self.hardware.flops_per_s
        return self.hardware.prefill_overhead_s + max(computing_s, read / self.hardware.memory_bytes_per_s)

    def prefill_overhead_s(self, num_rows: int) -> float:
        """In `prefill_s` already."""
        return 0.0

    def step_s(self, num_rows: int, longest: int, total: int) -> float:
        """Reading weights and all K/V, or computing, whichever takes longer. No overhead: none is published."""
        read = self.model.weight_bytes(num_rows) + total * self.bytes_per_token
        flops = 2 * num_rows * self.model.active_parameters + 4 * self.model.num_layers * self.model.hidden_size * total
        return max(read / self.hardware.memory_bytes_per_s, flops / self.hardware.flops_per_s)

    def move_s(self, kept: int, to_gpu: int, to_host: int) -> float:
        """Over PCIe, one direction after the other; what a prefill has computed stays where it is."""
        return (to_gpu + to_host) / self.hardware.swap_bytes_per_s


A10G_MISTRAL_7B = PublishedCosts(MISTRAL_7B, A10G)
A10G_LLAMA2_7B = PublishedCosts(LLAMA2_7B, A10G)
H800_MIXTRAL_8X7B = PublishedCosts(MIXTRAL_8X7B, TWO_H800)
H800_LLAMA2_70B = PublishedCosts(LLAMA2_70B, TWO_H800)
