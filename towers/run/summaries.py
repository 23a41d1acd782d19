"""TensorBoard summaries of a training with towers."""

import os
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.built import BuiltTowers
from towers.arguments import (
    check_count,
    check_flag,
    check_instance,
    check_number,
    check_step_variable,
    checked_path,
    scalar_tensors,
)
from towers.errors import InvalidArgumentError
from towers.model.objectives import with_parts
from towers.placement.variable_device import Placement, only_device


def default_summaries(built: BuiltTowers, learning_rate: typing.Any = None,
                      norms: bool = True) -> typing.List[tf.Tensor]:
    """Makes the summaries of a training; to be called before the session is made.

        train/loss             `BuiltTowers.loss`
        train/learning_rate    if given
        train/gradient_norm    sqrt(sum_v |g_v|^2) of the gradients that the optimizer gets; rows of
                               a sparse gradient that occur several times are summed first
        train/weight_norm      the same of the variables that have a gradient, read during the step
        train/noise_scale      the gradient noise scale, where the towers' gradients tell it

    and those that the model function made in the first tower, of its shard.

    Args:
      built: `BuiltTowers` with an optimizer.
      learning_rate: scalar tensor (or a number), or None.
      norms: whether to write norms and the noise scale.

    Returns:
      A list of string tensors such as `tf.summary.scalar` returns, for `SummaryHook`, or for
      TensorFlow's `SummarySaverHook`. Others, such as one of `tf.summary.histogram`, may be added.

    Raises:
      InvalidArgumentError: `built` was built without an optimizer; the learning rate is no number;
        or the model has a scalar of one of these names.
    """
    check_instance('built', built, BuiltTowers, 'the result of build_towers')
    if built.train_op is None:
        raise InvalidArgumentError('these towers were built without an optimizer: there is no '
                                   'training to make summaries of.')
    check_flag('norms', norms)
    values = dict(with_parts('loss', built.loss))
    if learning_rate is not None:
        values['learning_rate'] = _checked_rate(learning_rate)
    model_summaries = [summary for summary in tf.get_collection(tf.GraphKeys.SUMMARIES)
                       if built.towers[0].has(summary.op.name)]
    with tf.name_scope('summaries/'):  # with '/', a second call goes on in this scope
        if norms:
            values.update(_norms(built))
        with tf.device('/cpu:0'):
            tags = ['train/' + name for name in values]
            _check_tags_are_new(tags, model_summaries)
            numbers = [tf.cast(value, tf.float32) for value in values.values()]
            # One operation for all numbers, where `tf.summary.scalar` makes one for each.
            training_summary = tf.raw_ops.ScalarSummary(tags=tags, values=tf.stack(numbers))
    return [training_summary] + model_summaries


def _check_tags_are_new(tags: typing.Iterable[str],
                        model_summaries: typing.Iterable[tf.Tensor]) -> None:
    """Raises `InvalidArgumentError` if the model has a scalar under one of these tags: TensorBoard
    would draw both numbers as one curve."""
    tags_of_model: typing.Set[str] = set()
    for summary in model_summaries:
        if summary.op.type == 'ScalarSummary':
            static_tags = tf.get_static_value(summary.op.inputs[0])  # None for computed tags
            if static_tags is not None:
                tags_of_model.update(tag.decode('utf-8') for tag in np.ravel(static_tags))
    for tag in tags:
        if tag in tags_of_model:
            raise InvalidArgumentError('the model has a summary %r of its own, which '
                                       'default_summaries makes, too: give it another name.' % tag)


def _checked_rate(learning_rate: typing.Any) -> typing.Any:
    """A learning rate as a scalar tensor, a variable or a float.

    Raises:
      InvalidArgumentError: the learning rate is no number.
    """
    if isinstance(learning_rate, (tf.Tensor,) + compat.VARIABLE_TYPES):
        scalar_tensors('learning_rate', {'rate': learning_rate})  # raises if it is none
        return learning_rate
    check_number('learning_rate', learning_rate, expected='a scalar tensor, a number, or None')
    return float(learning_rate)


