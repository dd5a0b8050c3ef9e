"""Where chunk K/V are kept between requests: memory, disks, and what loads them layer by layer."""

from kvreuse.store.devices import StorageDevice
from kvreuse.store.store import KVStore, StoreStats, TierStats

__all__ = ["KVStore", "StorageDevice", "StoreStats", "TierStats"]
