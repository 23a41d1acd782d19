"""`OptimizerCalls`: one update for all towers from each optimizer call of a model function.

An Estimator's model function does not return gradients: it calls `optimizer.minimize`, or
`compute_gradients`, clips, and `apply_gradients`, perhaps for several optimizers, and returns a
train op. So the model function makes the update itself, as on one device, with its slots and names.

1. `call` is the context of the model function's call. `weighted` multiplies the tower's loss with
   the weight of its shard, so that the sum of the towers' gradients is the batch's gradient.
2. `applied` makes the update with *stand-ins*: operations that hand the first tower's gradients on.
   The update is no part of the tower, and is not copied.
3. When all towers are built, `update` sums the gradients of each call over the towers, variable by
   variable, and connects the stand-ins of that call to the sums.

Below, a *call* is a call of `apply_gradients` in the model function; calls have indices, from 0.
Only the method `call` is about the call of the model function itself.

Words of other modules used here: `pairs` are gradients with their variables; a `Recording` notes
the operations that a block makes; slots are variables that an optimizer makes for a variable;
`combine` adds the towers' gradients up, variable by variable.

Its test is `tests/fronts/test_optimizer_calls.py`.
"""

import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import GradientError
from towers.fronts.call_checks import check_before_updates, check_no_gathering, check_wrapped
from towers.fronts.stand_ins import connect, one_if_any, stand_in_of
from towers.gradients.gradient_pairs import tensors_of, times
from towers.graph import graph_walk
from towers.graph.graph_walk import map_leaves, operation_names, operation_of
from towers.model.build_context import variables_of_optimizer
from towers.model.keras_calls import unique
from towers.optimizers import GradientsOfModel, rows_at_rate
from towers.placement.variable_device import Placement, only_device
from towers.reduce.combination import combine
from towers.shards.cut_batch import CutBatch
from towers.variables.slots import new_slots

Pairs = typing.List[typing.Tuple[typing.Any, tf.Variable]]
"""Gradients, each None, a tensor or `tf.IndexedSlices`, with their variables."""


class Call(typing.NamedTuple):
    """One call of `apply_gradients`, in the first tower.

    Attributes:
      optimizer: the wrapped optimizer.
      pairs: the gradients of the first tower, weighted: the sum over the towers is the batch's
        gradient.
      waits_for: an operation with all control inputs that the call was made under.
      stand_ins: pairs of stand-ins, in the place of gradients; without gradients that are None.
      update: the operation that the optimizer returned.
      operations: names of the operations that the optimizer made.
    """
    optimizer: tf.train.Optimizer
    pairs: Pairs
    waits_for: tf.Operation
    stand_ins: Pairs
    update: tf.Operation
    operations: typing.Set[str]


# The `OptimizerCalls` of each graph in which towers are being built.
_CALLS: typing.Dict[tf.Graph, 'OptimizerCalls'] = {}


def calls_of(graph: tf.Graph) -> typing.Optional['OptimizerCalls']:
    """The `OptimizerCalls` of the towers that are being built in a graph, or None."""
    return _CALLS.get(graph)


