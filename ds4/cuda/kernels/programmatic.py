"""Overlap of neighbouring kernels in a captured graph: edges that let a kernel start early.

The invariant: only edges between two kernels that both call `grid_wait` before they touch anything
another kernel writes may be relaxed, and every kernel of such a chain must call it, since waiting
is for the direct predecessor only. These kernels load their first weights before it.
Source: CUDA driver API, "programmatic dependent launch" and `CUgraphEdgeData`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ds4.errors import DeviceError

__all__ = ["check", "relax_kernel_edges"]

_PORT_PROGRAMMATIC = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC


def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def check(result: tuple[Any, ...], operation: str) -> Any:
    """Value of a driver call's result tuple: nothing, one value or a tuple of them.

    Raises:
      DeviceError: the call failed; the text names the operation and the status.
    """
    status, *values = result
    if int(status) != 0:
        raise DeviceError(f"{operation}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values) or None


def relax_kernel_edges(graph: Any, may_relax: Callable[[Any, Any], bool] | None = None) -> int:
    """Make kernel-to-kernel edges of a captured graph programmatic, before it is instantiated.

    Args:
      graph: CUgraph of `cuda.bindings.driver`.
      may_relax: called with two kernel nodes; false leaves the edge alone. By default all may.

    Returns:
      How many edges were changed. An edge into a kernel with several predecessors stays as it is:
      programmatic edges are for chains.

    Raises:
      DeviceError: the driver refused.
    """
    cu = _driver()
    _, _, _, count = check(cu.cuGraphGetEdges(graph), "count graph edges")
    if count == 0:
        return 0
    sources, targets, data, _ = check(cu.cuGraphGetEdges(graph, count), "list graph edges")
    kernel = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    kinds = {
        int(node): check(cu.cuGraphNodeGetType(node), "graph node type")
        for node in (*sources, *targets)
    }
    n_before: dict[int, int] = {}
    for target in targets:
        n_before[int(target)] = n_before.get(int(target), 0) + 1
    changed = 0
    for source, target, old in zip(sources, targets, data, strict=True):
        if kinds[int(source)] != kernel or kinds[int(target)] != kernel:
            continue
        if n_before[int(target)] > 1 or (may_relax and not may_relax(source, target)):
            continue
        new = cu.CUgraphEdgeData()
        new.from_port = _PORT_PROGRAMMATIC
        new.type = int(cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
        check(cu.cuGraphRemoveDependencies(graph, [source], [target], [old], 1), "remove edge")
        check(cu.cuGraphAddDependencies(graph, [source], [target], [new], 1), "add edge")
        changed += 1
    return changed
