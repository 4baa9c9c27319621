"""Rematerialisation for JAX, planned and proven: train inside a byte budget at the least extra time.

@jaxremat.optimize("24GiB", donate_argnums=0)
def train_step(state, batch): ...
"""

from typing import TYPE_CHECKING, Any

from . import testing as testing
from . import zoo as zoo
from ._actions import Action as Action
from ._alive import Alive as Alive
from ._api import Step as Step
from ._api import optimize as optimize
from ._ask import cost as cost
from ._ask import memory as memory
from ._ask import plan as plan
from ._ask import search_plan as search_plan
from ._budget import format_nbytes as format_nbytes
from ._checkpoint import Checkpointed as Checkpointed
from ._checkpoint import checkpoint as checkpoint
from ._errors import ArgumentError as ArgumentError
from ._errors import BudgetError as BudgetError
from ._errors import HintError as HintError
from ._errors import InfeasibleBudgetError as InfeasibleBudgetError
from ._errors import InfeasibleHintError as InfeasibleHintError
from ._errors import InstallError as InstallError
from ._errors import JaxrematError as JaxrematError
from ._errors import JaxrematWarning as JaxrematWarning
from ._errors import PlanMismatchError as PlanMismatchError
from ._errors import SolverError as SolverError
from ._errors import SolverRuleError as SolverRuleError
from ._errors import TargetError as TargetError
from ._frontier import Frontier as Frontier
from ._frontier import Point as Point
from ._graph import Graph as Graph
from ._graph import Node as Node
from ._graph import Pin as Pin
from ._graph import Stage as Stage
from ._graph import Value as Value
from ._held_plan import HeldPlan as HeldPlan
from ._hints import hint as hint
from ._loop_forms import LoopForm as LoopForm
from ._memory import MemoryStats as MemoryStats
from ._names import name_values as name_values
from ._names import policy as policy
from ._outcome import Round as Round
from ._plan import Plan as Plan
from ._program import compiler_options as compiler_options
from ._report import Report as Report
from ._schedule import Schedule as Schedule
from ._schedule import complete as complete
from ._simulate import Profile as Profile
from ._simulate import simulate as simulate
from ._solver import Chen as Chen
from ._solver import Greedy as Greedy
from ._solver import MinCut as MinCut
from ._solver import RecomputeAll as RecomputeAll
from ._solver import SaveAll as SaveAll
from ._solver import SaveDots as SaveDots
from ._solver import Solution as Solution
from ._solver import Solver as Solver
from ._sweep import sweep as sweep
from ._target import targets as targets

if TYPE_CHECKING:
    from ._solver._milp import Milp as Milp


def __getattr__(name: str) -> Any:
    if name == "Milp":  # imported when asked for: loading a saved plan needs no python-mip
        from ._solver._milp import Milp

        return Milp
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
