"""Combines the optimizer calls that a model function makes in each tower into one update each.

An Estimator's model function does not return gradients: it calls `optimizer.minimize`, or
`compute_gradients`, clips, and `apply_gradients`, perhaps for several optimizers, and returns a
train op. So the update is there when the model function returns, as on one device, with its slots
and names: of the first tower's gradients, each by way of a *stand-in*, an operation that hands it
on. The update is no part of the tower, and is not copied. When all towers are built, the gradients
of call number i of all towers are summed per variable, and its stand-ins hand on these sums.
"""

import contextlib
import re
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import GradientError
from towers.gradients.gradient_pairs import tensors_of, times
from towers.graph import graph_walk
from towers.graph.graph_walk import map_leaves
from towers.graph.variable_access import Writes
from towers.model.build_context import variables_of_optimizer
from towers.optimizers import OPTIMIZER_UPDATES, GradientsOfModel, rows_at_rate
from towers.placement.variable_device import only_device
from towers.reduce.combination import combine
from towers.roles.ownership import OF_GRADIENTS
from towers.variables.new_variables import new_slots

_GATHERED = re.compile(r'Accumulator(Take|Apply)Gradient$')  # outside of the graph's tensors

Pairs = typing.List[typing.Tuple[typing.Any, tf.Variable]]
"""Gradients, each None, a tensor or `tf.IndexedSlices`, with their variables."""


class Call(typing.NamedTuple):
    """One call of `apply_gradients`, in the first tower."""
    optimizer: typing.Any  # the one that is wrapped
    pairs: Pairs  # of weighted gradients: their sum over the towers is the gradient
    waits_for: tf.Operation  # waits for all that the update waits for besides its gradients
    stand_ins: Pairs  # of the stand-ins in the place of gradients, without those of None
    update: tf.Operation  # what the optimizer returned
    operations: typing.Set[str]  # names of the operations that the optimizer made


_CALLS: typing.Dict[tf.Graph, 'OptimizerCalls'] = {}  # of the towers that are built in a graph now


