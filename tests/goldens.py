"""The first losses of every recipe, level and dtype: computed in a process whose arithmetic is pinned.

    python -m tests.goldens            prints them
    python -m tests.goldens --update   writes tests/goldens.json, after a change meant to change numbers

One thread, AVX2 kernels (a processor that has more shows no more), the conditional reproducibility of MKL and
`kernels="rounded"`: fp32 arithmetic on rounded values. Two small recipes run with `kernels="native"` too.
"""

import dataclasses
import functools
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).with_name("goldens.json")
STEPS = 20
#: Smaller batches than the recipes' own: 20 steps of each in seconds.
BATCH = {"digits-mlp": 16, "digits-cnn": 4, "text-gpt": 1, "digits-faint": 16}
PINNED = {
    "OMP_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT",
    "MKL_CBWR": "COMPATIBLE",
}


def cases() -> Iterator[tuple[str, str, str | None, str]]:
    """(recipe, level, dtype, kernels)."""
    for name in BATCH:
        yield name, "O0", None, "native"
        for dtype in ("bf16", "fp16"):
            for level in ("O1", "O2", "O3"):
                yield name, level, dtype, "rounded"
    for name in ("digits-mlp", "digits-faint"):
        yield name, "O2", "bf16", "native"


@functools.cache
def batches(name: str) -> list:
    """The first batches, read once for all cases of a recipe."""
    from halfstep.recipes import recipe_of

    task = dataclasses.replace(recipe_of(name), batch_size=BATCH[name]).task()
    return list(itertools.islice(task.train(0), STEPS))


def train(name: str, level: str, dtype: str | None, kernels: str) -> list[str]:
    """The losses as hex floats; a failure's first words end the list."""
    import halfstep as hs
    from halfstep.recipes import recipe_of

    recipe = recipe_of(name)
    model, optimizer = recipe.build(0, level)
    amp = hs.prepare(model, optimizer, level=level, dtype=dtype, kernels=kernels)
    losses = []
    for x, y in batches(name):
        with amp.autocast():
            loss = recipe.loss(model(x), y)
        amp.backward(loss)
        amp.step(clip_norm=1.0)
        losses.append(loss.detach())
    amp.revert()
    return [loss.item().hex() for loss in losses]


def found() -> dict[str, object]:
    """All losses, and what they rest on; runs in the pinned process."""
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rest = {"torch": torch.__version__.partition("+")[0], "python": platform.python_version()}
    rest["isa"] = torch.backends.cpu.get_cpu_capability()
    return {**rest, "losses": {" ".join(map(str, case)): train(*case) for case in cases()}}


def in_pinned_process() -> dict:
    """`found()` of a child with `PINNED` in its environment."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.goldens"]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env={**os.environ, **PINNED}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


if __name__ == "__main__":
    if "--update" in sys.argv:
        FILE.write_text(json.dumps(in_pinned_process(), indent=1) + "\n")
    else:
        print(json.dumps(found()))
