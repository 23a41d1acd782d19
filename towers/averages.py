"""Moving averages of the weights: kept while training, used to evaluate and to export."""

import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from towers.placement import only_device


class WeightAverages:
    """Exponential moving averages of trained variables, by `tf.train.ExponentialMovingAverage`.

        average <- average - (1 - d) * (average - variable),   d = min(decay, (1 + t) / (10 + t))

    after each step t. The averages are saved with the rest, as `<variable>/ExponentialMovingAverage`.
    """

    def __init__(self, decay, global_step):
        """
        Args:
          decay: in (0, 1), such as 0.999.
          global_step: the variable that counts steps; early averages follow the weights faster.

        Raises:
          InvalidArgumentError: a decay outside of (0, 1).
        """
        if not 0 < decay < 1:
            raise InvalidArgumentError('decay=%r: expected a number between 0 and 1, such as 0.999.'
                                       % (decay,))
        self._averages = tf.train.ExponentialMovingAverage(decay, global_step)
        self._by_name = {}

    def update_after(self, train_op, variables):
        """The train op that also brings the averages up to date, after the weights have changed.

        Args:
          train_op: operation that updates the weights.
          variables: the variables to average, those that are trained.
        """
        with tf.control_dependencies([train_op]), only_device(train_op.device or None):
            updated = self._averages.apply(variables)
        self._by_name = {variable.op.name: self._averages.average(variable)
                         for variable in variables}
        return updated

    def instead_of_weights(self):
        """A scope in which `get_variable` gives the average of a variable that has one.

        For the towers of an evaluation: it covers models that make their variables with
        `get_variable` (slim and `tf.layers` do).
        """
        def average_or_variable(getter, name, *args, **kwargs):
            variable = getter(name, *args, **kwargs)
            return self._by_name.get(variable.op.name, variable)
        return tf.variable_scope(tf.get_variable_scope(), custom_getter=average_or_variable,
                                 auxiliary_name_scope=False)


def averages_in(checkpoint, variables):
    """What to restore variables from: their moving averages, where a checkpoint has them.

    For a graph that was built without `WeightAverages`, to evaluate or to export.

    Args:
      checkpoint: prefix of a checkpoint.
      variables: list of variables.

    Returns:
      `(names, count)`: a dict from names in the checkpoint to variables, for `tf.train.Saver`, and
      how many of the names are those of averages.
    """
    there = {name for name, _ in tf.train.list_variables(checkpoint)}
    names = {}
    for variable in variables:
        average = variable.op.name + '/ExponentialMovingAverage'
        names[average if average in there else variable.op.name] = variable
    return names, sum(name.endswith('/ExponentialMovingAverage') for name in names)
