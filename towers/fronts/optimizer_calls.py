"""Combines the optimizer calls that a model function makes in each tower into one update each.

An Estimator's model function does not return gradients: it calls `optimizer.minimize`, or
`compute_gradients`, clips, and `apply_gradients`, perhaps for several optimizers, and returns a
train op. Such a call is noted, also for each copied tower, and returns an operation that does
nothing yet, its *placeholder*. When all towers are built, the gradients of call number i of all
towers are summed per variable, the first tower's optimizer applies them, once, and the placeholders
of call i wait for this update. So operations that the model function makes from a placeholder (a
group, an operation after the update) behave as on one device. The optimizer's slots are made in the
first tower's call, so that a `Saver` or an initializer of the model function has them.
"""

import collections
import contextlib
import re

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_step_variable
from towers.errors import GradientError
from towers.fronts.optimizer_slots import apply_call, make_slots
from towers.graph import graph_walk
from towers.graph.variable_access import Writes
from towers.reduce.combination import combine
from towers.tower.objectives import GradientsOfModel
from towers.tower.optimizer_gradients import listed_pairs
from towers.tower.ownership import OF_GRADIENTS, OPTIMIZER_UPDATES

_KEY = ('towers_optimizer_calls',)
"""A collection's key that is no string, like those of TF's stores: no meta graph holds it."""

Call = collections.namedtuple('Call', [
    'optimizer', 'pairs', 'arguments', 'placeholder', 'variable_scope', 'name_scope'])
"""One call of `apply_gradients` in one tower.

Fields:
  optimizer: the optimizer that is wrapped.
  pairs: list of `(gradient, variable)`, weighted: their sum over the towers is the gradient.
  arguments: dict of the other arguments.
  placeholder: the operation that the model function was given for its result.
  variable_scope, name_scope: names of the scopes that the call was made in.
"""


def calls_of(graph):
    """The `OptimizerCalls` of the towers that are being built in a graph, or None."""
    found = graph.get_collection(_KEY)
    return found[-1] if found else None


