"""Region of rows, graph of the plain step -> what each number of chunks saves in memory and costs in time."""

from .._compiler._devices import DeviceSpec
from .._model._graph import Graph
from .._model._loop_levels import Chunking
from .._model._schedule import everything
from .._model._simulate import simulate
from .._rewrite._row_regions import Region


def chunkings(graph: Graph, region: Region, device: DeviceSpec) -> list[Chunking]:
    """What becomes of a region of the step in each number of chunks that it may be done in."""
    return [_chunking(graph, region, chunks, device) for chunks in region.choices]


def _chunking(graph: Graph, region: Region, chunks: int, device: DeviceSpec) -> Chunking:
    fewer, more = region.fewer_nbytes(chunks), region.more_seconds(chunks, device)
    if region.whole:
        temporaries = simulate(graph, everything(graph)).peak_nbytes - graph.base_nbytes
        fewer = max(min(fewer, temporaries - temporaries // chunks) - region.sum_nbytes, 0)
        launched = sum(graph.trips[n.loop] if n.loop >= 0 else 1 for n in graph.kernels())
        more += (chunks - 1) * max(launched - region.kernels, 0) * device.launch_seconds
    return Chunking(chunks, fewer, more, region.whole)
