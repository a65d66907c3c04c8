"""Files whose SHA-256 is known when they have been written, without reading them again."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem


class HashedFile(io.FileIO):
    """Written front to back, unbuffered. A thread hashes what another hands to the system: neither waits for the other
    but at the end of each write."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "w")
        self._digest = hashlib.sha256()
        self.bytes = 0

    def write(self, data: Any) -> int:
        whole = memoryview(data).cast("B")
        hashing = threading.Thread(target=self._digest.update, args=(whole,))
        hashing.start()
        try:
            done = 0
            while done < len(whole):  # the system may take less than all: at most 2 GiB at a time
                done += self._take(whole[done:])
        finally:
            hashing.join()
        self.bytes += done
        return done

    def _take(self, part: memoryview) -> int:
        return super().write(part)

    def seek(self, *_: Any) -> int:
        raise io.UnsupportedOperation("a file that is hashed while it is written is written front to back")

    def record(self) -> dict[str, Any]:
        """Size and SHA-256, as in a manifest."""
        return {"bytes": self.bytes, "sha256": self._digest.hexdigest()}


class HashedFileSystem(FileSystem):
    """DCP's file system, where every file that is written is hashed on the way."""

    def __init__(self) -> None:
        self._records: dict[Path, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with HashedFile(path) as stream:
            yield stream
        self._records[Path(path)] = stream.record()

    def record(self, path: Path) -> dict[str, Any]:
        """Of a file that has been written and closed."""
        return self._records[path]
