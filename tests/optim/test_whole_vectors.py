"""Every kind of update is compiled in whole vectors: one wide number or one call makes a loop far slower.

What a loop was compiled to does not show in its results, so the compiler's own text is read.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")
pytestmark = pytest.mark.long

READ = """
import re
from halfstep.kernels import codes as L
from halfstep.kernels.cpu import models

kinds = {
    "adamw bf16": (L.ADAMW, L.BF16_EXACT, L.BF16, L.STATE_FP32),
    "adamw fp16": (L.ADAMW, L.FP16_EXACT, L.FP16, L.STATE_FP32),
    "momentum fp16, 8-bit": (L.SGD_MOMENTUM, L.FP16_EXACT, L.FP16, L.STATE_8BIT),
    "lion fp16, bf16": (L.LION, L.FP16_EXACT, L.FP16, L.STATE_BF16),
    "adamw stochastic bf16, 8-bit": (L.ADAMW, L.BF16_STOCHASTIC, L.BF16, L.STATE_8BIT),
}
for name, kind in kinds.items():
    (text,) = models.updater(*kind, False).inspect_llvm().values()
    print(name, max(map(int, re.findall(r"fmul (?:\\w+ )*<(\\d+) x float>", text)), default=1), sep=": ")
"""


def test_every_update_has_as_many_lanes_as_the_plainest(tmp_path) -> None:
    """In a process without kernels on disk: of those the compiler's text is not known any more."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=True
    ).stdout
    lanes = {name: int(count) for name, count in (line.split(": ") for line in said.splitlines())}
    assert len(lanes) == 5
    assert min(lanes.values()) == lanes["adamw bf16"] >= 4  # of twice as many the compiler makes two
