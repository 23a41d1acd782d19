"""Combines the optimizer calls that a model function makes in each tower into one update each.

An Estimator's model function does not return gradients: it calls `optimizer.minimize`, or
`compute_gradients`, clips, and `apply_gradients`, perhaps for several optimizers, and returns a
train op. So the update is there when the model function returns, as on one device, with its slots
and names: of the first tower's gradients, each by way of a *stand-in*, an operation that hands it
on. The update is no part of the tower, and is not copied. When all towers are built, the gradients
of call number i of all towers are summed per variable, and its stand-ins hand on these sums.
"""

import collections
import contextlib
import functools
import re

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import GradientError
from towers.graph import graph_walk
from towers.graph.graph_walk import map_leaves
from towers.graph.variable_access import Writes
from towers.optimizers import OPTIMIZER_UPDATES, GradientsOfModel
from towers.placement.variable_device import only_device
from towers.reduce.combination import combine
from towers.tower.build_context import current_call
from towers.tower.gradient_pairs import tensors_of, times
from towers.tower.ownership import OF_GRADIENTS
from towers.tower.variables import new_slots

_CALLS = {}  # graph -> the `OptimizerCalls` of the towers that are being built in it

_GATHERED = re.compile(r'Accumulator(Take|Apply)Gradient$')  # outside of the graph's tensors

Call = collections.namedtuple('Call', 'optimizer pairs waits_for stand_ins update operations')
"""One call of `apply_gradients`, in the first tower.

Fields:
  optimizer: the optimizer that is wrapped.
  pairs: list of `(gradient, variable)`, weighted: their sum over the towers is the gradient.
  waits_for: an operation that waits for all that the update waits for besides its gradients.
  stand_ins: list of `(stand-in of the gradient, variable)`, without gradients of None.
  update: the operation that the optimizer returned.
  operations: names of the operations that the optimizer made.
"""


def calls_of(graph: tf.Graph):
    """The `OptimizerCalls` of the towers that are being built in a graph, or None."""
    return _CALLS.get(graph)


