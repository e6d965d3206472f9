"""On PYTHONPATH: Python as on a machine that lacks what `make gpu` must do without."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

LACKING = {"sybil", "tyro", "expecttest", "ml_dtypes", "safetensors", "transformers", "xdist", "flashoptim"}


class Lacking(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        if name.split(".")[0] in LACKING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Lacking())
