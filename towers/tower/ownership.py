"""Ownership: what each variable that the forward pass writes is to the towers."""

import collections

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.variable_access import metric_variables
from towers.graph.variable_writes import Writes
from towers.tower.example_writes import written_by_every_tower
from towers.tower.inline_updates import inline_updates
from towers.tower.local_state import own_state
from towers.tower.outputs import fetches_of, metrics_by_kind


class Roles(collections.namedtuple('Roles', [
        'own_state', 'inline_updates', 'replicas', 'of_every_tower', 'written'])):
    """What each variable is to the towers.

    Attributes:
      own_state: `OwnState`: local variables that the forward pass writes, one for each tower.
      inline_updates: `InlineUpdates`: shared variables that the forward pass writes.
      replicas: `Replicas` of the trained variables; or None.
      of_every_tower: names of the variables that every tower writes, see `example_writes`.
      written: set of the names of all variables that a step of tower 0 writes before the update.
    """
    __slots__ = ()

    def in_tower(self, part, micro_batches):
        """{name of a variable: the variable of another tower}.

        Args:
          part: the number of the tower's micro-batch among those of all towers.
          micro_batches: how many each tower has.
        """
        found = {} if self.replicas is None else self.replicas.in_tower(part // micro_batches)
        found.update(self.own_state.in_tower(part))
        return found

    def describe(self, trained, update_ops):
        """The plan's line: who writes what; None where all that is written is trained.

        Args:
          trained: how many variables are trained.
          update_ops: as for `build_towers`.
        """
        own = {variable.op.name for variable in self.own_state.of_all_towers()}
        metric = self.written.intersection(metric_variables())
        others = self.written - own - metric - set(self.of_every_tower)
        rows = [('trained', 'all towers' if self.replicas is None else 'a replica per tower',
                 trained),
                ('averages and counters', {'first': 'tower 0 writes', 'none': 'not written',
                                           'all': 'every tower writes'}[update_ops], len(others)),
                ('rows and counts of examples', 'every tower writes, in turn',
                 len(self.of_every_tower)),
                ('state', 'one per tower', len(self.own_state.variables)),
                ('metrics', 'every tower adds', len(metric))]
        return '; '.join('%s: %s, %d' % row for row in rows if row[2]) if any(
            row[2] for row in rows[1:]) else None


def ownership(recorded, request, size, taken=(), make_replicas=None):
    """Finds what each variable is to the towers; makes their replicas and state: `Roles`.

    Args:
      recorded: `Recorded`.
      request: `Request`.
      size: examples in tower 0's shard: an int, or a tensor.
      taken: what a step runs besides what the model function returned.
      make_replicas: the function that makes `Replicas` of variables; None where there are none.

    Raises:
      SharedVariableError: a write that no tower can make for all.
    """
    graph, output = tf.get_default_graph(), recorded.output
    scalars, pairs = metrics_by_kind(output.metrics)
    fetches = fetches_of(output._replace(metrics=scalars)) + list(taken)
    step, counted = [{op.name for op in graph_walk.step_operations(each)} for each in (
        fetches + recorded.updates, [update for _, update in pairs])]
    state = own_state(recorded, step, counted, request.parts_a_call)
    own = set(map(id, state.variables))
    replicas = None if make_replicas is None else make_replicas(
        [each for each in recorded.variables if id(each) not in own], request.devices)
    ignored = set(metric_variables()).union(
        variable.op.name for variable in state.variables + state.of_other_towers)
    finder = Writes(graph)
    written = {name for op in recorded.operations for name in finder.of(op)
               if op.name in step | counted and op.name not in recorded.owned}
    of_cluster = 'servers' if request.served_rank is not None else (
        'copies' if request.has_copies else None)
    runs = step if request.objectives else {  # no step runs updates in an evaluation
        op.name for op in graph_walk.step_operations(fetches)}
    of_every_tower = written_by_every_tower(recorded, size, runs, ignored, of_cluster) if (
        request.update_ops == 'first' and (
            request.parts_a_call > 1 or of_cluster == 'servers')) else []
    updates = inline_updates(recorded.operations, fetches, ignored.union(of_every_tower), request,
                             replicas.of_variable if replicas is not None else ())
    return Roles(state, updates, replicas, of_every_tower, written)
