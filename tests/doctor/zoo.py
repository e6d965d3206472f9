"""Training scripts with a planted fault, or none, and what the doctor must say of each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Script:
    """A script and its truth. `op` and `cause` list what is right; `says` must be in the verdict."""

    name: str
    text: str
    step: int = -1
    phase: str = ""
    module: str = ""
    op: tuple[str, ...] = ()
    cause: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    cure: str = ""
    steps: int = 20

    @property
    def line(self) -> int:
        """The line marked `# HERE`, 0 if there is none."""
        lines = self.text.splitlines()
        return next((i + 1 for i, line in enumerate(lines) if "# HERE" in line), 0)
