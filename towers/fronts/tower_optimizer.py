"""`TowerOptimizer`: an optimizer that a replicated model function calls in each tower."""

import typing
import weakref

import tensorflow.compat.v1 as tf

from towers.api.options import check_optimizer
from towers.errors import InvalidArgumentError
from towers.fronts.optimizer_calls import calls_of
from towers.tower.objectives import has_own_minimize


_OR_ELSE = 'or a function without arguments that returns one'


class TowerOptimizer(tf.train.Optimizer):
    """Wraps an optimizer, so that all towers of `replicate_model_fn` make one update together.

        optimizer = towers.TowerOptimizer(tf.train.AdamOptimizer(0.001))
        train_op = optimizer.minimize(loss, global_step=tf.train.get_global_step())

    Under `replicate_model_fn` on N > 1 devices `compute_gradients` gives the tower's share of the
    gradient: the gradient of the tower's loss times the weight of its shard (see there). Operations
    of the model function on it, such as clipping, apply to that share. `apply_gradients` returns an
    operation that runs the one update of all towers, by the first tower's optimizer, under the
    names that its variables would have without towers. Gradients that were not computed by
    `compute_gradients`, but by `tf.gradients` of the loss, are weighted then. In evaluation and
    prediction it does nothing.

    Elsewhere, also on one device, all calls are passed on to the wrapped optimizer. A model
    function may use several `TowerOptimizer`s, for one loss or for several, if every tower makes
    the same calls in the same order; updates that one train op runs together all use gradients at
    the weights from before it. Wrap a `tf.train.SyncReplicasOptimizer` by a `TowerOptimizer`, not
    the other way round.
    """

    def __init__(self, optimizer_or_optimizer_fn: typing.Any):
        """
        Args:
          optimizer_or_optimizer_fn: a `tf.train.Optimizer`; or a function without arguments that
            returns one, called once for each graph, when it is first used there.

        Raises:
          InvalidArgumentError: something else.
        """
        super().__init__(use_locking=False, name='TowerOptimizer')
        if not callable(optimizer_or_optimizer_fn):
            check_optimizer(optimizer_or_optimizer_fn, 'optimizer_or_optimizer_fn', _OR_ELSE)
        self._optimizer_or_optimizer_fn = optimizer_or_optimizer_fn
        self._made = None  # (weak reference to a graph, the optimizer that was made for it)

    @property
    def minimize(self):
        """As the wrapped optimizer's.

        Raises:
          InvalidArgumentError: in a tower, of an optimizer with a `minimize` of its own: it would
            clip, say, each tower's share of the gradient.
        """
        optimizer = self._optimizer()
        if not has_own_minimize(optimizer):
            return super().minimize
        if calls_of(tf.get_default_graph()) is not None:
            raise InvalidArgumentError(
                '%s has a minimize of its own, which replicate_model_fn would call in each tower, '
                'for a part of the batch. Put what it does between the gradients and their update '
                'into its apply_gradients, which gets those of all towers.'
                % type(optimizer).__name__)
        return optimizer.minimize

    def compute_gradients(self, loss, *args, **kwargs):
        """As the wrapped optimizer's; in a tower, for the loss times the weight of the shard."""
        calls = calls_of(tf.get_default_graph())
        return self._optimizer().compute_gradients(
            loss if calls is None else calls.weighted(loss), *args, **kwargs)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None, **kwargs):
        """As the wrapped optimizer's; in a tower, the operation that stands for all towers' update.

        Raises:
          GradientError: in a branch or a loop of a replicated model function.
        """
        if name is not None:
            kwargs['name'] = name
        calls = calls_of(tf.get_default_graph())
        if calls is None:
            return self._optimizer().apply_gradients(grads_and_vars, global_step=global_step,
                                                     **kwargs)
        return calls.applied(self._optimizer(), grads_and_vars, global_step=global_step, **kwargs)

    def get_slot(self, *args, **kwargs):
        """This and the next three methods are the wrapped optimizer's."""
        return self._optimizer().get_slot(*args, **kwargs)

    def get_slot_names(self, *args, **kwargs):
        return self._optimizer().get_slot_names(*args, **kwargs)

    def get_name(self, *args, **kwargs):
        return self._optimizer().get_name(*args, **kwargs)

    def variables(self, *args, **kwargs):
        return self._optimizer().variables(*args, **kwargs)

    def _optimizer(self):
        optimizer = self._given_or_made()
        # With a `TowerOptimizer` around another one the shard's weight would count twice.
        return optimizer._optimizer() if isinstance(optimizer, TowerOptimizer) else optimizer

    def _given_or_made(self):
        given = self._optimizer_or_optimizer_fn
        if not callable(given):
            return given
        graph = tf.get_default_graph()
        if self._made is None or self._made[0]() is not graph:
            made = given()
            check_optimizer(made, 'optimizer_or_optimizer_fn() of TowerOptimizer', or_else='')
            self._made = weakref.ref(graph), made
        return self._made[1]
