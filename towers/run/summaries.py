"""TensorBoard summaries of a training with towers."""

import collections
import os
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import (
    check_count,
    check_flag,
    check_instance,
    check_number,
    check_step_variable,
    directory_name,
    scalar_tensors,
)
from towers.errors import InvalidArgumentError
from towers.model.objectives import all_pairs, with_parts
from towers.placement.variable_device import only_device


def default_summaries(built: typing.Any, learning_rate: typing.Any = None,
                      norms: bool = True) -> typing.List[tf.Tensor]:
    """The summaries of a training. Makes operations: to be called before the session is made.

        train/loss             `BuiltTowers.loss`
        train/learning_rate    if given
        train/gradient_norm    sqrt(sum_v |g_v|^2) of the gradients that the optimizer gets; rows of
                               a sparse gradient that occur several times are summed first
        train/weight_norm      the same of the variables that have a gradient, read during the step
        train/noise_scale      of the towers' gradients, where they tell it

    and those that the model function made in the first tower, of its shard.

    Args:
      built: `BuiltTowers`, of a training.
      learning_rate: scalar tensor (or a number), or None.
      norms: whether to write norms and the noise scale.

    Returns:
      List of string tensors, as `tf.summary.scalar` returns one: for `SummaryHook`, or TensorFlow's
      `SummarySaverHook`. Others, of `tf.summary.histogram` say, may be added.

    Raises:
      InvalidArgumentError: `built` was built without an optimizer; a learning rate that is no
        number.
    """
    if isinstance(built, type) or not hasattr(built, 'train_op'):
        raise InvalidArgumentError('built=%.80r: expected the result of build_towers.' % (built,))
    if built.train_op is None:
        raise InvalidArgumentError('these towers were built without an optimizer: there is no '
                                   'training to make summaries of.')
    check_flag('norms', norms)
    if isinstance(learning_rate, (tf.Tensor,) + compat.VARIABLE_TYPES):
        scalar_tensors('learning_rate', {'rate': learning_rate})
    elif learning_rate is not None:
        check_number('learning_rate', learning_rate, expected='a scalar tensor, a number, or None')
        learning_rate = float(learning_rate)
    values = dict(with_parts('loss', built.loss))
    with tf.name_scope('summaries/'):
        if learning_rate is not None:
            values['learning_rate'] = learning_rate
        if norms:
            values.update(_norms(built))
        with tf.device('/cpu:0'):
            numbers = [tf.cast(value, tf.float32) for value in values.values()]
            of_training = tf.raw_ops.ScalarSummary(
                tags=['train/' + name for name in values], values=tf.stack(numbers))
    of_model = [summary for summary in tf.get_collection(tf.GraphKeys.SUMMARIES)
                if built.towers[0].has(summary.op.name)]
    return [of_training] + of_model


Sums = typing.List[typing.Tuple[list, tf.Variable]]
"""Sums of gradients or weights: the tensors to be added, and the variable of their device."""


def _norms(built: typing.Any) -> typing.Dict[str, tf.Tensor]:
    """From names to the norms of gradients and weights, and the noise scale if it is known, of a
    build."""
    sums: typing.Dict[str, Sums] = {}
    for name, pairs in with_parts('gradient_norm', built.gradients):
        sums[name] = [([gradient], variable) for gradient, variable in pairs
                      if gradient is not None]
    trained = {variable.op.name: variable for gradient, variable in all_pairs(built.gradients)
               if gradient is not None}
    sums['weight_norm'] = [([variable], variable) for variable in trained.values()]
    norms = {}
    with only_device(built.placement.main):
        for name, its_sums in sums.items():
            norms[name] = tf.sqrt(_squares(its_sums, built.placement))
    noise_scale = _noise_scale(built)
    if noise_scale is not None:
        norms['noise_scale'] = noise_scale
    return norms


def _is_summary(given: typing.Any) -> bool:
    """Whether something given may be a summary: a tensor of strings."""
    return isinstance(given, tf.Tensor) and given.dtype == tf.string