def calls_of(graph: tf.Graph) -> typing.Optional['OptimizerCalls']:
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
        self._graph = graph
        self._is_sum = is_sum
        self._trains = trains
        # The first tower's calls, and which of them the model's train op runs in one step.
        self._calls: typing.List[Call] = []
        self._numbers_in_step: typing.List[int] = []
        # From names of variables to the number of the call that hands over their gradient.
        self._owners: typing.Dict[str, int] = {}
        # The weight of the tower's loss, None where it counts as it is; and the operations of the
        # weights by which losses were multiplied.
        self._weight: typing.Any = None
        self._weight_operations: typing.List[tf.Operation] = []
        # How many operations the graph had before the model function was called, and its own.
        self._start = 0
        self._operations: typing.List[tf.Operation] = []
        self._placement: typing.Any = None
        self._slots: typing.List[tf.Variable] = []

    @contextlib.contextmanager
    def reported_to(self) -> typing.Iterator[None]:
        """The context in which the graph's `TowerOptimizer`s report to this object."""
        _CALLS[self._graph] = self
        try:
            yield
        finally:
            _CALLS.pop(self._graph, None)

    def weights(self, batch: typing.Any) -> typing.Optional[list]:
        """The weights of the towers' losses; None where these count as they are."""
        if not self._is_sum:
            return batch.weights
        if batch.is_even:
            return None
        return [share_of_sum(size) for size in batch.sizes]

    @contextlib.contextmanager
    def call(self, weight: typing.Any, placement: typing.Any) -> typing.Iterator[None]:
        """The context of the model function's call, whose loss has this weight."""
        self._placement = placement
        self._weight = weight
        self._start = len(self._graph.get_operations())
        yield
        self._operations = self._operations_of_call()
        self._check_no_gathering()

    def weighted(self, loss: tf.Tensor) -> tf.Tensor:
        """A tower's loss, weighted: the sum over the towers is the loss of the batch."""
        if not self._trains or self._weight is None:
            return loss
        loss = tf.convert_to_tensor(loss)
        weight = self._weight_as(loss.dtype)
        self._weight_operations.append(weight.op)
        return loss * weight

    def applied(self, optimizer: typing.Any, pairs: Pairs,
                **arguments: typing.Any) -> tf.Operation:
        """The operation of the update for one call of `optimizer.apply_gradients`, with these
        further arguments."""
        waits_for = tf.no_op('before_update')
        if not self._trains:
            return waits_for
        if waits_for.graph is not self._graph or compat.in_control_flow(waits_for):
            raise GradientError(
                'a TowerOptimizer applies gradients in a branch or a loop (cond, while_loop), '
                'which no other tower can join: call it outside, and decide by the gradients.')
        pairs = self._weighted_pairs(pairs)
        variables = [variable for _, variable in pairs]
        with variables_of_optimizer(self._graph), only_device(self._placement.main), \
                new_slots(self._placement, variables) as slots, rows_at_rate(optimizer), \
                graph_walk.Recording(self._graph) as made:
            stand_ins = [(_stand_in(gradient, variable), variable) for gradient, variable in pairs]
            update = optimizer.apply_gradients(stand_ins, **arguments)
        self._slots += slots
        self._calls.append(Call(
            optimizer=optimizer, pairs=pairs, waits_for=waits_for,
            stand_ins=[pair for pair in stand_ins if pair[0] is not None],
            update=getattr(update, 'op', update),
            operations=graph_walk.names_of(made.operations)))
        return update

    def check_spec(self, spec: typing.Any) -> None:
        """Checks the `EstimatorSpec` that the call of the model function returns.

        Raises:
          GradientError: not all updates of the train op come from `TowerOptimizer`s; the loss or an
            update in UPDATE_OPS waits for one of these.
        """
        step = graph_walk.step_operations([spec.train_op])
        self._check_wrapped(spec.train_op, step)
        self._check_before_updates([spec.loss] + tf.get_collection(tf.GraphKeys.UPDATE_OPS))
        step_names = graph_walk.names_of(step)
        self._numbers_in_step = [number for number, call in enumerate(self._calls)
                                 if call.update.name in step_names]

    def _check_wrapped(self, train_op: tf.Operation, step: typing.List[tf.Operation]) -> None:
        """Raises `GradientError` for a train op, of these operations, that updates a trained
        variable by an optimizer which no `TowerOptimizer` wraps; or that updates none."""
        trained = graph_walk.operation_names(tf.trainable_variables())
        reported = self._update_operations()
        updates = [op for op in step if OPTIMIZER_UPDATES.search(op.type)]
        other_updates = []  # of trained variables, by optimizers that nothing wraps
        for op in updates:
            is_of_trained = not trained.isdisjoint(graph_walk.operation_names(op.inputs))
            if is_of_trained and op.name not in reported:
                other_updates.append(op)
        if self._calls and not other_updates:
            return
        if other_updates:
            found = 'has the update %r' % other_updates[0].name
        else:
            found = 'is %r' % train_op.name
        raise GradientError(
            'the train_op of the model function %s, which comes from no TowerOptimizer: each '
            'tower would train on its own shard. Wrap every optimizer of the model function: '
            'optimizer = towers.TowerOptimizer(optimizer).' % found)

    def _check_before_updates(self, fetches: typing.Iterable[typing.Any]) -> None:
        """Raises `GradientError` for a tensor or operation that waits for an update."""
        updates = [call.update for call in self._calls]
        after = graph_walk.reachable_from(updates, self._operations_of_call(), control=True)
        for fetch in fetches:
            op = getattr(fetch, 'op', fetch)
            if op.name in after:
                raise GradientError(
                    '%r, the loss of the model function or one of its UPDATE_OPS, waits for an '
                    'update of a TowerOptimizer, which itself comes after the losses and the '
                    'UPDATE_OPS of all towers: take it out of tf.control_dependencies of the train '
                    'op.' % op.name)

    def optimizers(self) -> list:
        """The wrapped optimizers, each once."""
        return list({id(call.optimizer): call.optimizer for call in self._calls}.values())

    def slots(self) -> list:
        """The variables that the optimizers have made."""
        return list(self._slots)

    def fetches(self) -> list:
        """What the updates are made of: the gradients, and what the updates wait for."""
        return [call.waits_for for call in self._calls] + self._gradient_tensors()

    def _gradient_tensors(self) -> typing.List[tf.Tensor]:
        """The tensors of the gradients of all calls."""
        return [tensor for call in self._calls for tensor in tensors_of(call.pairs)]

    def _update_operations(self) -> typing.Set[str]:
        """Names of the operations that the wrapped optimizers have made."""
        return set().union(*[call.operations for call in self._calls])

    def _operations_of_call(self) -> typing.List[tf.Operation]:
        """The operations that the model function has made so far."""
        return self._graph.get_operations()[self._start:]

    def _check_no_gathering(self) -> None:
        """Raises `GradientError` for gradients that are gathered in shared state, then applied.

        Each tower would add its share of the gradient to the variable or accumulator that all
        towers share, and hand over the whole of it.
        """
        updates = self._update_operations()
        model = [op for op in self._operations_of_call() if op.name not in updates]
        applied = graph_walk.ancestors(self._gradient_tensors())
        gathered = [op.name for op in model if _GATHERED.search(op.type) and op.name in applied]
        gathered += self._variables_with_gradients(model, applied)
        if gathered:
            raise GradientError(
                'the model function writes gradients of a tower to %r, which all towers share, and '
                'applies what is computed from it. An optimizer within the TowerOptimizer gets the '
                'gradients of all towers: towers.TowerOptimizer(tf.train.SyncReplicasOptimizer('
                'optimizer, …)), or TowerOptimizer(GatheringOptimizer(optimizer)).' % gathered[0])

    def _variables_with_gradients(self, model: typing.List[tf.Operation],
                                  applied: typing.Set[str]) -> typing.List[str]:
        """Names of variables that are not trained, that an operation of the `model` writes from
        gradients, and from which the gradients that are `applied` are computed."""
        variables = graph_walk.operation_names(tf.global_variables())
        trained = graph_walk.operation_names(tf.trainable_variables())
        read = (variables - trained) & applied
        if not read:
            return []
        writes = Writes(self._graph)
        gradient_names = {op.name for op in model if OF_GRADIENTS.search(op.name)}
        found = []
        for op in model:
            for name in read.intersection(writes.of(op)):
                others = [tensor for tensor in op.inputs if tensor.op.name != name]
                if not gradient_names.isdisjoint(graph_walk.ancestors(others)):
                    found.append(name)
        return found

    def _weight_as(self, dtype: tf.DType) -> tf.Tensor:
        """The weight of the tower's loss, in a type."""
        if isinstance(self._weight, float):  # tf.cast would round it to float32
            return tf.constant(self._weight, dtype)
        return tf.identity(tf.cast(self._weight, dtype))

    def _weighted_pairs(self, pairs: Pairs) -> Pairs:
        """The pairs, as tensors; gradients that are not computed from a weighted loss are weighted
        here: a model function (BERT's) takes these with `tf.gradients` of the loss it returns."""
        weighted = graph_walk.reachable_from(self._weight_operations, self._operations_of_call())
        found: Pairs = []
        for gradient, variable in pairs:
            if gradient is not None:
                gradient = tf.convert_to_tensor_or_indexed_slices(
                    gradient, variable.dtype.base_dtype)
                if self._weight is not None and gradient.op.name not in weighted:
                    gradient = times(gradient, self._weight_as(gradient.dtype))
            found.append((gradient, variable))
        return found

    def compute_gradients(self, loss: tf.Tensor,
                          var_list: typing.Optional[list] = None) -> Pairs:
        """The pairs of all calls, weighted; the `loss` was differentiated by the model function. A
        variable that several calls train is handed over by the first of them alone."""
        handed_over: Pairs = []
        for number, call in enumerate(self._calls):
            for gradient, variable in call.pairs:
                if self._owners.setdefault(variable.op.name, number) == number:
                    handed_over.append((gradient, variable))
        return handed_over

    def of_all_towers(self, copies: typing.Sequence[typing.Callable]) -> '_Update':
        """An object with `apply_gradients`, see `GradientsOfModel`."""
        return _Update(self, copies)

    def update(self, pairs: Pairs, copies: typing.Sequence[typing.Callable]) -> tf.Operation:
        """The operation of all updates, whose stand-ins then hand on the gradients of all towers.

        Args:
          pairs: the gradients over all towers of what `compute_gradients` has handed over.
          copies: functions from a tensor of the first tower to its copy, one a further tower.
        """
        ready = tf.no_op('before_update')
        handed_over = {variable.op.name: gradient for gradient, variable in pairs}
        combined = [self._combined(number, handed_over, copies)
                    for number in range(len(self._calls))]
        for number, call in enumerate(self._calls):
            waits_for = [ready] + self._old_gradients(number, combined)
            for stand_in, variable in call.stand_ins:
                gradient = combined[number][variable.op.name]
                for old, new in zip(_components(stand_in), _components(gradient)):
                    compat.replace_input(old.op, 0, new)
                    compat.add_control_inputs(old.op, waits_for)
        return tf.group(*[call.update for call in self._calls])

    def _combined(self, number: int, handed_over: typing.Dict[str, typing.Any],
                  copies: typing.Sequence[typing.Callable]) -> typing.Dict[str, typing.Any]:
        """The gradients of one call over all towers, by the variable's name.

        Args:
          number: of the call.
          handed_over: those that are combined already, by the variable's name.
          copies: as for `update`.
        """
        combined = {}
        others: Pairs = []  # another call has handed over a gradient of these variables
        for gradient, variable in self._calls[number].pairs:
            if gradient is None:
                continue
            if self._owners[variable.op.name] == number:
                combined[variable.op.name] = handed_over[variable.op.name]
            else:
                others.append((gradient, variable))
        if not others:
            return combined
        with tf.name_scope('combine_gradients'):
            of_copies = [[(map_leaves(copied, gradient), variable) for gradient, variable in others]
                         for copied in copies]
            for gradient, variable in combine([others] + of_copies):
                combined[variable.op.name] = gradient
        return combined

    def _old_gradients(self, number: int, combined: typing.List[typing.Dict[str, typing.Any]]
                       ) -> typing.List[tf.Operation]:
        """The operations of the gradients that the update of call `number` waits for: all that are
        taken at the old weights. These are of the calls that one train op runs together, but for
        a call whose gradients are taken after this update, on purpose.

        `combined` has the gradients of each call over all towers, by the variable's name.
        """
        after_update = graph_walk.reachable_from(
            [self._calls[number].update], self._operations, control=True)
        together = self._numbers_in_step if number in self._numbers_in_step else [number]
        waits_for: typing.List[tf.Operation] = []
        for other in together:
            own_tensors = tensors_of(self._calls[other].pairs)
            if any(tensor.op.name in after_update for tensor in own_tensors):
                continue
            for gradient in combined[other].values():
                waits_for.extend(tensor.op for tensor in tensors_of([(gradient, None)]))
        return waits_for


