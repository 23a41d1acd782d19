"""The view of a running training: one bar on a terminal, plain lines anywhere else."""

import collections
import os
import time
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_count, check_flag, check_instance, check_number, scalar_tensors
from towers.errors import InvalidArgumentError
from towers.run.device_usage import DeviceUse
from towers.run.input_watch import checked_watch
from towers.run.output_stream import OutputStream, progress_stream
from towers.run.step_clock import SaveListener, StepClock, rate
from towers.run.step_loop import OccasionalHook

Throughput = collections.namedtuple('Throughput', 'examples seconds')

Field = collections.namedtuple('Field', 'text priority')
"""A part of the bar's line; where there is no room, the highest priority number goes first."""


class ProgressHook(OccasionalHook):
    """Shows step, epoch, values such as the loss, examples per second, time left, and device use.

    Where standard output and error are a terminal, one bar there, drawn anew a few times a second;
    else one line every `log_every` steps on standard output, so that `| tee log` and `> log` have
    them. Where that can no longer be written the run goes on without them. Rates are those of the
    last seconds, without evaluations that `evaluated` is told of and checkpoints that `listener` is
    told of.

    The values are fetched with a step only where they are shown. A session optimises the graph anew
    for each set of things that is fetched, which takes some 10 s for InceptionResNet-v2 on two
    CPU towers, so give all hooks the same tensors for the same things.

    Attributes:
      listener: a `CheckpointSaverListener`, to be given to the hook that saves.
    """

    _REDRAW_SECONDS = 0.2
    _RATE_SECONDS = 10.

    def __init__(self, values: typing.Any, global_step: typing.Optional[tf.Variable],
                 train_steps: int, batch_size: int, examples_per_epoch: int, log_every: int = 100,
                 stream: typing.Any = None, devices: typing.Sequence[str] = (),
                 examples: typing.Any = None, fetch_every_step: bool = False,
                 input_watch: typing.Any = None):
        """
        Args:
          values: dict (or list of pairs) from a short name to a scalar tensor, shown in that order.
          global_step: the variable that counts steps.
          train_steps: the step at which training ends.
          batch_size: examples a step.
          examples_per_epoch: examples in one pass over the data.
          log_every: steps from one plain line to the next, at least 1.
          stream: where to write: the bar if it is a terminal, else lines. None: the bar to
            standard error if that and standard output are terminals, else lines to the latter.
          devices: the towers' devices; use and memory of the GPUs among them are shown, if pynvml
            is installed (`pip install nvidia-ml-py`, the extra gpu).
          examples: variable that counts examples; None: the step times `batch_size`.
          fetch_every_step: fetch the values with every step, so that the graph is optimised for
            one set of fetches less; some microseconds a step more.
          input_watch: `InputWatchHook` of the same session: the share of the time since the last
            line that was spent waiting for input is shown; or None.

        Raises:
          InvalidArgumentError: a number below 1.
        """
        check_count('log_every', log_every)
        check_count('train_steps', train_steps)
        check_flag('fetch_every_step', fetch_every_step)
        check_instance('devices', devices, (list, tuple), "a list of devices, as the towers'")
        if stream is not None and not (hasattr(stream, 'write') and hasattr(stream, 'isatty')):
            raise InvalidArgumentError('stream=%.80r: expected a text stream.' % (stream,))
        check_number('examples_per_epoch', examples_per_epoch, above=0, expected='more than 0')
        self._clock = StepClock(global_step, batch_size, examples)
        self.listener = SaveListener(self._clock)
        self._arguments = tf.train.SessionRunArgs(scalar_tensors('values', values))
        self._train_steps = train_steps
        self._examples_per_epoch = examples_per_epoch
        self._log_every = log_every
        self._fetches_always = fetch_every_step
        self._waiting = checked_watch(input_watch)
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
        """`Throughput` since the end of the second step, or None before the third."""
        begin, end = self._first_mark, self._clock.mark
        if begin is None or end is None or end.examples <= begin.examples:
            return None
        return Throughput(end.examples - begin.examples, end.seconds)

    def after_create_session(self, session, coord):
        """Starts from the step that was restored."""
        self._clock.restart(session)
        self._first_mark = self._shown_at = None
        self._marks.clear()
        if self._on_terminal:
            if self._bar is None:
                self._bar = _new_bar(self._stream, max(self._train_steps, self._clock.step),
                                     self._clock.step)
            self._draw([])

    def before_run(self, run_context):
        """Fetches the values when this step is one to show."""
        self._shows = self.is_due()
        return self._arguments if self._shows or self._fetches_always else None

    def after_run(self, run_context, run_values):
        """Counts the step, and shows it where it is one to show."""
        clock = self._clock
        self._count()
        if not self._shows:
            return
        clock.read(run_context.session)
        values = []
        for number, (name, value) in enumerate(run_values.results.items()):
            if getattr(value, 'size', 1) != 1:  # its shape was not known before
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
        """Whether the coming step is one to show."""
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
        """The values, with `fetch_every_step`."""
        return self._arguments.fetches if self._fetches_always else None

    def end(self, session):
        """Leaves the last state of the bar on the screen."""
        self.close()

    def close(self):
        """Ends the line of the bar. `end` does it; call it where an error ends the session, so that
        what is written about the error starts on a line of its own. May be called twice."""
        if self._bar is not None:
            self._bar.n = self._clock.step
            self._bar.left = self._position()
            self._bar.close()
            self._bar = None
        self._use.close()

    def write(self, text):
        """Writes lines above the bar, or just writes them; so this can stand for a stream."""
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
          seconds: how long it took; left out of the rates.
          name: what the results are of.
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
        bar, use = self._bar, self._fields_of_use()
        bar.n = self._clock.step
        bar.left = self._position()
        bar.right = values + self._fields_of_rate() + use
        bar.refresh()

    def _write_line(self, values):
        fields = self._position() + values + self._fields_of_rate() + self._fields_of_use()
        self.write('step ' + '  '.join(field.text for field in fields))

    def _position(self):
        # Right-aligned on a terminal, so that what follows stands still.
        width = len(str(self._train_steps)) if self._bar is not None else 0
        return [Field(self._of_all(self._clock.step, width), 0),
                Field('epoch %.1f' % (self._clock.examples / self._examples_per_epoch), 5)]

    def _of_all(self, step, width=0):
        """The step and the number of the last one, unless the run has gone on beyond that."""
        return '%*d' % (width, step) + (
            '/%d' % self._train_steps if step <= self._train_steps else '')

    def _fields_of_use(self):
        gpus, cpu = self._use.describe()
        if self._use.problem and not self._problem_told:
            self._problem_told = True
            self.write(self._use.problem)
        return [Field(text, priority) for text, priority in ((gpus, 3), (cpu, 6)) if text]

    def _fields_of_rate(self):
        marks, mark = self._marks, self._clock.mark
        # The last mark that is old enough to measure from, or the oldest of all.
        while len(marks) > 1 and mark.seconds - marks[1].seconds >= self._RATE_SECONDS:
            marks.popleft()
        speed = rate(marks[0], mark) if marks else None
        if speed is None:
            return []
        if mark != marks[-1]:
            marks.append(mark)
        fields = [Field(('{:,.0f}' if speed >= 10 else '{:.2g}').format(speed) + ' images/s', 2)]
        steps_left = self._train_steps - self._clock.step
        if steps_left >= 0:  # a loop of the program's own may go on for longer
            seconds_left = steps_left * self._clock.batch_size / speed
            fields.append(Field('%s left' % describe_time(seconds_left), 1))
        return fields


