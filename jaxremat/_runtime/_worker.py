"""A request -> the answer of a worker process, or `WorkerLostError`; law: never later than requested.

For C libraries that may crash or exceed their time limit. A worker starts on the first request and is reused;
concurrent threads have one each. It ends if it crashes or is late, on Ctrl-C, and with this process. Processes forked
from this one start separate workers.
"""

import atexit
import math
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

_START_SECONDS = 120.0
"""A busy machine starts a worker within this time; one that is later never starts."""

_POLL_SECONDS = 0.5
"""If another thread receives the signal, waiting for a worker is interrupted after this time."""

_MOST_IDLE = 2
"""Workers of one kind that wait for the next request; others end with their answer."""


_LINES_SHOWN = 10
"""Last lines of a worker's output that an error shows, from the failed check on."""


class WorkerLostError(Exception):
    """A worker that crashed, was late or could not answer; the message says which."""


class WorkerLateError(WorkerLostError):
    """A worker that did not answer in time."""


class WorkerRefusedError(WorkerLostError):
    """An exception of `answer` in a worker's script."""


def ask(script: Path, request: object, seconds: float = math.inf) -> Any:
    """Return what `answer(request)` of the script returns, within so many seconds. Both are plain data.

    **Raises:** `WorkerLostError`.
    """
    idle = _idle.setdefault(script, [])
    worker = _idle_worker(idle) or Worker(script)
    try:
        kind, answer = worker.ask(request, seconds)
    except BaseException:
        worker.stop()  # else its answer would be taken for that to the next question
        raise
    if len(idle) < _MOST_IDLE:
        idle.append(worker)
    else:
        worker.stop()
    if kind == "failed":
        raise WorkerRefusedError(answer)
    return answer


class Worker:
    """One process, and what it printed."""

    def __init__(self, script: Path) -> None:
        self.printed = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        self._pipe, theirs = Pipe()
        with theirs:
            own, number = str(Path(__file__).with_name("_worker_process.py")), theirs.fileno()
            self.process = subprocess.Popen(
                # Without -P modules beside the script would hide those of other packages.
                [sys.executable, "-P", own, str(script), str(number)],
                stdin=subprocess.DEVNULL,
                stdout=self.printed,
                stderr=self.printed,
                pass_fds=(number,),
            )
        _alive.add(self)
        try:
            self._receive(_START_SECONDS)
        except BaseException:
            self.stop()
            raise

    def ask(self, request: object, seconds: float) -> tuple[str, Any]:
        """("answered", its answer) or ("failed", why).

        **Raises:** `WorkerLostError`; then nothing else may be asked.
        """
        try:
            self._pipe.send(request)  # which it reads at once, whatever it does besides
        except OSError:
            raise self._lost() from None
        return self._receive(seconds)

    def stop(self) -> None:
        """End the process, if it still runs, and forget it."""
        _alive.discard(self)
        self.process.kill()
        self.process.wait()
        self._close()

    def forget(self) -> None:
        """Let go of the pipe of a process that is another's child."""
        self.process.returncode = 0  # nothing to wait for
        self._close()

    def _close(self) -> None:
        self._pipe.close()
        self.printed.close()

    def _receive(self, seconds: float) -> Any:
        """Return the next message. A signal handler that raises ends the waiting at once.

        Time spent waiting here counts: neither a clock that jumps nor a suspended machine makes a worker late.
        """
        try:
            while not self._pipe.poll(min(seconds, _POLL_SECONDS)):
                seconds -= _POLL_SECONDS
                if seconds <= 0:
                    raise WorkerLateError("no answer in time")
            return self._pipe.recv()
        except (EOFError, OSError):
            raise self._lost() from None

    def _lost(self) -> WorkerLostError:
        try:
            code = self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            return WorkerLostError("closed its output")
        self.printed.seek(0)
        lines = self.printed.read().decode(errors="replace").strip().splitlines()
        checks = [i for i, line in enumerate(lines) if "Check failed" in line]
        last = lines[checks[-1] :][:_LINES_SHOWN] if checks else lines[-_LINES_SHOWN:]
        how = signal.Signals(-code).name if code < 0 else f"ended with exit status {code}"
        return WorkerLostError("\n".join([f"{how}: {last[0]}", *last[1:]]) if last else how)


_idle: dict[Path, list[Worker]] = {}
_alive: set[Worker] = set()


def _idle_worker(idle: list[Worker]) -> Worker | None:
    while True:
        try:
            worker = idle.pop()  # of one thread at a time, without a lock that a fork could leave held
        except IndexError:
            return None
        if worker.process.poll() is None:
            return worker
        worker.stop()


def _stop_all() -> None:
    for worker in tuple(_alive):
        worker.stop()


def _after_fork() -> None:
    for worker in tuple(_alive):
        worker.forget()
    _alive.clear()
    _idle.clear()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_after_fork)
