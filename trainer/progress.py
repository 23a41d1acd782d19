"""Shows the progress of a training: one bar on a terminal, plain lines anywhere else."""

import collections
import os
import time

import tensorflow.compat.v1 as tf

from towers.arguments import scalar_tensors
from towers.errors import InvalidArgumentError
from towers.run.input_watch import checked_watch
from towers.run.step_clock import SaveListener, StepClock, rate
from towers.run.step_loop import OccasionalHook
from trainer.device_usage import DeviceUse
from trainer.output_stream import OutputStream, progress_stream

Throughput = collections.namedtuple('Throughput', 'examples seconds')
"""Examples of some steps, and the seconds that they took."""

Field = collections.namedtuple('Field', 'text priority')
"""A part of the bar's line. Where there is no room, the fields with the highest number are left out
first; those with 0 never are."""


class ProgressHook(OccasionalHook):
    """Shows step, epoch, values such as the loss, examples per second, time left, and device use.

    Where standard output and standard error are terminals it shows a bar, redrawn a few times a
    second; else it writes a line every `log_every` steps to standard output, for `| tee log` and
    `> log`. If the lines can no longer be written, the run goes on without them. Rates are of the
    last ten seconds, without the evaluations that `evaluated` and the checkpoints that `listener`
    are called for.

    The values are fetched only with the steps that are shown. TensorFlow optimises the graph once
    for each set of fetches, some 10 s for InceptionResNet-v2 on two CPU towers: so give all hooks
    the same tensor for the same value.

    Attributes:
      listener: a `CheckpointSaverListener`, to be given to the hook that saves.
    """

    _REDRAW_SECONDS = 0.2
    _RATE_SECONDS = 10.

    def __init__(self, values, counts, log_every=100, stream=None, *, devices=(),
                 fetch_every_step=False, input_watch=None, unit='images'):
        """
        Args:
          values: dict (or list of pairs) from a short name to a scalar tensor, shown in that order.
          counts: `StepCounts` with `last_step` and `examples_per_epoch`.
          log_every: steps from one plain line to the next, at least 1.
          stream: text stream: gets the bar if it is a terminal, else lines. None: the bar goes to
            standard error if that and standard output are terminals, else lines go to the latter.
          devices: the towers' devices; use and memory of the GPUs among them are shown if pynvml
            is installed (`pip install nvidia-ml-py`, the extra gpu).
          fetch_every_step: whether to fetch the values with every step: TensorFlow then optimises
            the graph for one set of fetches less, and a step takes some microseconds more.
          input_watch: `InputWatchHook` of the same session, to show the share of the time since the
            line before that was waiting for input; or None.
          unit: the name of the examples.
        """
        self._clock = StepClock(counts.global_step, counts.batch_size, counts.examples)
        self.listener = SaveListener(self._clock)
        self._arguments = tf.train.SessionRunArgs(scalar_tensors('values', values))
        self._train_steps = counts.last_step
        self._examples_per_epoch = counts.examples_per_epoch
        self._log_every = log_every
        self._fetches_always = fetch_every_step
        self._waiting = checked_watch(input_watch)
        self._unit = unit
        self._stream = OutputStream(progress_stream() if stream is None else stream,
                                    on_lost=lambda error: None)
        self._on_terminal = _can_show_bar(self._stream)
        self._use = DeviceUse(devices)
        self._problem_told = False
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
        """Fetches the values if the coming step is shown."""
        self._shows = self.is_due()
        return self._arguments if self._shows or self._fetches_always else None

    def after_run(self, run_context, run_values):
        """Counts the step, and shows it if it is due."""
        clock = self._clock
        self._count()
        if not self._shows:
            return
        clock.read(run_context.session)
        values = []
        for number, (name, value) in enumerate(run_values.results.items()):
            if getattr(value, 'size', 1) != 1:  # its static shape was not known
                raise InvalidArgumentError('the value %r of a ProgressHook has the shape %s: '
                                           'expected one number.' % (name, list(value.shape)))
            text = '%.4g' % value if number else ('%#.4g' % value).rstrip('.')
            values.append(Field('%s %s' % (name, text), 4 if number else 0))
        share = None if self._waiting is None else self._waiting.next(run_context.session).share
        if share is not None:
            values.append(Field('input wait %.0f%%' % (100 * share), 5))
        if self._on_terminal:
            self._draw(values)
        else:
            self._write_line(values)
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
        """Counts a step that is not shown."""
        self._count()

    def always_fetched(self):
        """The values, with `fetch_every_step`; else None."""
        return self._arguments.fetches if self._fetches_always else None

    def end(self, session):
        """Closes the bar; its last state stays on the screen."""
        self.close()

    def close(self):
        """Ends the line of the bar; may be called twice.

        `end` does it. A program calls it where an error ends the session, so that the text of the
        error begins on a line of its own.
        """
        if self._bar is not None:
            self._bar.n = self._clock.step
            self._bar.left = self._position()
            self._bar.close()
            self._bar = None
        self._use.close()

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

    def _count(self):
        self._clock.count()
        if self._first_mark is None and self._clock.mark is not None:
            self._first_mark = self._clock.mark
            self._marks.append(self._clock.mark)

    def _draw(self, values):
        """Redraws the bar, with a list of `Field`s for the values."""
        bar, use = self._bar, self._fields_of_use()
        bar.n = self._clock.step
        bar.left = self._position()
        bar.right = values + self._fields_of_rate() + use
        bar.refresh()

    def _write_line(self, values):
        """Writes a plain line, with a list of `Field`s for the values."""
        fields = self._position() + values + self._fields_of_rate() + self._fields_of_use()
        self.write('step ' + '  '.join(field.text for field in fields))

    def _position(self):
        """`Field`s of step and epoch."""
        # Right-aligned in a bar, so that the text behind it does not move.
        width = len(str(self._train_steps)) if self._bar is not None else 0
        return [Field(self._of_all(self._clock.step, width), 0),
                Field('epoch %.1f' % (self._clock.examples / self._examples_per_epoch), 5)]

    def _of_all(self, step, width=0):
        """`'8/10'`, step and last step; `'12'` where the run has gone on beyond the last step."""
        return '%*d' % (width, step) + (
            '/%d' % self._train_steps if step <= self._train_steps else '')

    def _fields_of_use(self):
        """`Field`s of the use of the devices; writes, once, why GPUs are not read."""
        gpus, cpu = self._use.describe()
        if self._use.problem and not self._problem_told:
            self._problem_told = True
            self.write(self._use.problem)
        return [Field(text, priority) for text, priority in ((gpus, 3), (cpu, 6)) if text]

    def _fields_of_rate(self):
        """`Field`s of examples a second over the last seconds, and of the time left."""
        marks, mark = self._marks, self._clock.mark
        # Keeps, as the first, the latest mark that is at least `_RATE_SECONDS` old.
        while len(marks) > 1 and mark.seconds - marks[1].seconds >= self._RATE_SECONDS:
            marks.popleft()
        speed = rate(marks[0], mark) if marks else None
        if speed is None:
            return []
        if mark != marks[-1]:
            marks.append(mark)
        form = '{:,.0f} {}/s' if speed >= 10 else '{:.2g} {}/s'
        fields = [Field(form.format(speed, self._unit), 2)]
        steps_left = self._train_steps - self._clock.step
        if steps_left >= 0:  # a program's own loop may go on beyond the last step
            seconds_left = steps_left * self._clock.batch_size / speed
            fields.append(Field('%s left' % describe_time(seconds_left), 1))
        return fields


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


