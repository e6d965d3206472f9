"""Training projects as people write them, with guards, logs and checkpoints, and the truth of each."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Project:
    """Files of a project and what is true of it.

    The first of `files` is the main one. `steps` is what the doctor is asked to watch, 0 for the whole
    script. `step` is the bad step as a person counts, from 1, -1 where several are right. Of each tuple in
    `says` one word must stand in the verdict, in lower case. `files_written` are the names that a plain run
    leaves, and `exit_code` is how it ends.
    """

    name: str
    files: dict[str, str]
    args: tuple[str, ...] = ()
    module: str = ""
    steps: int = 20
    healthy: bool = False
    step: int = -1
    says: tuple[tuple[str, ...], ...] = ()
    files_written: tuple[str, ...] = ()
    exit_code: int = 0

    @property
    def main(self) -> str:
        """The file that is run."""
        return next(iter(self.files))

    @property
    def places(self) -> list[str]:
        """`file.py:LINE` of each line marked `# HERE`; one of them must be named."""
        return [
            f"{Path(name).name}:{number}"
            for name, text in self.files.items()
            for number, line in enumerate(text.splitlines(), 1)
            if "# HERE" in line
        ]

    @property
    def started(self) -> list[str]:
        """What follows `python` to start it."""
        return ["-m", self.module] if self.module else [self.main]

    def write(self, folder: Path) -> None:
        """Writes the files into a folder, which is made."""
        for name, text in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
