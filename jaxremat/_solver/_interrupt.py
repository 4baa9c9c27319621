"""A long call into C -> its result, or `KeyboardInterrupt` as soon as somebody asks for it.

Python hears Ctrl-C between its own instructions, which a solver in C keeps from coming for as long as its time limit
is; and CBC takes no notice of signals. So it runs in a thread while the main thread waits, which can be interrupted.
The call itself goes on unseen to its time limit, with objects that nobody else has; the process may end meanwhile.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_POLL_SECONDS = 0.5
"""Where waiting for a thread cannot be interrupted (Windows), it is over after so long."""


def interruptible(call: Callable[[], T]) -> T:
    """The call's result or exception. In other threads than the main one, which hear no Ctrl-C, it is a mere call.

    **Raises:** `KeyboardInterrupt`.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # the waiting thread raises it
            errors.append(error)

    thread = threading.Thread(target=run, name="jaxremat solve", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
    if errors:
        raise errors[0]
    return results[0]