class OptimizerCalls(GradientsOfModel):
    """The object in the place of an optimizer of `build_towers`, to which `TowerOptimizer`s report.

    With n_k of the batch's n examples on tower k of N, loss L_k there, the gradient of a call is

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
        # The first tower's calls, and the indices of the calls that the model's train op runs.
        self._calls: typing.List[Call] = []
        self._calls_in_step: typing.List[int] = []
        # {name of a variable: index of the first call that trains it}. `build_towers` combines the
        # gradient of this call; `update` combines the gradients of later calls.
        self._first_calls: typing.Dict[str, int] = {}
        # The weight of the tower's loss, None where the loss is not multiplied; and the operations
        # of the weights that losses were multiplied with.
        self._weight: typing.Any = None
        self._weight_operations: typing.List[tf.Operation] = []
        # How many operations the graph had before the model function was called; and the operations
        # that the model function has made.
        self._num_operations_before = 0
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

    def weights(self, batch: CutBatch) -> typing.Optional[list]:
        """The factors with which the towers' losses are multiplied; None where they are not."""
        if not self._is_sum:
            return batch.weights
        if batch.is_even:
            return None  # no shard is empty, so each loss counts once as it is
        return [one_if_any(size) for size in batch.sizes]

    @contextlib.contextmanager
    def call(self, weight: typing.Any, placement: Placement) -> typing.Iterator[None]:
        """The context of the model function's call.

        Args:
          weight: the factor of the tower's loss, a number or a float64 scalar; or None.
          placement: the placement of the variables, for the slots.

        Raises:
          GradientError: the model function adds gradients up in a variable or an accumulator before
            it applies them, which the towers would share.
        """
        self._placement = placement
        self._weight = weight
        self._num_operations_before = len(self._graph.get_operations())
        yield  # here `build_towers` calls the model function, which calls `weighted` and `applied`
        self._operations = self._operations_so_far()
        made_by_optimizers = self._names_made_by_optimizers()
        model_operations = graph_walk.without_names(self._operations, made_by_optimizers)
        check_no_gathering(model_operations, self._gradient_tensors())

    def weighted(self, loss: tf.Tensor) -> tf.Tensor:
        """A tower's loss times its weight: the sum over the towers is the loss of the batch. In
        evaluation and prediction, and where the towers' losses are added up as they are, it is the
        loss itself."""
        if not self._trains or self._weight is None:
            return loss
        loss = tf.convert_to_tensor(loss)
        weight = self._weight_as(loss.dtype)
        self._weight_operations.append(weight.op)  # for `_weighted_pairs`
        return loss * weight

    def applied(self, optimizer: tf.train.Optimizer, pairs: Pairs,
                **arguments: typing.Any) -> tf.Operation:
        """Makes the update of all towers for one call of `apply_gradients` in the first tower.

        Args:
          optimizer: the wrapped optimizer.
          pairs: the first tower's gradients, with their variables.
          **arguments: the other arguments of the call.

        Returns:
          The operation that the optimizer returns; without training one that does nothing.
        """
        # This operation waits for what the open `tf.control_dependencies` of the model function
        # name.
        waits_for = tf.no_op('before_update')
        if not self._trains:
            return waits_for
        self._check_is_outside_of_loops(waits_for)
        pairs = self._weighted_pairs(pairs)
        variables = [variable for _, variable in pairs]
        # Neither slots nor the operations of the update count as the tower's. Slots are put beside
        # their variables, everything else on the main device. `rows_at_rate` is for gradient
        # descent on TF 1.15: it does not cast the learning rate for a sparse gradient, and would
        # fail for a rate in float64, or one that a function gives.
        with variables_of_optimizer(self._graph), only_device(self._placement.main), \
                new_slots(self._placement, variables) as slots, rows_at_rate(optimizer), \
                graph_walk.Recording(self._graph) as made:
            # A gradient of None stays None: the optimizer gets a pair for each variable, as it does
            # when the model function calls it directly.
            stand_ins = [(stand_in_of(gradient, variable), variable)
                         for gradient, variable in pairs]
            update = optimizer.apply_gradients(stand_ins, **arguments)
        self._slots += slots
        self._calls.append(Call(
            optimizer=optimizer, pairs=pairs, waits_for=waits_for,
            stand_ins=[(stand_in, variable) for stand_in, variable in stand_ins
                       if stand_in is not None],
            update=operation_of(update),
            operations=graph_walk.names_of(made.operations)))
        return update

    def _check_is_outside_of_loops(self, op: tf.Operation) -> None:
        """Raises `GradientError` for an update in a branch or a loop; `op` is made where the update
        would be. The branches and loops of v2 are functions, with graphs of their own."""
        is_in_function = op.graph is not self._graph
        if is_in_function or compat.in_control_flow(op):
            raise GradientError(
                'a TowerOptimizer applies gradients in a branch or a loop (cond, while_loop), '
                'which no other tower can join: call it outside, and decide by the gradients.')

    def check_spec(self, spec: typing.Any) -> None:
        """Checks the `EstimatorSpec` that the model function returns, and notes which calls its
        train op runs.

        Raises:
          GradientError: not all updates of the train op come from `TowerOptimizer`s; the loss or an
            operation in UPDATE_OPS waits for an update of a `TowerOptimizer`.
        """
        operations_of_step = graph_walk.step_operations([spec.train_op])
        check_wrapped(spec.train_op, operations_of_step, self._names_made_by_optimizers())
        update_ops = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        updates = [call.update for call in self._calls]
        check_before_updates([spec.loss] + update_ops, updates, self._operations_so_far())
        names_of_step = graph_walk.names_of(operations_of_step)
        self._calls_in_step = [index for index, update in enumerate(updates)
                               if update.name in names_of_step]

    def optimizers(self) -> list:
        """The wrapped optimizers, each once."""
        return unique([call.optimizer for call in self._calls])

    def slots(self) -> list:
        """The variables that the wrapped optimizers have made."""
        return list(self._slots)

    def fetches(self) -> list:
        """What the updates need of the first tower: the gradients, and what the updates wait for.
        """
        return [call.waits_for for call in self._calls] + self._gradient_tensors()

    def _gradient_tensors(self) -> typing.List[tf.Tensor]:
        """The tensors of the gradients of all calls."""
        tensors = []
        for call in self._calls:
            tensors += tensors_of(call.pairs)
        return tensors

    def _names_made_by_optimizers(self) -> typing.Set[str]:
        """Names of the operations that the wrapped optimizers have made."""
        return set().union(*[call.operations for call in self._calls])

    def _operations_so_far(self) -> typing.List[tf.Operation]:
        """The operations that the model function has made so far."""
        return self._graph.get_operations()[self._num_operations_before:]

    def _weight_as(self, dtype: tf.DType) -> tf.Tensor:
        """The weight of the tower's loss as a tensor of this type."""
        if isinstance(self._weight, float):
            return tf.constant(self._weight, dtype)  # `tf.cast` would first round it to float32
        # `tf.identity` makes a new operation in each call, also where `tf.cast` makes none. By this
        # operation `_weighted_pairs` tells which gradients are of a weighted loss.
        return tf.identity(tf.cast(self._weight, dtype))

    def _weighted_pairs(self, pairs: Pairs) -> Pairs:
        """The pairs with each gradient as a tensor, and times the weight of the tower.

        `TowerOptimizer.compute_gradients` has differentiated a loss that `weighted` has multiplied.
        A model function (BERT's) that calls `tf.gradients` itself has differentiated the loss as it
        is: only such gradients are multiplied here.
        """
        from_weighted_loss = graph_walk.reachable_from(
            self._weight_operations, self._operations_so_far())
        weighted_pairs: Pairs = []
        for gradient, variable in pairs:
            if gradient is not None:
                gradient = tf.convert_to_tensor_or_indexed_slices(
                    gradient, variable.dtype.base_dtype)
                gradient = self._weighted_gradient(gradient, from_weighted_loss)
            weighted_pairs.append((gradient, variable))
        return weighted_pairs

    def _weighted_gradient(self, gradient: typing.Any,
                           from_weighted_loss: typing.Container[str]) -> typing.Any:
        """A gradient, times the weight of the tower unless it has it already; `from_weighted_loss`
        are the names of the operations that are computed from a weighted loss."""
        if self._weight is None or gradient.op.name in from_weighted_loss:
            return gradient
        return times(gradient, self._weight_as(gradient.dtype))

    def compute_gradients(self, loss: tf.Tensor,
                          var_list: typing.Optional[list] = None) -> Pairs:
        """The weighted pairs of all calls in the first tower, for `build_towers` to combine.

        The model function itself has differentiated the `loss`. A variable that several calls train
        has one pair: the pair of the first of these calls.
        """
        first_pairs: Pairs = []
        for index, call in enumerate(self._calls):
            for gradient, variable in call.pairs:
                name = variable.op.name
                if name not in self._first_calls:
                    self._first_calls[name] = index
                if self._first_calls[name] == index:
                    first_pairs.append((gradient, variable))
        return first_pairs

    def of_all_towers(self, copies: typing.Sequence[typing.Callable]) -> '_Update':
        """An object whose `apply_gradients` makes the updates of all towers.

        Args:
          copies: for each tower but the first, a function from a tensor of the first tower to its
            copy.
        """
        return _Update(self, copies)

    def update(self, pairs: Pairs, copies: typing.Sequence[typing.Callable]) -> tf.Operation:
        """Connects the updates to the gradients of all towers.

        Say calls 0 and 1 both train w. `compute_gradients` has given `build_towers` the gradient of
        w in call 0 alone, so `pairs` has this gradient, combined over all towers. The gradient of w
        in call 1 is combined here.

        Args:
          pairs: the pairs of `compute_gradients`, combined over all towers.
          copies: for each tower but the first, a function from a tensor of the first tower to its
            copy.

        Returns:
          The operation that runs the updates of all calls.
        """
        # This operation waits for what the open `tf.control_dependencies` of `build_towers` name.
        before_updates = tf.no_op('before_update')
        gradients_of_first_calls = {variable.op.name: gradient for gradient, variable in pairs}
        combined = [self._combined_gradients(index, gradients_of_first_calls, copies)
                    for index in range(len(self._calls))]
        for index, call in enumerate(self._calls):
            predecessors = [before_updates] + self._gradients_before_update(index, combined)
            for stand_in, variable in call.stand_ins:
                connect(stand_in, combined[index][variable.op.name], predecessors)
        return tf.group(*[call.update for call in self._calls])

    def _combined_gradients(self, index: int, first_gradients: typing.Dict[str, typing.Any],
                            copies: typing.Sequence[typing.Callable]
                            ) -> typing.Dict[str, typing.Any]:
        """The gradients of one call, combined over all towers; without gradients that are None.

        `build_towers` has combined the gradients of each variable's first call. The gradients of
        later calls that train the same variable are combined here.

        Args:
          index: the index of the call.
          first_gradients: {name of a variable: the combined gradient of the first call that
            trains it}.
          copies: for each tower but the first, a function from a tensor of the first tower to its
            copy.

        Returns:
          {name of a variable: gradient}.
        """
        combined = {}
        later_pairs: Pairs = []  # of variables that an earlier call also trains
        for gradient, variable in self._calls[index].pairs:
            if gradient is None:
                continue
            is_of_first_call = self._first_calls[variable.op.name] == index
            if is_of_first_call:
                combined[variable.op.name] = first_gradients[variable.op.name]
            else:
                later_pairs.append((gradient, variable))
        if later_pairs:
            with tf.name_scope('combine_gradients'):
                for gradient, variable in combine(_pairs_of_towers(later_pairs, copies)):
                    combined[variable.op.name] = gradient
        return combined

    def _gradients_before_update(self, index: int,
                                 combined: typing.List[typing.Dict[str, typing.Any]]
                                 ) -> typing.List[tf.Operation]:
        """The operations of the gradients that are to be computed before an update changes weights.

        Say the train op runs the updates of calls 0 and 1. Both use the gradients at the weights
        from before the step, so the update of call 0 waits for the gradients of both calls. But if
        the model function takes the gradients of call 1 after the update of call 0, by
        `tf.control_dependencies`, this update waits for the gradients of call 0 alone.

        Args:
          index: the index of the call whose update it is.
          combined: for each call its gradients over all towers, by the variable's name.
        """
        names_after_update = graph_walk.reachable_from(
            [self._calls[index].update], self._operations, control=True)
        operations: typing.List[tf.Operation] = []
        for other in self._calls_with(index):
            # All towers are alike, so the first one tells what comes after the update. The update
            # then waits for the combined gradients.
            gradients_of_first_tower = tensors_of(self._calls[other].pairs)
            comes_after = not names_after_update.isdisjoint(
                operation_names(gradients_of_first_tower))
            if not comes_after:
                operations += _operations_of(combined[other].values())
        return operations

    def _calls_with(self, index: int) -> typing.List[int]:
        """The indices of the calls that run in one step with a call, its own index among them.

        The train op that the model function returns need not run all of its calls. A program may
        run the update of another call by itself: then it waits for no other call's gradients.
        """
        if index in self._calls_in_step:
            return self._calls_in_step
        return [index]


