"""What CacheBlend says, to be set beside ours: values of figures 12 and 13 read off the plots, claims of the others."""

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


# Figures without readable values: what the text says of them.
CLAIMS: dict[str, str] = {
    "fig02": "F1 improves significantly with more chunks, too many hurt (lost in the middle); the gap between full "
    "recompute and full reuse widens with their number (3.2, 3.3).",
    "fig03": "Full recompute answers right and clearly; with full reuse the model rambles (3.3).",
    "fig04": "Under full reuse the cross-attention between the two chunks is missing entirely (3.3).",
    "fig06": "Attention deviation falls with the ratio, most with the first few tokens of highest KV deviation (4.3).",
    "fig07": "10-15% of the tokens have a much higher KV deviation than the others (4.3).",
    "fig08": "Consistently high rank correlation of the KV deviation between neighbouring layers (4.3).",
    "fig15a": "Similar reduction of compute at every number of chunks, at most 0.015 F1 lost (7.3).",
    "fig15b": "Similar reduction of compute at every chunk length, at most 0.015 F1 lost (7.3).",
    "fig15c": "Compute of the prefill phase grows with the batch, and what CacheBlend saves of it, too (7.3).",
    "fig16": "With 5-18% recomputed at most 0.002 F1 or ROUGE-L lost; TTFT 4.1-6.6 times lower than full recompute, "
    "3.4-6.1 times lower than prefix caching (Yi-34B, 7.3).",
}


def markdown(figure: str) -> str:
    """The paper's values as a Markdown table, or what it says of the figure."""
    if figure in CLAIMS:
        return f"The paper: {CLAIMS[figure]}"
    lines = [
        "| paper, read off its plots | dataset | CacheBlend | full reuse | full recompute | MapReduce | MapRerank |"
    ]
    lines.append("|" + " --- |" * 7)
    for model, datasets in FIG12_SCORES.items():
        for dataset, scores in datasets.items():
            maps = FIG13_SCORES[dataset] if model == "Yi-34B" else ("-", "-")
            lines.append("| " + " | ".join(map(str, (model, dataset, *scores, *maps))) + " |")
    return "\n".join(lines)
