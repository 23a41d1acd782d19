"""The writes whose new value is used.

The loss may wait for a write of the forward pass without using the new value, as of the moving
averages of batch norms. Other towers can leave such a write out. If something is computed from the
new value, the towers have to share it.

Words of other modules used here: `Writes.takers` are the operations that take a variable itself;
`Writes.readers` are those that compute with it, of a reference variable also those that take its
memory from an `Identity`. `Precedence` tells what waits for what.

Its test is `tests/roles/test_inline_updates.py`.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import by_name, names_of, operation_of, producers_of
from towers.graph.order import awaited_without
from towers.graph.variable_access import Writes
from towers.graph.waits import Precedence
from towers.roles.writes import Write, after_kept_writes


def used_writes(writes: typing.Sequence[Write], fetches: list,
                operations: typing.Sequence[tf.Operation],
                counts_results: bool = True) -> typing.Set[str]:
    """Set of the names of the writes whose new value the fetches are computed from.

    A control edge from a write does not use its value; a read of the variable that waits for the
    write does.

    Args:
      writes: the writes.
      fetches: what a step runs in every tower.
      operations: all operations of the call of the model function.
      counts_results: whether the result of a write also counts as its new value; else only reads of
        the variable after the write do.
    """
    values = _WrittenValues(writes, counts_results)
    used: typing.Set[str] = set()
    while True:
        # A used write is not left out. So more operations are in `after_kept` than before, and
        # `_found_used` visits them where it has passed them over: they may use another write.
        after_kept = after_kept_writes(operations, left_out=values.write_ops.keys() - used)
        found = _found_used(values, fetches, used, after_kept)
        if found == used:
            return used
        used = found


def _found_used(values: '_WrittenValues', fetches: list, known: typing.Set[str],
                after_kept: typing.Container[str]) -> typing.Set[str]:
    """The names of used writes that a walk from the fetches finds, and the known ones.

    A write that is waited for, and not used, will be left out. What waits for it then waits for
    what the write itself waits for, and for those operations in `after_kept` that compute the
    written value: through these, too, it has waited for a write that stays (`awaited_without`). So
    the walk goes on at these operations, and not at the write.

    Args:
      values: tells which writes an operation takes the new value of.
      fetches: what a step runs in every tower.
      known: names of writes that are known to be used.
      after_kept: names of the writes that are not left out, and of what waits for these.
    """
    to_visit = list(map(operation_of, fetches))
    used = known | values.results_among(to_visit)
    seen = set()
    while to_visit:
        op = to_visit.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        used_by_op = values.used_by(op)
        used |= used_by_op
        used_ops = [values.write_ops[name] for name in used_by_op]
        unused = values.write_ops.keys() - used
        awaited = awaited_without(op.control_inputs, unused, after_kept)
        to_visit += producers_of(op) + used_ops + awaited
    return used


class _WrittenValues:
    """Tells which writes an operation takes the new value of.

    Attributes:
      write_ops: {name of an operation that writes: the operation}.
    """

    def __init__(self, writes: typing.Sequence[Write], counts_results: bool = True):
        """
        Args:
          writes: all writes.
          counts_results: whether the result of a write counts as its new value.
        """
        self._counts_results = counts_results
        self.write_ops: typing.Dict[str, tf.Operation] = by_name(write.op for write in writes)
        self._writes_by_reader = _writes_by_reader(writes)
        self._order = Precedence(list(self.write_ops.values()))

    def results_among(self, operations: typing.Iterable[tf.Operation]) -> typing.Set[str]:
        """Set of the names of the writes among operations whose results are taken."""
        if not self._counts_results:
            return set()
        return names_of(operations) & self.write_ops.keys()

    def used_by(self, op: tf.Operation) -> typing.Set[str]:
        """Set of the names of the writes whose new value an operation takes: as the result of the
        write, or by reading the variable after the write."""
        used = self.results_among(producers_of(op))
        for name in self._writes_by_reader.get(op.name, ()):
            is_itself = name == op.name  # a write itself takes its variable
            if not is_itself and self._order.waits_for(op, self.write_ops[name]):
                used.add(name)
        return used


def _writes_by_reader(
        writes: typing.Iterable[Write]) -> typing.Dict[str, typing.Set[str]]:
    """{name of an operation that reads a variable: names of the writes of this variable}."""
    graph = tf.get_default_graph()
    finder = Writes(graph)
    found = collections.defaultdict(set)
    for write in writes:
        for name in write.variables:
            variable = graph.get_operation_by_name(name)
            # `takers` has what takes the variable itself, such as an `Identity`. `readers` also has
            # what takes the memory of a reference variable from the `Identity`, without operations
            # in a branch that does not run in a step of the write. Takers in such a branch count:
            # a write may be taken for used that is not, and be refused; never the contrary.
            for reader in finder.takers(variable) + finder.readers(variable, write=write.op):
                found[reader.name].add(write.op.name)
    return found
