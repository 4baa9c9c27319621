"""Compiled program -> its memory on one device, as XLA's buffer assignment says; or as the model does, marked so."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """What a program holds on one device, in bytes, as XLA's buffer assignment says of the compiled one.

    **Fields:** `arguments_nbytes`, `outputs_nbytes`, `aliased_nbytes` (outputs that reuse donated arguments),
    `temporaries_nbytes`. `peak_nbytes` is arguments + outputs - aliased + temporaries. `host_nbytes` are temporaries in
    host memory, which count in none of these. Where the compiler does not compile the program the model says it, and
    `modelled` why; that is "" where the figures are the compiler's.
    """

    arguments_nbytes: int
    outputs_nbytes: int
    aliased_nbytes: int
    temporaries_nbytes: int
    host_nbytes: int = 0
    modelled: str = ""

    @property
    def base_nbytes(self) -> int:
        """What is there all the time: arguments + outputs - aliased."""
        return self.arguments_nbytes + self.outputs_nbytes - self.aliased_nbytes

    @property
    def peak_nbytes(self) -> int:
        """The whole step's memory."""
        return self.base_nbytes + self.temporaries_nbytes

    @classmethod
    def of(cls, compiled: Any) -> "MemoryStats":
        """Read them off a compiled program (anything with `memory_analysis`)."""
        stats = compiled.memory_analysis()
        return cls(
            arguments_nbytes=int(stats.argument_size_in_bytes),
            outputs_nbytes=int(stats.output_size_in_bytes),
            aliased_nbytes=int(stats.alias_size_in_bytes),
            temporaries_nbytes=int(stats.temp_size_in_bytes),
            host_nbytes=int(getattr(stats, "host_temp_size_in_bytes", 0)),
        )
