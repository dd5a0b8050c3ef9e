"""Answers questions about a folder of texts from the terminal, and says what was reused.

    python -m kvreuse.ragcache.serve --corpus FOLDER [--ask "question" ...]

Every ``.txt`` and ``.md`` file under the folder is cut into chunks, embedded and indexed; then each line typed is a
question. ``--ask`` answers and ends.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import kvreuse as kr
from kvreuse.ragcache.corpus import Corpus, Retriever
from kvreuse.ragcache.kv import TreeCache
from kvreuse.ragcache.profiler import CostProfiler
from kvreuse.ragcache.server import RagServer
from kvreuse.ragcache.serving_types import ServedAnswer, ServerOptions
from kvreuse.retrieval import Embedder, split_text

SUFFIXES = (".txt", ".md")


def read_folder(folder: Path, model: kr.ReuseModel, chunk_tokens: int) -> tuple[list[str], list[str]]:
    """Chunks of all texts under ``folder``, and where each comes from.

    Raises:
        FileNotFoundError: there is no such folder, or no text in it.
    """
    paths = sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.is_file()) if folder.is_dir() else []
    texts, names = [], []
    for path in paths:
        text = path.read_text(errors="replace")
        if text.strip():
            chunks = split_text(text, model, chunk_tokens)
            texts += chunks
            name = str(path.relative_to(folder))
            names += [f"{name} #{i}" if len(chunks) > 1 else name for i in range(1, len(chunks) + 1)]
    if not texts:
        raise FileNotFoundError(f"{folder}: no {' or '.join(SUFFIXES)} file with text in it; give a folder of texts")
    return texts, names


def report(answer: ServedAnswer, names: Sequence[str]) -> str:
    """The answer, its documents, and what of them was reused."""
    request = answer.request
    lines = [answer.text or "(empty answer)"]
    for rank, number in enumerate(answer.documents):
        lines.append(f"  {'reused  ' if rank < request.cached_documents else 'computed'}  {names[number]}")
    started = "during the search" if request.speculative else "after the search"
    lines.append(
        f"  {request.cached_tokens} of {request.context_tokens} context tokens reused; first token after "
        f"{answer.ttft_s * 1e3:.0f} ms, begun {started}; {request.num_tokens} tokens"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the folder, start a server, answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--ask", nargs="+", help="questions to answer instead of those typed")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device")
    parser.add_argument("--top-k", type=int, default=2, help="documents per question")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--gpu", default="1GiB", help="K/V kept in GPU memory (in main memory without a GPU)")
    parser.add_argument("--host", default="4GiB", help="K/V kept on host")
    parser.add_argument("--profile", type=Path, help="cost profile: read if it is there, else measured and written")
    args = parser.parse_args(arguments)
    if not args.corpus.is_dir():
        parser.error(f"--corpus {args.corpus}: there is no such folder")

    model = kr.load_model(args.model, device=args.device)
    texts, names = read_folder(args.corpus, model, args.chunk_tokens)
    retriever = Retriever.build(texts, Embedder("demo"), args.top_k)
    corpus = Corpus(model, texts)
    cache = TreeCache(model, corpus.prefix, args.gpu, args.host, cost=_cost(args.profile, model))
    print(f"{len(texts)} chunks of {args.corpus}; {model.name} on {model.device}")
    with RagServer(model, corpus, retriever, cache, ServerOptions(max_new_tokens=args.max_new_tokens)) as server:
        for question in args.ask or _typed():
            try:
                print(report(server.answer(question), names), flush=True)
            except kr.PromptTooLongError as error:
                print(error)


def _cost(path: Path | None, model: kr.ReuseModel) -> CostProfiler | None:
    if path is None:
        return None
    if not path.exists():
        print("measuring the cost of prefills, once ...", flush=True)
        _measured(model).save(path)
    return CostProfiler.load(path, model)


def _measured(model: kr.ReuseModel) -> CostProfiler:
    return CostProfiler.measure(model)


def _typed() -> Iterator[str]:
    """Lines typed, until an empty one or the end of input."""
    while True:
        try:
            line = input("\nquestion> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not line:
            return
        yield line


if __name__ == "__main__":
    main()
