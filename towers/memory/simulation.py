"""A step as TensorFlow's executor runs it: what is in memory after each operation.

Ready operations run first come first served. The executor has two or more threads, of which each
prefers what it has just made ready; on average that is near this order. (A single thread would put
off all gradients of weights.) An output is freed when the last operation that takes it has
finished. An operation's scratch memory is there until the next one has begun, since the two
gradients of a convolution run at the same time.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.memory.buffers import SCRATCH, TRANSFER, UPDATE, VARIABLE, Buffer, Memory, Owner
from towers.memory.kernels import REUSES, passes_on, scratch
from towers.memory.node import Node
from towers.memory.step_graph import StepGraph

# The beginnings of the types of operations that write a resource variable in place. By
# `AssignVariableOp`, which is not one, a variable takes the memory of the value.
_UPDATES = ('ResourceApply', 'AssignAddVariableOp', 'AssignSubVariableOp', 'ResourceScatter',
            'ResourceSparseApply')
_VARIABLES = ('VarHandleOp', 'VariableV2', 'Variable', 'TemporaryVariable')
_MERGES = ('Merge', 'RefMerge')
FED = ('Placeholder', 'PlaceholderV2')  # the caller holds a fed value for the whole step

_OutputIndex = typing.Tuple[int, int]
"""An output of a node: the number of the node, and the index of the output."""


class Run:
    """The simulation of a step: which memory is in use when. Nothing is computed.

    Attributes:
      buffers: list of `Buffer`, in order of allocation, without constants.
      peaks: dict from a device to its `Peak`; under None for all devices together.
    """

    def __init__(self, step: StepGraph):
        """Simulates the step."""
        self._memory = Memory()
        self.buffers = self._memory.buffers
        self.peaks = self._memory.peaks
        # {number of a node: how many nodes it still waits for}
        self._num_awaited: typing.Dict[int, int] = {}
        # {number of a node: the nodes that wait for it}
        self._followers: typing.Dict[int, typing.List[Node]] = collections.defaultdict(list)
        # {output: devices of the nodes that take it}
        self._takers: typing.Dict[_OutputIndex, typing.List[str]] = collections.defaultdict(list)
        # {output: its buffer on the device of its node}
        self._held: typing.Dict[_OutputIndex, Buffer] = {}
        # {(output, another device): the buffer of its copy there}
        self._copies: typing.Dict[typing.Tuple[_OutputIndex, str], Buffer] = {}
        # {number of a variable's node: the buffer that holds the variable now}
        self._variables: typing.Dict[int, Buffer] = {}
        nodes = [node for node in step.nodes if not node.folded]
        for node in nodes:
            self._connect(node)
            if node.type in _VARIABLES:
                self._variables[node.number] = self._memory.allocate_variable(
                    node, _variable_bytes(node), node)
        self._run(nodes)

    def alive(self, event: int, device: typing.Optional[str] = None) -> typing.List[Buffer]:
        """List of the buffers that are in memory right after an event, on a device; None for all
        devices."""
        alive = []
        for buffer in self.buffers:
            is_on_device = device is None or device == buffer.device
            if is_on_device and buffer.size and buffer.is_there(event):
                alive.append(buffer)
        return alive

    def _connect(self, node: Node) -> None:
        """Notes what a node waits for, and which outputs it takes."""
        sources = {source.number for source in node.controls if not source.folded}
        for source, index in _computed_inputs(node):
            sources.add(source.number)
            self._takers[source.number, index].append(node.device)
        self._num_awaited[node.number] = len(sources)
        if node.type in _MERGES and sources:
            self._num_awaited[node.number] = 1  # it begins with the first of its inputs
        for number in sources:
            self._followers[number].append(node)

    def _run(self, nodes: typing.List[Node]) -> None:
        """Runs the nodes, each when all that it waits for has ended."""
        ready = collections.deque(node for node in nodes if not self._num_awaited[node.number])
        queued = {node.number for node in ready}  # so far
        scratch_buffer = None
        while ready:
            node = ready.popleft()
            scratch_buffer = self._begin(node, scratch_buffer)
            for follower in self._followers[node.number]:
                self._num_awaited[follower.number] -= 1
                # Below 0 for a `Merge`, whose other inputs come later.
                is_ready = self._num_awaited[follower.number] <= 0
                if is_ready and follower.number not in queued:
                    queued.add(follower.number)
                    ready.append(follower)
            self._end(node)
        self._memory.release(scratch_buffer)

    def _input(self, source: Node, index: int, device: str) -> typing.Optional[Buffer]:
        """The `Buffer` of an input on a device: the copy there, else the output itself; None where
        it takes no memory.

        Args:
          source: the node whose output is the input.
          index: the index of that output.
          device: the device of the operation that takes it.
        """
        output = source.number, index
        return self._copies.get((output, device)) or self._held.get(output)

    # ---- the beginning of an operation

    def _begin(self, node: Node, scratch_before: typing.Optional[Buffer]
               ) -> typing.Optional[Buffer]:
        """Allocates an operation's outputs and scratch, and frees the scratch of the operation that
        began before it.

        Args:
          node: the operation.
          scratch_before: the scratch to free; or None.

        Returns:
          The `Buffer` of the operation's scratch; None if it takes none.
        """
        if node.type.startswith(_UPDATES):
            self._move_variables_that_are_read(node)
        outputs = self._outputs(node)
        scratch_buffer = self._memory.allocate(scratch(node), node.device, node, what=SCRATCH)
        self._memory.release(scratch_before)
        for index, buffer in enumerate(outputs):
            if buffer is not None:
                buffer.references += 1  # until `_end` has counted the takers
                self._held[node.number, index] = buffer
        return scratch_buffer

    def _move_variables_that_are_read(self, node: Node) -> None:
        """Gives the variables of an update new memory, if others still read their old memory, which
        TensorFlow then leaves to them."""
        for tensor, (source, _) in zip(node.op.inputs, node.inputs):
            if tensor.dtype != tf.resource:
                continue
            old = self._variables.get(_variable_of(source))
            if old is None or old.variable is None:
                continue
            is_read = old.references > 1  # one reference is the variable's own
            if is_read:
                self._variables[old.variable.number] = self._memory.allocate_variable(
                    old.variable, old.size, node, what=UPDATE)
                self._memory.release(old)

    def _outputs(self, node: Node) -> typing.List[typing.Optional[Buffer]]:
        """List of the `Buffer` of each output of an operation; None for an output that takes no
        memory. An output may be an input's buffer, passed on or written over."""
        if node.type in _VARIABLES:
            return [self._variables[node.number] if size else None for size in node.sizes]
        if node.type == 'ReadVariableOp':
            return [self._variables.get(_variable_of(node))]  # its value is its memory
        inputs: typing.List[typing.Optional[Buffer]] = []
        for source, index in node.inputs:
            if source.folded:  # a constant, which is counted elsewhere
                inputs.append(None)
            else:
                inputs.append(self._input(source, index, node.device))
        if node.inputs and passes_on(node):
            return _passed_on(node, inputs)
        outputs: typing.List[typing.Optional[Buffer]] = []
        for index, size in enumerate(node.sizes):
            buffer = _buffer_to_write_over(node, index, inputs, outputs)
            if buffer is None:
                buffer = self._memory.allocate(size, node.device, node, index)
            else:
                buffer.write_over(Owner(self._memory.last_event, node, index))
            outputs.append(buffer)
        return outputs

    # ---- its end

    def _end(self, node: Node) -> None:
        """Ends an operation: its outputs go to the operations that take them, on their devices, and
        its references to its inputs are taken away."""
        outputs = []
        for index in range(len(node.sizes)):
            buffer = self._held.get((node.number, index))
            if buffer is not None:
                self._hand_out(node, index, buffer)
                outputs.append(buffer)
        for source, index in _computed_inputs(node):
            self._memory.release(self._input(source, index, node.device))
        if node.type not in FED:
            for buffer in outputs:
                self._memory.release(buffer)  # the reference that `_begin` has added

    def _hand_out(self, node: Node, index: int, buffer: Buffer) -> None:
        """Counts the operations that take an output, and copies it to devices with other memory.

        Args:
          node: the operation.
          index: the index of its output.
          buffer: what holds the output.
        """
        output = node.number, index
        takers_elsewhere: typing.Counter[str] = collections.Counter()  # {device: number of takers}
        for device in self._takers.get(output, ()):
            if _memory_of(device) == _memory_of(node.device):
                buffer.references += 1
            else:
                takers_elsewhere[device] += 1
        for device, num_takers in takers_elsewhere.items():
            copied = self._memory.allocate(node.sizes[index], device, node, index, TRANSFER)
            if copied is not None:
                copied.references = num_takers
                self._copies[output, device] = copied


