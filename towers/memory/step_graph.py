"""A step's graph as plain data: which operations run, and how many bytes their outputs have.

`tower_step` makes it for the towers of a build, at any batch size.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.op_types import CONTROL_FLOW, CONTROL_FLOW_V2, PLACEHOLDERS, SIZES, VARIABLE_OPS
from towers.memory.node import Node

# Operations that need only the shapes of their inputs. Inputs of the last one are shapes.
_SHAPE_ONLY = SIZES | {'BroadcastGradientArgs'}
_NEVER_FOLDED = CONTROL_FLOW | CONTROL_FLOW_V2 | PLACEHOLDERS | VARIABLE_OPS | {'NoOp'}
_STRING_BYTES = 16  # of the object; its text is elsewhere


class StepGraph:
    """The operations that a step executes, with what they take and the sizes of their outputs.

    Attributes:
      nodes: list of the `Node`s, in the order in which their operations were made.
      by_name: {name: `Node`}.
      unknown: names of the operations with an output of unknown size; the size of their largest
        input is counted, which is a bound for operations that select a part of an input.
    """

    def __init__(self, fetches: list, elements_of: typing.Optional[typing.Callable] = None):
        """
        Args:
          fetches: what a step runs: operations or tensors of one graph.
          elements_of: function from a tensor to its number of elements, or to None if that is not
            known. Without such a function, static shapes say it.
        """
        ops = graph_walk.step_operations(fetches)
        all_operations = ops[0].graph.get_operations()
        index_by_name = graph_walk.indices_by_name(all_operations)
        ops.sort(key=lambda op: index_by_name[op.name])
        self.nodes = [Node(op, number) for number, op in enumerate(ops)]
        self.by_name = graph_walk.by_name(self.nodes)
        self.unknown: typing.List[str] = []
        for node in self.nodes:
            self._connect(node)
        nodes_in_order = self._in_order()
        for node in nodes_in_order:
            self._measure(node, elements_of or _static_elements)
        # After all sizes: in a loop, a size may come after the operation that asks for it.
        for node in nodes_in_order:
            node.folded = _is_folded(node)
        _keep_order_of_folded(nodes_in_order)

    def _connect(self, node: Node) -> None:
        """Notes the nodes whose outputs a node takes, and the nodes that it only waits for."""
        for tensor in node.op.inputs:
            node.inputs.append((self.by_name[tensor.op.name], tensor.value_index))
        for source in node.op.control_inputs:
            node.controls.append(self.by_name[source.name])

    def _in_order(self) -> typing.List[Node]:
        """List of the nodes, each after its inputs; in a loop, in the order in which the operations
        were made. A search depth first, without recursion."""
        seen = set()
        in_order = []
        for start in self.nodes:
            if start.number in seen:
                continue
            seen.add(start.number)
            # The way from `start` to the node that is looked at, each with the inputs that are left
            # to be looked at; each node on the way is an input of the node before it.
            path = [(start, iter(start.inputs))]
            while path:
                node, inputs_left = path[-1]
                unseen = (source for source, _ in inputs_left if source.number not in seen)
                source = next(unseen, None)
                if source is None:
                    in_order.append(node)
                    path.pop()
                else:
                    seen.add(source.number)
                    path.append((source, iter(source.inputs)))
        return in_order

    def _measure(self, node: Node, elements_of: typing.Callable) -> None:
        """Notes the static shape and the bytes of each output of a node.

        Args:
          node: the node; its inputs have been measured before.
          elements_of: function from a tensor to its number of elements, or to None.
        """
        for tensor in node.op.outputs:
            shape = tensor.shape
            node.shapes.append(tuple(shape.as_list()) if shape.is_fully_defined() else None)
            elements = 0 if _takes_no_memory(tensor) else elements_of(tensor)
            if elements is None:
                node.sizes.append(_bytes_of_largest_input(node))
                self.unknown.append(node.name)
                continue
            dtype = tensor.dtype.base_dtype
            bytes_of_element = _STRING_BYTES if dtype == tf.string else dtype.size
            node.sizes.append(elements * bytes_of_element)


def _static_elements(tensor: tf.Tensor) -> typing.Optional[int]:
    """The number of elements of a tensor; None where its shape is not static."""
    return tensor.shape.num_elements()


def _takes_no_memory(tensor: tf.Tensor) -> bool:
    """Whether a tensor takes no memory: a handle; or a batch norm's `reserve_space_3`, which takes
    some on GPUs only."""
    if tensor.dtype.base_dtype in (tf.resource, tf.variant):
        return True
    return tensor.op.type == 'FusedBatchNormV3' and tensor.value_index == 5


def _bytes_of_largest_input(node: Node) -> int:
    """Bytes of the largest input of a node, among those that have been measured."""
    sizes = [source.sizes[index] for source, index in node.inputs if index < len(source.sizes)]
    return max(sizes, default=0)


def _is_folded(node: Node) -> bool:
    """Whether TensorFlow computes a node once, before the step (constant folding): its inputs are
    constants, or it needs only the shape of inputs whose shape is static. The inputs have to be
    known as folded or not before."""
    if node.type == 'Const':
        return True
    if not node.inputs:
        return False
    if node.type in _SHAPE_ONLY:
        return all(source.shapes[index] is not None for source, index in node.inputs)
    has_no_output = not node.sizes
    if node.type in _NEVER_FOLDED or node.op.op_def.is_stateful or has_no_output:
        return False
    return all(source.folded for source, _ in node.inputs)


def _keep_order_of_folded(nodes: typing.List[Node]) -> None:
    """Makes the nodes that take folded constants wait for what the constants would wait for.

    A constant that is computed before the step waits for nothing in the step, so that the order of
    the step would be lost.

    Args:
      nodes: all nodes, each after its inputs; their `controls` are changed.
    """
    # {number of a folded node: {number of a node that it waits for: this node}}
    awaited_by_folded: typing.Dict[int, typing.Dict[int, Node]] = {}
    for node in nodes:
        awaited: typing.Dict[int, Node] = {}
        for source, _ in node.inputs:
            awaited.update(awaited_by_folded.get(source.number, {}))
        for source in node.controls:
            if source.folded:
                awaited.update(awaited_by_folded.get(source.number, {}))
            else:
                awaited[source.number] = source
        if node.folded:
            awaited_by_folded[node.number] = awaited
        else:
            node.controls = list(awaited.values())
