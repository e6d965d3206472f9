"""Samples of one tensor over steps."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Sample:
    """One tensor at one step: `counts` from exponent `first` on, and what an exponent cannot tell."""

    step: int
    amax: float
    dtype: str
    first: int
    counts: tuple[int, ...]
    zeros: int
    infs: int
    nans: int
    scale: float = 1.0

    @property
    def total(self) -> int:
        """Elements counted."""
        return sum(self.counts) + self.zeros + self.infs + self.nans


@dataclass
class Series:
    """What was seen of one tensor: `kind` is weight, activation, activation_grad, gradient or update.

    `steps` and `amax` go back to the start (thinned when long); `samples` are the latest histograms.
    """

    path: str
    kind: str
    steps: list[int] = field(default_factory=list)
    amax: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def add(self, sample: Sample, keep: int) -> None:
        """Appends a sample; the oldest histogram goes when there are more than `keep`."""
        self.note(sample.step, sample.amax)
        self.samples.append(sample)
        del self.samples[:-keep]

    def note(self, step: int, amax: float) -> None:
        """Appends a largest magnitude alone."""
        self.steps.append(step)
        self.amax.append(amax)
        if len(self.steps) > 4096:
            half = len(self.steps) // 2
            self.steps[:half], self.amax[:half] = self.steps[:half:2], self.amax[:half:2]