def _operations_of(gradients: typing.Iterable[typing.Any]) -> typing.List[tf.Operation]:
    """The operations that compute gradients; for a sparse gradient, all of its tensors."""
    tensors = tensors_of([(gradient, None) for gradient in gradients])
    return list(map(operation_of, tensors))


def _pairs_of_towers(pairs: Pairs,
                     copies: typing.Sequence[typing.Callable]) -> typing.List[Pairs]:
    """The `(gradient, variable)` pairs of each tower.

    Args:
      pairs: the pairs of the first tower.
      copies: for each tower but the first, a function from a tensor of the first tower to its copy.
    """
    pairs_of_towers = [pairs]
    for copy_of in copies:
        pairs_of_towers.append([(map_leaves(copy_of, gradient), variable)
                                for gradient, variable in pairs])
    return pairs_of_towers


class _Update(typing.NamedTuple):
    """An object with the `apply_gradients` of an optimizer, for when all towers are built."""
    calls: OptimizerCalls
    copies: typing.Sequence[typing.Callable]

    def apply_gradients(self, grads_and_vars: Pairs,
                        global_step: typing.Any = None) -> tf.Operation:
        """The operation of all updates.

        The `global_step` is not used: the model function has given it to its own optimizers, which
        count it.
        """
        return self.calls.update(grads_and_vars, self.copies)
