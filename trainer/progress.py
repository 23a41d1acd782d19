"""Shows the progress of a training: one bar on a terminal, plain lines anywhere else."""

import collections
import os
import time

import tensorflow.compat.v1 as tf

from towers.arguments import scalar_tensors
from towers.errors import InvalidArgumentError
from towers.run.step_clock import SaveListener, StepClock, rate, share_waited
from towers.run.step_loop import OccasionalHook
from trainer.output_stream import OutputStream, progress_stream

Throughput = collections.namedtuple('Throughput', 'examples seconds')
"""Examples of some steps, and the seconds that they took."""


class ProgressHook(OccasionalHook):
    """Shows step, values such as the loss, time left, examples per second, input wait, and epoch.

    Where standard output and standard error are terminals it shows a bar, redrawn a few times a
    second; else it writes a line every `log_every` steps to standard output, for `| tee log` and
    `> log`. If the lines can no longer be written, the run goes on without them. Rates are of the
    last ten seconds, without the evaluations that `evaluated` and the checkpoints that `listener`
    are called for.

    The values are fetched with every step. TensorFlow optimises the graph once for each set of
    fetches, some 10 s for InceptionResNet-v2 on two CPU towers: so give all hooks the same tensor
    for the same value.

    Attributes:
      listener: a `CheckpointSaverListener`, to be given to the hook that saves.
    """

    _REDRAW_SECONDS = 0.2
    _RATE_SECONDS = 10.

    def __init__(self, values, counts, log_every=100, stream=None, *, input_wait=None,
                 unit='images'):
        """
        Args:
          values: dict (or list of pairs) from a short name to a scalar tensor, shown in that order.
          counts: `StepCounts` with `last_step` and `examples_per_epoch`.
          log_every: steps from one plain line to the next, at least 1.
          stream: text stream: gets the bar if it is a terminal, else lines. None: the bar goes to
            standard error if that and standard output are terminals, else lines go to the latter.
          input_wait: scalar tensor, the seconds that a step waits for its batch: the share of them
            is shown. Or None.
          unit: the name of the examples.
        """
        self._clock = StepClock(counts)
        self.listener = SaveListener(self._clock)
        self._fetches = {'shown': scalar_tensors('values', values)}
        if input_wait is not None:
            self._fetches['waited'] = input_wait
        self._train_steps = counts.last_step
        self._examples_per_epoch = counts.examples_per_epoch
        self._log_every = log_every
        self._unit = unit
        self._stream = OutputStream(progress_stream() if stream is None else stream,
                                    on_lost=lambda error: None)
        self._on_terminal = _can_show_bar(self._stream)
        self._bar = None
        self._first_mark = None
        self._marks = collections.deque()
        self._shows = False
        self._shown_at = None

    @property
    def throughput(self):
        """`Throughput` of all steps of the session after the second; None before the third."""
        begin, end = self._first_mark, self._clock.mark
        if begin is None or end is None or end.examples <= begin.examples:
            return None
        return Throughput(end.examples - begin.examples, end.seconds)

    def after_create_session(self, session, coord):
        """Takes over the restored step, and draws the bar."""
        self._clock.restart(session)
        self._first_mark = self._shown_at = None
        self._marks.clear()
        if self._on_terminal:
            if self._bar is None:
                self._bar = _new_bar(self._stream, max(self._train_steps, self._clock.step),
                                     self._clock.step)
            self._draw([])

    def before_run(self, run_context):
        """Fetches the values."""
        self._shows = self.is_due()
        return tf.train.SessionRunArgs(self._fetches)

    def after_run(self, run_context, run_values):
        """Counts the step, and shows it if it is due."""
        self.step_done(run_values.results)
        if not self._shows:
            return
        self._clock.read(run_context.session)
        values = []
        for number, (name, value) in enumerate(run_values.results['shown'].items()):
            if getattr(value, 'size', 1) != 1:  # its static shape was not known
                raise InvalidArgumentError('the value %r of a ProgressHook has the shape %s: '
                                           'expected one number.' % (name, list(value.shape)))
            values.append('%s %s' % (
                name, '%.4g' % value if number else ('%#.4g' % value).rstrip('.')))
        if self._on_terminal:
            self._draw(values)
        else:
            self.write('step ' + '  '.join([self._of_all(self._clock.step)] + self._fields(values)))
        self._shown_at = time.perf_counter()

    def is_due(self):
        """Whether the coming step is shown."""
        following = self._clock.step + 1
        if self._shown_at is None or following == self._train_steps:
            return True
        if self._on_terminal:
            return time.perf_counter() - self._shown_at >= self._REDRAW_SECONDS
        return following % self._log_every == 0

    def step_done(self, fetched):
        """Counts a step."""
        self._clock.count(fetched.get('waited', 0.))
        if self._first_mark is None and self._clock.mark is not None:
            self._first_mark = self._clock.mark
            self._marks.append(self._clock.mark)

    def always_fetched(self):
        """The values."""
        return self._fetches

    def end(self, session):
        """Closes the bar; its last state stays on the screen."""
        self.close()

    def close(self):
        """Ends the line of the bar; may be called twice.

        `end` does it. A program calls it where an error ends the session, so that the text of the
        error begins on a line of its own.
        """
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def write(self, text):
        """Writes lines, above the bar if there is one: with `flush`, a hook can stand for a stream.
        """
        text = text.strip('\n') + '\n'
        if self._bar is not None:
            self._bar.clear()
            self._stream.write(text)
            self._bar.refresh()
        else:
            self._stream.write(text)
            self._stream.flush()

    def flush(self):
        """Flushes the stream that the lines go to."""
        self._stream.flush()

    def evaluated(self, step, results, seconds=0., name='test'):
        """Writes a line with the results of an evaluation.

        Args:
          step: the step whose weights were evaluated.
          results: dict from names to numbers, as `Evaluation.run` returns it.
          seconds: duration of the evaluation; left out of the rates.
          name: of the evaluated data, at the begin of the line.
        """
        self._clock.away(seconds)
        shown = ', '.join('%s %.4g' % item for item in results.items() if item[0] != 'examples')
        if 'examples' in results:
            shown += ' on {:,d} examples'.format(int(results['examples']))
        self.write('step %s  %s %s' % (self._of_all(step), name, shown))

    def _draw(self, values):
        """Redraws the bar, with a list of texts for the values."""
        bar, step = self._bar, self._of_all(self._clock.step, len(str(self._train_steps)))
        bar.n = self._clock.step
        bar.bar_format = ' '.join([step, '|{bar}|'] + self._fields(values))
        bar.refresh()

    def _of_all(self, step, width=0):
        """`'8/10'`, step and last step; `'12'` where the run has gone on beyond the last step."""
        return '%*d' % (width, step) + (
            '/%d' % self._train_steps if step <= self._train_steps else '')

    def _fields(self, values):
        """List of the texts of a line: a narrow terminal cuts off what matters least."""
        marks, mark = self._marks, self._clock.mark
        # Keeps, as the first, the latest mark that is at least `_RATE_SECONDS` old.
        while len(marks) > 1 and mark.seconds - marks[1].seconds >= self._RATE_SECONDS:
            marks.popleft()
        speed, fields = rate(marks[0], mark) if marks else None, list(values)
        if speed is not None:
            steps_left = self._train_steps - self._clock.step
            if steps_left >= 0:  # a program's own loop may go on beyond the last step
                fields.append('%s left' % describe_time(
                    steps_left * self._clock.batch_size / speed))
            fields.append(('{:,.0f} {}/s' if speed >= 10 else '{:.2g} {}/s').format(
                speed, self._unit))
            if 'waited' in self._fetches:
                fields.append('input wait %.0f%%' % (100 * share_waited(marks[0], mark)))
            if mark != marks[-1]:
                marks.append(mark)
        return fields + ['epoch %.1f' % (self._clock.examples / self._examples_per_epoch)]


def _can_show_bar(stream):
    """Whether a stream is a terminal of known size (in a container it may have 0 columns)."""
    if not stream.isatty() or os.environ.get('TERM') == 'dumb':
        return False
    try:
        return min(os.get_terminal_size(stream.fileno())) > 0
    except (AttributeError, OSError):  # a program's own stream, which says that it is a terminal
        return True


def describe_time(seconds):
    """A number of seconds as text: `'0:34'`, `'1:02:03'` or `'3 d 04:05'`."""
    minutes, seconds = divmod(int(round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return '%d d %02d:%02d' % (hours // 24, hours % 24, minutes)
    return '%d:%02d:%02d' % (hours, minutes, seconds) if hours else '%d:%02d' % (minutes, seconds)


def _new_bar(stream, total, initial):
    """tqdm's bar of `total` steps that begins at step `initial`."""
    from tqdm import tqdm  # pylint: disable=import-outside-toplevel
    return tqdm(total=total, initial=initial, file=stream, dynamic_ncols=True, mininterval=0)
