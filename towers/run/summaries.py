"""TensorBoard summaries of a training with towers, under the model's own names."""

import collections
import os
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import (check_count, check_flag, check_instance, check_number, directory_name,
                              scalar_tensors)
from towers.errors import InvalidArgumentError
from towers.placement.variable_device import only_device
from towers.run.noise_scale import noise_scale
from towers.run.step_clock import SaveListener, StepClock, StepCounts, rate
from towers.run.step_loop import OccasionalHook
from towers.tower.objectives import all_pairs, with_parts


class Summaries(collections.namedtuple('Summaries', 'scalars weights custom')):
    """The summaries that `SummaryHook` writes.

    Attributes:
      scalars: dict from tags to scalar tensors, fetched with the step.
      weights: dict from tags to scalar tensors that depend on variables alone, fetched after it.
      custom: the model's own summaries, a string tensor with a serialized `tf.Summary`; or None.
    """
    __slots__ = ()


def default_summaries(built: typing.Any, learning_rate: typing.Any = None, norms: bool = True,
                      scalars: typing.Optional[dict] = None,
                      custom: typing.Sequence = ()) -> Summaries:
    """The summaries of a training. Makes operations: to be called before the session is made.

        loss                      `BuiltTowers.loss`
        learning_rate             if given
        gradient_norm             sqrt(sum_v |g_v|^2) of the gradients that the optimizer gets; rows
                                  of a sparse gradient that occur several times are summed first
        weight_norm               the same of the variables that have a gradient
        noise_scale               of the towers' gradients, where they tell it, see `noise_scale`

    Args:
      built: `BuiltTowers`, of a training.
      learning_rate: scalar tensor (or a number), or None.
      norms: whether to write norms.
      scalars: dict from further tags to scalar tensors.
      custom: list of results of `tf.summary.scalar`, `histogram`, `image`, …. Those that the model
        function made in the first tower, of its shard, are written in any case.

    Returns:
      `Summaries`.

    Raises:
      InvalidArgumentError: `built` was built without an optimizer; a learning rate that is no
        number; a `custom` that is no list of summaries.
    """
    if isinstance(built, type) or not hasattr(built, 'train_op'):
        raise InvalidArgumentError('built=%.80r: expected what build_towers returned.' % (built,))
    if built.train_op is None:
        raise InvalidArgumentError('these towers were built without an optimizer: there is no '
                                   'training to make summaries of.')
    scalars = scalar_tensors('scalars', {} if scalars is None else scalars)
    check_flag('norms', norms)
    if not isinstance(custom, (list, tuple)) or not all(
            isinstance(each, tf.Tensor) and each.dtype == tf.string for each in custom):
        raise InvalidArgumentError('custom=%.80r: expected a list of what tf.summary.scalar and '
                                   'the like return.' % (custom,))
    learning_rate = _checked_rate(learning_rate)
    fetched = collections.OrderedDict(with_parts('loss', built.loss))
    weights = collections.OrderedDict()
    with tf.name_scope('summaries/'):
        if learning_rate is not None:
            fetched['learning_rate'] = tf.convert_to_tensor(learning_rate)
        if norms:
            for tag, pairs in with_parts('gradient_norm', built.gradients):
                pairs = [(gradient, variable) for gradient, variable in pairs
                         if gradient is not None]
                fetched[tag] = _norm(pairs, built.placement)
            trained = list({variable.op.name: variable for gradient, variable
                            in all_pairs(built.gradients) if gradient is not None}.values())
            weights['weight_norm'] = _norm([(variable, variable) for variable in trained],
                                           built.placement)
            noise = noise_scale(built, _squared_norm_of_sum)
            if noise is not None:
                fetched['noise_scale'] = noise
        fetched.update(scalars)
        custom = list(custom) + [summary for summary in tf.get_collection(tf.GraphKeys.SUMMARIES)
                                 if built.towers[0].has(summary.op.name)]
        with tf.device(None):
            merged = tf.summary.merge(custom, collections=[]) if custom else None
    return Summaries(fetched, weights, merged)


def _checked_rate(rate):
    """The learning rate: a scalar tensor, a number, or None.

    Raises:
      InvalidArgumentError: something else.
    """
    if isinstance(rate, (tf.Tensor,) + compat.VARIABLE_TYPES):
        return scalar_tensors('learning_rate', {'rate': rate})['rate']
    if rate is not None:
        check_number('learning_rate', rate, expected='a scalar tensor, a number, or None')
    return rate


