"""A request -> the answer of a process of our own, or `WorkerLostError`; law: never later than asked, whatever it does.

For libraries in C that may crash or go on past their time limit. A worker is started when first asked for and used
again; threads that ask at once have one each. It is ended where it crashes or is late, where Ctrl-C ends the waiting,
and with this process. Processes forked from this one start workers of their own.
"""

import atexit
import math
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_START_SECONDS = 120.0
"""A machine may be busy; a worker that is not there by then never will be."""

_POLL_SECONDS = 0.5
"""Where another thread is given the signal, waiting for a worker is interrupted after so long."""

_MOST_IDLE = 2
"""Workers of one kind that wait for the next request; others end with their answer."""


_LINES_SHOWN = 10
"""Of what a worker printed last before it ended, or from the check on that failed in it."""


class WorkerLostError(Exception):
    """A worker that crashed, was late or could not answer; the message says which."""


class WorkerLateError(WorkerLostError):
    """A worker that did not answer in time."""


class WorkerRefusedError(WorkerLostError):
    """What `answer` of a worker's script raised."""


def ask(script: Path, request: Any, seconds: float = math.inf) -> Any:
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
        self.process = subprocess.Popen(
            # Without -P modules beside the script would hide those of other packages.
            [sys.executable, "-P", str(Path(__file__).with_name("_worker_process.py")), str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.printed,
            bufsize=0,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._into, self._out_of = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._into, False)
        _alive.add(self)
        try:
            self._left = _START_SECONDS
            self._receive()
        except BaseException:
            self.stop()
            raise

    def ask(self, request: Any, seconds: float) -> tuple[str, Any]:
        """("answered", its answer) or ("failed", why).

        **Raises:** `WorkerLostError`; then nothing else may be asked.
        """
        self._left = seconds
        data = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
        rest = memoryview(struct.pack("<Q", len(data)) + data)
        while rest:
            self._wait(self._into, select.POLLOUT)
            try:
                rest = rest[os.write(self._into, rest) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._lost() from None
        return self._receive()

    def stop(self) -> None:
        """End the process, if it still runs, and forget it."""
        _alive.discard(self)
        self.process.kill()
        self.process.wait()
        self._close()

    def forget(self) -> None:
        """Let go of the pipes of a process that is another's child."""
        self.process.returncode = 0  # nothing to wait for
        self._close()

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout, self.printed):
            if pipe is not None:
                pipe.close()

    def _receive(self) -> Any:
        (size,) = struct.unpack("<Q", self._exactly(8))
        return pickle.loads(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait(self._out_of, select.POLLIN)
            part = os.read(self._out_of, min(size - len(data), 2**20))
            if not part:
                raise self._lost()
            data += part
        return bytes(data)

    def _wait(self, pipe: int, event: int) -> None:
        """Wait until the pipe is ready. A signal handler that raises ends the waiting at once.

        Time spent waiting here counts: neither a clock that jumps nor a suspended machine makes a worker late.
        """
        poll = select.poll()
        poll.register(pipe, event)
        while self._left > 0:
            if poll.poll(1000 * min(self._left, _POLL_SECONDS)):
                return
            self._left -= _POLL_SECONDS
        raise WorkerLateError("no answer in time")

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
