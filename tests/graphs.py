"""The graphs of `jaxremat.testing` and their builder, under the names that the tests use."""

from jaxremat._specimens import UNIT as UNIT
from jaxremat._specimens import Builder as Builder
from jaxremat._specimens import blocks as blocks
from jaxremat._specimens import chain as chain
from jaxremat._specimens import diamond as diamond
from jaxremat._specimens import forward_only as forward_only
from jaxremat._specimens import in_loops as in_loops
from jaxremat._specimens import unrepeatable as unrepeatable
