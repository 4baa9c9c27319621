"""What runs in a worker: the path of a Python file that defines `answer` -> its replies to requests, until they end.

Run as a script by `_worker`. Imports nothing of this library, so that it starts quickly. Messages are pickles, each
after its length, on what was standard input and output; what libraries print goes to standard error. Law: the process
ends as soon as its input does, also in the middle of an answer, so that it never outlives whoever asked.
"""

import importlib.util
import os
import pickle
import queue
import signal
import struct
import sys
import threading
from typing import Any


def serve(path: str) -> None:
    """Answer requests. The first message out says that the worker is there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the asking process's affair
    replies, source = os.fdopen(os.dup(1), "wb"), os.dup(0)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(source, requests), daemon=True).start()
    spec = importlib.util.spec_from_file_location("jaxremat_worker", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reply: Any = ("ready", None)
    while True:
        data = pickle.dumps(reply)
        replies.write(struct.pack("<Q", len(data)) + data)
        replies.flush()
        try:
            reply = ("answered", module.answer(pickle.loads(requests.get())))
        except Exception as error:  # whatever it is, it is the caller's to report
            reply = ("failed", f"{type(error).__name__}: {error}")


def _read(source: int, requests: "queue.SimpleQueue[bytes]") -> None:
    while True:
        (size,) = struct.unpack("<Q", _exactly(source, 8))
        requests.put(_exactly(source, size))


def _exactly(source: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(source, min(size - len(data), 2**20))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


if __name__ == "__main__":
    serve(sys.argv[1])
