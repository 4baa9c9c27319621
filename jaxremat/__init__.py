"""Rematerialisation for JAX: a train step within a memory budget, with the smallest slowdown that a planner finds.

@jaxremat.optimize("24GiB", donate_argnums=0)
def train_step(state, batch): ...
"""

# First, because it imports JAX: on the command line without what the CUDA plugin says where there is no GPU.
from ._program import _plugin_messages as _plugin_messages  # isort: split

from . import testing as testing
from . import zoo as zoo
from ._api._checkpoint import Checkpointed as Checkpointed
from ._api._checkpoint import checkpoint as checkpoint
from ._api._comparison import Comparison as Comparison
from ._api._comparison import compare as compare
from ._api._names import name_values as name_values
from ._api._names import policy as policy
from ._api._optimize import optimize as optimize
from ._api._planning import cost as cost
from ._api._planning import memory as memory
from ._api._planning import plan as plan
from ._api._planning import search_plan as search_plan
from ._api._step import Step as Step
from ._api._sweep import sweep as sweep
from ._compiler._memory_stats import MemoryStats as MemoryStats
from ._compiler._peak_contents import Alive as Alive
from ._compiler._program import compiler_options as compiler_options
from ._compiler._target import targets as targets
from ._model._graph import Graph as Graph
from ._model._graph import Node as Node
from ._model._graph import Pin as Pin
from ._model._graph import Stage as Stage
from ._model._graph import Value as Value
from ._model._schedule import Schedule as Schedule
from ._model._schedule import close_over_dependencies as close_over_dependencies
from ._model._simulate import Profile as Profile
from ._model._simulate import simulate as simulate
from ._model._sites import EXACT as EXACT
from ._plan._frontier import Frontier as Frontier
from ._plan._frontier import Point as Point
from ._plan._plan import HeldPlan as HeldPlan
from ._plan._plan import Plan as Plan
from ._plan._request import Planning as Planning
from ._program._hints import hint as hint
from ._program._host_arguments import to_host as to_host
from ._report import Report as Report
from ._report._actions import Action as Action
from ._report._loop_forms import Copied as Copied
from ._report._loop_forms import LoopForm as LoopForm
from ._report._outcome import Round as Round
from ._runtime._bytes import format_nbytes as format_nbytes
from ._runtime._errors import ArgumentError as ArgumentError
from ._runtime._errors import BudgetError as BudgetError
from ._runtime._errors import CompilationError as CompilationError
from ._runtime._errors import HintError as HintError
from ._runtime._errors import HostMemoryError as HostMemoryError
from ._runtime._errors import InfeasibleBudgetError as InfeasibleBudgetError
from ._runtime._errors import InfeasibleHintError as InfeasibleHintError
from ._runtime._errors import InstallError as InstallError
from ._runtime._errors import JaxrematError as JaxrematError
from ._runtime._errors import JaxrematWarning as JaxrematWarning
from ._runtime._errors import PlanMismatchError as PlanMismatchError
from ._runtime._errors import ProcessError as ProcessError
from ._runtime._errors import SolverError as SolverError
from ._runtime._errors import SolverRuleError as SolverRuleError
from ._runtime._errors import TargetError as TargetError
from ._solver import Chen as Chen
from ._solver import Greedy as Greedy
from ._solver import Milp as Milp
from ._solver import MinCut as MinCut
from ._solver import RecomputeAll as RecomputeAll
from ._solver import SaveAll as SaveAll
from ._solver import SaveDots as SaveDots
from ._solver import Solution as Solution
from ._solver import Solver as Solver

__version__ = "0.2.0"

_RENAMED = {"complete": "close_over_dependencies"}


def __getattr__(name: str) -> object:
    """Raise an error that says the new name where an old one is asked for."""
    if name in _RENAMED:
        raise AttributeError(f"`jaxremat.{name}` is now called `jaxremat.{_RENAMED[name]}`.")
    raise AttributeError(f"module 'jaxremat' has no attribute {name!r}")