class OptimizerCalls(GradientsOfModel):
    """Stands in place of an optimizer in `build_towers`; `TowerOptimizer`s report their calls here.

    With n_k of the batch's n examples on tower k of N, loss L_k there, the gradient of call i is

        mean:  sum_k (n_k / n) dL_k
        sum:   sum_k dL_k
    """

    def __init__(self, graph: tf.Graph, is_sum: bool, trains: bool):
        """
        Args:
          graph: the `tf.Graph` of the towers.
          is_sum: whether the towers' losses are added up, or averaged.
          trains: False for evaluation and prediction, where calls do nothing.
        """
        self._graph, self._is_sum, self._trains = graph, is_sum, trains
        self._calls = []        # the first tower's `Call`s
        self._weight = None     # of the tower's loss; None: it counts as it is
        self._weighted = []     # the operations by which losses of this tower were weighted
        self._start = 0         # how many operations the graph had before the call,
        self._operations = []   # and those that the call made
        self._owners = {}       # variable's name -> number of the call that hands its gradient over
        self._together = ()     # numbers of the calls that the model's train op runs in one step
        self._placement, self._slots = None, []

    @contextlib.contextmanager
    def reported_to(self):
        """The context in which the graph's `TowerOptimizer`s report to this object."""
        _CALLS[self._graph] = self
        try:
            yield
        finally:
            _CALLS.pop(self._graph, None)

    def weights(self, batch):
        if not self._is_sum:
            return batch.weights
        return None if batch.is_even else list(map(share_of_sum, batch.sizes))

    @contextlib.contextmanager
    def call(self, weight, placement):
        self._placement, self._weight = placement, weight
        self._start = len(self._graph.get_operations())
        yield
        self._operations = self._made()
        self._check_no_gathering()

    def weighted(self, loss: tf.Tensor) -> tf.Tensor:
        """A tower's loss, weighted: the sum over the towers is the loss of the batch."""
        if not self._trains or self._weight is None:
            return loss
        loss = tf.convert_to_tensor(loss)
        weight = self._weight_as(loss.dtype)
        self._weighted.append(weight.op)
        return loss * weight

    def applied(self, optimizer, pairs: list, **arguments) -> tf.Operation:
        """A call of `apply_gradients`: the operation of the update."""
        pairs = [(gradient if gradient is None else tf.convert_to_tensor_or_indexed_slices(
            gradient, variable.dtype.base_dtype), variable) for gradient, variable in pairs]
        waits_for = tf.no_op('before_update')
        if not self._trains:
            return waits_for
        if waits_for.graph is not self._graph or compat.in_control_flow(waits_for):
            raise GradientError(
                'a TowerOptimizer applies gradients in a branch or a loop (cond, while_loop), '
                'which no other tower can join: call it outside, and decide by the gradients.')
        pairs = self._weighted_pairs(pairs)
        variables = [variable for _, variable in pairs]
        with current_call(self._graph).variables.outside(), only_device(self._placement.main), \
                new_slots(self._placement, variables) as slots, \
                graph_walk.Recording(self._graph) as made:
            handed_on = [(_stand_in(gradient, variable), variable) for gradient, variable in pairs]
            update = optimizer.apply_gradients(handed_on, **arguments)
        self._slots += slots
        self._calls.append(Call(
            optimizer, pairs, waits_for, [pair for pair in handed_on if pair[0] is not None],
            getattr(update, 'op', update), {op.name for op in made.operations}))
        return update

    def check_spec(self, spec) -> None:
        """Checks the `EstimatorSpec` that the call of the model function returns.

        Raises:
          GradientError: not all updates of the train op come from `TowerOptimizer`s; the loss or an
            update in UPDATE_OPS waits for one of these.
        """
        step = graph_walk.step_operations([spec.train_op])
        trained = {variable.op.name for variable in tf.trainable_variables()}
        known = self._of_updates()
        alone = [op.name for op in step if OPTIMIZER_UPDATES.search(op.type)
                 and op.name not in known and any(each.op.name in trained for each in op.inputs)]
        if alone or not self._calls:
            raise GradientError(
                'the train_op of the model function %s, which comes from no TowerOptimizer: each '
                'tower would train on its own shard. Wrap every optimizer of the model function: '
                'optimizer = towers.TowerOptimizer(optimizer).' % (
                    'has the update %r' % alone[0] if alone else 'is %r' % spec.train_op.name))
        after = graph_walk.reachable_from([call.update for call in self._calls], self._made(),
                                          control=True)
        for each in [spec.loss] + tf.get_collection(tf.GraphKeys.UPDATE_OPS):
            op = getattr(each, 'op', each)
            if op.name in after:
                raise GradientError(
                    '%r, the loss of the model function or one of its UPDATE_OPS, waits for an '
                    'update of a TowerOptimizer, which itself comes after the losses and the '
                    'UPDATE_OPS of all towers: take it out of tf.control_dependencies of the train '
                    'op.' % op.name)
        names = {op.name for op in step}
        self._together = [number for number, call in enumerate(self._calls)
                          if call.update.name in names]

    def optimizers(self):
        return list({id(call.optimizer): call.optimizer for call in self._calls}.values())

    def slots(self):
        return list(self._slots)

    def fetches(self):
        return [call.waits_for for call in self._calls] + self._tensors()

    def _tensors(self):
        return [tensor for call in self._calls for tensor in tensors_of(call.pairs)]

    def _of_updates(self):
        return set().union(*[call.operations for call in self._calls])

    def _check_no_gathering(self):
        """Raises `GradientError` for gradients that are gathered in shared state, then applied.

        Each tower would add its share of the gradient to the variable or accumulator that all
        towers share, and hand over the whole of it.
        """
        of_updates = self._of_updates()
        made = [op for op in self._made() if op.name not in of_updates]
        names = {op.name for op in made}
        trained = {variable.op.name for variable in tf.trainable_variables()}
        applied = graph_walk.ancestors(self._tensors())
        read = {variable.op.name for variable in tf.global_variables()} & applied - trained
        writes = Writes(self._graph)

        def is_of_gradients(op, name):
            sources = graph_walk.ancestors([each for each in op.inputs if each.op.name != name])
            return any(OF_GRADIENTS.search(each) for each in names & set(sources))
        gathered = [op.name for op in made if _GATHERED.search(op.type) and op.name in applied] + [
            name for op in made for name in read.intersection(writes.of(op) if read else ())
            if is_of_gradients(op, name)]
        if gathered:
            raise GradientError(
                'the model function writes gradients of a tower to %r, which all towers share, and '
                'applies what is computed from it. An optimizer within the TowerOptimizer gets the '
                'gradients of all towers: towers.TowerOptimizer(tf.train.SyncReplicasOptimizer('
                'optimizer, …)), or TowerOptimizer(GatheringOptimizer(optimizer)).' % gathered[0])

    def _made(self):
        return self._graph.get_operations()[self._start:]

    def _weight_as(self, dtype):
        if isinstance(self._weight, float):  # tf.cast would round it to float32
            return tf.constant(self._weight, dtype)
        return tf.identity(tf.cast(self._weight, dtype))

    def _weighted_pairs(self, pairs):
        """The pairs; gradients that are not computed from a weighted loss are weighted here.

        A model function (BERT's) takes these with `tf.gradients` of the loss that it returns.
        """
        if self._weight is None:
            return pairs
        known = graph_walk.reachable_from(self._weighted, self._made())
        return [(gradient if gradient is None or gradient.op.name in known
                 else times(gradient, self._weight_as(gradient.dtype)), variable)
                for gradient, variable in pairs]

    def compute_gradients(self, loss, var_list=None):
        # A variable that several calls train is handed over once, so that each occurs once.
        return [(gradient, variable) for number, call in enumerate(self._calls)
                for gradient, variable in call.pairs
                if self._owners.setdefault(variable.op.name, number) == number]

    def of_all_towers(self, copies):
        return _Applying(functools.partial(self._apply, copies))

    def _apply(self, copies, grads_and_vars, global_step=None):
        """Has the stand-ins of all calls hand on the gradients of all towers."""
        ready = tf.no_op('before_update')
        handed_over = {variable.op.name: gradient for gradient, variable in grads_and_vars}
        combined = [self._combined(call, handed_over, copies) for call in range(len(self._calls))]
        for number, call in enumerate(self._calls):
            waits_for = [ready] + self._before(number, combined)
            for stand_in, variable in call.stand_ins:
                for old, new in zip(_parts(stand_in), _parts(combined[number][variable.op.name])):
                    compat.replace_input(old.op, 0, new)
                    compat.add_control_inputs(old.op, waits_for)
        return tf.group(*[call.update for call in self._calls])

    def _combined(self, number, handed_over, copies):
        """{name of a variable: gradient} of call `number`, over all towers."""
        pairs = [pair for pair in self._calls[number].pairs if pair[0] is not None]
        found = {variable.op.name: handed_over[variable.op.name] for _, variable in pairs
                 if self._owners[variable.op.name] == number}
        others = [pair for pair in pairs if pair[1].op.name not in found]
        if others:
            with tf.name_scope('combine_gradients'):
                found.update((variable.op.name, gradient) for gradient, variable in combine(
                    [others] + [[(map_leaves(copied, gradient), variable)
                                 for gradient, variable in others] for copied in copies]))
        return found

    def _before(self, number, combined):
        """The gradients that the update of a call waits for: all that are taken at the old weights,
        those of the other calls of a train op included."""
        after = graph_walk.reachable_from([self._calls[number].update], self._operations,
                                          control=True)
        waits_for = []
        for other in self._together if number in self._together else [number]:
            # Unless they are taken after the update, on purpose.
            if not any(tensor.op.name in after for tensor in tensors_of(self._calls[other].pairs)):
                waits_for += [tensor.op for tensor in tensors_of(
                    [(gradient, None) for gradient in combined[other].values()])]
        return waits_for


_Applying = collections.namedtuple('_Applying', 'apply_gradients')


def _stand_in(gradient, variable):
    """A tensor that hands a gradient on to an update: of the first tower, then of all towers."""
    if gradient is None:
        return None
    with only_device(variable.device or None):
        if not isinstance(gradient, tf.IndexedSlices):
            return tf.identity(gradient, 'gradient')
        values, indices = [tf.identity(tf.placeholder_with_default(  # of any number of rows
            part, tf.TensorShape([None]).concatenate(part.shape[1:]))) for part in _parts(gradient)]
        return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _parts(gradient):
    """The tensors of a gradient that differ from tower to tower."""
    return [gradient.values, gradient.indices] if isinstance(
        gradient, tf.IndexedSlices) else [gradient]


def share_of_sum(size):
    """The weight of a shard where losses are added up: 0 of padding alone, else 1; as of a mean."""
    return float(size > 0) if isinstance(size, int) else tf.cast(size > 0, tf.float64)
