"""The order of a finished graph's operations: which wait for which, through loops and branches.
`waits` adds new waits.

Loops and branches of control flow v1 are found from the graph itself, since a copy's operations
have none of TensorFlow's Python objects for them.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.graph_walk import by_name, in_order_of_names, inputs_of, reached
from towers.graph.op_types import CONTROL_FLOW

_LOOP = 'loop'
_BRANCH = 'branch'
# They give a value of one turn of a loop to the next. Each edge from them closes a circle in the
# graph, over which nothing waits within a turn.
BACK = ('NextIteration', 'RefNextIteration')


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
        def followers_up_to_end(inner: tf.Operation) -> typing.Sequence[tf.Operation]:
            if self.always_runs(inner):
                return ()
            return self._followers.get(inner.name, ())

        found = in_order_of_names(reached([op], followers_up_to_end))
        return [end for end in found if self.always_runs(end)]

    def _note(self, op: tf.Operation) -> None:
        """Notes which loops and branches are around an operation, and around its results.

        The loops and branches around an operation are those around the results that it takes, or
        waits for; if these are at different depths, those around the deepest. The operations that
        give the results have to be noted before.
        """
        around: typing.Tuple[str, ...] = ()
        # Of several at the same depth the first counts: in the order of names, which is the same in
        # every process, and that of a set is not.
        for name in sorted(awaited_names(op)):
            around_input = self._around_results.get(name, ())
            if len(around_input) > len(around):
                around = around_input
        self._around[op.name] = around
        self._around_results[op.name] = _around_results(op, around)


def _around_results(op: tf.Operation, around: typing.Tuple[str, ...]) -> typing.Tuple[str, ...]:
    """The loops and branches around what takes the results of an operation.

    An `Enter` leads into a loop, and an `Exit` out of it. A `Switch` leads into a branch, and a
    `Merge` out of it. Loops have these two as well, and stay around them: a `Merge` begins each
    turn, and a `Switch` by the loop's condition leads to the body or to the `Exit`.

    Args:
      op: the operation.
      around: the loops and branches around the operation itself, the outermost first.
    """
    kind = op.type
    if kind.startswith('Ref'):
        kind = kind[len('Ref'):]
    if kind == 'Enter':
        return around + (_LOOP,)
    if kind == 'Exit':
        return around[:-1]
    if kind == 'Switch':
        is_of_loop = op.inputs[1].op.type == 'LoopCond'
        return around if is_of_loop else around + (_BRANCH,)
    if kind == 'Merge':
        is_of_branch = around[-1:] == (_BRANCH,)
        return around[:-1] if is_of_branch else around
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
        innermost = branches[0]
        with tf.control_dependencies([op]):
            has_run = tf.identity(innermost.pivot)
        not_taken = [_has_value_beside(branch) for branch in branches]
        # In each step one of these tensors has a value, which the `Merge` hands on: `has_run` if
        # all branches around `op` are taken, else the one of the branch that is not.
        return tf.raw_ops.Merge(inputs=[has_run] + not_taken)[0].op


def _has_value_beside(branch: compat.BranchAround) -> tf.Tensor:
    """Makes a tensor that has a value in the steps in which a branch (v1) is not taken, although
    what is around it is."""
    # The value of `pred` goes to one output of the `Switch`: to 0 if it is False, to 1 if True.
    outputs = tf.raw_ops.Switch(data=branch.condition, pred=branch.condition)
    other_value = 1 - branch.runs_if
    return tf.identity(outputs[other_value])


def awaited_instead(control_inputs: typing.Sequence[tf.Operation],
                   left_out: typing.Container[str]) -> typing.List[tf.Operation]:
    """Finds what to wait for in the place of operations that are left out of a copy of the graph:
    what these wait for themselves.

    Say that b waits for a write, and the write for a. Without the write, b has to wait for a. If
    the write is in a branch (v1), b also waits for the values that the write takes: they are there
    only if that branch is taken, and else b would run whichever branch is taken.

    Args:
      control_inputs: what an operation waits for now.
      left_out: names of the operations that are left out.

    Returns:
      List of operations, none of them left out.
    """
    found = []
    candidates = list(reversed(control_inputs))  # the last of the list comes first
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
            # Without handles of variables: they are there before the step, in whichever branch.
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
    # What is left in `stuck` waits for a circle, or is in one. So a walk from one of these, each
    # time to one that the last one waits for, comes to an operation for the second time.
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
