"""By which names kernel choices speak of ops: kinds, geometries and sizes, and what else a row may say."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Mapping
from typing import Any

from halfstep.torch_private import all_op_names

KINDS = ("convolution", "linear", "bmm", "attention", "lstm", "gru", "rnn_tanh")
SIZES = ("tiny", "small", "medium", "large")
DTYPES = ("bf16", "fp16")

_SHAPES = {
    "1d": ("dense", "pointwise", "depthwise", "strided-depthwise", "transposed"),
    "2d": (
        "dense",
        "pointwise",
        "narrow-pointwise",
        "stem",
        "grouped",
        "depthwise",
        "strided-depthwise",
        "transposed",
    ),
    "3d": ("dense", "pointwise", "strided-depthwise", "transposed"),
}
_NAMED = {
    "linear": ("plain", "thin"),
    "bmm": ("matrices up to 64", "matrices over 64"),
    "attention": ("full", "causal"),
}


@functools.cache
def geometries(op: str) -> tuple[str, ...]:
    """The geometries that a kind of op is divided into."""
    if op == "convolution":
        common = [f"{dims} {shape}" for dims, shapes in _SHAPES.items() for shape in shapes]
        return (*common, *(f"2d {shape} channels_last" for shape in _SHAPES["2d"]))
    return _NAMED.get(op, ("plain",))


def sizes(geometry: str) -> tuple[str, ...]:
    """The sizes that a geometry is divided into; beyond the last of them nothing changes."""
    common = geometry[:2] in ("1d", "3d", "th") or geometry.endswith("channels_last")
    return SIZES[:3] if common else SIZES


def check_row(number: int, row: Mapping[str, Any]) -> None:
    """Refuse a row of a file that can fit no op.

    Raises:
        ValueError: an op, dtype, geometry or size that there is none of, with the nearest that there is.
    """
    op, geometry = row.get("op"), row.get("geometry")
    if op is not None and "::" in op:  # an op without a kind has neither geometry nor size
        names = all_op_names() if op.startswith("aten::") else (op,)
        _check(number, "op", op, names)
        shapes, extents = ("",), ("",)
    else:
        _check(number, "op", op, KINDS)
        shapes = geometries(op) if op else tuple(g for kind in KINDS for g in geometries(kind))
        extents = sizes(geometry) if geometry in shapes else SIZES
    _check(number, "dtype", row.get("dtype"), DTYPES)
    _check(number, "geometry", geometry, shapes)
    _check(number, "size", row.get("size"), extents)


def _check(number: int, key: str, given: str | None, known: Collection[str]) -> None:
    if given is None or given in known:
        return
    near = difflib.get_close_matches(given, list(known), n=1)
    short = list(dict.fromkeys(known)) if len(known) < 60 else ["the name of an overload of torch's"]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"kernel row {number} has {key} = {given!r}; expected {', '.join(map(repr, short))}{hint}"
    )
