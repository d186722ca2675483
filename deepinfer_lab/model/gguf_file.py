"""The GGUF container: key-value metadata, and tensors read through a memory map.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here rather than by
`gguf.GGUFReader`, which takes seconds for a vocabulary of fifty thousand and does not tell a truncated file from a
malformed one. Block formats and their dequantisation are the `gguf` package's.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from deepinfer_lab.errors import CheckpointError, UnsupportedArchitecture

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, unless general.alignment says otherwise
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in numpy's order, outermost first; `offset` and `nbytes` in bytes of the file."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    nbytes: int


class GgufFile:
    """An open GGUF file.

    Raises:
        CheckpointError: the file is missing, is no GGUF file of a known version, is truncated or malformed.
        UnsupportedArchitecture: a tensor in a block format that the `gguf` package does not know.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if file.read(4) != MAGIC:
                    raise CheckpointError(f"{path}: not a GGUF file (it does not begin with 'GGUF')")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}), expected a GGUF file") from error
        header = _Header(path, self._map)
        version = header.number("I")
        if version not in VERSIONS:
            raise CheckpointError(f"{path}: GGUF version {version}, supported are {VERSIONS}, little-endian")
        tensors, pairs = header.number("Q"), header.number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = header.string()
            self.metadata[key] = header.value(header.number("I"))
        infos = [_tensor_info(header) for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{path}: general.alignment is {alignment!r}, expected a positive integer")
        start = -(-header.at // alignment) * alignment
        self.tensors = {}
        for name, shape, kind, offset in infos:
            info = TensorInfo(name, shape, kind, start + offset, _nbytes(path, name, shape, kind))
            if info.offset + info.nbytes > len(self._map):
                raise CheckpointError(
                    f"{path}: truncated, tensor '{name}' ends at byte {info.offset + info.nbytes}, "
                    f"the file has {len(self._map)} bytes"
                )
            self.tensors[name] = info

    def read(self, name: str) -> np.ndarray:
        """One tensor as a fresh float32 array, dequantised where it is in blocks.

        Raises:
            CheckpointError: no such tensor.
            UnsupportedArchitecture: a block format that the `gguf` package cannot dequantise.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: no tensor '{name}'")
        info = self.tensors[name]
        raw = np.frombuffer(self._map, dtype=np.uint8, count=info.nbytes, offset=info.offset)
        try:
            flat = gguf.quants.dequantize(raw.reshape(prod(info.shape[:-1]), -1), info.kind)
        except NotImplementedError as error:
            raise UnsupportedArchitecture(f"{self.path}: tensor '{name}' is {info.kind.name}: {error}") from error
        return np.array(flat, dtype=np.float32).reshape(info.shape)


class _Header:
    """A cursor over the header that never runs past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.at, self._data = path, len(MAGIC), data

    def number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def string(self) -> str:
        size = self.number("Q")
        self._require(size)
        text = self._data[self.at : self.at + size]
        self.at += size
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: a string at byte {self.at - size} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == ARRAY:
            item, count = self.number("I"), self.number("Q")
            if item in SCALARS:
                return list(self._numbers(SCALARS[item], count))
            if item == STRING:
                self._require(count * 8)  # each has at least its length
                return [self.string() for _ in range(count)]
            kind = item
        raise CheckpointError(f"{self.path}: unknown metadata type {kind} at byte {self.at}")

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        size = count * struct.calcsize(f"<{code}")
        self._require(size)
        found = struct.unpack_from(f"<{count}{code}", self._data, self.at)
        self.at += size
        return found

    def _require(self, size: int) -> None:
        if self.at + size > len(self._data):
            raise CheckpointError(
                f"{self.path}: truncated, the header needs {size} bytes at byte {self.at}, the file has {len(self._data)}"
            )


def _tensor_info(header: _Header) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
    name = header.string()
    shape = tuple(header.number("Q") for _ in range(header.number("I")))[::-1]  # the file lists the innermost first
    number, offset = header.number("I"), header.number("Q")
    try:
        return name, shape, gguf.GGMLQuantizationType(number), offset
    except ValueError as error:
        raise UnsupportedArchitecture(f"{header.path}: tensor '{name}' has unknown block format {number}") from error


def _nbytes(path: Path, name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> int:
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    if not shape or 0 in shape or shape[-1] % block:
        raise CheckpointError(
            f"{path}: tensor '{name}' of shape {list(shape)} is no whole number of {kind.name} blocks"
        )
    return prod(shape) // block * nbytes
