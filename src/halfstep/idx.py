"""Reads MNIST's IDX files."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from halfstep.errors import DataError

_UNSIGNED_BYTES = 0x08


def read_idx(path: Path) -> Tensor:
    """An IDX file of unsigned bytes (gzip or not) as a uint8 tensor of the shape its header states.

    Format: http://yann.lecun.com/exdb/mnist: two zero bytes, an element code, the number of dimensions,
    each dimension as a big-endian uint32, the elements. Raises DataError on anything else.
    """
    try:
        raw = path.read_bytes()
        data = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    except Exception as error:  # zlib.error has no public base class of its own
        raise DataError(f"cannot decompress {path}: {error}") from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _UNSIGNED_BYTES:
        raise DataError(
            f"{path} is not an IDX file of unsigned bytes (starts with {data[:4].hex() or 'nothing'})"
        )
    dims = data[3]
    header = 4 + 4 * dims
    if len(data) < header:
        raise DataError(f"{path} ends inside its header ({len(data)} of {header} bytes)")
    shape = struct.unpack(f">{dims}I", data[4:header])
    if len(data) - header != math.prod(shape):
        raise DataError(
            f"{path} states shape {list(shape)} = {math.prod(shape)} bytes but holds {len(data) - header}; "
            "download it again"
        )
    return torch.frombuffer(bytearray(data[header:]), dtype=torch.uint8).reshape(shape)
