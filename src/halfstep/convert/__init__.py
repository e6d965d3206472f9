"""Apply a level or a plan to a model: dtypes, casts at the edges, hooks, and the way back."""

from halfstep.convert.conversion import Change, Conversion, convert
from halfstep.convert.hooks import own_dtype, to_float

__all__ = [
    "Change",
    "Conversion",
    "convert",
    "own_dtype",
    "to_float",
]
