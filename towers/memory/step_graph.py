"""A step's graph as plain data: what runs, on which device, with tensors of how many bytes."""

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.op_types import CONTROL_FLOW, CONTROL_FLOW_V2, PLACEHOLDERS, SIZES, VARIABLE_OPS

_SHAPE_ONLY = SIZES | {'BroadcastGradientArgs'}
_NEVER_FOLDED = CONTROL_FLOW | CONTROL_FLOW_V2 | PLACEHOLDERS | VARIABLE_OPS | {'NoOp'}
# Types of tensors that are handles and take no memory.
_HANDLES = (tf.resource, tf.variant)

# `reserve_space_3` takes memory on GPUs only, and less than the other outputs.
_EMPTY_ON_CPUS = frozenset([('FusedBatchNormV3', 5)])

# Operations that run although no output is taken, besides operations with state
# (`dependency_optimizer.cc`).
_ALWAYS_RUN = CONTROL_FLOW | {'Assert', 'CheckNumerics', 'CheckNumericsV2'}


class Node:
    """One operation of a step.

    Attributes:
      name, type: the operation's.
      device: canonical name of the operation's device.
      op: the `tf.Operation`.
      number: the node's place in `StepGraph.nodes`.
      inputs: list of `(Node, output number)`.
      controls: list of `Node`s that the operation only waits for.
      sizes: bytes of each output.
      shapes: static shape of each output, a tuple, or None where a dimension is not known.
      folded: whether it is a constant before the step begins.
      idle: whether other operations wait for its end but take no output: grappler's dependency
        optimizer makes an empty operation of it. Its inputs are then among `controls`.
    """
    __slots__ = ('name', 'type', 'device', 'op', 'inputs', 'controls', 'sizes', 'shapes', 'folded',
                 'number', 'idle')

    def __init__(self, op, number):
        self.op, self.name, self.type, self.device = op, op.name, op.type, op.device
        self.number = number
        self.inputs, self.controls = [], []
        self.sizes, self.shapes, self.folded, self.idle = [], [], False, False

    def __repr__(self):
        return '<Node %s (%s)>' % (self.name, self.type)


class StepGraph:
    """The operations that one run of some fetches executes.

    Attributes:
      nodes: list of `Node`s; each comes after its inputs, but for the back edges of loops.
      by_name: dict from names to `Node`s.
      unknown: names of the operations with an output of unknown size; the size of their largest
        input is counted, which is a bound for operations that select a part of an input.
    """

    def __init__(self, fetches, size_of=None):
        """
        Args:
          fetches: operations or tensors of one graph.
          size_of: function from a tensor to its number of elements (None where it is not known),
            see `batch_size`; None to count the elements of static shapes.
        """
        ops = graph_walk.step_operations(fetches)
        graph = ops[0].graph
        order = {name: number for number, name in enumerate(
            op.name for op in graph.get_operations())}
        ops.sort(key=lambda op: order[op.name])
        self.nodes = [Node(op, number) for number, op in enumerate(ops)]
        self.by_name = {node.name: node for node in self.nodes}
        self.unknown = []
        for node in self.nodes:
            node.device = node.device or '/device:CPU:0'
            node.inputs = [(self.by_name[tensor.op.name], tensor.value_index)
                           for tensor in node.op.inputs]
            node.controls = [self.by_name[other.name] for other in node.op.control_inputs]
        for node in self._in_order():
            self._measure(node, size_of)
        for node in self._in_order():
            node.folded = self._is_folded(node)
        self._keep_order_of_folded()
        self._leave_out_idle([getattr(fetch, 'op', fetch).name for fetch in fetches])

    def _in_order(self):
        """The nodes, inputs first; in a loop, in the order in which the operations were made."""
        done, result = set(), []
        for start in self.nodes:
            stack = [(start, iter(start.inputs))]
            if start.number in done:
                continue
            done.add(start.number)
            while stack:
                node, rest = stack[-1]
                for other, _ in rest:
                    if other.number not in done:
                        done.add(other.number)
                        stack.append((other, iter(other.inputs)))
                        break
                else:
                    stack.pop()
                    result.append(node)
        return result

    def _measure(self, node, size_of):
        for tensor in node.op.outputs:
            dtype = tensor.dtype.base_dtype
            shape = tensor.shape
            known = shape.is_fully_defined()
            node.shapes.append(tuple(shape.as_list()) if known else None)
            if dtype in _HANDLES or (node.type, tensor.value_index) in _EMPTY_ON_CPUS:
                node.sizes.append(0)
                continue
            elements = (shape.num_elements() if known else None) if size_of is None else size_of(
                tensor)
            if elements is not None:
                node.sizes.append(elements * (16 if dtype == tf.string else dtype.size))
                continue
            bound = max([other.sizes[index] for other, index in node.inputs
                         if index < len(other.sizes)] + [0])
            node.sizes.append(bound)
            self.unknown.append(node.name)

    def _keep_order_of_folded(self):
        """Moves control inputs of folded constants to the operations that take the constants."""
        waits = {}  # number of a folded operation: {number: Node} that it waits for
        for node in self._in_order():
            found = {}
            for other, _ in node.inputs:
                if other.folded:
                    found.update(waits.get(other.number, {}))
            for other in node.controls:
                found.update(waits.get(other.number, {}) if other.folded else {other.number: other})
            if node.folded:
                waits[node.number] = found
            else:
                node.controls = list(found.values())

    def _leave_out_idle(self, fetched):
        stack = [node for node in self.nodes if node.name in fetched or node.type in _ALWAYS_RUN
                 or node.op.op_def is None or node.op.op_def.is_stateful
                 or any(argument.is_ref for argument in node.op.op_def.input_arg)]
        taken = {node.number for node in stack}
        while stack:
            for other, _ in stack.pop().inputs:
                if other.number not in taken:
                    taken.add(other.number)
                    stack.append(other)
        for node in self.nodes:
            if node.number not in taken:
                node.idle = True
                node.controls = node.controls + [other for other, _ in node.inputs]
                node.inputs, node.sizes = [], [0] * len(node.sizes)

    def _is_folded(self, node):
        if node.type == 'Const':
            return True
        if node.type in _SHAPE_ONLY and node.inputs:
            return all(shape is not None for other, index in node.inputs
                       for shape in [other.shapes[index]])
        return (bool(node.inputs) and node.type not in _NEVER_FOLDED
                and not node.op.op_def.is_stateful and bool(node.sizes)
                and all(other.folded for other, _ in node.inputs))
