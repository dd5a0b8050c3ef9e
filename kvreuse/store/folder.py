"""What the disk tier does to its folder: find whole files, write one so that it is whole or not there."""

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvreuse.store.codec import PackedKV
from kvreuse.store.format import write_chunk

_HASH = re.compile(r"[0-9a-f]{64}")
_SUFFIX = ".safetensors"
_ORPHAN_S = 600  # a temporary file this old has lost its writer


def file_path(folder: str, name: str, model: str) -> str:
    """``folder / model / name.safetensors``; a model that is no hash is hashed."""
    if not _HASH.fullmatch(model):
        model = hashlib.sha256(model.encode()).hexdigest()
    return os.path.join(folder, model, name + _SUFFIX)


def scan_folder(folder: str) -> list[tuple[float, str, str, int]]:
    """(time of last use, name, path, bytes) of every chunk's file, oldest first; removes what dead writers left."""
    found = []
    for model in os.scandir(folder):
        if not _HASH.fullmatch(model.name) or not model.is_dir(follow_symlinks=False):
            continue
        for file in os.scandir(model.path):
            name, suffix = os.path.splitext(file.name)
            with suppress(OSError):  # another process may just have removed it
                if suffix == _SUFFIX and _HASH.fullmatch(name):
                    status = file.stat()
                    found.append((status.st_mtime, name, file.path, status.st_size))
                elif suffix == ".tmp" and time.time() - file.stat().st_mtime > _ORPHAN_S:
                    os.unlink(file.path)
    return sorted(found)


@contextmanager
def written_aside(path: str, entry: PackedKV) -> Iterator[tuple[str, int]]:
    """An entry written and synced beside ``path``: (temporary name, bytes). Gone afterwards unless renamed.

    Raises OSError where the device is full or may not be written.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = os.path.join(os.path.dirname(path), f".{uuid.uuid4().hex}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        try:
            write_chunk(descriptor, entry)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        yield temporary, size
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def publish(temporary: str, path: str) -> None:
    """Give a written file its name, on the device too."""
    os.replace(temporary, path)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(os.path.dirname(path), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
