"""Solvers: `Graph`, budget -> `Solution`, one per file, all with the same signature."""

from ._chen import Chen as Chen
from ._greedy import Greedy as Greedy
from ._interface import Solution as Solution
from ._interface import Solver as Solver
from ._milp import Milp as Milp
from ._mincut import MinCut as MinCut
from ._sublinear import Sublinear as Sublinear
from ._trivial import RecomputeAll as RecomputeAll
from ._trivial import SaveAll as SaveAll
from ._trivial import SaveDots as SaveDots
