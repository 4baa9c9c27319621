"""An integer program as plain data -> status, bound and values by python-mip, in a separate process.

Run by `_runtime._worker`; imports nothing from this library. The request is that of `IntegerProgram.optimize`.
"""

import time
from typing import Any

import mip as _mip
import mip.cbc as _cbc

mip: Any = _mip  # its annotations do not cover its own operators


def answer(request: dict[str, Any]) -> tuple[str, float | None, list[float] | None, bool]:
    """Return the name of the status, a bound on the objective, the values of the variables if there is a solution, and
    whether the clock rather than the limit on nodes ended the search.
    """
    engine: str = request["engine"]
    model = mip.Model(sense=mip.MINIMIZE, solver_name=engine)
    model.verbose = 0
    model.threads = request["threads"]
    model.seed = 1
    # CBC's integer preprocessing kills the process (in CglPreProcess::postProcess) if the time limit ends a
    # search that was given a start. These programs are solved as fast, and as far, without it.
    model.preprocess = 0 if engine == mip.CBC else -1
    if not request["heuristics"] and engine == mip.CBC:
        _cbc.cbc_set_parameter(model.solver, "heur", "off")
    variables = [
        model.add_var(lb=0.0, ub=upper, var_type=mip.INTEGER if integer else mip.CONTINUOUS)
        for upper, integer in request["columns"]
    ]
    for columns, factors, sense, bound in request["rows"]:
        model.add_constr(mip.LinExpr([variables[i] for i in columns], factors, -bound, sense))
    columns, factors = request["objective"]
    model.objective = mip.LinExpr([variables[i] for i in columns], factors)
    model.max_mip_gap_abs, model.max_mip_gap = request["gap_abs"], request["gap"]
    if request["start"]:
        model.start = [(variables[i], value) for i, value in request["start"]]
    began = time.monotonic()
    status = model.optimize(max_seconds=request["seconds"], max_nodes=request["nodes"])
    late = time.monotonic() - began >= request["seconds"]
    values = [float(x.x) for x in variables] if model.num_solutions else None
    return status.name, model.objective_bound, values, late
