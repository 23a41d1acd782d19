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
# The types of operations that give a value of one iteration of a loop to the next. Each edge from
# them closes a circle in the graph, over which nothing waits within an iteration.
BACK = ('NextIteration', 'RefNextIteration')


class Frames:
    """The frames, that is the loops and branches (v1), around each of some operations.

    They are found from the operations that enter and leave them. An operation in a loop which is in
    a branch has the frames `('branch', 'loop')`, the outermost first. The `Exit` of the loop gives
    its result to operations with the frames `('branch',)`.
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
        types = {op.type for op in operations}
        if types.isdisjoint(CONTROL_FLOW):
            return  # there are no frames, and the dicts stay empty
        for op in operations:
            for source in inputs_of(op):
                self._followers.setdefault(source.name, []).append(op)
        for op in topological_order(operations, awaited_names):
            self._note(op)

    def is_outside_of_loops(self, op: tf.Operation) -> bool:
        """Whether an operation is in no loop, though perhaps in a branch: then it may be made to
        wait for an operation outside. The `Enter`s of a loop are outside of it."""
        return _LOOP not in self._around.get(op.name, ())

    def always_runs(self, op: tf.Operation) -> bool:
        """Whether an operation runs exactly once a step, so that any operation may wait for it: its
        results are in no loop or branch."""
        if op.type in ('Switch', 'RefSwitch'):
            return False  # in each step, one of its two results is missing
        return not self._around_results.get(op.name)

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
        return list(filter(self.always_runs, found))

    def _note(self, op: tf.Operation) -> None:
        """Notes which loops and branches are around an operation, and around its results.

        An operation is in the same loops and branches as the results that it takes, or waits for.
        If these results are in loops and branches of different depths, it is in the deepest: an
        operation in a loop may take constants from outside. The operations that give the results
        have been noted before.
        """
        # Sorted, since the order of a set differs from process to process: `max` takes the first of
        # the deepest.
        around_inputs = [self._around_results.get(name, ()) for name in sorted(awaited_names(op))]
        around = max(around_inputs, key=len, default=())
        self._around[op.name] = around
        self._around_results[op.name] = _around_results(op, around)


def fetches_for(writers: typing.Iterable[tf.Operation],
                operations: typing.Sequence[tf.Operation]) -> typing.List[tf.Operation]:
    """The operations to fetch so that a step runs the `writers`, in the order of their names.

    A step cannot fetch an operation in a loop or a branch, but it can fetch an operation outside
    that comes after it. If none comes after it, it is fetched itself: then the program's own update
    op is in the loop or branch.

    Args:
      writers: some of the operations.
      operations: operations, with the `Enter`s and `Switch`es of their loops and branches.
    """
    frames = Frames(operations)
    fetches: typing.Dict[str, tf.Operation] = {}
    for op in writers:
        fetches.update(by_name(frames.ends(op) or [op]))
    return in_order_of_names(fetches)


def _around_results(op: tf.Operation, around: typing.Tuple[str, ...]) -> typing.Tuple[str, ...]:
    """The loops and branches around what takes the results of an operation.

    An `Enter` leads into a loop, and an `Exit` out of it. A `Switch` leads into a branch, and a
    `Merge` out of it. But a loop also has `Merge`s and `Switch`es, whose results stay in the loop:
    a `Merge` begins each iteration, and a `Switch` by the loop's condition (`LoopCond`) leads to
    the body or to the `Exit`.

    Args:
      op: the operation.
      around: the loops and branches around the operation itself, the outermost first.
    """
    kind = op.type
    if kind.startswith('Ref'):
        kind = kind[len('Ref'):]
    outside_of_innermost = around[:-1]
    if kind == 'Enter':
        return around + (_LOOP,)
    if kind == 'Exit':
        return outside_of_innermost
    if kind == 'Switch' and op.inputs[1].op.type != 'LoopCond':
        return around + (_BRANCH,)
    if kind == 'Merge' and around[-1:] == (_BRANCH,):
        return outside_of_innermost
    return around


def end_of_branches(op: tf.Operation) -> tf.Operation:
    """Makes an operation that always runs: after `op` if its branch (v1) is taken, at once if not.

    It is a `Merge`, which runs as soon as one of its inputs has a value. In each step exactly one
    input has a value: `has_run` if all branches around `op` are taken; else the input that is made
    for the outermost branch that is not taken.

    Returns:
      The `Merge`; `op` itself if it is in no branch.
    """
    branches = compat.branches_around(op)
    if not branches:
        return op
    with tf.control_dependencies(None), tf.device('/cpu:0'), tf.name_scope('has_run/'):
        innermost = branches[0]
        with tf.control_dependencies([op]):
            has_run = tf.identity(innermost.pivot)  # which has a value if the branch is taken
        inputs = [has_run]
        for branch in branches:
            inputs.append(_has_value_if_not_taken(branch))
        merge = tf.raw_ops.Merge(inputs=inputs)
        return merge.output.op


def _has_value_if_not_taken(branch: compat.BranchAround) -> tf.Tensor:
    """Makes a tensor that has a value in the steps in which a branch (v1) is not taken. If the
    branch is within another branch that is not taken, its condition has no value, and neither has
    this tensor."""
    # The value of `pred` goes to one output of the `Switch`: to 0 if it is False, to 1 if True.
    outputs = tf.raw_ops.Switch(data=branch.condition, pred=branch.condition)
    other_value = 1 - branch.runs_if
    return tf.identity(outputs[other_value])


def awaited_without(control_inputs: typing.Sequence[tf.Operation],
                   left_out: typing.Container[str],
                   after_kept: typing.Container[str] = ()) -> typing.List[tf.Operation]:
    """Finds what an operation is to wait for, if some of the operations that it waits for are left
    out of a copy of the graph: in their place, what they wait for themselves.

    Say that b waits for a write, and the write for a. Without the write, b has to wait for a.

    Say that `tf.control_dependencies([a])` is around `write = tf.assign_add(v, 1.)`. Then
    TensorFlow makes the constant wait for a, and not the write, which takes the constant. If a
    writes another variable, and is kept, b has to wait for the constant.

    Say that b and the write are in a branch (v1), and that nothing but the wait for the write tells
    TensorFlow that b is in the branch. Then b also has to wait for the values that the write takes,
    which are there only if the branch is taken. Otherwise b would run in every step.

    Args:
      control_inputs: what an operation waits for now.
      left_out: names of the operations that are left out.
      after_kept: names of the writes of variables that are kept, and of all that waits for these.

    Returns:
      List of operations, none of them left out.
    """
    found = []
    candidates = list(reversed(control_inputs))  # `pop` takes the last, the first control input
    seen = set()
    while candidates:
        op = candidates.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        if op.name not in left_out:
            found.append(op)
            continue
        candidates += op.control_inputs
        may_not_run = compat.in_control_flow(op)
        for tensor in op.inputs:
            is_handle = tensor.dtype == tf.resource  # it is there whichever branch is taken
            if not is_handle and (may_not_run or tensor.op.name in after_kept):
                candidates.append(tensor.op)
    return found


def awaited_names(op: tf.Operation) -> typing.Set[str]:
    """Set of the names of the operations that an operation waits for, within an iteration of a
    loop: the edges from one iteration to the next would make each loop a circle."""
    return {other.name for other in inputs_of(op) if other.type not in BACK}


def find_cycle(operations: typing.Sequence[tf.Operation],
               awaited: typing.Callable = awaited_names) -> typing.List[tf.Operation]:
    """Finds operations that wait for each other in a circle.

    Args:
      operations: the operations, in any order.
      awaited: function from an operation to the names of the operations that it waits for.

    Returns:
      List of operations: each waits for the operation before it in the list, and the first waits
      for the last. [] if there is no such circle.
    """
    stuck = by_name(operations)
    for op in topological_order(operations, awaited):
        del stuck[op.name]
    if not stuck:
        return []
    # Each operation left in `stuck` waits for a circle, or is in one. A walk goes from an operation
    # to one that it waits for, and so on, until it comes to some operation a second time. Any
    # choice would do; `min` makes the same choice in every process.
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
    """Yields operations, each after the operations that it waits for.

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

