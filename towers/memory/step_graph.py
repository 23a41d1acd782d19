"""A step's graph as plain data: which operations run, and how many bytes their outputs have.

`tower_step` makes it for the towers of a build, at any batch size.

Words of `graph/op_types.py` used here: `SIZES` are operations that need only the shape of their
input, such as `Shape`; `CONTROL_FLOW` and `CONTROL_FLOW_V2` are the operations of loops and
branches (v1, v2); `PLACEHOLDERS` give the fed values.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.op_types import CONTROL_FLOW, CONTROL_FLOW_V2, PLACEHOLDERS, SIZES
from towers.memory.node import Node, Output

# Types of operations that a step runs also if their inputs are constants: they choose a branch, or
# give a fed value (`PlaceholderWithDefault`).
_NEVER_FOLDED = CONTROL_FLOW | CONTROL_FLOW_V2 | PLACEHOLDERS
_STRING_BYTES = 16  # of the string object; its text is elsewhere
_RESERVE_SPACE_3 = 5  # index of the last output of a `FusedBatchNormV3`


def _static_elements(tensor: tf.Tensor) -> typing.Optional[int]:
    """The number of elements of a tensor; None where its shape is not static."""
    return tensor.shape.num_elements()


class StepGraph:
    """The operations that a step needs, with what they take and the sizes of their outputs.

    Attributes:
      nodes: list of the `Node`s, in the order in which their operations were made.
      by_name: {name: `Node`}.
      unknown: names of the operations with an output of unknown size; the size of their largest
        input is counted, which is a bound for operations that select a part of an input.
    """

    def __init__(self, fetches: list, elements_of: typing.Callable = _static_elements):
        """
        Args:
          fetches: what a step runs: operations or tensors of one graph.
          elements_of: function from a tensor to its number of elements, or to None if that is not
            known.
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
            self._measure(node, elements_of)
        # Only when all nodes have shapes: `_is_folded` asks for the shapes of inputs, and in a loop
        # a node may come before a node that it takes an input from.
        for node in nodes_in_order:
            node.folded = _is_folded(node)
        _keep_order_of_folded(nodes_in_order)

    @property
    def executed(self) -> typing.List[Node]:
        """List of the nodes that a step executes: all but the folded nodes, in the same order."""
        return [node for node in self.nodes if not node.folded]

    @property
    def operations(self) -> typing.List[tf.Operation]:
        """List of the operations of the nodes."""
        return [node.op for node in self.nodes]

    def _connect(self, node: Node) -> None:
        """Notes the nodes whose outputs a node takes, and the nodes that it only waits for."""
        for tensor in node.op.inputs:
            node.inputs.append(Output(self.by_name[tensor.op.name], tensor.value_index))
        for source in node.op.control_inputs:
            node.controls.append(self.by_name[source.name])

    def _in_order(self) -> typing.List[Node]:
        """List of the nodes, each after the nodes that it takes inputs from. In a loop not all can
        be in this order: the node that the search reaches first is after the other nodes. The
        search is depth first, without recursion."""
        seen: typing.Set[int] = set()
        in_order = []
        for start in self.nodes:
            if start.number in seen:
                continue
            seen.add(start.number)
            # From `start` to the node that is looked at. Each node on the path is an input of the
            # node before it.
            path = [start]
            while path:
                node = path[-1]
                source = _next_unseen_input(node, seen)
                if source is None:  # all its inputs are in the list
                    in_order.append(node)
                    path.pop()
                else:
                    seen.add(source.number)
                    path.append(source)
        return in_order

    def _measure(self, node: Node, elements_of: typing.Callable) -> None:
        """Notes the static shape and the bytes of each output of a node. If an output's size is not
        known, the node becomes one of the `unknown`.

        Args:
          node: the node; its inputs have been measured before.
          elements_of: function from a tensor to its number of elements, or to None.
        """
        for tensor in node.op.outputs:
            node.shapes.append(_static_shape(tensor))
            if _takes_no_memory(tensor):
                node.sizes.append(0)
                continue
            elements = elements_of(tensor)
            if elements is None:
                node.sizes.append(_bytes_of_largest_input(node))
                self.unknown.append(node.name)
            else:
                node.sizes.append(elements * _bytes_of_element(tensor.dtype.base_dtype))


def _next_unseen_input(node: Node, seen: typing.Set[int]) -> typing.Optional[Node]:
    """The first of the nodes whose outputs a node takes, and whose number is not in `seen`."""
    for output in node.inputs:
        if output.node.number not in seen:
            return output.node
    return None


def _static_shape(tensor: tf.Tensor) -> typing.Optional[tuple]:
    """The static shape of a tensor as a tuple; None where a dimension is not known."""
    if not tensor.shape.is_fully_defined():
        return None
    return tuple(tensor.shape.as_list())


def _bytes_of_element(dtype: tf.DType) -> int:
    """Bytes of one element of a tensor."""
    if dtype == tf.string:
        return _STRING_BYTES
    return dtype.size


def _takes_no_memory(tensor: tf.Tensor) -> bool:
    """Whether a tensor takes no memory: a handle; or a batch norm's `reserve_space_3`, which takes
    memory on GPUs only."""
    if tensor.dtype.base_dtype in (tf.resource, tf.variant):
        return True
    return tensor.op.type == 'FusedBatchNormV3' and tensor.value_index == _RESERVE_SPACE_3


def _bytes_of_largest_input(node: Node) -> int:
    """Bytes of the largest input of a node, among the inputs that have been measured."""
    largest = 0
    for output in node.inputs:
        # An input from the end of a loop's body is measured after the node.
        is_measured = output.value_index < len(output.node.sizes)
        if is_measured:
            largest = max(largest, output.size)
    return largest


def _is_folded(node: Node) -> bool:
    """Whether TensorFlow computes a node once, before the step (constant folding): its inputs are
    constants, or it needs only the shape of inputs whose shape is static. `folded` of the nodes
    that the node takes inputs from has to be set before."""
    if node.type == 'Const':
        return True
    if not node.inputs:
        return False  # a variable, a placeholder, an operation that only waits
    if node.type in SIZES:
        return all(output.shape is not None for output in node.inputs)
    if _runs_in_each_step(node):
        return False
    return all(output.node.folded for output in node.inputs)


def _runs_in_each_step(node: Node) -> bool:
    """Whether a step runs a node also if its inputs are constants: for its effect, such as a write
    or new random numbers; or because of its type."""
    has_effect = node.op.op_def.is_stateful or not node.op.outputs
    return has_effect or node.type in _NEVER_FOLDED


def _keep_order_of_folded(nodes: typing.List[Node]) -> None:
    """Makes each node that takes or awaits a folded node wait for the nodes that the folded node
    would wait for.

    Let b wait for a, and c take b. Then c comes after a in the graph. If b is folded, the step does
    not run it, and c would wait for nothing: c gets a control edge from a, in the place of b.

    Args:
      nodes: all nodes, each after its inputs. In the nodes that a step executes, `controls` is set
        to a list of nodes that the step also executes.
    """
    # {folded node: the nodes of the step that it would wait for}
    awaited_by_folded: typing.Dict[Node, typing.Set[Node]] = {}
    for node in nodes:
        awaited = {source for source in node.controls if not source.folded}
        producers = [output.node for output in node.inputs]
        for source in producers + node.controls:
            awaited |= awaited_by_folded.get(source, set())  # none for a source that runs
        if node.folded:
            awaited_by_folded[node] = awaited
        else:
            node.controls = list(awaited)