class OptimizerCalls(GradientsOfModel):
    """Stands in place of an optimizer in `build_towers`; `TowerOptimizer`s report their calls here.

    With n_k of the batch's n examples on tower k of N, loss L_k there, the gradient of call i is

        mean:  sum_k (n_k / n) dL_k
        sum:   sum_k dL_k

    Attributes:
      of_towers: for each tower the list of its `Call`s.
      late: list of the global variables that an update made, and not the first tower's call.
    """

    def __init__(self, graph, num_towers, is_sum, trains):
        """
        Args:
          graph: the `tf.Graph` of the towers.
          num_towers: N.
          is_sum: whether the towers' losses are added up, or averaged.
          trains: False for evaluation and prediction, where calls do nothing.
        """
        self.of_towers = []
        self.late = []
        self._graph = graph
        self._num_towers = num_towers
        self._is_sum = is_sum
        self._trains = trains
        self._weight = None     # of the tower's loss; None: it counts as it is
        self._divides = False   # whether losses are divided by N, which is the same
        self._weighted = []     # the operations by which losses of this tower were weighted
        self._start = 0         # how many operations the graph had before the call
        self._operations = []   # those that the call made
        self._owners = {}       # variable's name -> number of the call that hands its gradient over
        self._together = ()     # numbers of the calls that the model's train op runs in one step
        self._placement = None
        self._slots = []        # those made in the first tower's call

    @contextlib.contextmanager
    def reported_to(self):
        """The context in which the graph's `TowerOptimizer`s report to this object."""
        entries = self._graph.get_collection_ref(_KEY)
        entries.append(self)
        try:
            yield
        finally:
            entries.pop()
            if not entries:
                self._graph.clear_collection(_KEY)

    # ---- within a tower -------------------------------------------------------------------------

    def weights(self, shards):
        if not self._is_sum:
            return shards.weights
        return None if shards.is_even else list(map(share_of_sum, shards.sizes))

    @contextlib.contextmanager
    def call(self, weight, is_even, placement):
        self.of_towers.append([])
        self._placement = placement
        self._divides = not self._is_sum and is_even
        self._weight = weight
        self._start = len(self._graph.get_operations())
        yield
        self._operations = self._made()
        self._check_no_gathering()

    def note_copy(self, copied):
        self.of_towers.append([call._replace(
            placeholder=copied(call.placeholder),
            pairs=[(_map_gradient(copied, gradient), variable) for gradient, variable in call.pairs]
        ) for call in self.of_towers[0]])

    def weighted(self, loss):
        """A tower's loss, weighted: the sum over the towers is the loss of the batch."""
        if not self._trains or self._weight is None:
            return loss
        if callable(loss):
            return lambda: self.weighted(loss())
        if loss is None:
            raise GradientError('compute_gradients or minimize of a TowerOptimizer was given '
                                'loss=None: expected a scalar tensor.')
        loss = tf.convert_to_tensor(loss)
        weight = self._weight_as(loss.dtype)
        self._weighted.append(weight.op)
        # Even shards are divided, as contrib's are, so that the numbers are the same to a bit.
        return loss / weight if self._divides else loss * weight

    def applied(self, optimizer, pairs, **arguments):
        """Notes a call of `apply_gradients`; returns its placeholder."""
        pairs = _checked_pairs(pairs)
        if arguments.get('global_step') is not None:
            check_step_variable(arguments['global_step'])
        gathered = [op.name for op in self._made() if self._trains and _GATHERED.search(op.type)]
        if gathered:
            raise GradientError(
                'a TowerOptimizer applies gradients that come from the accumulator %r, as those of '
                'a SyncReplicasOptimizer do: each tower would hand its own share over to it. Wrap '
                'them the other way round: towers.TowerOptimizer(tf.train.SyncReplicasOptimizer('
                'optimizer, …)).' % gathered[0])
        placeholder = tf.no_op('train_op')
        if not self._trains:
            return placeholder
        if placeholder.graph is not self._graph or compat.in_control_flow(placeholder):
            raise GradientError(
                'a TowerOptimizer applies gradients in a branch or a loop (cond, while_loop), '
                'which no other tower can join: call it outside, and decide by the gradients.')
        self.of_towers[0].append(Call(
            optimizer, self._weighted_pairs(pairs), arguments, placeholder,
            tf.get_variable_scope().name, self._graph.get_name_scope() or ''))
        self._slots += make_slots(
            optimizer, [variable for gradient, variable in pairs if gradient is not None],
            self._placement)
        return placeholder

    def check_train_op(self, train_op):
        """Checks the train op that the call of the model function returns.

        Raises:
          GradientError: not all updates of the train op come from `TowerOptimizer`s.
        """
        if not self.of_towers[0]:
            raise GradientError(
                'the train_op of the model function comes from no TowerOptimizer, and there are %d '
                'devices: each tower would train on its own shard. Wrap the optimizer: '
                'optimizer = towers.TowerOptimizer(optimizer).' % self._num_towers)
        step = graph_walk.step_operations([train_op])
        trainable = {variable.op.name for variable in tf.trainable_variables()}
        for op in step:
            if OPTIMIZER_UPDATES.search(op.type) and any(
                    tensor.op.name in trainable for tensor in op.inputs):
                raise GradientError(
                    'the train_op of the model function has the update %r, which comes from no '
                    'TowerOptimizer: wrap every optimizer of the model function.' % op.name)
        names = {op.name for op in step}
        self._together = [number for number, call in enumerate(self.of_towers[0])
                          if call.placeholder.name in names]

    def optimizers(self):
        calls = self.of_towers[0] if self.of_towers else []
        return list({id(call.optimizer): call.optimizer for call in calls}.values())

    def slots(self):
        return list(self._slots)

    def fetches(self):
        return [call.placeholder for call in self.of_towers[0]] + [
            gradient for call in self.of_towers[0] for gradient in _gradients(call)]

    def after_update(self):
        """Names of the call's operations that come after one of its updates."""
        return graph_walk.reachable_from([call.placeholder for call in self.of_towers[0]],
                                         self._made(), control=True)

    def _check_no_gathering(self):
        """Raises `GradientError` for gradients that are gathered in a variable, then applied.

        Each tower would add its share of the gradient to the variable that all towers share, and
        hand over the whole of it; or the first tower's train op would add that tower's share alone.
        """
        made = self._made()
        names = {op.name for op in made}
        trained = {variable.op.name for variable in tf.trainable_variables()}
        applied = graph_walk.ancestors([each for call in self.of_towers[0]
                                        for each in _gradients(call)])
        read = {variable.op.name for variable in tf.global_variables()} & applied - trained
        writes = Writes(self._graph)
        for op in made if read else ():
            for name in read.intersection(writes.of(op)):
                if any(OF_GRADIENTS.search(each) for each in names.intersection(
                        graph_walk.ancestors([tensor for tensor in op.inputs
                                              if tensor.op.name != name]))):
                    raise GradientError(
                        'the model function writes gradients of a tower to the variable %r, which '
                        'all towers share, and applies what is computed from it: that would not be '
                        'the gradient of all towers. Do it in the apply_gradients of an optimizer '
                        'of your own, which gets the gradients of all towers, and wrap that one: '
                        'towers.TowerOptimizer(GatheringOptimizer(optimizer)).' % name)

    def _made(self):
        return self._graph.get_operations()[self._start:]

    def _weight_as(self, dtype):
        if self._divides:
            return tf.constant(self._num_towers, dtype)
        if isinstance(self._weight, float):  # tf.cast would round it to float32
            return tf.constant(self._weight, dtype)
        return tf.identity(tf.cast(self._weight, dtype))

    def _weighted_pairs(self, pairs):
        """The pairs; gradients that are not computed from a weighted loss are weighted here.

        A model function may take these with `tf.gradients` of the loss that it returns.
        """
        if self._weight is None:
            return pairs
        known = graph_walk.reachable_from(self._weighted, self._made())
        return [(gradient if gradient is None or gradient.op.name in known
                 else self._weighted_gradient(gradient), variable) for gradient, variable in pairs]

    def _weighted_gradient(self, gradient):
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(self._weighted_gradient(gradient.values), gradient.indices,
                                    gradient.dense_shape)
        weight = self._weight_as(gradient.dtype)
        return gradient / weight if self._divides else gradient * weight

    # ---- over all towers ------------------------------------------------------------------------

    def compute_gradients(self, loss, var_list=None):
        # A variable that several calls train is handed over once, so that each occurs once.
        return [(gradient, variable) for number, call in enumerate(self.of_towers[0])
                for gradient, variable in call.pairs
                if self._owners.setdefault(variable.op.name, number) == number]

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        handed_over = {variable.op.name: gradient for gradient, variable in grads_and_vars}
        combined = [self._combined(number, handed_over) for number in range(len(self.of_towers[0]))]
        updates, known = [], {variable.op.name for variable in tf.global_variables()}
        for number, (call, pairs) in enumerate(zip(self.of_towers[0], combined)):
            with tf.control_dependencies(call.placeholder.control_inputs + self._before(number)):
                update = apply_call(call, pairs)
            update = getattr(update, 'op', update)
            for calls in self.of_towers:
                compat.add_control_inputs(calls[number].placeholder, [update])
            updates.append(update)
        self.late = [each for each in tf.global_variables() if each.op.name not in known]
        return tf.group(*updates)

    def _combined(self, number, handed_over):
        """`(gradient, variable)` pairs of call `number`, over all towers."""
        others = [[(gradient, variable) for gradient, variable in calls[number].pairs
                   if self._owners[variable.op.name] != number] for calls in self.of_towers]
        if any(gradient is not None for pairs in others for gradient, _ in pairs):
            with tf.name_scope('combine_gradients'):
                own = {variable.op.name: gradient
                       for gradient, variable in combine(others)}
        else:
            own = {}
        listed = collections.OrderedDict(
            (variable.op.name, variable) for calls in self.of_towers
            for _, variable in calls[number].pairs)
        return [(handed_over.get(name) if self._owners[name] == number else own.get(name), variable)
                for name, variable in listed.items()]

    def _before(self, number):
        """The gradients that the update of a call waits for: all that are taken at the old weights.

        Not only the call's own gradients: if a reference variable is updated while another gradient
        is computed, that gradient changes, on one device, too.
        """
        waits_for = []
        for other in self._together if number in self._together else [number]:
            gradients = [_gradients(calls[other]) for calls in self.of_towers]
            if not self._come_after(number, gradients[0]):
                waits_for += [gradient.op for each in gradients for gradient in each]
        return waits_for

    def _come_after(self, number, gradients):
        """Whether gradients are taken after the update of call `number`, on purpose."""
        after = graph_walk.reachable_from([self.of_towers[0][number].placeholder],
                                          self._operations, control=True)
        return any(gradient.op.name in after for gradient in gradients)


