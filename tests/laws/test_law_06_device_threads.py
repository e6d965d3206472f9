"""Law 6 where backward runs on autograd's own threads: a PrivateUse1 device, in a process of its own."""

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_recomputation_on_device_threads_sees_the_policy_of_forward() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.laws.test_law_06_device_threads"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "18 cases on a device thread"


def main() -> None:
    """Recompute in every mode and depth, backward called outside, inside and in another region."""
    import torch
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

    from halfstep.casting import autocast, disabled
    from halfstep.policy import Policy
    from tests.python_device import NAME

    edited = Policy().with_rules(low=["exp"], full=["linear"])
    x, w = torch.randn(4, 8).to(NAME), torch.randn(8, 8).to(NAME).requires_grad_()
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    threads: set[int] = set()

    def block(a: torch.Tensor) -> torch.Tensor:
        threads.add(threading.get_ident())
        y = F.linear(a, w)
        z = y.exp()
        seen.append((y.dtype, z.dtype))
        return z.float().sum()

    def nested(a: torch.Tensor, depth: int, reentrant: bool) -> torch.Tensor:
        inner = (lambda b: nested(b, depth - 1, reentrant)) if depth else block
        return checkpoint(inner, a, use_reentrant=reentrant)

    cases = list(itertools.product((True, False), (0, 1, 2), ("outside", "inside", "another region")))
    for reentrant, depth, where in cases:
        seen.clear()
        threads.clear()
        leaf = x.clone().requires_grad_()
        with set_checkpoint_early_stop(False), autocast(NAME, policy=edited):
            loss = nested(leaf, depth, reentrant)
            if where == "inside":
                loss.backward()
        if where != "inside":
            with autocast(NAME, "bf16") if where == "another region" else disabled(NAME):
                loss.backward()
        assert len(seen) > 1, (reentrant, depth, where)
        assert set(seen) == {(torch.float32, torch.bfloat16)}, (reentrant, depth, where, seen)
        assert len(threads) > 1
    print(f"{len(cases)} cases on a device thread")


if __name__ == "__main__":
    main()
