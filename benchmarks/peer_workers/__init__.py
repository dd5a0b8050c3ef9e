"""One file per peer: a process in the peer's own virtual environment, driven by `benchmarks.peers`.

A worker imports nothing of this project but `protocol` (the one of kvreuse's own methods apart).
"""
