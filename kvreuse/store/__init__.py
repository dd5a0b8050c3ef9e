"""Where chunk K/V are kept between requests."""

from kvreuse.store.store import KVStore, StoreStats

__all__ = ["KVStore", "StoreStats"]
