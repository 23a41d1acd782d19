"""Values of reference variables that are read after the variable has been written.

On one machine an operation that takes the value of a reference variable gets the variable's memory:
if it waits for a write, it sees what was written. Between a server and a worker the value is sent
at the start of the step, whatever the operation that takes it waits for: moving averages after the
train op would be of the weights before it, and clipped weights would undo the update. Here such an
operation gets a read of its own, on the server, which waits for the writes as well.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ClusterError
from towers.graph.frames import Frames
from towers.graph.op_types import LEAD_IN, RESHAPES
from towers.graph.variable_access import REFERENCE_VARIABLES
from towers.graph.variable_writes import Writes

# They pass on the value of their first input as it is, or in another shape.
_PASS = LEAD_IN | RESHAPES


def read_after_writes(graph, variables, train_op=None):
    """Gives what waits for a write of a reference variable the value from after that write.

    Args:
      graph: a `tf.Graph` that no session has run yet.
      variables: the variables that are on servers.
      train_op: operation that counts as a write of all of them: on a worker that does not make the
        update itself, it waits for the one that does; or None.

    Returns:
      List of the new operations that read.

    Raises:
      ClusterError: an operation waits for a write in the same loop or branch (v1), where it cannot
        be given another value.
    """
    sources = [variable.op for variable in variables if variable.op.type in REFERENCE_VARIABLES]
    return _Reads(graph, sources, train_op).make() if sources else []


class _Reads:
    """The reads of one graph. A set of variables is an int, with a bit for each."""

    def __init__(self, graph, sources, train_op):
        self._graph = graph
        self._bits = {name: 1 << place for place, name in enumerate(sorted({
            op.name for op in sources}))}
        self._operations = graph.get_operations()
        self._written = self._writes(train_op)
        self._before = self._waits()
        self._made, self._frames = {}, None

    def make(self):
        for op in self._operations:
            known = self._before.get(op.name)
            if known is None or op.type in ('Merge', 'RefMerge'):
                continue  # the value of one branch does not wait for a write in the other
            for place, tensor in enumerate(op.inputs):
                if _takes_reference(op, place, tensor):
                    continue
                source, passed = self._source(tensor)
                if source is not None and known & self._bits[source.name]:
                    self._replace(op, place, source, passed)
        return list(self._made.values())

    def _writes(self, train_op):
        """Dict from names of operations to the variables that they write."""
        writes, found = Writes(self._graph), {}
        for op in self._operations:
            for name in writes.of(op):
                if name in self._bits:
                    found[op.name] = found.get(op.name, 0) | self._bits[name]
        if train_op is not None:
            found[train_op.name] = sum(self._bits.values())
        return found

    def _waits(self):
        """Dict from names of operations to the variables of which they wait for a write."""
        takers = {}
        for op in self._operations:
            for other in _inputs(op):
                takers.setdefault(other.name, []).append(op.name)
        before, stack = {}, list(self._written)
        while stack:
            name = stack.pop()
            variables = before.get(name, 0) | self._written.get(name, 0)
            for taker in takers.get(name, ()):
                known = before.get(taker, 0)
                if known | variables != known:
                    before[taker] = known | variables
                    stack.append(taker)
        return before

    def _waits_for(self, op, source):
        return self._before.get(op.name, 0) & self._bits[source.name]

    def _source(self, tensor):
        """`(variable's operation, operations that pass its value on)`; `(None, [])` if no value.

        What waits for a write itself passes on a value from after it: it is looked at on its own.
        """
        passed, op = [], tensor.op
        while op.type in _PASS:
            passed.append(op)
            op = op.inputs[0].op
        if op.name not in self._bits or any(self._waits_for(each, op) for each in passed):
            return None, []
        return op, passed

    def _replace(self, op, place, source, passed):
        """Lets an input of an operation be the variable's value from after the writes."""
        shaping = [each for each in passed if each.type != 'Identity']
        if not shaping:
            compat.replace_input(op, place, self._read(op, source, [op]))
            return
        first = shaping[-1]  # the nearest to the variable: all that comes from it gets the value
        takers = self._takers_of(first, source)
        if first.type.startswith('Ref') or not all(
                self._waits_for(each, source) for each in takers):
            raise self._error(op, source, '%r passes its value on to what does not wait for that, '
                              'too' % first.name)
        compat.replace_input(first, 0, self._read(op, source, takers))

    def _takers_of(self, passing, source):
        """The operations that an operation passes the value on to."""
        found, stack, seen = {}, [passing], set()
        while stack:
            each = stack.pop()
            for taker in [taker for output in each.outputs for taker in output.consumers()]:
                if taker.type in _PASS and not self._waits_for(taker, source):
                    if taker.name not in seen:
                        seen.add(taker.name)
                        stack.append(taker)
                else:
                    found[taker.name] = taker
        return list(found.values())

    def _read(self, op, source, takers):
        """The variable's value after the writes that some operations wait for, on its server."""
        after = {each.name: each for taker in takers for each in self._after(op, source, taker)}
        key = source.name, tuple(sorted(after))
        if key not in self._made:
            with self._graph.as_default(), tf.control_dependencies(None), tf.name_scope(
                    'served/after/'), self._graph.colocate_with(source, True):
                with tf.control_dependencies([after[name] for name in sorted(after)]):
                    self._made[key] = tf.identity(source.outputs[0], source.name + '/read').op
        return self._made[key].outputs[0]

    def _after(self, op, source, taker):
        """The nearest operations outside of all loops and branches by which `taker` waits."""
        if self._frames is None:
            self._frames = Frames(self._operations)
        found, stack, seen = [], [taker], set()
        while stack:
            for other in _inputs(stack.pop()):
                writes = self._written.get(other.name, 0) & self._bits[source.name]
                if other.name in seen or not writes and not self._waits_for(other, source):
                    continue
                seen.add(other.name)
                if self._frames.always_runs(other) and other.type != 'Const':
                    found.append(other)
                elif writes:
                    raise self._error(op, source, '%r writes it in the same loop or branch'
                                      % other.name)
                else:
                    stack.append(other)
        return found

    def _error(self, op, source, why):
        return ClusterError(
            '%r takes the value of the variable %r after a write that it waits for. %r is a '
            'reference variable on a parameter server, whose value is sent at the start of the '
            'step, and %s. Make it with tf.get_variable(…, use_resource=True), and read it there '
            'by read_value().' % (op.name, source.name, source.name, why))


def _inputs(op):
    return [tensor.op for tensor in op.inputs] + list(op.control_inputs)


def _takes_reference(op, place, tensor):
    """Whether an operation takes the variable itself as this input, and not its value."""
    if tensor.dtype == tensor.dtype.base_dtype:
        return False
    arguments = op.op_def.input_arg
    return any(each.is_ref for each in arguments) and (
        len(arguments) != len(op.inputs) or arguments[place].is_ref)
