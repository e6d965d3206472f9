"""Make the faults of tests/faults/cases.py and write docs/reliability.md from what happened."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

HEAD = """# What happens when something breaks

The table is made by `python docs/generate_reliability.py`, which makes each fault and writes down what
happened; a test makes them again. Resuming is bit-identical in every row that ends a run: `tests/faults/`
kills ranks at random moments, in saves too, and compares.

| fault | where | what happens |
|---|---|---|
"""

TAIL = """
Who watches: `hs.Trainer(..., rank_timeout=60)`, or in a loop of your own

```python
import halfstep as hs

steps = 0
with hs.distributed.watchdog(lambda: steps, seconds=60):
    ...  # the training loop
```

Within, a rank that fails writes its error into the store of the process group, and one whose collective
breaks off or runs out of time looks there: who wrote nothing was killed or hangs. Nothing is sent while all
goes well. The time limit is that of the process group (measured with gloo), so no thread of ours has to
live.

Not covered: an optimizer of torch's that fails in the middle of its update leaves some weights updated and
others not: resume from the last checkpoint. A checkpoint that is altered together with its checksums is
believed.
"""


def page(rows: Sequence[tuple[str, str, str]]) -> str:
    """Return the text of docs/reliability.md."""
    cells = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)
    return HEAD + "".join(f"| {line} |\n" for line in cells) + TAIL


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tests.faults.cases import alone, over_ranks

    with tempfile.TemporaryDirectory() as name:
        found = [(row.fault, row.where, row.told) for row in (*alone(Path(name)), *over_ranks(Path(name)))]
    Path(__file__).with_name("reliability.md").write_text(page(found), encoding="utf-8")
