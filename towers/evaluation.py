"""Metrics over a whole data set, on all towers, exact whether or not the batches divide."""

import collections

import tensorflow.compat.v1 as tf

from towers.build import build_towers
from towers.errors import InvalidArgumentError


class Evaluation:
    """A model function that is evaluated on every example of a data set, once.

    The towers share the variables of an earlier build. Each batch is cut into shards weighted by
    their size (`remainder='weight'`), and batches are weighted by their size in turn:

        metric = sum_b n_b * metric_b / sum_b n_b

    so that a short last batch, or one with fewer examples than towers, counts just its examples.

    Attributes:
      built: the `BuiltTowers` of the evaluation.
    """

    def __init__(self, model_fn, dataset, trained, name='eval_tower'):
        """
        Args:
          model_fn: as for `build_towers`; its `metrics` are scalars, means over the shard.
          dataset: a `tf.data.Dataset` that ends, of batches `(inputs..., )` as `model_fn` takes.
          trained: the `BuiltTowers` whose variables, devices and placement are used.
          name: prefix of the towers' name scopes.

        Raises:
          InvalidArgumentError: the model function has neither a loss nor metrics.
        """
        with tf.device('/cpu:0'):
            self._iterator = tf.data.make_initializable_iterator(dataset)
            batch = self._iterator.get_next()
            self._size = tf.shape(tf.nest.flatten(batch)[0], out_type=tf.int64)[0]
        self.built = build_towers(
            model_fn, batch, None, trained.devices, remainder='weight', reuse=trained, name=name,
            variable_device=trained.placement.main, check_devices=False,
            allow_repeated_devices=True)
        self._metrics = dict(self.built.metrics)
        if self.built.loss is not None:
            self._metrics['loss'] = self.built.loss
        if not self._metrics:
            raise InvalidArgumentError('the model function returned neither a loss nor metrics: '
                                       'there is nothing to evaluate.')

    def run(self, session):
        """Goes through the data set once.

        Args:
          session: a session with the variables initialised; a raw one, not a monitored one, whose
            hooks would take this for training steps.

        Returns:
          Dict from metric names, `'loss'` and `'examples'` (how many there were) to numbers.
        """
        session.run(self._iterator.initializer)
        totals, examples = collections.defaultdict(float), 0
        while True:
            try:
                size, values = session.run([self._size, self._metrics])
            except tf.errors.OutOfRangeError:
                break
            examples += int(size)
            for name, value in values.items():
                totals[name] += float(value) * int(size)
        result = {name: total / examples for name, total in totals.items()}
        result['examples'] = examples
        return result


class EvaluationHook(tf.train.SessionRunHook):
    """Evaluates at the end of training, and every so many steps when asked.

    Attributes:
      latest: dict of the latest evaluation, or None.
    """

    def __init__(self, evaluation, global_step, every_steps=None):
        self.latest = None
        self._evaluation = evaluation
        self._global_step = global_step
        self._every_steps = every_steps

    def after_run(self, run_context, run_values):
        """Evaluates when the step is one of every `every_steps`."""
        if self._every_steps:
            step = int(run_context.session.run(self._global_step))
            if step % self._every_steps == 0:
                self.latest = self._evaluation.run(run_context.session)

    def end(self, session):
        """Evaluates the final weights."""
        self.latest = self._evaluation.run(session)
