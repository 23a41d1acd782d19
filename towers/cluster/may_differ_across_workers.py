"""Which operations of a model may give other results on another worker, from equal inputs.

Whatever brings something in: shards, data, random numbers, the time, what a Python function returns
or a file holds. An operation that is not known to be harmless counts.
"""

import collections
import re

from towers import compat
from towers.cluster.forward_nodes import Library
from towers.graph.graph_walk import functions_of, is_random

_CONSTANTS = frozenset(['Const', 'NoOp', 'ControlTrigger', 'FakeParam', 'Arg', '_Arg'])
"""Types of operations without inputs that bring nothing in."""

_BRINGS_IN = re.compile(
    'PlaceholderWithDefault|PyFunc|ReadFile|MatchingFiles|Restore|Dataset|Iterator|'
    'Stateless(?!If|Case|While)')
"""Types of operations that bring something in, and may not call themselves stateful.

The towers' shards are placeholders with defaults. Stateless random operations may have seeds of
this worker's first tower.
"""

_HARMLESS = re.compile(
    '(_?ReadVariables?Op|ResourceGather|VariableShape|VarIsInitializedOp|Assign.*VariableOp|'
    'Resource(Sparse)?Apply|ResourceScatter|ResourceStridedSliceAssign|TensorArray|Stack|Assert|'
    'Print|CheckNumerics)')
"""Beginnings of types of stateful operations whose state is a variable, or begins in the step."""


_Kind = collections.namedtuple('_Kind', 'type')


class CommonValues:
    """Tells which operations of a graph give the same on all workers, from equal inputs."""

    def __init__(self, graph):
        self._library = Library(graph)
        self._known = {}  # names of functions -> whether they bring something in

    def brings_in(self, op):
        """Whether an operation, which is no variable, may give what differs from worker to worker.

        What its inputs bring in is not looked at, but for the functions that it calls.
        """
        return self._brings_in(op.node_def, bool(op.inputs))

    def _brings_in(self, node, has_inputs):
        functions = [name for name in functions_of(node)
                     if self._library.function(name) is not None]
        if functions:
            return any([self._of_function(name) for name in functions])
        return bool(not has_inputs and node.op not in _CONSTANTS or is_random(_Kind(node.op))
                    or _BRINGS_IN.search(node.op)
                    or compat.is_stateful(node.op) and not _HARMLESS.match(node.op))

    def _of_function(self, name):
        if name not in self._known:
            self._known[name] = False  # for functions that call themselves
            self._known[name] = any([
                self._brings_in(node, any(text[0] != '^' for text in node.input))
                for node in self._library.function(name).node_def])
        return self._known[name]
