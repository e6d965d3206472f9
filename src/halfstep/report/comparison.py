"""What `halfstep train` found, as typed values; printed, drawn, and `as_dict` for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class SeedRun:
    """One training: loss and scale at each step, skipped steps, test metrics; or why it failed."""

    seed: int
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    test: dict[str, float] = field(default_factory=dict)
    diverged_at: int | None = None
    failed: str | None = None
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Bound:
    """Estimated seconds of a step's arithmetic, memory traffic and op latency; the largest bounds it."""

    arithmetic: float
    memory: float
    latency: float
    flops: int
    bytes: int
    ops: int
    what: str = field(init=False)
    """`arithmetic`, `memory` or `latency`."""

    def __post_init__(self) -> None:
        parts = {"arithmetic": self.arithmetic, "memory": self.memory, "latency": self.latency}
        object.__setattr__(self, "what", max(parts, key=lambda name: parts[name]))


@dataclass(frozen=True)
class OpCost:
    """One op in one direction in one module: its seconds in a step, and in fp32 where that is known."""

    module: str
    op: str
    direction: str
    seconds: float
    fp32: float | None


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """One setting's summary and raw runs; None for what was not measured.

    `mean` and `spread` are of the test metric over seeds, `difference` is of the mean from O0's; `seconds`
    and `noise` are of a step, on the clock and in processor time; `profiled` the seconds of the step whose
    costliest `ops` are listed.
    """

    label: str
    level: str
    dtype: str
    mean: float | None = None
    spread: float | None = None
    difference: float | None = None
    why: str = ""
    seconds: float | None = None
    noise: float | None = None
    processor_seconds: float | None = None
    processor_noise: float | None = None
    samples_per_second: float | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    skipped: int = 0
    last_scale: float | None = None
    failed: str | None = None
    diverged: int = 0
    bound: Bound | None = None
    ops: Sequence[OpCost] = ()
    profiled: float | None = None
    runs: Sequence[SeedRun] = ()


@dataclass(frozen=True, kw_only=True)
class RecipeRows:
    """A recipe at every setting; `data` says what it was trained on, `metric` is "accuracy" or "loss".

    All were trained for `steps`, fewer than `steps_asked` where the time had a limit. `interrupted`: Ctrl-C
    ended the work, so settings may be missing.
    """

    name: str
    about: str
    data: str
    metric: str
    steps: int
    batch_size: int
    seeds: int
    rows: Sequence[SettingRow]
    interrupted: bool = False
    steps_asked: int | None = None

    @property
    def base(self) -> SettingRow | None:
        """The row of O0, that the others are compared with."""
        return next((row for row in self.rows if row.level == "O0"), None)

    @property
    def trained(self) -> str:
        """How many steps and seeds, in words."""
        asked = f" of {self.steps_asked}" if self.shortened else ""
        return f"{self.steps}{asked} steps, {self.seeds} seed" + ("s" if self.seeds > 1 else "")

    @property
    def shortened(self) -> bool:
        """Whether the limit of time ended the trainings before the steps that were asked for."""
        return self.steps_asked is not None and self.steps < self.steps_asked


@dataclass(frozen=True)
class Comparison:
    """Recipes at every setting on one machine, whose facts `machine` holds by name."""

    machine: Mapping[str, Any]
    recipes: Sequence[RecipeRows]

    @property
    def slow(self) -> Mapping[str, str]:
        """The dtypes that this device has no fast arithmetic for, and why."""
        return self.machine.get("slow", {})

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"machine": dict(self.machine), "recipes": [asdict(recipe) for recipe in self.recipes]}
