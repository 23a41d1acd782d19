"""TensorBoard summaries of a training with towers: one set, under the model's own names."""

import collections
import os
import re
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import (check_count, check_flag, check_instance, check_number, directory_name,
                              scalar_tensors)
from towers.errors import InvalidArgumentError
from towers.placement.variable_device import only_device
from towers.run.step_clock import SaveListener, StepClock, rate
from towers.run.step_loop import OccasionalHook
from towers.tower.objectives import all_pairs, with_parts


class Summaries(collections.namedtuple('Summaries', 'scalars weights custom tower_scope')):
    """The summaries that `SummaryHook` writes.

    Attributes:
      scalars: dict from tag to scalar tensor, computed along with the step.
      weights: dict from tag to scalar tensor that reads nothing but variables, computed after it.
      custom: a string tensor, a serialized `tf.Summary` of the model's own; or None.
      tower_scope: name scope to be taken out of the custom tags, such as `'tower_0/'`.
    """
    __slots__ = ()


def default_summaries(built: typing.Any, learning_rate: typing.Any = None, norms: bool = True,
                      norm_of_each: bool = False, scalars: typing.Optional[dict] = None,
                      custom: typing.Sequence = ()) -> Summaries:
    """Summaries of a built training. Makes operations, so call it before the session is made.

        loss                      over all towers, as `BuiltTowers.loss`
        learning_rate             if given
        gradient_norm             sqrt(sum_v |g_v|^2) of the gradients that the optimizer gets; rows
                                  of a sparse gradient that occur several times are summed first
        weight_norm               the same of the variables that have a gradient
        gradient_norm/<variable>, weight_norm/<variable>      if `norm_of_each`

    Args:
      built: `BuiltTowers`, of a training.
      learning_rate: scalar tensor (or a number), or None.
      norms: whether to write norms.
      norm_of_each: whether to write those of each variable as well.
      scalars: dict from more tags to scalar tensors.
      custom: results of `tf.summary.scalar`, `histogram`, `image`, … to write besides those that
        the model function made in the first tower, which are of that tower's shard.

    Returns:
      `Summaries`.

    Raises:
      InvalidArgumentError: `built` has no loss, as it was built to evaluate; a rate that is no
        number; summaries that are none.
    """
    if isinstance(built, type) or not hasattr(built, 'train_op'):
        raise InvalidArgumentError('built=%.80r: expected what build_towers returned.' % (built,))
    if built.train_op is None:
        raise InvalidArgumentError('these towers were built without an optimizer: there is no '
                                   'training to make summaries of.')
    scalars = scalar_tensors('scalars', {} if scalars is None else scalars)
    for flag, value in (('norms', norms), ('norm_of_each', norm_of_each)):
        check_flag(flag, value)
    if not isinstance(custom, (list, tuple)) or not all(
            isinstance(each, tf.Tensor) and each.dtype == tf.string for each in custom):
        raise InvalidArgumentError('custom=%.80r: expected a list of what tf.summary.scalar and '
                                   'the like return.' % (custom,))
    learning_rate = _checked_rate(learning_rate)
    scope = built.towers[0].name_scope
    fetched = collections.OrderedDict(with_parts('loss', built.loss))
    weights = collections.OrderedDict()
    with tf.name_scope('summaries/'):
        if learning_rate is not None:
            fetched['learning_rate'] = tf.convert_to_tensor(learning_rate)
        if norms:
            for tag, pairs in with_parts('gradient_norm', built.gradients):
                pairs = [(gradient, variable) for gradient, variable in pairs
                         if gradient is not None]
                _add_norms(fetched, tag, pairs, built.placement, norm_of_each)
            trained = list({variable.op.name: variable for gradient, variable
                            in all_pairs(built.gradients) if gradient is not None}.values())
            _add_norms(weights, 'weight_norm', [(variable, variable) for variable in trained],
                       built.placement, norm_of_each)
        fetched.update(scalars)
        custom = list(custom) + [summary for summary in tf.get_collection(tf.GraphKeys.SUMMARIES)
                                 if summary.op.name.startswith(scope)]
        with tf.device(None):
            merged = tf.summary.merge(custom, collections=[]) if custom else None
    return Summaries(fetched, weights, merged, scope)


def _checked_rate(rate):
    if isinstance(rate, (tf.Tensor,) + compat.VARIABLE_TYPES):
        return scalar_tensors('learning_rate', {'rate': rate})['rate']
    if rate is not None:
        check_number('learning_rate', rate, expected='a scalar tensor, a number, or None')
    return rate


def without_tower(tag, scope):
    """A tag without a tower's part: `'train/tower_0/conv'` of scope `'train/tower_0/'` as
    `'train/conv'`. A family stands before the scope; any other tag is left as it is."""
    parts = scope.rstrip('/').split('/')
    outer = '/'.join(parts[:-1] + [''])
    return re.sub('(^|/)' + re.escape(scope), lambda match: match.group(1) + outer, tag, count=1)


