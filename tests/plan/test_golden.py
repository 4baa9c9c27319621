"""Programs, plans and peaks are those of golden.json, whatever is changed inside the library.

    python -m pytest tests/plan/test_golden.py --rewrite-golden      # writes down what they are now

A difference need not be wrong: the commit that writes them anew says why. Plans are made by solvers that need no clock,
and all figures are of one processor and of jax 0.10.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import pytest
import recorded
import zoo_calls
import zoo_checkpoints
import zoo_loops
from zoo import BY_NAME, Case

import jaxremat
from jaxremat._rewrite._fingerprint import fingerprint
from jaxremat._rewrite._trace import trace

FILE = Path(__file__).with_name("golden.json")
CASES = {
    **{
        name: BY_NAME[name]
        for name in ("mlp_adamw", "resnet", "transformer", "tied_embeddings", "custom_vjp")
    },
    **{name: BY_NAME[name] for name in ("two_gradients", "global_norm", "masks", "scan", "cond")},
    "checkpoints": zoo_checkpoints.CHECKPOINTS["accumulation"],
    "calls": next(iter(zoo_calls.CALLS.values())),
    "accumulation over layers": zoo_loops.LOOPS["accumulation over layers"],
}
SCHEDULE = ("saved", "kept", "stages", "materialised", "unrepeated", "fence", "form")


def of(*values: Any) -> str:
    """Hash values that JSON can hold."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def facts(case: Case) -> dict[str, Any]:
    """Return what must stay the same of a step: its program, a plan, and what the compiler makes of both."""
    args = case.make_args()
    traced = trace(jax.jit(case.step, donate_argnums=case.donate_argnums), args, {})
    names = [eqn.primitive.name for eqn in traced.jaxpr.jaxpr.eqns]
    jitted: Any = {"donate_argnums": case.donate_argnums, "compiler_options": recorded.EMITTED}
    stats = jaxremat.memory(case.step, *args, **jitted)
    budget = stats.base_nbytes + int(0.7 * stats.temporaries_nbytes)
    settings: Any = {
        "budget": budget,
        "planning": jaxremat.Planning(solver=jaxremat.Greedy(), planning_seconds=600),
    }
    plan = jaxremat.plan(case.step, *args, **jitted, **settings)
    written = json.loads(plan.to_json())
    return {
        "fingerprint": fingerprint(traced)[:16],
        "equations": len(names),
        "order": of(names),
        "plain_peak_nbytes": stats.peak_nbytes,
        "saved": len(plan.saved),
        "schedule": of(*(written[name] for name in SCHEDULE)),
        "predicted_peak_nbytes": plan.predicted_peak_nbytes,
        "compiled_peak_nbytes": plan.compiled_peak_nbytes,
    }


@pytest.mark.jax_0_10("names, orders and peaks")
@pytest.mark.parametrize("name", CASES)
def test_nothing_has_changed(name: str, request: pytest.FixtureRequest) -> None:
    known, found = json.loads(FILE.read_text()), facts(CASES[name])
    if request.config.getoption("--rewrite-golden"):
        FILE.write_text(json.dumps({**known, name: found}, indent=1) + "\n")
    else:
        assert found == known[name]
