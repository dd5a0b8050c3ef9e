"""Prefix caching with chained block hashes, as vLLM does it, over the real K/V of a Hugging Face model."""

from kvreuse.prefix.block_cache import BlockPrefixCache
from kvreuse.prefix.block_hash import block_hash, block_hashes, root_hash
from kvreuse.prefix.blocks import BlockMatch, BlockRoot, JoinedBlocks

__all__ = ["BlockMatch", "BlockPrefixCache", "BlockRoot", "JoinedBlocks", "block_hash", "block_hashes", "root_hash"]