def _can_show_bar(stream):
    """Whether a stream is a terminal with rows and columns (one in a container may have none)."""
    if not stream.isatty() or os.environ.get('TERM') == 'dumb':
        return False
    try:
        return min(os.get_terminal_size(stream.fileno())) > 0
    except (AttributeError, OSError):  # a stream of a program's own that says it is a terminal
        return True


def describe_time(seconds):
    """`'0:34'`, `'1:02:03'` or `'3 d 04:05'`."""
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
      Pair of strings.
    """
    while True:
        texts = [' '.join(field.text for field in fields) for fields in (left, right)]
        last = max(left + right, key=lambda field: field.priority, default=None)
        if sum(map(len, texts)) <= width or last is None or last.priority == 0:
            return texts
        left, right = ([field for field in fields if field is not last]
                       for fields in (left, right))


def _new_bar(stream, total, initial):
    from tqdm import tqdm  # pylint: disable=import-outside-toplevel

    class Bar(tqdm):
        """tqdm's bar between texts that are cut to the terminal's width."""

        monitor_interval = 0  # of a thread that wakes bars up which count by themselves
        _FRAME_AND_BAR = 9

        left, right = (), ()

        @property
        def format_dict(self):
            """What the bar's format is filled in with."""
            values = super(Bar, self).format_dict
            width = (values['ncols'] or 80) - self._FRAME_AND_BAR
            values['left'], values['right'] = fit(list(self.left), list(self.right), width)
            return values

    return Bar(total=total, initial=initial, file=stream, dynamic_ncols=True,
               bar_format='{left} |{bar}| {right}', mininterval=0)
