"""Scripts that reproduce the papers' figures; run one with `python -m experiments.fig12`."""
