"""Which operations are within a loop or a branch of control flow v1, told from the graph alone.

TensorFlow's Python objects for control flow are not in a GraphDef, so a copy's operations have
none.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.op_types import CONTROL_FLOW

_LOOP, _BRANCH = 'loop', 'branch'
BACK = ('NextIteration', 'RefNextIteration')  # from one turn of a loop to the next


class Frames:
    """The loops and branches around each of some operations."""

    def __init__(self, operations):
        """
        Args:
          operations: list of operations. It holds the `Enter`s and `Switch`es of each loop and
            branch that an operation in it is in.
        """
        self._around, self._leaves, self._takers = {}, {}, {}
        if not any(op.type in CONTROL_FLOW for op in operations):
            return
        for op in operations:
            for other in [tensor.op for tensor in op.inputs] + list(op.control_inputs):
                self._takers.setdefault(other.name, []).append(op)
        for op in in_order(operations, before):
            self._note(op)

    def is_outside(self, op):
        """Whether an operation may wait for an operation that is in no loop or branch.

        An operation within a loop may not, since it runs in each turn. An operation that leads into
        a loop may, and so may one within a branch.
        """
        return _LOOP not in self._around.get(op.name, ())

    def always_runs(self, op):
        """Whether an operation is in no loop or branch: it runs once; others may wait for it."""
        return not self._leaves.get(op.name) and op.type not in ('Switch', 'RefSwitch')

    def ends(self, op):
        """The operations to wait for instead of `op`, which may be within a loop or a branch.

        Where `always_runs(op)`, it is `op` itself. Else these are the operations by which its
        results leave all loops and branches: they run whichever branch is taken, and when a loop
        has ended.

        Returns:
          List of operations; empty if nothing outside depends on `op`.
        """
        stack, seen, found = [op], {op.name}, []
        while stack:
            each = stack.pop()
            if self.always_runs(each):
                found.append(each)
                continue
            for taker in self._takers.get(each.name, ()):
                if taker.name not in seen:
                    seen.add(taker.name)
                    stack.append(taker)
        return sorted(found, key=lambda each: each.name)

    def _note(self, op):
        inputs = [self._leaves[name] for name in before(op) if name in self._leaves]
        around = max(inputs, key=len) if inputs else ()
        self._around[op.name] = leaves = around
        if op.type in ('Enter', 'RefEnter'):
            leaves = around + (_LOOP,)
        elif op.type in ('Exit', 'RefExit'):
            leaves = around[:-1]
        elif op.type in ('Switch', 'RefSwitch'):
            if op.inputs[1].op.type != 'LoopCond':
                leaves = around + (_BRANCH,)
        elif op.type in ('Merge', 'RefMerge'):
            if around and around[-1] == _BRANCH:
                leaves = around[:-1]
        self._leaves[op.name] = leaves


def left_branches(op):
    """An operation that runs after `op`, or where a branch around it is not taken; `op` outside.

    Args:
      op: an operation of the program, in any number of branches (v1), and in no loop.
    """
    branches = compat.branches_around(op)
    if not branches:
        return op
    with tf.control_dependencies(None), tf.device('/cpu:0'), tf.name_scope('has_run/'):
        skipped = [tf.raw_ops.Switch(data=pred, pred=pred)[1 - taken]
                   for pred, taken, _ in branches]
        with tf.control_dependencies([op]):
            done = tf.identity(branches[0][2])
        return tf.raw_ops.Merge(inputs=[done] + [tf.identity(each) for each in skipped])[0].op


def waited_instead(control_inputs, left_out):
    """What to wait for instead of operations that are left out: the operations that these wait for.

    In a branch of `tf.cond` (v1) the values to be written are waited for, too: an operation that
    waits for nothing within its branch would run whichever branch is taken.
    """
    found, stack, seen = [], list(reversed(control_inputs)), set()
    while stack:
        op = stack.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        if op.name not in left_out:
            found.append(op)
            continue
        stack.extend(op.control_inputs)
        if compat.in_control_flow(op):
            stack.extend(tensor.op for tensor in op.inputs if tensor.dtype != tf.resource)
    return found


def in_order(operations, awaited):
    """Yields operations, each after those that it waits for; none that wait in a circle.

    Args:
      operations: list of operations.
      awaited: function from an operation to the names of those that it waits for, among others.
    """
    by_name, left, takers = {op.name: op for op in operations}, {}, {}
    for op in operations:
        names = awaited(op) & by_name.keys()
        left[op.name] = len(names)
        for name in names:
            takers.setdefault(name, []).append(op.name)
    ready = [name for name, count in left.items() if not count]
    while ready:
        name = ready.pop()
        yield by_name[name]
        for taker in takers.get(name, ()):
            left[taker] -= 1
            if not left[taker]:
                ready.append(taker)


def before(op):
    """Names of the operations that an operation waits for, without the back edges of a loop."""
    return {other.name for other in [tensor.op for tensor in op.inputs] + list(op.control_inputs)
            if other.type not in BACK}
