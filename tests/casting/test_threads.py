"""Threads that entered a region end well, also while the interpreter does."""

import subprocess
import sys
import threading

import pytest
import torch

import halfstep as hs

WORKERS = """
import threading
import torch
import halfstep as hs

def work():
    for _ in range(3):
        with hs.autocast("cpu", torch.bfloat16):
            w = torch.ones(64, 64, requires_grad=True)
            (torch.ones(64, 64) @ w).sum().backward()

for _ in range(8):
    threading.Thread(target=work).start()
"""


@pytest.mark.exhaustive
def test_processes_whose_workers_entered_regions_exit_cleanly():
    """An object of ours in torch's thread-local store aborted 6 of 8 such processes."""
    for _ in range(5):
        running = [
            subprocess.Popen([sys.executable, "-c", WORKERS], stderr=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        for process in running:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors


def test_a_region_leaves_nothing_in_torchs_thread_local_store(monkeypatch):
    """What lies there is destroyed by the thread's end, which aborts while the interpreter ends."""
    stashed = []
    monkeypatch.setattr(torch._C, "_stash_obj_in_tls", lambda key, value: stashed.append(key))

    def work():
        with hs.autocast("cpu", torch.bfloat16):
            torch.ones(2, 2) @ torch.ones(2, 2)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert stashed == []
