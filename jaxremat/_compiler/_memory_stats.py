"""Compiled program -> its memory on one device, by XLA's buffer assignment, or by the model, marked as such."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """The memory that a compiled program needs on one device, in bytes, by XLA's buffer assignment.

    **Fields:** `arguments_nbytes`, `outputs_nbytes`, `aliased_nbytes` (outputs that reuse donated arguments),
    `temporaries_nbytes`. `peak_nbytes` is arguments + outputs - aliased + temporaries. `host_nbytes` are temporaries in
    host memory, which count in none of these. If the compiler did not compile the program, the figures are the model's,
    and `modelled` says why; else it is "".
    """

    arguments_nbytes: int
    outputs_nbytes: int
    aliased_nbytes: int
    temporaries_nbytes: int
    host_nbytes: int = 0
    modelled: str = ""

    @property
    def base_nbytes(self) -> int:
        """The bytes in use all the time: arguments + outputs - aliased."""
        return self.arguments_nbytes + self.outputs_nbytes - self.aliased_nbytes

    @property
    def peak_nbytes(self) -> int:
        """The peak of the whole step."""
        return self.base_nbytes + self.temporaries_nbytes

    def __repr__(self) -> str:
        """Return the peak and the fields that are not empty."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = {"peak_nbytes": self.peak_nbytes} | {name: value for name, value in found.items() if value}
        return f"MemoryStats({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @classmethod
    def of(cls, compiled: Any) -> "MemoryStats":
        """Return the memory of a compiled program (anything with `memory_analysis`)."""
        stats = compiled.memory_analysis()
        return cls(
            arguments_nbytes=int(stats.argument_size_in_bytes),
            outputs_nbytes=int(stats.output_size_in_bytes),
            aliased_nbytes=int(stats.alias_size_in_bytes),
            temporaries_nbytes=int(stats.temp_size_in_bytes),
            host_nbytes=int(getattr(stats, "host_temp_size_in_bytes", 0)),
        )
