"""README and docs as a reader with a GPU runs them."""

from __future__ import annotations

from typing import Any
from unittest import SkipTest

ON_A_GPU = {
    '"cpu"': '"cuda"',
    "cpu=True": "cpu=False",
    "torch.from_numpy(": "torch.tensor(",  # which goes by the default device
    "torch.arange(i, i + 16)": 'torch.arange(i, i + 16, device="cpu")',  # rows, which a loader pins
}
"""What such a reader writes in a Python block, which says nothing else of devices."""


def move_to_gpu(example: Any) -> None:
    """Change a page's example, as sybil found it, to what such a reader runs."""
    evaluator = example.region.evaluator
    if getattr(evaluator, "__name__", "") == "run_shell":
        example.region.evaluator = _leave_out
    elif type(evaluator).__name__ == "PythonEvaluator":
        code = example.parsed
        for here, there in ON_A_GPU.items():
            code = code.replace(here, there)
        example.parsed = type(example.parsed)(code, example.parsed.offset, example.parsed.line_offset)


def _leave_out(example: Any) -> None:
    raise SkipTest("a shell's commands say where they run")