class _Sum(typing.NamedTuple):
    """A sum that is still to be computed.

    Attributes:
      tensors: the tensors to be added: gradients of a variable, or the variable alone.
      variable: the variable, on whose device they are added.
    """
    tensors: list
    variable: tf.Variable


def _norms(built: BuiltTowers) -> typing.Dict[str, tf.Tensor]:
    """The norms of gradients and weights of a build, and the noise scale if it is known, by name.

    Each loss has a norm of its gradients, `gradient_norm` and the like.
    """
    trained: typing.Dict[str, tf.Variable] = {}
    sums_by_norm: typing.Dict[str, typing.List[_Sum]] = {}
    for name, pairs in with_parts('gradient_norm', built.gradients):
        sums_by_norm[name] = []
        for gradient, variable in pairs:
            if gradient is not None:
                sums_by_norm[name].append(_Sum([gradient], variable))
                trained[variable.op.name] = variable
    # A weight is a sum of one tensor, the variable itself.
    sums_by_norm['weight_norm'] = [_Sum([variable], variable) for variable in trained.values()]
    norms = {}
    with only_device(built.placement.main):
        for name, sums in sums_by_norm.items():
            norms[name] = tf.sqrt(_sum_of_squares(sums, built.placement))
    noise_scale = _noise_scale(built)
    if noise_scale is not None:
        norms['noise_scale'] = noise_scale
    return norms


def _is_summary(given: typing.Any) -> bool:
    """Whether a value may be a summary: a tensor of strings."""
    return isinstance(given, tf.Tensor) and given.dtype == tf.string


