"""A step as TensorFlow's executor runs it: what is in memory after each operation.

Ready operations run first come first served. TensorFlow's executor has two or more threads. Each
thread prefers the operations that it has just made ready; on average this order is near first come
first served. (A single thread would put off all gradients of weights.) An output is freed when the
last operation that takes it has finished. An operation's scratch memory is there until the next
operation has begun, since the two gradients of a convolution run at the same time.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.memory.buffers import SCRATCH, TRANSFER, UPDATE, VARIABLE, Buffer, Memory, Owner
from towers.memory.kernels import REUSES, passes_on, scratch
from towers.memory.node import Node, Output
from towers.memory.step_graph import StepGraph

# The beginnings of the types of operations that write a resource variable in place. An
# `AssignVariableOp` does not: the variable takes over the memory of the assigned value.
_UPDATES = ('ResourceApply', 'AssignAddVariableOp', 'AssignSubVariableOp', 'ResourceScatter',
            'ResourceSparseApply')
_VARIABLES = ('VarHandleOp', 'VariableV2', 'Variable', 'TemporaryVariable')
_MERGES = ('Merge', 'RefMerge')
FED = ('Placeholder', 'PlaceholderV2')  # the caller holds a fed value for the whole step


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
        self._takers: typing.Dict[Output, typing.List[str]] = collections.defaultdict(list)
        # {output: its buffer on the device of its node}
        self._held: typing.Dict[Output, Buffer] = {}
        # {(output, another device): the buffer of its copy there}
        self._copies: typing.Dict[typing.Tuple[Output, str], Buffer] = {}
        # {number of a variable's node: the buffer that holds the variable now}
        self._variables: typing.Dict[int, Buffer] = {}
        for node in step.executed:
            self._connect(node)
            if node.type in _VARIABLES:
                self._variables[node.number] = self._memory.allocate_variable(
                    node, _variable_bytes(node), node)
        self._run(step.executed)

    def alive(self, event: int, device: typing.Optional[str] = None) -> typing.List[Buffer]:
        """List of the buffers that are in memory right after an event.

        Variables whose size is not known have a buffer of no bytes, which is left out.

        Args:
          event: the event.
          device: the device of the buffers; None for all devices.
        """
        alive = []
        for buffer in self.buffers:
            is_on_device = device in (None, buffer.device)
            if is_on_device and buffer.size and buffer.is_there(event):
                alive.append(buffer)
        return alive

    def _connect(self, node: Node) -> None:
        """Notes what a node waits for, and which outputs it takes."""
        awaited = {source.number for source in node.controls}
        for output in computed_inputs(node):
            # A node waits once for another node, however many outputs of that node it takes.
            awaited.add(output.node.number)
            self._takers[output].append(node.device)
        for number in awaited:
            self._followers[number].append(node)
        num_awaited = len(awaited)
        if node.type in _MERGES:
            # A `Merge` begins with the first of its inputs, since only one of two branches is run.
            # A `Merge` without inputs that a step computes waits for nothing.
            num_awaited = min(1, num_awaited)
        self._num_awaited[node.number] = num_awaited

    def _run(self, nodes: typing.List[Node]) -> None:
        """Runs the nodes, each when all that it waits for has ended."""
        ready = collections.deque(node for node in nodes if not self._num_awaited[node.number])
        scratch_buffer = None
        while ready:
            node = ready.popleft()
            scratch_buffer = self._begin(node, scratch_buffer)
            for follower in self._followers[node.number]:
                self._num_awaited[follower.number] -= 1
                # A `Merge` waits for one of its inputs. The others bring its number below 0, when
                # it is ready already, or has run.
                if self._num_awaited[follower.number] == 0:
                    ready.append(follower)
            self._end(node)
        self._memory.release(scratch_buffer)

    def _buffer_on(self, output: Output, device: str) -> typing.Optional[Buffer]:
        """The `Buffer` from which an operation on a device reads an output: the output's copy on
        that device, if there is a copy, else the output's own buffer. None if the output takes no
        memory, or is a constant, which the account counts separately."""
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
        for output, buffer in zip(node.outputs, outputs):
            if buffer is not None:
                buffer.references += 1  # until `_end` has counted the takers
                self._held[output] = buffer
        return scratch_buffer

    def _move_variables_that_are_read(self, node: Node) -> None:
        """Gives a variable that an operation updates new memory, if other operations still read its
        old memory, which TensorFlow then leaves to these readers."""
        for tensor, output in zip(node.op.inputs, node.inputs):
            if tensor.dtype != tf.resource:
                continue  # a gradient or the like: no handle of a variable
            variable = _variable_of(output.node)
            old = self._variables.get(variable.number)
            if old is None:
                continue  # a handle that comes from no variable of the step
            is_read = old.references > 1  # one reference is the variable's own
            if is_read:
                self._variables[variable.number] = self._memory.allocate_variable(
                    variable, old.size, node, what=UPDATE)
                self._memory.release(old)  # the variable's own reference

    def _outputs(self, node: Node) -> typing.List[typing.Optional[Buffer]]:
        """List of the `Buffer` of each output of an operation; None for an output that takes no
        memory. The buffer of an output may be a variable's, an input's, or a new buffer."""
        if node.type in _VARIABLES:
            # A reference is the variable's memory. A handle has 0 bytes, and so no buffer.
            return _without_empty([self._variables[node.number]], node)
        if node.type == 'ReadVariableOp':
            variable = _variable_of(node)
            return [self._variables.get(variable.number)]  # a read copies nothing
        inputs = [self._buffer_on(output, node.device) for output in node.inputs]
        if passes_on(node):
            return _passed_on(node, inputs)
        return self._written_outputs(node, inputs)

    def _written_outputs(self, node: Node, inputs: typing.List[typing.Optional[Buffer]]
                         ) -> typing.List[typing.Optional[Buffer]]:
        """List of the `Buffer` into which a kernel writes each output: the buffer of an input that
        the kernel may write over, else a new buffer; None for an output that takes no memory.

        Args:
          node: the operation.
          inputs: the buffer of each input, or None.
        """
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
        for output in node.outputs:
            if output in self._held:
                self._hand_out(output, self._held[output])
        for taken in computed_inputs(node):
            self._memory.release(self._buffer_on(taken, node.device))
        if node.type in FED:
            return  # the caller keeps a fed value: the reference of `_begin` stays
        for output in node.outputs:
            self._memory.release(self._held.get(output))  # the reference that `_begin` has added

    def _hand_out(self, output: Output, buffer: Buffer) -> None:
        """Counts the operations that take an output, and copies it to devices with other memory.

        Args:
          output: the output of an operation that ends.
          buffer: the memory that holds the output.
        """
        node = output.node
        takers_elsewhere: typing.Counter[str] = collections.Counter()  # {device: number of takers}
        for device in self._takers.get(output, ()):
            if _memory_of(device) == _memory_of(node.device):
                buffer.references += 1
            else:
                takers_elsewhere[device] += 1
        for device, num_takers in takers_elsewhere.items():
            copied = self._memory.allocate(output.size, device, node, output.value_index, TRANSFER)
            # None for an output of 0 bytes, such as the value of a variable of unknown size.
            if copied is not None:
                copied.references = num_takers
                self._copies[output, device] = copied


def computed_inputs(node: Node) -> typing.List[Output]:
    """List of the inputs of a node that a step computes, so without constants. The back edges of
    loops are left out, since one iteration of a loop is simulated."""
    inputs = []
    for output in node.inputs:
        is_back_edge = node.type in _MERGES and output.node.type.endswith('NextIteration')
        if not output.node.folded and not is_back_edge:
            inputs.append(output)
    return inputs


def _passed_on(node: Node, inputs: typing.List[typing.Optional[Buffer]]
               ) -> typing.List[typing.Optional[Buffer]]:
    """List of the `Buffer` of each output of a node that hands an input's memory on; None for an
    output that takes no memory.

    Args:
      node: the node, for which `passes_on` is true.
      inputs: the buffer of each input, or None.
    """
    if node.type == 'IdentityN':  # output i is input i
        return _without_empty(inputs, node)
    # All outputs are in the memory of one input: the first input that has a buffer. The axis of a
    # `Split`, for example, has none.
    first = next((buffer for buffer in inputs if buffer is not None), None)
    return _without_empty([first] * len(node.sizes), node)


def _without_empty(buffers: typing.Iterable[typing.Optional[Buffer]],
                   node: Node) -> typing.List[typing.Optional[Buffer]]:
    """The buffers of the outputs of a node, with None in the place of an output of 0 bytes, such as
    a handle."""
    return [buffer if size else None for buffer, size in zip(buffers, node.sizes)]


def _buffer_to_write_over(node: Node, index: int, inputs: typing.List[typing.Optional[Buffer]],
                          outputs: typing.List[typing.Optional[Buffer]]
                          ) -> typing.Optional[Buffer]:
    """Finds the input into whose memory a kernel writes an output, since no other operation needs
    the input any more.

    Args:
      node: the operation.
      index: the index of the output.
      inputs: the `Buffer` of each input, or None.
      outputs: the buffers of the outputs before this output.

    Returns:
      The `Buffer` of the input; None if the output needs memory of its own.
    """
    reusable_inputs = REUSES.get(node.type, {}).get(index, ())  # their indices
    for input_index, buffer in enumerate(inputs):
        if buffer is None or input_index not in reusable_inputs:
            continue
        if _may_be_written_over(buffer, node.sizes[index], outputs):
            return buffer
    return None


def _may_be_written_over(buffer: Buffer, size: int,
                         outputs: typing.List[typing.Optional[Buffer]]) -> bool:
    """Whether an operation may write an output into the memory of one of its inputs.

    Args:
      buffer: the memory of the input.
      size: bytes of the output.
      outputs: the memory of the operation's outputs before this output.
    """
    if buffer in outputs:
        return False  # another output is written into it
    # The one reference is the operation's own.
    is_needed_by_no_other = buffer.references == 1 and buffer.what != VARIABLE
    return is_needed_by_no_other and buffer.size == size


def _variable_bytes(node: Node) -> int:
    """Bytes of the variable of an operation; 0 where its shape is not known."""
    elements = tf.TensorShape(node.op.get_attr('shape')).num_elements()
    return (elements or 0) * tf.as_dtype(node.op.get_attr('dtype')).size


def _variable_of(node: Node) -> Node:
    """The node of the variable whose handle a node takes, or hands on, as its first input. For a
    handle that comes from no variable of the step, the node that the handle comes from."""
    while node.inputs and node.type not in _VARIABLES:
        node = node.inputs[0].node
    return node


def _memory_of(device: str) -> str:
    """The name of a device's memory: the name of the device; or `'/device:CPU'` for each CPU, since
    all CPUs of a process share one memory."""
    if 'CPU' in device:
        return device.rsplit(':', 1)[0]  # without the number
    return device
