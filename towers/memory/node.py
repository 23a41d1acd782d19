"""One operation of a step as plain data, with the sizes of its outputs.

Its test is `tests/memory/test_step_graph.py`.
"""

import typing

import tensorflow.compat.v1 as tf


class Output(typing.NamedTuple):
    """A result of a node, which other nodes take as an input."""
    node: 'Node'
    value_index: int  # the index among the node's outputs, as `tf.Tensor.value_index`

    @property
    def name(self) -> str:
        """The name of its `tf.Tensor`: `'add:0'`."""
        return '%s:%d' % (self.node.name, self.value_index)

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.node.sizes[self.value_index]

    @property
    def shape(self) -> typing.Optional[tuple]:
        """Its static shape, a tuple; None where a dimension is not known."""
        return self.node.shapes[self.value_index]


class Node:
    """One operation of a step.

    Attributes:
      op: the `tf.Operation`.
      name, type, device: the operation's. An operation that asks for no device counts as on the
        CPU.
      number: the index of the node in `StepGraph.nodes`.
      inputs: the `Output`s that the operation takes, in the order of `op.inputs`.
      controls: list of the nodes that the operation waits for by control edges.
      sizes: bytes of each output.
      shapes: static shape of each output, a tuple, or None where a dimension is not known.
      folded: whether the result is there before the step: the operation is a constant, or
        TensorFlow computes it once, from constants or static shapes.
    """
    __slots__ = ('name', 'type', 'device', 'op', 'inputs', 'controls', 'sizes', 'shapes', 'folded',
                 'number')

    def __init__(self, op: tf.Operation, number: int):
        """Makes a node without inputs and sizes, which `StepGraph` adds."""
        self.op = op
        self.name = op.name
        self.type = op.type
        self.device = op.device or '/device:CPU:0'
        self.number = number
        self.inputs: typing.List[Output] = []
        self.controls: typing.List['Node'] = []
        self.sizes: typing.List[int] = []
        self.shapes: typing.List[typing.Optional[tuple]] = []
        self.folded = False

    @property
    def outputs(self) -> typing.List[Output]:
        """List of its `Output`s."""
        return [Output(self, index) for index in range(len(self.sizes))]