class SummaryHook(OccasionalHook):
    """Writes summaries at each multiple of `summary_steps` steps and at the last step.

    They are fetched with the step itself, without a second forward pass; norms of weights are
    computed after it, from the updated weights. `images_per_second` and the results of evaluations
    (`evaluated`) are added. Where the model itself has a summary with a tag of these, its own keeps
    the tag, and the one here becomes `towers/<tag>`.

    Each start writes a new file that begins with `SessionLog.START` at the step after the restored
    one, at which TensorBoard drops the later steps of earlier files.

    Attributes:
      listener: a `CheckpointSaverListener` to be given to the hook that saves: it flushes the file
        before each checkpoint.
    """

    def __init__(self, summaries: Summaries, counts: StepCounts, logdir: str,
                 summary_steps: int = 100, *,
                 graph: typing.Union[None, tf.Graph, tf.GraphDef] = None):
        """
        Args:
          summaries: `Summaries`.
          counts: `StepCounts`, whose `last_step`, if given, is written whatever its number.
          logdir: folder of the event files.
          summary_steps: steps from one summary to the next.
          graph: a `tf.Graph` or `tf.GraphDef` for TensorBoard to draw, written once; or None.

        Raises:
          InvalidArgumentError: a number below 1, or missing; a `logdir` that is a file.
        """
        check_instance('summaries', summaries, Summaries, 'what default_summaries returned')
        check_instance('counts', counts, StepCounts, 'StepCounts')
        check_count('summary_steps', summary_steps)
        if counts.last_step is not None:
            check_count('last_step', counts.last_step)
        scalar_tensors('scalars', summaries.scalars)
        logdir = directory_name('logdir', logdir)
        if os.path.exists(logdir) and not os.path.isdir(logdir):
            raise InvalidArgumentError('logdir=%r is a file: expected the name of a directory.'
                                       % logdir)
        if graph is not None:
            check_instance('graph', graph, (tf.Graph, tf.GraphDef), 'a tf.Graph, or None')
        fetches = {'scalars': dict(summaries.scalars)}
        if summaries.custom is not None:
            fetches['custom'] = summaries.custom
        self._arguments = tf.train.SessionRunArgs(fetches)
        self._summaries = summaries
        self._logdir = logdir
        self._summary_steps = summary_steps
        self._last_step = counts.last_step
        self._graph = graph
        self._clock = StepClock(counts)
        self.listener = SaveListener(self._clock, self._before_save)
        self._writer = None
        self._writes = False
        self._since = 0
        self._mark = None

    def after_create_session(self, session, coord):
        """Opens an event file and writes its `SessionLog.START`."""
        self._clock.restart(session)
        step = self._clock.step
        self._since, self._mark, self._writes = step, None, False
        if self._writer is None:
            # The name of an event file has the second and the host: without more TF 1.15 would
            # overwrite the file of a run that ended within the same second.
            self._writer = tf.summary.FileWriter(
                self._logdir, filename_suffix='.from_%d.%d' % (step, os.getpid()))
            if self._graph is not None:
                is_graph = isinstance(self._graph, tf.Graph)
                self._writer.add_graph(self._graph if is_graph else None, step,
                                       None if is_graph else self._graph)
        # From the next step on: the summaries of `step` itself were written before its checkpoint.
        self._writer.add_session_log(tf.SessionLog(status=tf.SessionLog.START), step + 1)

    def before_run(self, run_context):
        """Fetches the summaries if they are due after the coming step."""
        self._writes = self.is_due()
        return self._arguments if self._writes else None

    def after_run(self, run_context, run_values):
        """Counts the step, and writes its summaries if they are due."""
        clock = self._clock
        self._count()
        if not self._writes:
            return
        clock.read(run_context.session)
        if not clock.passed(self._since, self._summary_steps, self._last_step):
            return
        self._since = clock.step
        values = dict(run_values.results['scalars'])
        if self._summaries.weights:
            values.update(run_context.session.run(dict(self._summaries.weights)))
        values['images_per_second'] = rate(self._mark, clock.mark)
        self._mark = clock.mark
        summary = tf.Summary.FromString(run_values.results.get('custom', b''))
        taken = {value.tag for value in summary.value}
        for tag, value in values.items():
            if value is not None:
                summary.value.add(tag='towers/' + tag if tag in taken else tag,
                                  simple_value=float(value))
        self._writer.add_summary(summary, clock.step)

    def is_due(self):
        """Whether summaries of the coming step are written."""
        return self._clock.comes_to(self._summary_steps, self._last_step)

    def step_done(self, fetched):
        """Counts a step without summaries."""
        self._count()

    def end(self, session):
        """Flushes the file."""
        self._writer.flush()

    def evaluated(self, step, results, seconds=0., name='test'):
        """Writes the results of an evaluation: `test/accuracy`, ….

        Args:
          step: the step whose weights were evaluated.
          results: dict from names to numbers, as `Evaluation.run` returns it.
          seconds: duration of the evaluation; left out of `images_per_second`.
          name: prefix of the tags of the results.
        """
        self._clock.away(seconds)
        self._writer.add_summary(tf.Summary(value=[
            tf.Summary.Value(tag='%s/%s' % (name, key), simple_value=float(value))
            for key, value in results.items() if key != 'examples']), step)
        self._writer.flush()

    def _count(self):
        self._clock.count()
        if self._mark is None:
            self._mark = self._clock.mark

    def _before_save(self, unused_step):
        if self._writer is not None:
            self._writer.flush()


def _norm(pairs, placement):
    """The norm of all tensors together, computed on the devices of the variables.

    Args:
      pairs: list of (tensor, variable).
      placement: `BuiltTowers.placement`.
    """
    squares = []
    for tensor, variable in pairs:
        with placement.scope_of(variable):
            squares.append(_squared_norm(tensor))
    with only_device(placement.main):
        return tf.sqrt(tf.add_n(squares))


def _squared_norm_of_sum(tensors):
    """`_squared_norm` of the sum of tensors, or of the rows of `IndexedSlices` together."""
    if all(isinstance(each, tf.IndexedSlices) for each in tensors):
        return _squared_norm(tf.IndexedSlices(tf.concat([each.values for each in tensors], 0),
                                              tf.concat([each.indices for each in tensors], 0)))
    return _squared_norm(tf.add_n([tf.convert_to_tensor(each) for each in tensors]))


def _squared_norm(tensor):
    """The sum of squares of a tensor, a float64 scalar: sums over hundreds of variables are exact
    enough in float64. Rows of `IndexedSlices` that occur several times are summed first."""
    if isinstance(tensor, tf.IndexedSlices):
        rows, places = tf.unique(tensor.indices)
        tensor = tf.math.unsorted_segment_sum(tensor.values, places, tf.size(rows))
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype in (tf.float16, tf.bfloat16):
        tensor = tf.cast(tensor, tf.float32)
    return 2. * tf.cast(tf.nn.l2_loss(tensor), tf.float64)
