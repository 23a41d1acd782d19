"""`ProgressHook`: a bar on a terminal, else lines; and the lines of `metrics.jsonl`."""

import collections
import os
import time
import typing

import tensorflow.compat.v1 as tf

from towers.checkpoint.files import list_checkpoints
from towers.errors import counted
from trainer.metrics_log import MetricsLog
from trainer.output import OutputStream, progress_stream
from trainer.speed import Mark, StepClock, StepCounts, rate, share_waited

_SHORT = {'learning_rate': 'lr'}  # names on the screen


class Throughput(typing.NamedTuple):
    """The examples of some steps, and the time that these took.

    Attributes:
      examples: the number of examples.
      seconds: the time, without evaluations and checkpoints.
    """
    examples: int
    seconds: float


class ProgressHook(tf.train.SessionRunHook):
    """Shows step, loss, time left, examples per second and input wait; writes `metrics.jsonl`.

    Where standard output and standard error are terminals it shows a bar, redrawn a few times a
    second; else it writes a line every `log_every` steps to standard output, for `| tee log` and
    `> log`. If the lines can no longer be written, the run goes on without them. The rates shown
    are those of the last ten seconds, without evaluations and checkpoints.

    `metrics.jsonl` has a line for each multiple of `log_every` steps, and for the last step. After
    a kill it has the same lines as without it: which steps have a line depends only on the step,
    and a run that goes on from a step removes the lines of later ones. For that the line of a step
    has to be on the disk before its checkpoint: give `listener` to the hook that saves, and put
    this hook and the hook that evaluates before it in the list of hooks.

    The values are fetched with every step, since TensorFlow optimizes the graph once for each set
    of fetches, which takes some 10 s for InceptionResNet-v2 on two CPU towers.

    Attributes:
      listener: a `CheckpointSaverListener`.
    """

    _REDRAW_SECONDS = 0.2
    _RATE_SECONDS = 10.

    def __init__(self, values: typing.Sequence[tuple], counts: StepCounts, path: str,
                 log_every: int = 100, stream: typing.Optional[typing.TextIO] = None,
                 input_wait: typing.Optional[tf.Tensor] = None, unit: str = 'image'):
        """
        Args:
          values: list of pairs of a name and a scalar tensor: `loss`, `learning_rate`, ….
          counts: the counts of a step.
          path: the name of the file `metrics.jsonl`.
          log_every: steps from one line of the file to the next.
          stream: the stream for the bar or for lines; None for `progress_stream()`.
          input_wait: scalar tensor, the seconds that a step waits for its batch; or None.
          unit: the name of an example.
        """
        self._fetches: dict = {'values': collections.OrderedDict(values)}
        if input_wait is not None:
            self._fetches['waited'] = input_wait
        self._counts = counts
        self._log_every = log_every
        self._unit = unit
        self._clock = StepClock(counts)
        self._log = MetricsLog(path)
        self.listener = _Saves(self._clock, self._log)
        self._stream = OutputStream(progress_stream() if stream is None else stream,
                                    on_lost=lambda error: None)
        self._on_terminal = _can_show_bar(self._stream)
        self._bar: typing.Any = None
        self._marks: typing.Deque[Mark] = collections.deque()  # those of the last ten seconds
        self._first_mark: typing.Optional[Mark] = None
        self._logged_mark: typing.Optional[Mark] = None  # that of the last line of the file
        self._shown_at: typing.Optional[float] = None  # the time at which a step was last shown
        self._is_first_session = True
        self._logs = False  # whether the current step gets a line of the file
        self._shows = False  # whether the current step is shown

    @property
    def throughput(self) -> typing.Optional[Throughput]:
        """The `Throughput` of all steps of the session after the second; None before the third."""
        begin = self._first_mark
        end = self._clock.mark
        if begin is None or end is None or rate(begin, end) is None:
            return None
        return Throughput(end.examples - begin.examples, end.seconds)

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator):
        """Takes over the restored step, removes the lines of later steps, and draws the bar."""
        self._clock.restart(session)
        self._first_mark = None
        self._logged_mark = None
        self._shown_at = None
        self._marks.clear()
        step = self._clock.step
        directory = os.path.dirname(os.path.abspath(self._log.path))
        is_new = self._is_first_session and step == 0 and not list_checkpoints(directory)
        self._is_first_session = False
        line = self._log.resume(step, is_new)
        if line is not None:
            self.write(line)
        if self._on_terminal:
            self._open_bar()

    def _open_bar(self) -> None:
        """Shows the bar before the first step, which takes long: TensorFlow optimizes the graph."""
        first_state = ['first step: the graph is made ready']
        if self._bar is None:
            from tqdm import tqdm  # pylint: disable=import-outside-toplevel
            self._bar = tqdm(total=max(self._counts.last_step, self._clock.step),
                             initial=self._clock.step, file=self._stream, dynamic_ncols=True,
                             mininterval=0, bar_format=self._bar_format(first_state))
        self._draw(first_state)

    def before_run(self, run_context: typing.Any):
        """Fetches the values; writes the line of the step before, since this one may fail."""
        self._log.flush()
        step = self._clock.step + 1
        self._logs = step % self._log_every == 0 or step == self._counts.last_step
        self._shows = self._shown_at is None or self._logs or self._is_redrawn()
        return tf.train.SessionRunArgs(self._fetches)

    def _is_redrawn(self) -> bool:
        """Whether it is time to draw the bar again."""
        if not self._on_terminal or self._shown_at is None:
            return False
        return time.perf_counter() - self._shown_at >= self._REDRAW_SECONDS

    def after_run(self, run_context: typing.Any, run_values: typing.Any):
        """Counts the step; shows it, and puts its line into the log, if that is due."""
        clock = self._clock
        fetched = run_values.results
        clock.count(fetched.get('waited', 0.))
        if self._first_mark is None and clock.mark is not None:
            self._first_mark = clock.mark
            self._logged_mark = clock.mark
            self._marks.append(clock.mark)
        if not self._shows:
            return
        clock.read(run_context.session)
        if self._logs:
            self._log_step(fetched)
        value_texts = _value_texts(fetched['values'])
        if self._on_terminal:
            self._draw(value_texts)
        else:
            fields = [self._of_all(clock.step)] + self._fields(value_texts)
            self.write('step ' + '  '.join(fields))
        self._shown_at = time.perf_counter()

    def end(self, session: tf.Session):
        """Closes the bar; its last state stays on the screen."""
        self.close()

    def close(self) -> None:
        """Ends the line of the bar, so that the text of an error begins on a line of its own."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def write(self, text: str) -> None:
        """Writes lines, above the bar if there is one."""
        text = text.strip('\n') + '\n'
        if self._bar is not None:
            self._bar.clear()
            self._stream.write(text)
            self._bar.refresh()
        else:
            self._stream.write(text)
            self._stream.flush()

    def evaluated(self, step: int, results: dict, seconds: float = 0.) -> None:
        """Writes a line with the results of an evaluation, and adds them to the line of its step.

        Args:
          step: the current step.
          results: the dict that `Evaluation.run` returned.
          seconds: how long the evaluation took; the rates leave this time out.
        """
        self._clock.away(seconds)
        self._log.add(step, {'test_' + name: value for name, value in results.items()})
        shown = ', '.join('%s %.4g' % (name, value) for name, value in results.items()
                          if name != 'examples')
        self.write('step %s  test %s on %s' % (
            self._of_all(step), shown, counted(int(results['examples']), 'example')))

    def _log_step(self, fetched: dict) -> None:
        """Puts the line of a step into the log, which keeps it back for an evaluation.

        Args:
          fetched: the values of the fetches.
        """
        clock = self._clock
        speed = rate(self._logged_mark, clock.mark)
        share = share_waited(self._logged_mark, clock.mark)
        self._logged_mark = clock.mark
        line: dict = {'epoch': round(clock.examples / self._counts.examples_per_epoch, 6),
                      'examples': clock.examples}
        line.update(fetched['values'])
        line[self._unit + 's_per_second'] = None if speed is None else round(speed, 3)
        if 'waited' in fetched:
            line['input_wait'] = None if share is None else round(share, 4)
        line['wall_time'] = round(time.time(), 3)
        self._log.add(clock.step, line)

    def _draw(self, value_texts: typing.List[str]) -> None:
        """Redraws the bar, with these texts for the values."""
        self._bar.n = self._clock.step
        self._bar.bar_format = self._bar_format(value_texts)
        self._bar.refresh()

    def _bar_format(self, value_texts: typing.List[str]) -> str:
        """tqdm's format of the bar, with these texts for the values."""
        width = 2 * len(str(self._counts.last_step)) + 1
        step = self._of_all(self._clock.step).rjust(width)
        return ' '.join([step, '|{bar}|'] + self._fields(value_texts))

    def _of_all(self, step: int) -> str:
        """The text of a step and the last step: `'8/10'`."""
        return '%d/%d' % (step, self._counts.last_step)

    def _is_old(self, mark: Mark) -> bool:
        """Whether a mark is at least `_RATE_SECONDS` before the latest step."""
        latest = self._clock.mark
        return latest is not None and latest.seconds - mark.seconds >= self._RATE_SECONDS

    def _fields(self, value_texts: typing.List[str]) -> typing.List[str]:
        """The texts of a line, the most important first: a narrow terminal cuts the last.

        Args:
          value_texts: the texts for the values.

        Returns:
          The texts for the values, the time left, examples a second, the wait for input, and the
          epoch.
        """
        mark = self._clock.mark
        fields = list(value_texts)
        # The first mark, from which the rate is measured, is the newest one that is old.
        while len(self._marks) > 1 and self._is_old(self._marks[1]):
            self._marks.popleft()
        speed = rate(self._marks[0], mark) if self._marks else None
        if mark is not None and speed is not None:
            fields += self._fields_of_speed(speed, mark)
            if mark != self._marks[-1]:
                self._marks.append(mark)
        epoch = self._clock.examples / self._counts.examples_per_epoch
        return fields + ['epoch %.1f' % epoch]

    def _fields_of_speed(self, speed: float, mark: Mark) -> typing.List[str]:
        """The texts about the time left, the examples a second, and the wait for input.

        Args:
          speed: examples a second.
          mark: the mark of the latest step.
        """
        steps_left = self._counts.last_step - self._clock.step
        seconds_left = steps_left * self._counts.batch_size / speed
        number = '{:,.0f}'.format(speed) if speed >= 10 else '{:.2g}'.format(speed)
        fields = ['%s left' % describe_time(seconds_left), '%s %ss/s' % (number, self._unit)]
        share = share_waited(self._marks[0], mark)
        if share is not None and 'waited' in self._fetches:
            fields.append('input wait %.0f%%' % (100 * share))
        return fields


