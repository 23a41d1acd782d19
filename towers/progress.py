"""The view of a running training: one bar on a terminal, plain lines anywhere else."""

import collections
import sys
import time

import tensorflow.compat.v1 as tf
from tqdm import tqdm

from towers.errors import InvalidArgumentError

Throughput = collections.namedtuple('Throughput', 'examples seconds')


class ProgressHook(tf.train.SessionRunHook):
    """Shows epoch, step, values such as the loss, examples per second, and the time left.

    On a terminal, one bar that is drawn anew a few times a second; otherwise one line every
    `log_every` steps. The values are fetched with the step only when they are shown.

    Attributes:
      throughput: `Throughput` since the end of the first step (which builds kernels and is no
        measure of anything), or None before the second.
    """

    _REDRAW_SECONDS = 0.2

    def __init__(self, values, global_step, train_steps, batch_size, examples_per_epoch,
                 log_every=100, stream=None):
        """
        Args:
          values: dict from a short name to a scalar tensor, shown in that order.
          global_step: the variable that counts steps.
          train_steps: the step at which training ends.
          batch_size: examples a step.
          examples_per_epoch: examples in one pass over the data.
          log_every: steps from one plain line to the next, at least 1.
          stream: where to write; None for standard error.

        Raises:
          InvalidArgumentError: `log_every` below 1.
        """
        if log_every < 1:
            raise InvalidArgumentError('log_every=%r: expected at least 1 step.' % (log_every,))
        self._values = collections.OrderedDict(values)
        self._global_step = global_step
        self._train_steps = train_steps
        self._batch_size = batch_size
        self._examples_per_epoch = examples_per_epoch
        self._log_every = log_every
        self._stream = stream or sys.stderr
        self._on_terminal = self._stream.isatty()
        self._bar = None
        self._step = 0
        self._shows = False
        self._first_end = self._shown_at = None
        self._steps_timed = self._steps_at_line = 0

    @property
    def throughput(self):
        if not self._steps_timed:
            return None
        return Throughput(self._steps_timed * self._batch_size, self._last_end - self._first_end)

    def after_create_session(self, session, coord):
        """Starts from the step that was restored."""
        self._step = int(session.run(self._global_step))
        if self._on_terminal and self._bar is None:
            self._bar = tqdm(total=self._train_steps, initial=self._step, unit='step',
                             file=self._stream, dynamic_ncols=True, mininterval=0, miniters=1)

    def before_run(self, run_context):
        """Fetches the values when this step is one to show."""
        following = self._step + 1
        if following >= self._train_steps or self._shown_at is None:
            self._shows = True
        elif self._on_terminal:
            self._shows = time.time() - self._shown_at >= self._REDRAW_SECONDS
        else:
            self._shows = following % self._log_every == 0
        return tf.train.SessionRunArgs(dict(self._values)) if self._shows else None

    def after_run(self, run_context, run_values):
        """Counts the step, and shows it where it is one to show."""
        self._step += 1
        self._last_end = time.time()
        if self._first_end is None:
            self._first_end = self._shown_at = self._last_end
            self._rate_from = (self._last_end, self._step)
        else:
            self._steps_timed += 1
        if self._shows:
            self._show(run_values.results)
            self._shown_at = self._last_end

    def end(self, session):
        """Leaves the last state of the bar on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show(self, values):
        seconds, steps = self._last_end - self._rate_from[0], self._step - self._rate_from[1]
        parts = ['epoch %.1f' % (self._step * self._batch_size / self._examples_per_epoch)]
        parts += ['%s %.4g' % item for item in values.items()]
        if steps:
            parts.append('{:,.0f} images/s'.format(steps * self._batch_size / seconds))
        if self._bar is not None:
            self._bar.set_postfix_str(', '.join(parts), refresh=False)
            self._bar.update(self._step - self._bar.n)
            return
        if steps:
            left = (self._train_steps - self._step) * seconds / steps
            parts.append('%d:%02d left' % divmod(int(left), 60))
        self._stream.write('step %d/%d  %s\n' % (self._step, self._train_steps, '  '.join(parts)))
        self._stream.flush()
