"""A real server as a subprocess, and ways to look at it from outside."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

DSJAX = Path(sys.executable).with_name("dsjax")
DEADLINE_S = 120.0


def wait_until[T](look: Callable[[], T | None], what: str) -> T:
    """The first truthy result of `look`."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.01)  # between two looks
    return found


def run_dsjax(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [str(DSJAX), *arguments]
    env = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=env, check=False)


class ServerProcess:
    """`dsjax serve` on a free port, its output in a file, its sockets in a folder of its own."""

    def __init__(self, model: str, *flags: str, folder: Path):
        self.socket_parent = folder / "tmp"
        self.socket_parent.mkdir()
        self._log_path = folder / "log"
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [str(DSJAX), "serve", model, "--port", "0", *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TMPDIR": str(self.socket_parent)},
            )

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def search_log(self, pattern: str) -> re.Match[str]:
        """Wait until a line matches."""
        return wait_until(lambda: re.search(pattern, self.log, re.MULTILINE), f"{pattern!r} in the log:\n{self.log}")

    def wait_ready(self) -> "ServerProcess":
        def ready() -> re.Match[str] | None:
            assert self.process.poll() is None, self.log
            return re.search(r"^dsjax serves \S+ at (http://\S+) \(ready after [\d.]+ s\)$", self.log, re.MULTILINE)

        self.url = wait_until(ready, "the server to be ready")[1]
        return self

    def client(self) -> httpx.Client:
        # There is no TLS, and loading certificates takes longer than most tests.
        return httpx.Client(base_url=self.url, timeout=DEADLINE_S, verify=False)

    def engine_pid(self) -> int:
        """The engine process: the child that multiprocessing spawned."""

        def look() -> int | None:
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and _is_engine_of(entry, self.process.pid):
                    return int(entry.name)
            return None

        return wait_until(look, "the engine process")

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self) -> int:
        """The exit code, once the server has ended."""
        return self.process.wait(timeout=DEADLINE_S)

    def stop(self) -> None:
        """End the server, whatever state it is in."""
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)  # its engine follows by itself
        self.wait()


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _is_engine_of(entry: Path, parent: int) -> bool:
    try:
        ppid = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        return ppid == parent and b"spawn_main" in (entry / "cmdline").read_bytes()
    except OSError:
        return False