def _value_texts(values: typing.Dict[str, float]) -> typing.List[str]:
    """A text for each value, by name; the first, that of the loss, always has four digits."""
    texts: typing.List[str] = []
    for name, value in values.items():
        number = '%.4g' % value
        if not texts:
            # '#' keeps zeros at the end, and puts a point behind a number of four whole digits.
            number = ('%#.4g' % value).rstrip('.')
        texts.append('%s %s' % (_SHORT.get(name, name), number))
    return texts


class _Saves(tf.train.CheckpointSaverListener):
    """Writes the log to the disk before each checkpoint; tells the clock how long a save takes."""

    def __init__(self, clock: StepClock, log: MetricsLog):
        """`clock` leaves the time of saves out, `log` is the log of the run."""
        self._clock = clock
        self._log = log
        self._began = 0.  # the time at which the save began

    def before_save(self, session: tf.Session, global_step_value: int):
        """Syncs the log, before the variables are read."""
        self._began = time.perf_counter()
        self._log.sync()

    def after_save(self, session: tf.Session, global_step_value: int):
        """Tells the clock how long the checkpoint took."""
        self._clock.away(time.perf_counter() - self._began)

    def end(self, session: tf.Session, global_step_value: int):
        """Syncs the log, also where the last step was saved already; writes it as CSV, too."""
        self._log.sync()
        self._log.write_csv()


def _can_show_bar(stream: typing.Any) -> bool:
    """Whether a stream is a terminal of known size (in a container it may have 0 columns)."""
    if not stream.isatty() or os.environ.get('TERM') == 'dumb':
        return False
    try:
        return min(os.get_terminal_size(stream.fileno())) > 0
    except (AttributeError, OSError):  # no file, but `isatty` says that it is a terminal
        return True


def describe_time(seconds: float) -> str:
    """A time as text: `'0:34'`, `'1:02:03'`, or from a day on `'3 d 04:05'`.

    Args:
      seconds: the time, at least 0; it is rounded to whole seconds.
    """
    minutes, seconds_left = divmod(int(round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return '%d d %02d:%02d' % (hours // 24, hours % 24, minutes)
    if hours:
        return '%d:%02d:%02d' % (hours, minutes, seconds_left)
    return '%d:%02d' % (minutes, seconds_left)