def _computed_inputs(node: Node) -> typing.List[typing.Tuple[Node, int]]:
    """List of the inputs of a node that a step computes, as `(node, index of its output)`. The back
    edges of loops are left out, since one turn of a loop is simulated."""
    inputs = []
    for source, index in node.inputs:
        is_back_edge = node.type in _MERGES and source.type.endswith('NextIteration')
        if not source.folded and not is_back_edge:
            inputs.append((source, index))
    return inputs


def _passed_on(node: Node, inputs: typing.List[typing.Optional[Buffer]]
               ) -> typing.List[typing.Optional[Buffer]]:
    """List of the buffers of a node's outputs, which are the memory of its inputs.

    Args:
      node: the node, of a type that `passes_on` says.
      inputs: the buffer of each input, or None.
    """
    if node.type == 'IdentityN':  # output i is input i
        sources = inputs
    else:
        with_memory = [buffer for buffer in inputs if buffer is not None]
        first = with_memory[0] if with_memory else None
        sources = [first] * len(node.sizes)
    return [buffer if size else None for buffer, size in zip(sources, node.sizes)]


def _buffer_to_write_over(node: Node, index: int, inputs: typing.List[typing.Optional[Buffer]],
                          outputs: typing.List[typing.Optional[Buffer]]
                          ) -> typing.Optional[Buffer]:
    """Finds the input into whose memory a kernel writes an output, since no other operation needs
    the input any more.

    Args:
      node: the operation.
      index: the index of the output.
      inputs: the `Buffer` of each input, or None.
      outputs: the buffers of the outputs before.

    Returns:
      The `Buffer` of the input; None if the output needs memory of its own.
    """
    reusable = REUSES.get(node.type, {}).get(index, ())  # indices of inputs
    for input_index in reusable[:len(inputs)]:
        buffer = inputs[input_index]
        if buffer is None or buffer in outputs:
            continue
        is_needed_by_no_other = buffer.references == 1 and buffer.what != VARIABLE
        if is_needed_by_no_other and buffer.size == node.sizes[index]:
            return buffer
    return None


def _variable_bytes(node: Node) -> int:
    """Bytes of the variable of an operation; 0 where its shape is not known."""
    elements = tf.TensorShape(node.op.get_attr('shape')).num_elements()
    return (elements or 0) * tf.as_dtype(node.op.get_attr('dtype')).size


def _variable_of(node: Node) -> int:
    """The number of the variable's node whose handle a node takes or hands on."""
    while node.inputs and node.type not in _VARIABLES:
        node = node.inputs[0][0]
    return node.number


def _memory_of(device: str) -> str:
    """The name of a device's memory: the device, or, since they share one, `'/device:CPU'` for all
    CPUs of a process."""
    return device.rsplit(':', 1)[0] if 'CPU' in device else device
