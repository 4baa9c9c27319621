"""The main loop of a worker: path of a Python file that defines `answer` -> its replies to requests, until they end.

Run as a script by `_worker`, with the number of its end of a pipe. Imports nothing of this library, so that it starts
quickly. Law: the process ends as soon as the pipe does, also in the middle of an answer, so that it never outlives
whoever asked.
"""

import importlib.util
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any


def serve(path: str, pipe: "Connection[object, object]") -> None:
    """Answer requests. The first message out says that the worker is there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the asking process's affair
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, requests), daemon=True).start()
    spec = importlib.util.spec_from_file_location("jaxremat_worker", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reply: Any = ("ready", None)
    while True:
        pipe.send(reply)
        try:
            reply = ("answered", module.answer(requests.get()))
        except Exception as error:  # whatever it is, it is the caller's to report
            reply = ("failed", f"{type(error).__name__}: {error}")


def _read(pipe: "Connection[object, object]", requests: "queue.SimpleQueue[object]") -> None:
    while True:
        try:
            requests.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1], Connection(int(sys.argv[2])))
