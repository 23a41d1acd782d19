"""Moving averages of the weights: kept while training, used to evaluate and to export."""

import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_instance, check_number, check_step_variable
from towers.errors import InvalidArgumentError
from towers.graph import graph_walk
from towers.placement.variable_device import only_device
from towers.graph.variable_access import variables_read


class WeightAverages:
    """Exponential moving averages of trained variables, by `tf.train.ExponentialMovingAverage`.

        average <- average - (1 - d) * (average - variable),   d = min(decay, (1 + t) / (10 + t))

    after each step t. The averages are saved with the rest, as
    `<variable>/ExponentialMovingAverage`.
    """

    def __init__(self, decay: float, global_step: typing.Optional[tf.Variable]):
        """
        Args:
          decay: in (0, 1), such as 0.999.
          global_step: the variable that counts steps: t of the formula.

        Raises:
          InvalidArgumentError: a decay outside of (0, 1).
        """
        check_number('decay', decay, expected='a number between 0 and 1, such as 0.999')
        check_step_variable(global_step)
        if not 0 < decay < 1:
            raise InvalidArgumentError('decay=%r: expected a number between 0 and 1, such as 0.999.'
                                       % (decay,))
        self._averages = tf.train.ExponentialMovingAverage(float(decay), global_step)
        self._by_name = {}

    def update_after(self, train_op, variables):
        """Makes the averages of some variables, and the operation that updates them after a step.

        Args:
          train_op: operation that updates the weights.
          variables: list of the variables to average, the trained ones.

        Returns:
          The operation of a step: runs `train_op`, then updates the averages.
        """
        check_instance('train_op', train_op, (tf.Operation, tf.Tensor), 'an operation')
        if not isinstance(variables, (list, tuple)) or not variables:
            raise InvalidArgumentError('variables=%.80r: expected a list of variables.'
                                       % (variables,))
        for variable in variables:
            check_instance('a variable among variables', variable, compat.VARIABLE_TYPES,
                           'a tf.Variable')
        with tf.control_dependencies([train_op]), only_device(train_op.device or None):
            updated = self._averages.apply(variables)
        self._by_name = {variable.op.name: self._averages.average(variable)
                         for variable in variables}
        return updated

    @contextlib.contextmanager
    def instead_of_weights(self):
        """A scope in which `get_variable` gives the average of a variable that has one.

        For the towers of an evaluation whose model makes its variables with `get_variable` (slim
        and `tf.layers` do).

        Raises:
          InvalidArgumentError: at the end of the block, if an operation made in it reads a weight
            that has an average, as with variables of `tf.Variable` or Keras.
        """
        if not self._by_name:
            raise InvalidArgumentError('there are no averages yet: call update_after first.')

        def average_or_variable(getter, name, *args, **kwargs):
            variable = getter(name, *args, **kwargs)
            return self._by_name.get(getattr(getattr(variable, 'op', None), 'name', None),
                                     variable)
        with graph_walk.Recording(tf.get_default_graph()) as made, tf.variable_scope(
                tf.get_variable_scope(), custom_getter=average_or_variable,
                auxiliary_name_scope=False):
            yield
        for variable in variables_read(made.operations):
            if variable.op.name in self._by_name:
                raise InvalidArgumentError(
                    'what was built instead_of_weights() reads variable %r, not its average: only '
                    'tf.get_variable can give another variable, and this one was made or kept '
                    'otherwise (by tf.Variable, or in a Keras layer). Make it with '
                    'tf.get_variable.' % variable.op.name)


def averages_in(checkpoint, variables):
    """From which names of a checkpoint to restore variables: their moving averages, if it has them.

    For a graph without `WeightAverages` that evaluates or exports.

    Returns:
      `(names, count)`: a dict from names in the checkpoint to variables, for `tf.train.Saver`, and
      how many of the names are of averages.
    """
    there = {name for name, _ in tf.train.list_variables(checkpoint)}
    names = {}
    for variable in variables:
        average = variable.op.name + '/ExponentialMovingAverage'
        names[average if average in there else variable.op.name] = variable
    return names, sum(name.endswith('/ExponentialMovingAverage') for name in names)
