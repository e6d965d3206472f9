"""The tests of the ordinary suite that run with their tensors on the false CUDA device."""

GROUPS: dict[str, tuple[str, ...]] = {
    "session": (
        "tests/session/test_losses.py",
        "tests/session/test_session.py",
        "tests/session/test_round.py",
    ),
}
"""Files of a group, a process each."""

FAULTS: dict[str, str] = {}

CANNOT: dict[str, str] = {}
"""Tests of these files that are left out, by name, each with its reason."""