class SummaryHook(tf.train.SessionRunHook):
    """Writes summaries at each multiple of `summary_steps` steps, and the results of evaluations.

    It fetches them with the step itself, without a second forward pass, as
    `tf.train.SummarySaverHook` does. Each start writes a new file that begins with
    `SessionLog.START` at the step after the restored one: TensorBoard then drops the later steps of
    earlier files.
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
        self._logdir = checked_path('logdir', logdir)
        self._summary_steps = summary_steps
        self._graph = graph
        self._writer: typing.Any = None
        self._step = 0  # counts runs of the session, until the global step is read

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Opens an event file and writes its `SessionLog.START`."""
        self._step = int(session.run(self._global_step))
        if self._writer is None:  # else the session was lost, and this is another one
            # TF names an event file by the second and the host. Without the suffix, TF 1.15 would
            # overwrite the file of a run that ended within the same second.
            self._writer = tf.summary.FileWriter(
                self._logdir, filename_suffix='.from_%d.%d' % (self._step, os.getpid()))
            if self._graph is not None:
                self._writer.add_graph(self._graph, self._step)
        # TensorBoard drops what earlier files have of this step and later ones. Of the restored
        # step they have summaries that hold: they were written before its checkpoint.
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
        if run_values.results is None:  # no summaries were due
            return
        self._step = int(run_context.session.run(self._global_step))
        for summary in run_values.results:
            self._writer.add_summary(summary, self._step)
        self._writer.flush()  # before a checkpoint of this step is saved

    def evaluated(self, step: int, results: dict, seconds: float = 0.) -> None:
        """Writes the results of an evaluation as `test/accuracy` and the like.

        Args:
          step: the step that was evaluated.
          results: dict from names to numbers, as `Evaluation.run` returns it.
          seconds: how long the evaluation took; it is not written.

        Raises:
          InvalidArgumentError: the session of the hook is not made yet, or the results are no dict.
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


def _noise_scale(built: BuiltTowers) -> typing.Optional[tf.Tensor]:
    """The gradient noise scale of a build: above this number of examples in a batch, more examples
    help little.

    McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1. The
    gradients of N equal shards of a batch of B examples give without another pass

        small = the mean of |G_k|^2,  big = |the mean of G_k|^2    G_k: of shard k's mean loss,
                                                                   with the regularization
        |G|^2 = (N big - small) / (N - 1)          an estimate of the true gradient's square
        S     = B (small - big) / (N - 1)          of the trace of one example's covariance
        noise scale = S / |G|^2

    The value of one step is a rough figure, and may be negative: look at it smoothed.

    Returns:
      A float64 scalar. None where the gradients do not tell it: there is one shard, or shards have
      different or unknown sizes; there are micro-batches, whose gradients would all be in memory at
      once; there are several losses, or replicas.
    """
    towers = built.towers
    has_several_losses = isinstance(built.gradients, dict)
    if has_several_losses or not _are_equal_shards(towers):
        return None
    sums_over_towers = _sums_over_towers(towers)
    num_towers = len(towers)
    for sum_of_variable in sums_over_towers:
        # A variable may have a gradient in some towers only. With replicas each tower has variables
        # of its own, with one gradient each.
        if len(sum_of_variable.tensors) != num_towers:
            return None
    gradients_of_towers = []
    for gradients, variable in sums_over_towers:
        gradients_of_towers += [_Sum([gradient], variable) for gradient in gradients]
    if not gradients_of_towers:  # no variable has a gradient
        return None
    # A tower's gradient is G_k / N, for the weight of its shard, times a factor c that all towers
    # have in common, as N with the reduction 'sum'. So `small` and `big` are the formula's, times
    # c^2, which cancels out.
    with only_device(built.placement.main):
        small = num_towers * _sum_of_squares(gradients_of_towers, built.placement)
        big = _sum_of_squares(sums_over_towers, built.placement)
        return num_towers * towers[0].size * (small - big) / (num_towers * big - small)


def _sums_over_towers(towers: typing.Sequence[typing.Any]) -> typing.List[_Sum]:
    """For each variable the sum of its gradients in all towers that have one."""
    sums: typing.Dict[str, _Sum] = {}
    for tower in towers:
        for gradient, variable in tower.gradients:
            if gradient is not None:
                sum_of_variable = sums.setdefault(variable.op.name, _Sum([], variable))
                sum_of_variable.tensors.append(gradient)
    return list(sums.values())


def _are_equal_shards(towers: typing.Sequence[typing.Any]) -> bool:
    """Whether there are several towers, with shards of one known size, without micro-batches."""
    sizes = {tower.size for tower in towers}
    is_one_known_size = len(sizes) == 1 and isinstance(towers[0].size, int)
    has_micro_batches = any(tower.micro_batch for tower in towers)
    return len(towers) > 1 and is_one_known_size and not has_micro_batches


def _sum_of_squares(sums: typing.Iterable[_Sum], placement: Placement) -> tf.Tensor:
    """The sum of the squares of all entries of some sums, a float64 scalar.

    Args:
      sums: the sums; each is computed on the device of its variable.
      placement: the placement of the variables.
    """
    squares = []
    for tensors, variable in sums:
        with placement.scope_of(variable):
            squares.append(_squared_norm_of_sum(tensors))
    return tf.add_n(squares)


def _squared_norm_of_sum(tensors: list) -> tf.Tensor:
    """The sum of the squares of the entries of a sum of tensors, a float64 scalar.

    Rows of `IndexedSlices` that occur several times are summed first. The type is float64 since
    sums over hundreds of variables are not exact enough in float32.
    """
    if all(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        indices = tf.concat([slices.indices for slices in tensors], 0)
        values = tf.concat([slices.values for slices in tensors], 0)
        rows, index_of_row = tf.unique(indices)
        total = tf.math.unsorted_segment_sum(values, index_of_row, tf.size(rows))
    else:
        total = tf.add_n(list(map(tf.convert_to_tensor, tensors)))
    if total.dtype in (tf.float16, tf.bfloat16):  # whose squares overflow, or lose digits
        total = tf.cast(total, tf.float32)
    return 2. * tf.cast(tf.nn.l2_loss(total), tf.float64)  # l2_loss is half the sum of squares