def fit(left, right, width):
    """The texts left and right of a bar, without the fields for which there is no room.

    Args:
      left, right: lists of `Field`.
      width: columns for both.

    Returns:
      List of two strings.
    """
    while True:
        texts = [' '.join(field.text for field in fields) for fields in (left, right)]
        last = max(left + right, key=lambda field: field.priority, default=None)
        if sum(map(len, texts)) <= width or last is None or last.priority == 0:
            return texts
        left, right = ([field for field in fields if field is not last]
                       for fields in (left, right))


def _new_bar(stream, total, initial):
    """tqdm's bar of `total` steps that begins at step `initial`, with `Field`s on both sides."""
    from tqdm import tqdm  # pylint: disable=import-outside-toplevel

    class Bar(tqdm):
        """A bar between two texts that are cut to the terminal's width."""

        monitor_interval = 0  # no thread that redraws: the hook does
        _FRAME_AND_BAR = 9

        left, right = (), ()

        @property
        def format_dict(self):
            """The values that tqdm fills into the bar's format, a dict."""
            values = super(Bar, self).format_dict
            width = (values['ncols'] or 80) - self._FRAME_AND_BAR
            values['left'], values['right'] = fit(list(self.left), list(self.right), width)
            return values

    return Bar(total=total, initial=initial, file=stream, dynamic_ncols=True,
               bar_format='{left} |{bar}| {right}', mininterval=0)
