"""Values of CacheBlend's figures 12 and 13, read off the plots, to be set beside ours."""

from __future__ import annotations

# model -> dataset -> score of (CacheBlend, full reuse, full recompute)
FIG12_SCORES: dict[str, dict[str, tuple[float, float, float]]] = {
    "Mistral-7B": {
        "2wikimqa": (0.263, 0.088, 0.265),
        "musique": (0.295, 0.164, 0.299),
        "samsum": (0.385, 0.185, 0.390),
        "multinews": (0.180, 0.152, 0.181),
    },
    "Yi-34B": {
        "2wikimqa": (0.319, 0.153, 0.330),
        "musique": (0.339, 0.173, 0.356),
        "samsum": (0.363, 0.137, 0.380),
        "multinews": (0.172, 0.114, 0.171),
    },
    "Llama-70B": {
        "2wikimqa": (0.337, 0.191, 0.335),
        "musique": (0.311, 0.133, 0.309),
        "samsum": (0.390, 0.171, 0.393),
        "multinews": (0.197, 0.064, 0.197),
    },
}
# Mistral-7B on an A40: TTFT in seconds of (CacheBlend, full recompute)
FIG12_TTFT_S: dict[str, tuple[float, float]] = {
    "2wikimqa": (0.21, 0.595),
    "musique": (0.21, 0.595),
    "samsum": (0.295, 0.64),
    "multinews": (0.277, 0.58),
}
# Yi-34B: score of (MapReduce, MapRerank)
FIG13_SCORES: dict[str, tuple[float, float]] = {
    "2wikimqa": (0.219, 0.042),
    "musique": (0.183, 0.056),
    "samsum": (0.311, 0.238),
    "multinews": (0.105, 0.021),
}
# dataset -> (label, TTFT in seconds, score, marker) of the points whose both coordinates can be read
FIG12_MISTRAL: dict[str, tuple[tuple[str, float, float, str], ...]] = {
    dataset: (
        ("paper: CacheBlend, Mistral-7B", FIG12_TTFT_S[dataset][0], scores[0], "o"),
        ("paper: full recompute, Mistral-7B", FIG12_TTFT_S[dataset][1], scores[2], "s"),
    )
    for dataset, scores in FIG12_SCORES["Mistral-7B"].items()
}


def markdown() -> str:
    """The paper's values as a Markdown table."""
    lines = [
        "| paper, read off its plots | dataset | CacheBlend | full reuse | full recompute | MapReduce | MapRerank |"
    ]
    lines.append("|" + " --- |" * 7)
    for model, datasets in FIG12_SCORES.items():
        for dataset, scores in datasets.items():
            maps = FIG13_SCORES[dataset] if model == "Yi-34B" else ("-", "-")
            lines.append("| " + " | ".join(map(str, (model, dataset, *scores, *maps))) + " |")
    return "\n".join(lines)