class SummaryHook(OccasionalHook):
    """Writes summaries at each multiple of `summary_steps` steps and at the last step.

    They are fetched with the step itself, so there is no second forward pass; the norms of the
    weights are taken right after it, of the weights that it left. `images_per_second` and the
    results of evaluations (`evaluated`) join them. A tag of the model's own that is among those
    written here keeps its name, and the one here becomes `towers/<tag>`.

    A run that goes on from an earlier step writes a new file that begins with `SessionLog.START`,
    at which TensorBoard drops later steps of the earlier files.

    Attributes:
      listener: a `CheckpointSaverListener` to be given to the hook that saves: what was written up
        to a checkpoint is then in the file before it counts.
    """

    def __init__(self, summaries: typing.Any, global_step: typing.Optional[tf.Variable],
                 logdir: str, batch_size: int, summary_steps: int = 100,
                 last_step: typing.Optional[int] = None, examples: typing.Any = None,
                 graph: typing.Optional[tf.Graph] = None):
        """
        Args:
          summaries: `Summaries`.
          global_step: the variable that counts steps.
          logdir: folder of the event files.
          batch_size: examples a step.
          summary_steps: steps from one summary to the next.
          last_step: the step at which training ends, which is written whatever its number; or None.
          examples: variable that counts examples; None: the step times `batch_size`.
          graph: a `tf.Graph` for TensorBoard to draw, written once; or None.

        Raises:
          InvalidArgumentError: a number below 1; a `logdir` that is a file.
        """
        check_instance('summaries', summaries, Summaries, 'what default_summaries returned')
        check_count('summary_steps', summary_steps)
        if last_step is not None:
            check_count('last_step', last_step)
        scalar_tensors('scalars', summaries.scalars)
        logdir = directory_name('logdir', logdir)
        if os.path.exists(logdir) and not os.path.isdir(logdir):
            raise InvalidArgumentError('logdir=%r is a file: expected the name of a directory.'
                                       % logdir)
        if graph is not None:
            check_instance('graph', graph, tf.Graph, 'a tf.Graph, or None')
        fetches = {'scalars': dict(summaries.scalars)}
        if summaries.custom is not None:
            fetches['custom'] = summaries.custom
        self._arguments = tf.train.SessionRunArgs(fetches)
        self._summaries = summaries
        self._logdir = logdir
        self._summary_steps = summary_steps
        self._last_step = last_step
        self._graph = graph
        self._clock = StepClock(global_step, batch_size, examples)
        self.listener = SaveListener(self._clock, self._before_save)
        self._writer = None
        self._writes = False
        self._since = 0
        self._mark = None

    def after_create_session(self, session, coord):
        """Opens the event file and marks the step from which it goes on."""
        self._clock.restart(session)
        step = self._clock.step
        self._since, self._mark, self._writes = step, None, False
        if self._writer is None:
            # A file's name has the second and the host; TF 1.15 would write over that of a run
            # which ended within this second.
            self._writer = tf.summary.FileWriter(
                self._logdir, filename_suffix='.from_%d.%d' % (step, os.getpid()))
            if self._graph is not None:
                self._writer.add_graph(self._graph, step)
        # What was written of `step` itself is of before the checkpoint, and stays.
        self._writer.add_session_log(tf.SessionLog(status=tf.SessionLog.START), step + 1)

    def before_run(self, run_context):
        """Fetches the summaries when the next step is one to write."""
        self._writes = self.is_due()
        return self._arguments if self._writes else None

    def after_run(self, run_context, run_values):
        """Counts the step, and writes the summaries where it is one to write."""
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
        summary = self._custom(run_values.results.get('custom'))
        taken = {value.tag for value in summary.value}
        for tag, value in values.items():
            if value is not None:
                summary.value.add(tag='towers/' + tag if tag in taken else tag,
                                  simple_value=float(value))
        self._writer.add_summary(summary, clock.step)

    def is_due(self):
        """Whether the coming step is one to write."""
        return self._clock.comes_to(self._summary_steps, self._last_step)

    def step_done(self, fetched):
        """Counts a step that is not written."""
        self._count()

    def end(self, session):
        """Brings what was written to the disk."""
        self._writer.flush()

    def evaluated(self, step, results, seconds=0., name='test'):
        """Writes the results of an evaluation: `test/accuracy`, ….

        Args:
          step: the step whose weights were evaluated.
          results: dict from names to numbers, as `Evaluation.run` returns it.
          seconds: how long it took; left out of `images_per_second`.
          name: what the tags of the results begin with.
        """
        self._clock.away(seconds)
        self._writer.add_summary(tf.Summary(value=[
            tf.Summary.Value(tag='%s/%s' % (name, key), simple_value=float(value))
            for key, value in results.items() if key != 'examples']), step)
        self._writer.flush()

    def _custom(self, serialized):
        if serialized is None:
            return tf.Summary()
        summary = tf.Summary.FromString(serialized)
        for value in summary.value:
            value.tag = without_tower(value.tag, self._summaries.tower_scope)
        return summary

    def _count(self):
        self._clock.count()
        if self._mark is None:
            self._mark = self._clock.mark

    def _before_save(self, unused_step):
        if self._writer is not None:
            self._writer.flush()


def _add_norms(scalars, tag, pairs, placement, norm_of_each):
    """Adds the norm of each (tensor, variable) pair's tensor, and that of all of them."""
    squares = []
    for tensor, variable in pairs:
        with placement.scope_of(variable):
            squares.append(_squared_norm(tensor))
    with only_device(placement.main):
        scalars[tag] = tf.sqrt(tf.add_n(squares))
        if norm_of_each:
            for (_, variable), square in zip(pairs, squares):
                scalars['%s/%s' % (tag, variable.op.name)] = tf.sqrt(square)


def _squared_norm(tensor):
    """The sum of squares, summed in float64 over variables, of which there may be hundreds."""
    if isinstance(tensor, tf.IndexedSlices):
        rows, places = tf.unique(tensor.indices)
        tensor = tf.math.unsorted_segment_sum(tensor.values, places, tf.size(rows))
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype in (tf.float16, tf.bfloat16):
        tensor = tf.cast(tensor, tf.float32)
    return 2. * tf.cast(tf.nn.l2_loss(tensor), tf.float64)
