"""What processes hold while a soak runs: memory, file descriptors, threads, and the files below one folder."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from process_memory import growth, process_mb

ALLOWED = 0.05
"""Part of what it held at the end that a run may have added, by the slope of its later three quarters."""
ALLOWED_LEAST = {"mb": 8.0, "fds": 8.0, "threads": 8.0}
"""What a run may add in any case: allocators and pools of threads move by so much."""


@dataclass
class Held:
    """What one process held, sample by sample."""

    name: str
    pid: int | str
    series: dict[str, list[float]] = field(default_factory=lambda: {unit: [] for unit in ALLOWED_LEAST})

    def look(self) -> None:
        """Take a sample."""
        self.series["mb"].append(process_mb(self.pid, "RssAnon"))
        self.series["fds"].append(len(list(Path(f"/proc/{self.pid}/fd").iterdir())))
        self.series["threads"].append(len(list(Path(f"/proc/{self.pid}/task").iterdir())))

    def added(self, unit: str) -> float:
        """What the run added, by the slope of its later three quarters."""
        return growth(self.series[unit]) * len(self.series[unit])

    def flat(self) -> bool:
        """Whether nothing grows."""
        return all(
            self.added(unit) <= max(least, ALLOWED * self.series[unit][-1]) for unit, least in ALLOWED_LEAST.items()
        )

    def row(self) -> dict[str, object]:
        """For JSON: of each unit 11 samples from the first to the last, the most, and what the run added."""
        row: dict[str, object] = {"name": "soak process", "process": self.name, "samples": len(self.series["mb"])}
        for unit, values in self.series.items():
            row[unit] = [round(values[step * (len(values) - 1) // 10]) for step in range(11)]
            row[f"{unit}_most"] = round(max(values))
            row[f"{unit}_added"] = round(self.added(unit), 2)
        return row | {"flat": self.flat()}


class Watch:
    """Looks at processes every so many seconds, in a thread, until it is stopped. Raises what reading /proc raises."""

    def __init__(self, processes: Mapping[str, int | str], seconds: float) -> None:
        self.held = [Held(name, pid) for name, pid in processes.items()]
        self._seconds, self._stop = seconds, threading.Event()
        self.error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> Sequence[Held]:
        """What was seen. Raises OSError if a process had ended."""
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self.held

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            try:
                for each in self.held:
                    each.look()
            except OSError as error:
                self.error = error
                return


def children(pid: int) -> list[int]:
    """Processes that a process has started and that still run, oldest first."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
        if parent == pid:
            found.append(int(status.parent.name))
    return sorted(found)


def files_below(folder: Path) -> dict[str, int]:
    """Bytes of every file."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
