"""Snippets of the documentation of MindSpore, torch.amp and Apex run under our imports, unmodified.

`documented/*.txt` were written before their first run: 21 of the 41 ran then.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from halfstep.compat.apex import amp
from halfstep.compat.torch_amp import install

FOLDER = Path(__file__).parent / "documented"


def snippets(system):
    parts = re.split(r"^### (.*)\n", (FOLDER / f"{system}.txt").read_text(), flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2]))


SNIPPETS = [
    (system, title, code) for system in ("mindspore", "torch_amp", "apex") for title, code in snippets(system)
]
REFUSED = {
    "context and a dataset pipeline: take, skip, zip, rename, project": "no 'config': mindspore.set_seed",
    "sparse tensors and a profiler": "no 'CSRTensor': use torch.sparse_csr_tensor",
}
CHECKS = {
    "tensor: casts by string, by numpy's dtype and by mindspore's": lambda s: (
        [str(s[name].dtype) for name in ("half", "whole", "low", "same")]
        == ["torch.float16", "torch.int32", "torch.bfloat16", "torch.float32"]
    ),
    "ops: ones, zeros, add, full, arange, and reductions by axis": lambda s: (
        s["y"].tolist() == [[2.0] * 3] * 2 and s["s"].tolist() == [3.0, 3.0] and s["n"].tolist() == [0, 2, 4]
    ),
    "dataset: a random-accessible source": lambda s: len(s["rows"]) == 5 and s["seen"] == [0, 1, 2],
    "dataset: an iterable, and a generator behind a lambda": lambda s: (
        s["first"] == [1, 2, 3, 4] and s["second"] == s["third"] == [3, 4, 5]
    ),
    "schedule: CosineDecayLR given to an optimizer": lambda s: np.allclose(
        s["values"], [0.1, 0.0868198, 0.055, 0.0231802, 0.01]
    ),
    "schedule: the decays, warm-up, and a schedule written by hand": lambda s: np.allclose(
        s["rates"], [0.1, 0.0736396, 0.0689655, 0.0165299, 0.1]
    ),
    "model: LearningRateScheduler": lambda s: np.allclose(s["optim"].learning_rate.asnumpy(), 0.01),
    "model: fit with ReduceLROnPlateau and EarlyStopping": lambda s: np.allclose(
        s["optim"].learning_rate.asnumpy(), 0.0025
    ),
}
"""What a snippet must leave behind: numbers are MindSpore 2.10's."""


def ours(code):
    """The text with another place to import from."""
    code = re.sub(r"^import mindspore$", "import halfstep.compat.mindspore as mindspore", code, flags=re.M)
    return re.sub(r"^(from|import) (mindspore|apex)\b", r"\1 halfstep.compat.\2", code, flags=re.M)


@pytest.fixture
def mnist(tmp_path):
    """The folders that the tutorials unpack, with fewer images."""
    rng = np.random.default_rng(0)
    for folder, part, n in (("train", "train", 32), ("test", "t10k", 16)):
        home = tmp_path / "MNIST_Data" / folder
        home.mkdir(parents=True)
        header = np.array([0x803, n, 28, 28], ">u4").tobytes()
        images = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        (home / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = np.array([0x801, n], ">u4").tobytes()
        (home / f"{part}-labels-idx1-ubyte").write_bytes(header + bytes(i % 10 for i in range(n)))
    return tmp_path


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("system", "title", "code"), SNIPPETS, ids=[title for _, title, _ in SNIPPETS])
def test_documented_snippets_run(system, title, code, mnist, monkeypatch):
    monkeypatch.chdir(mnist)
    left = {"__name__": "snippet"}
    if title in REFUSED:
        with pytest.raises((ImportError, AttributeError), match=REFUSED[title]):
            exec(ours(code), left)
        return
    if system == "torch_amp":
        with install():
            exec(code, left)
    else:
        try:
            exec(ours(code), left)
        finally:
            amp.shutdown()
    assert CHECKS.get(title, bool)(left)


def test_most_are_run():
    assert len(SNIPPETS) == 41
    assert REFUSED.keys() | CHECKS.keys() <= {title for _, title, _ in SNIPPETS}
    assert len(REFUSED) <= len(SNIPPETS) // 10
