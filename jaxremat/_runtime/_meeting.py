"""Messages between the processes of one job -> what each has said, or an error that names the one that is silent.

Laws: nobody waits for a process that has stopped; nobody takes part in a meeting with what is left of another one.
"""

import json
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any, Protocol, TypeVar

from . import _errors
from ._errors import JaxrematError, ProcessError

T = TypeVar("T")

ARRIVING_SECONDS = 300.0
"""How long a process may take until it comes to a meeting: it may still be loading its data."""

SILENT_SECONDS = 60.0
"""How long one that has come may say nothing. It is at work meanwhile, and says so from another thread."""

_BEAT_SECONDS = 2.0

_WAIT_SECONDS = 1.0
"""After so long it is looked whether who is waited for is still there; Ctrl-C ends the waiting then, too."""


class Store(Protocol):
    """Texts by key that all processes of the job see, as `jax.distributed` has them."""

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        """Write one."""
        ...

    def key_value_try_get_bytes(self, key: str) -> bytes:
        """Read one. **Raises:** an error of which the text has NOT_FOUND in it where there is none."""
        ...

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Return the same once it is there. **Raises:** an error with DEADLINE_EXCEEDED in its text where that is
        too late.
        """
        ...

    def key_value_delete(self, key: str) -> None:
        """Remove one, or all below it."""
        ...


@dataclass
class Meeting:
    """Some processes of a job that have to agree.

    **Fields:** `store`; `name` of this meeting, the same in all of them and in no other; `members` the processes;
    `me` this one; `leader` the one that decides.
    """

    store: Store
    name: str
    members: tuple[int, ...]
    me: int
    _beats: dict[int, tuple[bytes | None, float]] = field(default_factory=dict)

    @property
    def leader(self) -> int:
        """The first of them."""
        return min(self.members)

    @property
    def others(self) -> tuple[int, ...]:
        """All but this one."""
        return tuple(each for each in self.members if each != self.me)

    @contextmanager
    def attended(self) -> Iterator[None]:
        """While this lasts the others are told that this process is at work."""
        ended = Event()

        def beat() -> None:
            count = 0
            while not ended.wait(_BEAT_SECONDS if count else 0.0):
                count += 1
                try:
                    self.store.key_value_set_bytes(self._key("beat", self.me), b"%d" % count, True)
                except Exception:  # whoever waits for something is told why
                    return

        thread = Thread(target=beat, name="jaxremat meeting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def say(self, topic: str, value: object) -> None:
        """Tell the others something that is JSON, or an error that they will raise where they `hear` it."""
        message = {"error": _packed(value)} if isinstance(value, BaseException) else {"value": value}
        self._reached(self.store.key_value_set_bytes, self._key(topic, self.me), _sealed(message), True)

    @contextmanager
    def saying(self, topic: str) -> Iterator[Callable[[Any], None]]:
        """Something is about to be said, or what goes wrong on the way to it."""
        try:
            yield lambda value: self.say(topic, value)
        except BaseException as error:
            with suppress(ProcessError):  # the error at hand says more
                self.say(topic, error)
            raise

    def hear(self, topic: str, process: int) -> Any:
        """Return what a process has to say. **Raises:** the error that it says; `ProcessError` where it stays
        silent.
        """
        key, patience = self._key(topic, process), int(1000 * _WAIT_SECONDS)
        while (packed := self._read(self.store.blocking_key_value_get_bytes, key, patience)) is None:
            self._watch(process)
        message = _opened(packed)
        if "error" in message:
            raise _unpacked(message["error"], process)
        return message["value"]

    def forget(self, name: str) -> None:
        """Remove what was said in an earlier meeting of the same processes."""
        self._reached(self.store.key_value_delete, f"{name}/")

    def _watch(self, process: int) -> None:
        """**Raises:** `ProcessError` where a process has said nothing for too long."""
        now = time.monotonic()
        beat = self._read(self.store.key_value_try_get_bytes, self._key("beat", process))
        before, since = self._beats.setdefault(process, (beat, now))
        if beat != before:
            self._beats[process] = beat, now
        elif beat is None and now - since > ARRIVING_SECONDS:
            raise ProcessError(
                f"Process {process} did not join the planning of this step within {ARRIVING_SECONDS:.0f} s. "
                "Every process that has devices of the step must call the step, or ask for its plan.",
                process=process,
            )
        elif beat is not None and now - since > SILENT_SECONDS:
            raise ProcessError(
                f"Process {process} stopped responding while the step was being planned ({SILENT_SECONDS:.0f} s ago). "
                "Read its own output for the cause, and restart the job.",
                process=process,
            )

    def _read(self, get: Callable[..., bytes], *args: object) -> bytes | None:
        try:
            return self._reached(get, *args)
        except ProcessError as error:
            if any(code in str(error) for code in ("NOT_FOUND", "DEADLINE_EXCEEDED")):
                return None
            raise

    def _reached(self, call: Callable[..., T], *args: object) -> T:
        try:
            return call(*args)
        except Exception as error:
            raise ProcessError(
                "Process 0, which passes messages between the processes of this job, cannot be reached: "
                f"{error}. Read its own output for the cause, and restart the job.",
                process=0,
            ) from error

    def _key(self, topic: str, process: int) -> str:
        return f"{self.name}/{topic}/{process}"


def first_said(store: Store, key: str, value: object) -> Any:
    """Return what the first process said under a key, which may be this one, with this value. Nobody waits."""
    try:
        store.key_value_set_bytes(key, _sealed(value))
    except Exception:
        return _opened(store.key_value_try_get_bytes(key))
    return value


def _sealed(value: object) -> bytes:
    """Return what is JSON, as bytes."""
    return zlib.compress(json.dumps(value).encode())


def _opened(sealed: bytes) -> Any:
    """Return what `_sealed` was given."""
    return json.loads(zlib.decompress(sealed))


def _packed(error: BaseException) -> dict[str, Any]:
    own = isinstance(error, JaxrematError)
    more = {k: v for k, v in vars(error).items() if not k.startswith("_")} if own else {}
    return {"type": type(error).__name__, "message": str(error), "more": more}


def _unpacked(error: dict[str, Any], process: int) -> JaxrematError:
    """Return what another process raised: of the same type where that is this library's."""
    kind, message, more = getattr(_errors, error["type"], None), error["message"], error["more"]
    if isinstance(kind, type) and issubclass(kind, JaxrematError):
        lists = {k: tuple(v) if isinstance(v, list) else v for k, v in more.items()}
        return kind(message, **lists)
    return ProcessError(f"Process {process} failed: {error['type']}: {message}", process=process)
