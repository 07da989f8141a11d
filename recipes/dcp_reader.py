"""torch.distributed.checkpoint's file reader, made fit for files that somebody else may have written.

Serves torch 2.11 to 2.14, whose reader loads `.metadata` with plain `pickle.load`, which runs what the file says; it
can go when upstream reads it safely. Tensors are read with `weights_only` by upstream already.

    reader = SafeReader(folder)
    reader.saved_shapes()                                   # {"model.lm_head.weight": [384, 256], ...}
    dcp.load(tensors, storage_reader=reader)
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata


class UnusableError(Exception):
    """A train state that is incomplete or damaged."""


class SafeReader(dcp.FileSystemReader):
    """Reads metadata by an unpickler that knows DCP's own classes and no others. Raises UnusableError for the rest."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata`."""
        try:
            with open(Path(self.path) / ".metadata", "rb") as file:
                metadata = _MetadataUnpickler(file).load()
            metadata.storage_meta.load_id = self.load_id
        except Exception as error:  # a damaged pickle raises anything at all
            raise UnusableError(f".metadata: {error}") from error
        return metadata

    def saved_shapes(self) -> dict[str, list[int]]:
        """Return the shape of every tensor by name."""
        return {name: list(value.size) for name, value in self.read_metadata().state_dict_metadata.items()}


class _MetadataUnpickler(pickle.Unpickler):
    _ALLOWED = frozenset(
        [
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
            ("pathlib", "PosixPath"),
            ("pathlib", "WindowsPath"),
            ("pathlib._local", "PosixPath"),
            ("pathlib._local", "WindowsPath"),
        ]
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        if module == "torch.distributed.checkpoint.metadata" and "." not in name:
            value = super().find_class(module, name)
            if isinstance(value, type) and value.__module__ == module:  # not what that module imports
                return value
        raise pickle.UnpicklingError(f".metadata asks for {module}.{name}, which no train state needs")
