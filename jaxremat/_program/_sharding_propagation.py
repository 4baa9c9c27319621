"""Lowered program -> how the compiler's propagation of shardings lays out its operations and its arguments."""

import importlib
from typing import Any

from jaxlib.mlir import ir as _ir
from jaxlib.mlir import passmanager as _passes
from jaxlib.mlir.dialects import sdy as _sdy

Axis = tuple[str, int, int]
"""An axis of a mesh, or a part of one: its name, the number of parts outside of this one, and how many it has."""

Layout = tuple[tuple[Axis, ...], ...]
"""The axes over which each dimension of an array is divided."""


Operation = tuple[str, list[Layout], list[tuple[tuple[int, ...], Layout]]]
"""An operation's name stack, the layouts of its operands, and the shape and layout of each result."""


def propagated(lowered: Any) -> tuple[list[Operation], list[Layout]]:
    """Return what the compiler's propagation of shardings says of a lowered program's operations and of its
    arguments, without compiling it.
    """
    # What JAX lowers a loop's body to is a call, into which shardings are not propagated: calls are inlined first, by
    # an extension that comes with the dialect of kernels for GPUs.
    lowered = getattr(lowered, "_lowered", lowered)
    module = lowered.compiler_ir("stablehlo").operation.clone()
    with module.context:
        gpu_kernels: Any = importlib.import_module("jaxlib.mlir._mlir_libs._mosaic_gpu_ext")
        gpu_kernels.register_inliner_extensions(module.context)
        passes = "inline,symbol-dce,sdy-propagation-pipeline"
        _passes.PassManager.parse(f"builtin.module({passes})").run(module)
        return _layouts_of(module)


def _layouts_of(module: Any) -> tuple[list[Operation], list[Layout]]:
    sizes: dict[str, dict[str, int]] = {}
    found: list[Operation] = []
    arguments: list[Layout] = []
    known: dict[Any, Layout] = {}

    def shape_of(kind: Any) -> tuple[int, ...]:
        return tuple(kind.shape) if isinstance(kind, _ir.RankedTensorType) else ()

    def layout(given: Any, rank: int) -> Layout:
        if given is None:
            return ((),) * rank
        sharding = _sdy.TensorShardingAttr(given)
        mesh = sizes.get(_ir.FlatSymbolRefAttr(sharding.mesh_or_ref).value, {})
        dims = [_sdy.DimensionShardingAttr(each) for each in sharding.dimension_shardings]
        axes = [[_sdy.AxisRefAttr(axis) for axis in dim.axes] for dim in dims] or [[]] * rank
        return tuple(tuple(part(axis, mesh[axis.name]) for axis in each) for each in axes)

    def part(axis: Any, size: int) -> Axis:
        info = axis.sub_axis_info
        if info is None:
            return axis.name, 1, size
        info = _sdy.SubAxisInfoAttr(info)
        return axis.name, info.pre_size, info.size

    def visit(op: Any) -> Any:
        attributes = op.attributes
        if op.name == "sdy.mesh":
            mesh = [_sdy.MeshAxisAttr(axis) for axis in _sdy.MeshAttr(attributes["mesh"]).axes]
            sizes[_ir.StringAttr(attributes["sym_name"]).value] = {axis.name: axis.size for axis in mesh}
        if op.name == "func.func" and _ir.StringAttr(attributes["sym_name"]).value == "main":
            types = _ir.FunctionType(_ir.TypeAttr(attributes["function_type"]).value).inputs
            bare = [_ir.DictAttr.get({})] * len(types)
            own = _ir.ArrayAttr(attributes["arg_attrs"]) if "arg_attrs" in attributes else bare
            for kind, each in zip(types, own, strict=True):
                given = [a.attr for a in _ir.DictAttr(each) if a.name == "sdy.sharding"]
                arguments.append(layout(given[0] if given else None, len(shape_of(kind))))
            known.update(zip(op.regions[0].blocks[0].arguments, arguments, strict=True))
        shapes = [shape_of(result.type) for result in op.results]
        several = next((attributes[a] for a in ("sdy.sharding", "out_shardings") if a in attributes), None)
        given = [None] * len(shapes)
        if several is not None and shapes:
            given = list(_sdy.TensorShardingPerValueAttr(several).shardings)
        elif "sharding" in attributes and op.name.startswith("sdy."):
            given = [attributes["sharding"]]
        if shapes:
            layouts = [layout(each, len(shape)) for each, shape in zip(given, shapes, strict=True)]
            known.update(zip(op.results, layouts, strict=True))
            read = [known.get(a, ((),) * len(shape_of(a.type))) for a in op.operands]
            found.append((str(op.location), read, list(zip(shapes, layouts, strict=True))))
        return _ir.WalkResult.ADVANCE

    module.walk(visit, _ir.WalkOrder.PRE_ORDER)
    return found, arguments