class _Update(typing.NamedTuple):
    """Stands in place of an optimizer when the gradients of all towers are there."""
    calls: OptimizerCalls
    copies: typing.Sequence[typing.Callable]

    def apply_gradients(self, grads_and_vars: Pairs,
                        global_step: typing.Any = None) -> tf.Operation:
        """The operation of all updates. The model's own optimizers count the `global_step`."""
        return self.calls.update(grads_and_vars, self.copies)


def _stand_in(gradient: typing.Any, variable: tf.Variable) -> typing.Any:
    """A tensor that hands a gradient on to an update: of the first tower, then of all towers."""
    if gradient is None:
        return None
    with only_device(variable.device or None):
        if not isinstance(gradient, tf.IndexedSlices):
            return tf.identity(gradient, 'gradient')
        values = _of_any_rows(gradient.values)
        indices = _of_any_rows(gradient.indices)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _of_any_rows(tensor: tf.Tensor) -> tf.Tensor:
    """The same tensor [n, …] with a static shape [?, …]: all towers together have other rows."""
    shape = tf.TensorShape([None]).concatenate(tensor.shape[1:])
    return tf.identity(tf.placeholder_with_default(tensor, shape))


def _components(gradient: typing.Any) -> typing.List[tf.Tensor]:
    """The tensors of a gradient that differ from tower to tower."""
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [gradient]


def share_of_sum(size: typing.Any) -> typing.Any:
    """The weight of a shard of a size where losses are added up: 0 of padding alone, else 1. A
    number or a float64 scalar, as the weights of a mean are."""
    if isinstance(size, int):
        return float(size > 0)
    return tf.cast(size > 0, tf.float64)