def _map_gradient(function, gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(*[None if part is None else function(part) for part in (
            gradient.values, gradient.indices, gradient.dense_shape)])
    return None if gradient is None else function(gradient)


def _checked_pairs(pairs):
    """A list of `(gradient or None, tf.Variable)`.

    Raises:
      GradientError: they are something else.
    """
    listed, given = listed_pairs(pairs), 'apply_gradients of a TowerOptimizer was given'
    if not listed:
        raise GradientError('%s %.200r: expected (gradient, variable) pairs.' % (
            given, pairs if listed is None else listed))
    checked = []
    for gradient, variable in listed:
        variable = compat.keras_variable_value(variable)
        if not isinstance(variable, compat.VARIABLE_TYPES):
            raise GradientError('%s %.80r of type %s as a variable: expected a tf.Variable.' % (
                given, variable, type(variable).__name__))
        if gradient is not None:
            try:
                gradient = tf.convert_to_tensor_or_indexed_slices(
                    gradient, variable.dtype.base_dtype)
            except (TypeError, ValueError) as error:
                raise GradientError(
                    '%s %.80r as the gradient of %r: expected a tensor of its type, or None. %s' % (
                        given, gradient, variable.op.name, error)) from error
        checked.append((gradient, variable))
    return checked


def share_of_sum(size):
    """The weight of a shard of this size where losses are added up.

    Returns:
      1, or 0 for a shard that holds nothing but padding: a float where the size is an int, else a
      float64 scalar.
    """
    return float(size > 0) if isinstance(size, int) else tf.cast(size > 0, tf.float64)


_GATHERED = re.compile(r'Accumulator(Take|Apply)Gradient$')
"""Types of the operations that gather gradients outside of the graph's tensors."""


def _gradients(call):
    """The tensors of a call's gradients."""
    return [tensor for tensor in tf.nest.flatten([gradient for gradient, _ in call.pairs],
                                                 expand_composites=True) if tensor is not None]
