"""The order of a finished graph's operations: which wait for which, through loops and branches, and
new waits that never close a circle (`Waits`).

Loops and branches of control flow v1 are found from the graph itself, since a copy's operations
have none of TensorFlow's Python objects for them.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.graph_walk import by_name, in_order_of_names, inputs_of, reached
from towers.graph.op_types import CONTROL_FLOW, VARIABLE_OPS
from towers.graph.variable_access import Writes, is_variable, variable_taken

_LOOP = 'loop'
_BRANCH = 'branch'
# They give a value of one turn of a loop to the next. Each edge from them closes a circle in the
# graph, over which nothing waits within a turn.
BACK = ('NextIteration', 'RefNextIteration')


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

    `add` notes them, and `put_into_graph` makes all of them at the end. None closes a circle: an
    operation is not made to wait for one that waits for it already.
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
        noted.reasons.setdefault(awaited.name, reason)
        return True

    def follows_any(self, op: tf.Operation) -> bool:
        """Whether an operation waits for any of the operations that may get a new wait."""
        return self._precedence.waits(op)

    def put_into_graph(self, finder: Writes) -> typing.List[Wait]:
        """Makes the operations of the graph wait, by control edges; returns what waits for what.

        `finder` finds the writes of the graph.
        """
        # {name of an awaited operation: the operations from which control edges go}
        edge_sources: typing.Dict[str, typing.List[tf.Operation]] = {}
        waits = []
        for held in self._held.values():
            control_inputs = []
            for name, awaited in held.awaited.items():
                if name not in edge_sources:
                    edge_sources[name] = operations_to_await(awaited, finder)
                control_inputs += edge_sources[name]
                waits.append(Wait(held.op.name, name, held.reasons[name]))
            compat.add_control_inputs(held.op, _one_a_device(control_inputs, held.op.device))
        return waits


def _one_a_device(awaited: typing.Sequence[tf.Operation],
                  device: str) -> typing.List[tf.Operation]:
    """Operations to wait for in the place of others, one for each other device.

    A wait for an operation of another device is a transfer. So an operation on that device waits
    for all that is awaited there, and is waited for alone.

    Args:
      awaited: the operations to wait for.
      device: the device of what waits for them.
    """
    by_device: typing.Dict[str, typing.Dict[str, tf.Operation]] = collections.OrderedDict()
    for op in awaited:
        by_device.setdefault(op.device, collections.OrderedDict())[op.name] = op
    found = []
    for other_device, operations in by_device.items():
        is_transfer = other_device not in ('', device)  # '' is placed by TensorFlow
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
                       frames: 'Frames') -> typing.List[tf.Operation]:
    """Finds the operations that have to wait so that an operation writes its variables later.

    Args:
      op: the operation that writes.
      variables: names of the variables whose write has to be later.
      frames: the loops around `op`.

    Returns:
      `[op]`; or, since an operation in a loop cannot wait for one outside, the operations that
      lead the variables into the loop around `op`. [] if the variables themselves enter the loop,
      without an operation between: a variable cannot wait, as it is there before any step.
    """
    if frames.is_outside(op):
        return [op]
    held = []
    for tensor in op.inputs:
        variable = variable_taken(tensor)
        if variable is None or variable.name not in variables:
            continue
        handed_on = tensor
        while not frames.is_outside(handed_on.op):  # back to where the variable enters the loop
            handed_on = handed_on.op.inputs[0]
        if handed_on.op.type not in VARIABLE_OPS:
            held.append(handed_on.op)
    return held


def operations_to_await(op: tf.Operation, finder: Writes) -> typing.List[tf.Operation]:
    """Finds, or makes, the operations to wait for so that `op` has certainly run.

    That is `op`; if it calls functions (control flow v2), also an identity of each of its values.
    For TensorFlow inlines the functions, and a control edge from an `If` then waits only for the
    condition (measured on 1.15.5 and 2.21).

    Args:
      op: the operation.
      finder: finds the functions that it calls.
    """
    if not finder.calls_functions(op):
        return [op]
    values = [tensor for tensor in op.outputs if not is_variable(tensor)]
    with tf.control_dependencies(None), tf.device(None), tf.device(op.device or None), \
            tf.name_scope(op.name + '_has_run/'):
        return [op] + [tf.identity(value).op for value in values]


class Precedence:
    """Knows which operations of a graph come after which of a few operations, the sources, directly
    or not.

    Edges may be added. Each source is a bit, so that the sources which an operation waits for are
    one number: with the sources a and b, an operation that waits for both has the bits 0b11.
    """

    def __init__(self, sources: typing.Sequence[tf.Operation]):
        """Looks at all that waits for any of the `sources`."""
        self._bit = {op.name: 1 << index for index, op in enumerate(sources)}
        self._before = dict(self._bit)  # {name of an operation: bits of the sources before it}
        # {name of an operation: operations that are to wait for it by an added edge}
        self._added: typing.Dict[str, typing.List[tf.Operation]] = {}
        self._spread(sources)

    def waits_for(self, op: tf.Operation, source: tf.Operation) -> bool:
        """Whether an operation is the source, or waits for it."""
        return bool(self._before.get(op.name, 0) & self._bit[source.name])

    def waits(self, op: tf.Operation) -> bool:
        """Whether an operation waits for any of the sources."""
        return op.name in self._before

    def add(self, op: tf.Operation, before: tf.Operation) -> None:
        """Notes that `op` is to wait for the operation `before`."""
        self._added.setdefault(before.name, []).append(op)
        self._spread([before])

    def _spread(self, operations: typing.Iterable[tf.Operation]) -> None:
        """Gives the sources before `operations` to all operations that wait for these, directly or
        not, by edges of the graph or added ones."""
        queue = collections.deque(operations)
        while queue:
            op = queue.popleft()
            bits = self._before.get(op.name, 0)
            if not bits:
                continue
            for follower in compat.waiting_for(op) + self._added.get(op.name, []):
                known_bits = self._before.get(follower.name, 0)
                new_bits = bits & ~known_bits
                if new_bits:
                    self._before[follower.name] = known_bits | new_bits
                    queue.append(follower)


# ---- loops and branches of control flow v1 -------------------------------------------------------

class Frames:
    """The loops and branches (v1) around each of some operations.

    They are found from the operations that enter and leave them. An operation within a loop within
    a branch has `('branch', 'loop')` around it, and the `Exit` of the loop gives its result to
    operations with `('branch',)` around them.
    """

    def __init__(self, operations: typing.Sequence[tf.Operation]):
        """`operations` have to include the `Enter`s and `Switch`es of each loop and branch that
        they are in."""
        # {name of an operation: the loops and branches around it, the outermost first}
        self._around: typing.Dict[str, typing.Tuple[str, ...]] = {}
        # {name of an operation: the loops and branches around what takes its results}
        self._around_results: typing.Dict[str, typing.Tuple[str, ...]] = {}
        # {name of an operation: the operations that take its results, or wait for it}
        self._followers: typing.Dict[str, typing.List[tf.Operation]] = {}
        if not any(op.type in CONTROL_FLOW for op in operations):
            return  # nothing is around any operation
        for op in operations:
            for source in inputs_of(op):
                self._followers.setdefault(source.name, []).append(op)
        for op in topological_order(operations, awaited_names):
            self._note(op)

    def is_outside(self, op: tf.Operation) -> bool:
        """Whether an operation may wait for one outside of all loops and branches: it is in no
        loop. One that leads into a loop, or is within a branch, may wait, too."""
        return _LOOP not in self._around.get(op.name, ())

    def always_runs(self, op: tf.Operation) -> bool:
        """Whether an operation runs exactly once a step, so that any operation may wait for it: its
        results are in no loop or branch. A `Switch` does not count, since of its two results one is
        missing in each step."""
        is_switch = op.type in ('Switch', 'RefSwitch')
        return not is_switch and not self._around_results.get(op.name)

    def ends(self, op: tf.Operation) -> typing.List[tf.Operation]:
        """Finds the operations by which others may wait for `op`.

        Returns:
          `[op]`, if it always runs. Else the operations by which its results leave all loops and
          branches: each of them runs after `op`, whichever branch is taken. [] if nothing outside
          depends on `op`.
        """
        def followers_within(inner: tf.Operation) -> typing.Sequence[tf.Operation]:
            return () if self.always_runs(inner) else self._followers.get(inner.name, ())
        found = in_order_of_names(reached([op], followers_within))
        return [end for end in found if self.always_runs(end)]

    def _note(self, op: tf.Operation) -> None:
        """Notes which loops and branches are around an operation, and around its results.

        An operation is where the results of its inputs are; if these are at different depths, it
        is where the deepest is. The inputs have to be noted before.
        """
        around: typing.Tuple[str, ...] = ()
        for name in sorted(awaited_names(op)):
            around_input = self._around_results.get(name, ())
            if len(around_input) > len(around):
                around = around_input
        self._around[op.name] = around
        self._around_results[op.name] = _around_results(op, around)


def _around_results(op: tf.Operation, around: typing.Tuple[str, ...]) -> typing.Tuple[str, ...]:
    """The loops and branches around what takes the results of an operation.

    Args:
      op: the operation.
      around: the loops and branches around the operation itself, the outermost first.
    """
    kind = op.type
    if kind.startswith('Ref'):
        kind = kind[len('Ref'):]
    if kind == 'Enter':
        return around + (_LOOP,)
    if kind == 'Switch' and op.inputs[1].op.type != 'LoopCond':
        return around + (_BRANCH,)  # with a `LoopCond` it leads to the body or out of the loop
    if kind == 'Exit':
        return around[:-1]
    if kind == 'Merge' and around[-1:] == (_BRANCH,):
        return around[:-1]  # in a loop a `Merge` begins each turn
    return around


def end_of_branches(op: tf.Operation) -> tf.Operation:
    """Makes an operation that always runs: after `op` if its branch (v1) is taken, at once if not.

    Returns:
      That operation; `op` itself if it is in no branch.
    """
    branches = compat.branches_around(op)
    if not branches:
        return op
    with tf.control_dependencies(None), tf.device('/cpu:0'), tf.name_scope('has_run/'):
        # A `Merge` hands on the one input that has a value: `done` if `op` runs; else the tensor of
        # the branch, among those around `op`, that is not taken.
        not_taken = []
        for condition, value_to_run, _ in branches:
            outputs = tf.raw_ops.Switch(data=condition, pred=condition)
            other_value = 1 - value_to_run
            not_taken.append(tf.identity(outputs[other_value]))
        _, _, tensor_of_branch = branches[0]  # the innermost
        with tf.control_dependencies([op]):
            done = tf.identity(tensor_of_branch)
        return tf.raw_ops.Merge(inputs=[done] + not_taken)[0].op


def awaited_instead(control_inputs: typing.Sequence[tf.Operation],
                   left_out: typing.Container[str]) -> typing.List[tf.Operation]:
    """Finds what to wait for in the place of operations that are left out of a copy of the graph:
    what these wait for themselves.

    If b waits for a write, and the write for a, b is to wait for a. In a branch (v1) the values
    that the write takes are waited for, too: else b would run whichever branch is taken.

    Args:
      control_inputs: what an operation waits for now.
      left_out: names of the operations that are left out.

    Returns:
      List of operations, none of them left out.
    """
    found = []
    candidates = list(reversed(control_inputs))
    seen = set()
    while candidates:
        op = candidates.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        if op.name not in left_out:
            found.append(op)
            continue
        candidates.extend(op.control_inputs)
        if compat.in_control_flow(op):
            # A handle is there before the step, and tells nothing of the branch.
            candidates.extend(tensor.op for tensor in op.inputs if tensor.dtype != tf.resource)
    return found


def find_cycle(operations: typing.Sequence[tf.Operation],
               awaited: typing.Optional[typing.Callable] = None) -> typing.List[tf.Operation]:
    """Finds operations that wait for each other in a circle.

    Args:
      operations: the operations, in any order.
      awaited: function from an operation to the names of the operations that it waits for; None for
        `awaited_names`.

    Returns:
      List of operations, of which each waits for the one before it and the first one for the last;
      [] if there is no such circle.
    """
    awaited = awaited or awaited_names
    stuck = by_name(operations)
    for op in topological_order(operations, awaited):
        del stuck[op.name]
    if not stuck:
        return []
    # An operation that never runs waits for a circle, or is in one. So a walk from it, each time to
    # an operation that the last one waits for, comes to an operation for the second time.
    walk: typing.List[str] = []
    name = min(stuck)
    while name not in walk:
        walk.append(name)
        name = min(awaited(stuck[name]) & stuck.keys())
    cycle = walk[walk.index(name):]
    return [stuck[name] for name in reversed(cycle)]


def topological_order(operations: typing.Sequence[tf.Operation],
                      awaited: typing.Callable[[tf.Operation], typing.Set[str]]
                      ) -> typing.Iterator[tf.Operation]:
    """Yields operations, each after those that it waits for.

    Operations that wait for each other in a circle, or for such a circle, are not yielded.

    Args:
      operations: the operations, in any order.
      awaited: function from an operation to the names of the operations that it waits for; a name
        that is not among `operations` does not count.
    """
    ops_by_name = by_name(operations)
    num_awaited = {}  # {name of an operation: how many operations it still waits for}
    followers: typing.Dict[str, typing.List[str]] = collections.defaultdict(list)
    for op in operations:
        names = awaited(op) & ops_by_name.keys()
        num_awaited[op.name] = len(names)
        for name in names:
            followers[name].append(op.name)
    ready = [name for name, count in num_awaited.items() if count == 0]
    while ready:
        name = ready.pop()
        yield ops_by_name[name]
        for follower in followers.get(name, ()):
            num_awaited[follower] -= 1
            if num_awaited[follower] == 0:
                ready.append(follower)


def awaited_names(op: tf.Operation) -> typing.Set[str]:
    """Set of the names of the operations that an operation waits for within a turn of a loop: the
    edges from one turn to the next would make each loop a circle."""
    return {other.name for other in inputs_of(op) if other.type not in BACK}