class SummaryHook(tf.train.SessionRunHook):
    """Writes summaries at each multiple of `summary_steps` steps, and the results of evaluations.

    As `tf.train.SummarySaverHook`, it fetches them with the step itself, without a second forward
    pass. Each start writes a new file that begins with `SessionLog.START` at the step after the
    restored one, at which TensorBoard drops the later steps of earlier files.
    """

    def __init__(self, summaries: typing.Sequence[tf.Tensor],
                 global_step: tf.Variable, logdir: str, summary_steps: int = 100,
                 *, graph: typing.Union[None, tf.Graph, tf.GraphDef] = None):
        """
        Args:
          summaries: list of summaries, such as `default_summaries` returns.
          global_step: the variable that counts steps.
          logdir: folder of the event files.
          summary_steps: steps from one summary to the next.
          graph: a `tf.Graph` or `tf.GraphDef` for TensorBoard to draw, written once; or None.

        Raises:
          InvalidArgumentError: an argument of another kind.
        """
        is_list = isinstance(summaries, (list, tuple))
        if not is_list or not all(map(_is_summary, summaries)):
            raise InvalidArgumentError('summaries=%.80r: expected a list of what tf.summary.scalar '
                                       'and the like return.' % (summaries,))
        check_step_variable(global_step)
        check_count('summary_steps', summary_steps)
        if graph is not None:
            check_instance('graph', graph, (tf.Graph, tf.GraphDef), 'a tf.Graph, or None')
        self._summaries = list(summaries)
        self._global_step = global_step
        self._logdir = directory_name('logdir', logdir)
        self._summary_steps = summary_steps
        self._graph = graph
        self._writer: typing.Any = None
        self._step = 0  # counted, as if each run of the session did one step

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Opens an event file and writes its `SessionLog.START`."""
        self._step = int(session.run(self._global_step))
        if self._writer is None:
            # The name of an event file has the second and the host: without more TF 1.15 would
            # overwrite the file of a run that ended within the same second.
            self._writer = tf.summary.FileWriter(
                self._logdir, filename_suffix='.from_%d.%d' % (self._step, os.getpid()))
            if self._graph is not None:
                self._writer.add_graph(self._graph, self._step)
        # From the next step on: the summaries of this one were written before its checkpoint.
        self._writer.add_session_log(tf.SessionLog(status=tf.SessionLog.START), self._step + 1)

    def before_run(self, run_context: tf.train.SessionRunContext
                   ) -> typing.Optional[tf.train.SessionRunArgs]:
        """Fetches the summaries if they are due after the coming step."""
        self._step += 1
        if self._step % self._summary_steps:
            return None
        return tf.train.SessionRunArgs(self._summaries)

    def after_run(self, run_context: tf.train.SessionRunContext,
                  run_values: tf.train.SessionRunValues) -> None:
        """Writes the summaries that were fetched."""
        if run_values.results is None:
            return
        self._step = int(run_context.session.run(self._global_step))
        for summary in run_values.results:
            self._writer.add_summary(summary, self._step)
        self._writer.flush()  # before a checkpoint of this step is saved

    def evaluated(self, step: int, results: dict, seconds: float = 0.) -> None:
        """Writes the results of an evaluation of a step: `test/accuracy`, ….

        Raises:
          InvalidArgumentError: the hook is of no session yet, or the results are no dict.
        """
        if self._writer is None:
            raise InvalidArgumentError('a SummaryHook writes from the moment that its session is '
                                       'made: put it among the hooks of the session.')
        check_instance('results', results, dict, 'a dict from names to numbers')
        summary = tf.Summary()
        for key, value in results.items():
            if key != 'examples':
                summary.value.add(tag='test/' + key, simple_value=float(value))
        self._writer.add_summary(summary, step)
        self._writer.flush()


def _noise_scale(built: typing.Any) -> typing.Optional[tf.Tensor]:
    """The gradient noise scale of a build, a float64: the number of examples in a batch beyond
    which more help little.

    McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1. The
    gradients of N equal shards of a batch of B examples give without another pass

        small = the mean of |G_k|^2,  big = |the mean of G_k|^2    G_k: of shard k's mean loss,
                                                                   with the regularization
        |G|^2 = (N big - small) / (N - 1)          an estimate of the true gradient's square
        S     = B (small - big) / (N - 1)          of the trace of one example's covariance
        noise scale = S / |G|^2

    Of one step this is a rough figure, and may be negative: look at it smoothed.

    Returns:
      It; None where the gradients do not tell it: of fewer than two shards, or of sizes that differ
      or are not known; of micro-batches, of which all gradients would be in memory at once; of
      several losses; of replicas.
    """
    towers = built.towers
    if not _are_equal_shards(towers) or isinstance(built.gradients, dict):
        return None
    variables = {}
    gradients_of = collections.defaultdict(list)  # by the name of the variable, one a tower
    for tower in towers:
        for gradient, variable in tower.gradients:
            if gradient is not None:
                variables[variable.op.name] = variable
                gradients_of[variable.op.name].append(gradient)
    counts = {len(gradients) for gradients in gradients_of.values()}
    if counts != {len(towers)}:
        return None
    # Each tower's gradient is its share of the sum: G_k and their mean are N times as large, but
    # for a factor that they have in common.
    count = len(towers)
    shards: Sums = []
    sums: Sums = []
    for name, gradients in gradients_of.items():
        shards += [([gradient], variables[name]) for gradient in gradients]
        sums.append((gradients, variables[name]))
    with only_device(built.placement.main):
        small = count * _squares(shards, built.placement)
        big = _squares(sums, built.placement)
        return count * towers[0].size * (small - big) / (count * big - small)


def _are_equal_shards(towers: typing.Sequence[typing.Any]) -> bool:
    """Whether towers are several, of one known size, and without micro-batches."""
    sizes = {tower.size for tower in towers}
    if len(towers) < 2 or len(sizes) > 1 or not isinstance(towers[0].size, int):
        return False
    return not any(tower.micro_batch for tower in towers)


def _squares(sums: Sums, placement: typing.Any) -> tf.Tensor:
    """The sum of all squares of some sums, each computed on the device of its variable; `placement`
    is of the build."""
    squares = []
    for tensors, variable in sums:
        with placement.scope_of(variable):
            squares.append(_squared_norm_of_sum(tensors))
    return tf.add_n(squares)


def _squared_norm_of_sum(tensors: list) -> tf.Tensor:
    """The sum of squares of a sum of tensors, a float64 scalar: sums over hundreds of variables are
    exact enough in float64. Rows of `IndexedSlices` that occur several times are summed first."""
    if all(isinstance(each, tf.IndexedSlices) for each in tensors):
        rows, places = tf.unique(tf.concat([each.indices for each in tensors], 0))
        tensor = tf.math.unsorted_segment_sum(tf.concat([each.values for each in tensors], 0),
                                              places, tf.size(rows))
    else:
        tensor = tf.add_n([tf.convert_to_tensor(each) for each in tensors])
    if tensor.dtype in (tf.float16, tf.bfloat16):
        tensor = tf.cast(tensor, tf.float32)
    return 2. * tf.cast(tf.nn.l2_loss(tensor), tf.float64)
