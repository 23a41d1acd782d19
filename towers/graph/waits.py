"""New waits in a finished graph: control edges that never close a circle. Finds the operations that
they start from (`operations_to_await`) and lead to (`operations_to_hold`).

`Waits` notes them first and makes them at the end. Its tests are `tests/roles/test_write_order.py`
and `tests/roles/test_update_order.py`.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.op_types import VARIABLE_OPS
from towers.graph.order import Frames
from towers.graph.variable_access import Writes, is_variable, variable_taken


class Wait(typing.NamedTuple):
    """A control edge that makes an operation come after another one, and why.

    Attributes:
      operation: name of the operation that waits.
      awaited: name of the operation that it waits for.
      reason: why, in words.
    """
    operation: str
    awaited: str
    reason: str


class _HeldOperation:
    """An operation that is held back, and what it is to wait for."""

    def __init__(self, op: tf.Operation):
        """`op` is the operation, which is to wait for nothing so far."""
        self.op = op
        self.awaited: typing.Dict[str, tf.Operation] = collections.OrderedDict()  # by name
        self.reasons: typing.Dict[str, str] = {}  # {name of an awaited operation: why it waits}


class Waits:
    """New waits of a finished graph's operations for others.

    `add` notes them, and `put_into_graph` makes all of them at the end. No wait closes a circle: an
    operation is not made to wait for an operation that waits for it already.
    """

    def __init__(self, held: typing.Iterable[tf.Operation]):
        """`held` are the operations that may get a new wait."""
        self._precedence = Precedence(list(held))
        self._held: typing.Dict[str, _HeldOperation] = collections.OrderedDict()  # by name

    def add(self, held: tf.Operation, awaited: tf.Operation, reason: str) -> bool:
        """Notes that an operation is to wait for another one, unless that closes a circle.

        Args:
          held: the operation that is to wait, one of those given at the start.
          awaited: what it is to wait for.
          reason: why, in words.

        Returns:
          Whether it is noted; False for a wait that would close a circle.
        """
        if self._precedence.waits_for(awaited, held):
            return False
        self._precedence.add(held, awaited)
        noted = self._held.setdefault(held.name, _HeldOperation(held))
        noted.awaited[awaited.name] = awaited
        noted.reasons.setdefault(awaited.name, reason)  # of several reasons the first one
        return True

    def follows_any(self, op: tf.Operation) -> bool:
        """Whether an operation may get a new wait, or waits for an operation that may get one."""
        return self._precedence.waits_for_any(op)

    def put_into_graph(self, finder: Writes) -> typing.List[Wait]:
        """Makes the operations of the graph wait, by control edges; returns what waits for what.

        `finder` finds the writes of the graph.
        """
        # {name of an awaited operation: the operations that control edges start from, to wait for
        # it}; some of these are made here, once for all operations that wait
        edge_sources: typing.Dict[str, typing.List[tf.Operation]] = {}
        waits = []
        for held in self._held.values():
            control_inputs: typing.List[tf.Operation] = []
            for name, awaited in held.awaited.items():
                if name not in edge_sources:
                    edge_sources[name] = operations_to_await(awaited, finder)
                control_inputs += edge_sources[name]
                waits.append(Wait(held.op.name, name, held.reasons[name]))
            control_inputs = _with_one_transfer_a_device(control_inputs, held.op.device)
            compat.add_control_inputs(held.op, control_inputs)
        return waits


def _with_one_transfer_a_device(awaited: typing.Sequence[tf.Operation],
                                device: str) -> typing.List[tf.Operation]:
    """Returns the operations that an operation waits for in the place of `awaited`.

    Each wait for an operation on another device is a transfer. So where `awaited` has several
    operations on one other device, a new operation on that device waits for these, and stands for
    them in the result.

    Args:
      awaited: the operations to wait for.
      device: the device of the operation that waits.
    """
    by_device: typing.Dict[str, typing.Dict[str, tf.Operation]] = collections.OrderedDict()
    for op in awaited:
        by_device.setdefault(op.device, collections.OrderedDict())[op.name] = op
    found = []
    for other_device, operations in by_device.items():
        is_transfer = other_device not in ('', device)  # '' leaves the device to TensorFlow
        if is_transfer and len(operations) > 1:
            found.append(_after_all(list(operations.values()), other_device))
        else:
            found += operations.values()
    return found


def _after_all(operations: typing.Sequence[tf.Operation], device: str) -> tf.Operation:
    """Makes an operation, on the device of some operations, that waits for all of these."""
    with tf.control_dependencies(None), tf.device(None), tf.device(device), \
            tf.name_scope(operations[0].name + '_and_others/'):
        return tf.group(*operations, name='have_run')


def operations_to_hold(op: tf.Operation, variables: typing.Container[str],
                       frames: Frames) -> typing.List[tf.Operation]:
    """Finds the operations that have to wait so that an operation writes its variables later.

    Args:
      op: the operation that writes.
      variables: names of the variables whose write has to be later.
      frames: the loops around `op`.

    Returns:
      `[op]`; or, since an operation in a loop cannot wait for one outside, the `Enter`s that lead
      the variables into the outermost loop around `op`. For a variable that the loop takes without
      an `Enter`, nothing: the operation of the variable also runs outside of steps, and cannot
      wait.
    """
    if frames.is_outside_of_loops(op):
        return [op]
    held = []
    for tensor in op.inputs:
        variable = variable_taken(tensor)
        if variable is None or variable.name not in variables:
            continue
        leads_in = _last_outside_of_loops(tensor, frames)
        is_variable_itself = leads_in.type in VARIABLE_OPS
        if not is_variable_itself:
            held.append(leads_in)
    return held


def _last_outside_of_loops(tensor: tf.Tensor, frames: Frames) -> tf.Operation:
    """The last operation on the way of a variable to `tensor` that is outside of all loops: the
    `Enter` of the outermost loop around `tensor`.

    Each operation on the way hands on its first input.
    """
    while not frames.is_outside_of_loops(tensor.op):
        tensor = tensor.op.inputs[0]
    return tensor.op


def operations_to_await(op: tf.Operation, finder: Writes) -> typing.List[tf.Operation]:
    """Finds, or makes, the operations to wait for so that `op` has certainly run.

    These are `op`, and if `op` calls functions (control flow v2) also an identity of each of its
    values. For TensorFlow puts the operations of the functions into the graph in the place of the
    call, and a control edge from an `If` then waits only for the condition (measured on 1.15.5 and
    2.21).

    Args:
      op: the operation.
      finder: finds the functions that it calls.
    """
    if not finder.calls_functions(op):
        return [op]
    values = [tensor for tensor in op.outputs if not is_variable(tensor)]
    # On the device of `op`, whatever `tf.device` scopes are open here.
    with tf.control_dependencies(None), tf.device(None), tf.device(op.device or None), \
            tf.name_scope(op.name + '_has_run/'):
        return [op] + [tf.identity(value).op for value in values]


class Precedence:
    """Tells which of the tracked operations, a few operations of a graph, any operation of the
    graph waits for, directly or not. Waits may be added that are no edges of the graph.

    Each tracked operation is a bit, so that a set of them is one number. If a (0b01) and b (0b10)
    are tracked, an operation that waits for both has the number 0b11. A tracked operation counts as
    waiting for itself.

    Attributes:
      tracked: the tracked operations.
    """

    def __init__(self, tracked: typing.Sequence[tf.Operation]):
        """Looks at all that waits for any of the operations in `tracked`."""
        self.tracked = tracked
        self._bit = {op.name: 1 << index for index, op in enumerate(tracked)}
        # {name of an operation: bits of the tracked operations that it waits for}, without
        # operations that wait for no tracked operation
        self._before = dict(self._bit)
        # {name of an operation: operations that are to wait for it by an added wait}
        self._added: typing.Dict[str, typing.List[tf.Operation]] = {}
        self._spread(tracked)

    def waits_for(self, op: tf.Operation, tracked: tf.Operation) -> bool:
        """Whether an operation is one of the tracked operations, or waits for it."""
        bits_before = self._before.get(op.name, 0)
        return bool(bits_before & self._bit[tracked.name])

    def waits_for_any(self, op: tf.Operation) -> bool:
        """Whether an operation is tracked, or waits for any tracked operation."""
        return op.name in self._before

    def add(self, op: tf.Operation, before: tf.Operation) -> None:
        """Notes that `op` is to wait for the operation `before`; the graph is not changed."""
        self._added.setdefault(before.name, []).append(op)
        self._spread([before])

    def _spread(self, operations: typing.Iterable[tf.Operation]) -> None:
        """Hands the bits of some operations on to all that waits for these, directly or not."""
        queue = collections.deque(operations)
        while queue:
            op = queue.popleft()
            bits = self._before.get(op.name, 0)
            for follower in compat.waiting_for(op) + self._added.get(op.name, []):
                known_bits = self._before.get(follower.name, 0)
                new_bits = bits & ~known_bits
                if new_bits:
                    self._before[follower.name] = known_bits | new_bits
                    queue.append(follower)
