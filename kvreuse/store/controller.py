"""`LoadingController`: how much to recompute while K/V load, and where to keep them (CacheBlend, 5)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvreuse.blend.schedule import Schedule, layer_ratio, parse_schedule
from kvreuse.kv import ChunkEncoder, EncoderContext
from kvreuse.prompt import RagPrompt
from kvreuse.store.devices import StorageDevice
from kvreuse.store.disk_entry import DiskEntry
from kvreuse.store.loader import LAYERS_AHEAD
from kvreuse.store.measured import Device, Measured
from kvreuse.store.profile import DeviceProfile, Work

if TYPE_CHECKING:
    from kvreuse.blend.plan import Segment
    from kvreuse.model import ReuseModel

Formula = Literal["paper", "measured"]
R_STAR = 0.15


@dataclass(frozen=True, repr=False)
class LoadingController(Measured):
    """Decides from an offline profile of one model and its storage devices.

    Args:
        model, devices: what was measured; `profile` measures, `load` reads what `save` has kept.
        min_ratio: r*, the least recompute ratio that keeps the quality; 0.15 in the paper (figure 16).
        formula: ``paper``: recompute takes ``ratio * Prefill(length)``, a lower bound, and all K/V are loaded.
            ``measured``: the real blend, with its full layer 0, and the K/V that it reads. What methods use by default.
        context: what chunks are encoded behind: behind the ``prefix`` a prompt's first chunk is exact.

    ``length`` is a prompt, or a number of tokens: then the profile's question behind that many inexact tokens.
    ``device`` is a name, or a device of that name. Times are seconds, in all or (``per_layer``) the layers' mean.
    """

    min_ratio: float = R_STAR
    formula: Formula = "measured"
    context: EncoderContext = "prefix"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ratio(self.min_ratio)
        self._formula(None)
        ChunkEncoder(self.context)

    @classmethod
    def profile(
        cls,
        model: ReuseModel,
        devices: Sequence[StorageDevice] = (),
        *,
        lengths: Sequence[int] = (512, 1024, 2048, 4096),
        ratios: Sequence[float] = (0.05, 0.15, 0.5),
        repeats: int = 3,
        memory_price_per_gb_month: float | None = None,
        **settings: Any,
    ) -> LoadingController:
        """Measure the model and the devices: some minutes on a CPU.

        Args:
            lengths: prompts' tokens; those above the model's context are left out.
            ratios: recompute ratios.
            repeats: interleaved rounds, at most two of full prefill; medians are kept.
            memory_price_per_gb_month: makes main memory one of the devices, named "memory".
            settings: ``warm_up`` rounds before them (1); ``kv_dtype`` of the store, ``chunk_tokens``; ``min_ratio``,
                ``formula``, ``context`` as above.
        """
        from kvreuse.store.profiling import profile_all

        own = {name: settings.pop(name) for name in ("min_ratio", "formula", "context") if name in settings}
        parts = profile_all(model, devices, lengths, ratios, repeats, memory_price_per_gb_month, **settings)
        return cls(*parts, **own)

    # -- delays -----------------------------------------------------------------------------------------------------

    def T_recompute(
        self, ratio: float, length: RagPrompt | int, *, formula: Formula | None = None, per_layer: bool = False
    ) -> float:
        """Seconds of recomputing a ratio of the tokens, K/V at hand (measured: the TTFT from memory)."""
        total = self._recompute(_check_ratio(ratio), self._work(length), self._formula(formula))
        return total / (self.model.num_layers if per_layer else 1)

    def T_load(
        self,
        length: RagPrompt | int | None,
        device: Device,
        *,
        num_bytes: float | None = None,
        formula: Formula | None = None,
        per_layer: bool = False,
    ) -> float:
        """Seconds of loading the K/V of a prompt, or ``num_bytes`` (then ``length`` is None), from a device."""
        if (length is None) == (num_bytes is None):
            raise ValueError(f"length={length!r}, num_bytes={num_bytes!r}: give one of them")
        if length is not None:
            num_bytes = sum(self._layer_bytes(self._work(length), self._formula(formula)))
        if num_bytes is None or not num_bytes >= 0:
            raise ValueError(f"num_bytes={num_bytes!r}: give 0 or more")
        return num_bytes / self.device(device).bytes_per_s / (self.model.num_layers if per_layer else 1)

    def cost_per_month(self, length: RagPrompt | int, device: Device) -> float:
        """Price of keeping the K/V of a prompt's context on a device for a month (the paper's C_store)."""
        return self.model.token_bytes * self._work(length).num_stored / 1e9 * self.device(device).price_per_gb_month

    def predict_ttft(
        self,
        length: RagPrompt | int,
        ratio: float,
        device: Device | None = None,
        *,
        pipelined: bool = True,
        schedule: str | Schedule = "gradual",
    ) -> float:
        """TTFT of a blend whose K/V are all on ``device`` (None: in memory), in seconds.

        Pipelined: a layer is computed when it has been read and the layer before it is done; readers are
        `LAYERS_AHEAD` layers ahead at most. A gradual ``schedule`` recomputes more on the first layers than on the
        last: where loading and recompute take about as long, it waits for the one first and for the other after that.
        """
        work, found = self._work(length), None if device is None else self.device(device)
        total = self.model.blend(work, _check_ratio(ratio))
        if found is None or found.in_memory:
            return total
        chunks = len(length.chunks) + (length.prefix.numel() > 0) if isinstance(length, RagPrompt) else 1
        opened = chunks * found.open_s
        reads = [num_bytes / found.bytes_per_s for num_bytes in self._layer_bytes(work, "measured", ratio)]
        if not pipelined:
            return opened + sum(reads) + total
        layers = self._layer_seconds(work, ratio, parse_schedule(schedule))
        return opened + pipelined_s(reads, [found.slows * layer_s for layer_s in layers])

    # -- decisions --------------------------------------------------------------------------------------------------

    def choose_ratio(self, prompt: RagPrompt | int, device: Device | None, *, formula: Formula | None = None) -> float:
        """max(r*, the ratio whose recompute takes as long as loading), at most 1; None and "memory" give r*."""
        if device is None or self.device(device).in_memory:
            return self.min_ratio
        behind_s = self._behind(device, self.T_load(prompt, device, formula=formula), self._formula(formula))
        return self._ratio_for(self._work(prompt), behind_s, self._formula(formula))

    def choose_device(
        self, ratio: float | None = None, length: RagPrompt | int | None = None, *, formula: Formula | None = None
    ) -> DeviceProfile:
        """The cheapest device that hides its load behind recomputing ``ratio`` (r* by default) of the tokens.

        ``length``: None wants it hidden at every length of the profile. If no device hides its load: the fastest, and
        a warning. Of equally cheap ones: the fastest.
        """
        ratio = self.min_ratio if ratio is None else _check_ratio(ratio)
        lengths = self.model.lengths if length is None else (length,)
        if not self.devices:
            raise ValueError("the profile has no devices: LoadingController.profile(model, [kr.StorageDevice(...)])")
        hiding = [d for d in self.devices if all(self.hides(d, ratio, n, formula=formula) for n in lengths)]
        if hiding:
            return min(hiding, key=lambda d: (d.price_per_gb_month, -d.bytes_per_s))
        fastest = max(self.devices, key=lambda d: d.bytes_per_s)
        message = f"no device hides its load behind recompute at ratio {ratio:g}: {fastest.name} is the fastest"
        warnings.warn(message, stacklevel=2)
        return fastest

    def hides(self, device: Device, ratio: float, length: RagPrompt | int, *, formula: Formula | None = None) -> bool:
        """Whether loading takes no longer than recomputing beside it."""
        behind_s = self._behind(device, self.T_load(length, device, formula=formula), self._formula(formula))
        return behind_s <= self.T_recompute(ratio, length, formula=formula)

    def request_ratio(
        self, model: ReuseModel, prompt: RagPrompt, segments: Sequence[Segment], fingerprint: str | None = None
    ) -> float:
        """The ratio for a request whose segments have been looked up: what it has to load from disk decides.

        Devices are read side by side: the slowest to finish counts. Raises ProfileMismatchError if the profile is of
        another model, or lacks a device.
        """
        num_bytes: dict[StorageDevice, float] = {}
        for s in segments:
            if isinstance(s.stored, DiskEntry):
                read = s.stored.num_bytes * (1.0 if s.exact else 1 - 1 / self.model.num_layers)
                num_bytes[s.stored.device] = num_bytes.get(s.stored.device, 0.0) + read
        if not num_bytes:
            return self.min_ratio
        self.check(model, num_bytes, fingerprint)
        loads = [(device, self.T_load(None, device, num_bytes=n)) for device, n in num_bytes.items()]
        behind_s = max(self._behind(device, load_s, self.formula) for device, load_s in loads)
        context = [s for s in segments if s.stop <= prompt.num_context]
        exact = sum(s.ids.numel() for s in context if s.exact and s.stored is not None)
        missing = sum(s.ids.numel() for s in context if s.stored is None)
        work = Work(prompt.num_tokens, prompt.question.numel(), exact, missing)
        return self._ratio_for(work, behind_s, self.formula)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _work(self, length: RagPrompt | int) -> Work:
        if isinstance(length, RagPrompt):
            exact = length.prefix.numel()
            exact += length.chunks[0].numel() if self.context == "prefix" or not exact else 0
            return Work(length.num_tokens, length.question.numel(), exact)
        if isinstance(length, bool) or not isinstance(length, int) or length <= self.model.num_question:
            question = self.model.num_question
            raise ValueError(f"length={length!r}: give a prompt, or a number of tokens above its question's {question}")
        return Work(length, self.model.num_question)

    def _formula(self, formula: Formula | None) -> Formula:
        chosen = self.formula if formula is None else formula
        if chosen not in get_args(Formula):
            raise ValueError(f"formula={chosen!r}: choose one of {', '.join(get_args(Formula))}")
        return chosen

    def _recompute(self, ratio: float, work: Work, formula: Formula) -> float:
        return ratio * self.model.prefill(work.num_tokens) if formula == "paper" else self.model.blend(work, ratio)

    def _layer_bytes(self, work: Work, formula: Formula, ratio: float = 1.0) -> list[float]:
        """Bytes read per layer. Of layer 0 a blend needs what is exact: the rest is computed there."""
        of_token = self.model.token_bytes / self.model.num_layers
        skips = formula == "measured" and ratio > 0
        first = of_token * (work.num_exact if skips else work.num_stored)
        return [first] + [of_token * work.num_stored] * (self.model.num_layers - 1)

    def _layer_seconds(self, work: Work, ratio: float, schedule: Schedule) -> list[float]:
        """Seconds of every layer of a blend from memory: what selection costs in layer 0, the rest by the schedule."""
        model, layers = self.model, self.model.num_layers
        reuse = model.blend(work, 0.0)
        first = model.first(work) if ratio > 0 and work.num_reused and layers > 1 else 0.0
        behind = max(0.0, model.blend(work, ratio) - reuse - first)
        shares = [0.0, *(layer_ratio(schedule, ratio, layer, layers) for layer in range(1, layers))]
        if not sum(shares):
            return [(reuse + behind) / layers] * layers
        return [
            reuse / layers + (0.0 if layer else first) + behind * share / sum(shares)
            for layer, share in enumerate(shares)
        ]

    def _behind(self, device: Device, load_s: float, formula: Formula) -> float:
        """Seconds of recompute, by its profile from memory, that last as long as a load beside it."""
        return load_s / self.device(device).slows if formula == "measured" else load_s

    def _ratio_for(self, work: Work, behind_s: float, formula: Formula) -> float:
        """max(r*, r with T_recompute(r) = behind_s), by bisection: T_recompute grows with r."""
        low, high = self.min_ratio, 1.0
        if self._recompute(low, work, formula) >= behind_s:
            return low
        if self._recompute(high, work, formula) <= behind_s:
            return high
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self._recompute(middle, work, formula) < behind_s else (low, middle)
        return high


def pipelined_s(reads_s: Sequence[float], compute_s: Sequence[float], ahead: int = LAYERS_AHEAD) -> float:
    """Seconds until the last layer is computed, each when it has been read and the one before it is done.

    A layer's read begins when the one before it has been read and the layer ``ahead`` places before it was taken.
    """
    read = computed = 0.0
    taken: list[float] = []
    for layer, (read_s, layer_s) in enumerate(zip(reads_s, compute_s, strict=True)):
        read = max(read, taken[layer - ahead] if layer >= ahead else 0.0) + read_s
        taken.append(max(computed, read))
        computed = taken[-1] + layer_s
    return computed


def _check_ratio(ratio: float) -> float:
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise ValueError(f"ratio={ratio!r}: the recompute ratio is a fraction in [0, 1]")
    return ratio
