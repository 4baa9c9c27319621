"""Benchmark network, budget, device -> a plan that comes with the library, already verified.

Law: a plan applies only to the program with its fingerprint: this network with these settings, traced and normalised
with the versions in `Entry.versions`. Loading or applying it to any other program raises a `PlanMismatchError`.
"""

import functools
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from .._plan._plan import Plan
from .._program._compat import JAX_VERSION
from .._runtime._errors import ArgumentError, PlanMismatchError

FORMAT = 1
OF = " of temporaries"
"""The unit of the shares in the zoo's files."""
SUFFIX = ".json.xz"
"""The suffix of the zoo's files: JSON, compressed to a thirtieth. `xzcat` shows one."""
JAX_MINOR = ".".join(map(str, JAX_VERSION))
"""The version of jax at hand, as far as plans depend on it."""


@dataclass(frozen=True)
class Entry:
    """A plan of the zoo.

    **Fields:**

    - `network`, `scale`: as `examples.benchmarks.networks.program` takes them. `target`: as for `jaxremat.optimize`, or
      `"cpu"`. `budget`: the share of the plain step's temporaries, beside its arguments and outputs (`"50% of
      temporaries"`), or `"min"`.
    - `jax`: the minor version that the plan is for. `versions`: of what made the plan.
    - `settings`: the program's inputs, parameters and donations.
    - `plan`: with all figures except for what is alive at the peak.
    """

    network: str
    scale: str
    target: str
    budget: str
    jax: str
    versions: dict[str, str]
    settings: dict[str, Any]
    plan: Plan = field(repr=False)

    @property
    def here(self) -> bool:
        """Whether it is for the version of jax at hand."""
        return self.jax == JAX_MINOR

    @property
    def name(self) -> str:
        """Its name in text."""
        return f"{self.network} {self.scale} {self.budget} {self.target}"


def entries() -> tuple[Entry, ...]:
    """Return every plan of the zoo, for every version of jax."""
    return tuple(entry for name in _names() for entry in _read(name))


def load(network: str, budget: str, *, target: str = "h100", scale: str = "full") -> Plan:
    """Return a plan of the zoo for the version of jax at hand: `optimize(plan=jaxremat.zoo.load("resnet50", "min"))`.

    **Arguments:** as the fields of `Entry`; `entries()` and `jaxremat zoo list` list them.

    **Raises:** `ArgumentError` where the zoo has no such plan; `PlanMismatchError` where it has it only for other
    versions of jax, whose jaxprs differ.
    """
    return find(network, budget, target=target, scale=scale).plan


def find(network: str, budget: str, *, target: str = "h100", scale: str = "full") -> Entry:
    """Return the plan that `load` returns, with its program's settings and the versions that made it."""
    named = [e for name in _names() if name.split("-")[0] == network for e in _read(name)]
    alike = [e for e in named if (e.budget, e.target, e.scale) == (budget, target, scale)]
    if not alike:
        known = sorted({e.name for e in named} or {name.split("-")[0] for name in _names()})
        raise ArgumentError(
            f"The zoo has no plan `{network} {scale} {budget} {target}`. It has {', '.join(known)}. "
            "Plan it with `jaxremat.plan`."
        )
    found = next((e for e in alike if e.here), None)
    if found is None:
        raise PlanMismatchError(
            f"The zoo's plan `{alike[0].name}` is for jax {' and '.join(e.jax for e in alike)}, and this is jax "
            f"{JAX_MINOR}, whose jaxprs differ. Make a new plan with `jaxremat.plan`."
        )
    return found


def file_name(network: str, scale: str, target: str) -> str:
    """Return where the plans of a network for the version of jax at hand are kept, in this folder."""
    return f"{network}-{scale}-{target}-jax{JAX_MINOR}{SUFFIX}"


def to_bytes(shared: dict[str, object], plans: dict[str, Plan]) -> bytes:
    """Return the bytes of such a file: the text, compressed; plans of one network share most of it."""
    return lzma.compress(to_json(shared, plans).encode(), preset=9)


def to_json(shared: dict[str, object], plans: dict[str, Plan]) -> str:
    """Return the text of such a file, a line for each plan. **Arguments:** `shared` fields of the entries, but for
    the two.
    """
    head = json.dumps({"zoo_format": FORMAT, **shared}, indent=1)[:-2]
    lines = [
        f'  "{b}": {json.dumps(json.loads(p.to_json()), separators=(",", ":"))}' for b, p in plans.items()
    ]
    return f'{head},\n "plans": {{\n' + ",\n".join(lines) + "\n }\n}\n"


def _names() -> list[str]:
    return sorted(each.name for each in files(__name__).iterdir() if each.name.endswith(SUFFIX))


@functools.cache
def _read(name: str) -> tuple[Entry, ...]:
    return tuple(parse(lzma.decompress((files(__name__) / name).read_bytes()).decode(), name))


def parse(text: str, name: str) -> Iterator[Entry]:
    """Yield the entries of a file. **Raises:** `PlanMismatchError` where it is none of this format version."""
    try:
        data = json.loads(text)
        if data.pop("zoo_format") != FORMAT:
            raise KeyError("zoo_format")
        plans = data.pop("plans")
        for budget, plan in plans.items():
            budget = f"{budget}{OF}" if budget.endswith("%") else budget
            yield Entry(budget=budget, plan=Plan.from_json(json.dumps(plan)), **data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, PlanMismatchError):
            raise
        raise PlanMismatchError(
            f"{name} is not a file of the zoo ({type(error).__name__}: {error})."
        ) from error
