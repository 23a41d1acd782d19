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
    """The examples of some steps, and the time that the steps took.

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
    `> log`. If the lines can no longer be written, the run goes on without them. The rates are
    measured over the last ten seconds, without evaluations and checkpoints.

    `metrics.jsonl` has a line for each multiple of `log_every` steps, and for the last step. A run
    that was killed has the same lines in the end as a run that was not: the number of a step alone
    says whether the step has a line, and a run that goes on from a step removes the lines of later
    steps. So the line of a step has to be on the disk before the checkpoint of the step: give
    `listener` to the hook that saves, and put this hook and the hook that evaluates before the hook
    that saves in the list of hooks.

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
        # A lost stream stops nothing here: the run goes on without its lines.
        self._stream = OutputStream(progress_stream() if stream is None else stream,
                                    on_lost=lambda error: None)
        self._on_terminal = _can_show_bar(self._stream)
        self._bar: typing.Any = None  # the bar of tqdm, while it is shown
        self._marks: typing.Deque[Mark] = collections.deque()  # the marks of the last ten seconds
        self._first_mark: typing.Optional[Mark] = None  # of the session, at 0 seconds
        self._logged_mark: typing.Optional[Mark] = None  # the mark of the last line of the file
        # The time at which a step was last shown; None until a session has shown its first step.
        self._shown_at: typing.Optional[float] = None
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
        return Throughput(end.examples - begin.examples, end.seconds - begin.seconds)

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator):
        """Takes over the restored step, removes the lines of later steps, and draws the bar."""
        self._clock.restart(session)
        self._first_mark = None
        self._logged_mark = None
        self._shown_at = None
        self._marks.clear()
        line = self._log.resume(self._clock.step, self._is_new_run())
        self._is_first_session = False
        if line is not None:
            self.write(line)
        if self._on_terminal:
            self._open_bar()

    def _is_new_run(self) -> bool:
        """Whether a new run begins: a log that is in the folder is then the log of another run.

        If the first session of a process was lost before a checkpoint, a later session also begins
        at step 0. But then the log is this run's own.
        """
        folder = os.path.dirname(os.path.abspath(self._log.path))
        begins_at_0 = self._clock.step == 0 and not list_checkpoints(folder)
        return self._is_first_session and begins_at_0

    def _open_bar(self) -> None:
        """Shows the bar before the first step, which takes long: TensorFlow optimizes the graph."""
        first_state = ['first step: the graph is made ready']
        if self._bar is None:  # else it is the bar of an earlier session, which was lost
            from tqdm import tqdm  # pylint: disable=import-outside-toplevel
            # A run may have more steps already than it is asked for now.
            self._bar = tqdm(total=max(self._counts.last_step, self._clock.step),
                             initial=self._clock.step, file=self._stream, dynamic_ncols=True,
                             mininterval=0, bar_format=self._bar_format(first_state))
        self._draw(first_state)

    def before_run(self, run_context: typing.Any):
        """Fetches the values; writes the line of the step before, since this step may fail."""
        self._log.flush()
        step = self._clock.step + 1
        self._logs = step % self._log_every == 0 or step == self._counts.last_step
        self._shows = self._logs or self._is_time_to_show()
        return tf.train.SessionRunArgs(self._fetches)

    def _is_time_to_show(self) -> bool:
        """Whether to show a step that has no line in the file: the first step of a session; and
        with a bar one step in every `_REDRAW_SECONDS`."""
        if self._shown_at is None:
            return True
        seconds_since_shown = time.perf_counter() - self._shown_at
        return self._on_terminal and seconds_since_shown >= self._REDRAW_SECONDS

    def after_run(self, run_context: typing.Any, run_values: typing.Any):
        """Counts the step; shows it, and puts its line into the log, if that is due."""
        clock = self._clock
        fetched = run_values.results
        clock.count(fetched.get('waited', 0.))
        if self._first_mark is None:
            self._begin_to_measure()
        if not self._shows:
            return
        # The clock counts only the steps of this worker. The variables also count the steps of
        # other asynchronous workers, but to read them in each step would cost a run of the session.
        clock.read(run_context.session)
        if self._logs:
            self._log_step(fetched)
        value_texts = _value_texts(fetched['values'])
        if self._on_terminal:
            self._draw(value_texts)
        else:
            fields = [self._of_all(clock.step)] + self._texts_of_line(value_texts)
            self.write('step ' + '  '.join(fields))
        self._shown_at = time.perf_counter()

    def _begin_to_measure(self) -> None:
        """Takes the first mark of the session, from which all rates are measured. The clock has no
        mark in the first steps, which are not timed."""
        mark = self._clock.mark
        if mark is not None:
            self._first_mark = mark
            self._logged_mark = mark
            self._marks.append(mark)

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
        # The number of examples ends the line.
        shown = ', '.join('%s %.4g' % (name, value) for name, value in results.items()
                          if name != 'examples')
        self.write('step %s  test %s on %s' % (
            self._of_all(step), shown, counted(int(results['examples']), 'example')))

    def _log_step(self, fetched: dict) -> None:
        """Puts the line of a step into the log. The log writes the line later, so that the results
        of an evaluation of this step can still be added to it.

        Speed and wait are measured from the line before. They are null in the first steps, which
        are not timed.

        Args:
          fetched: the values of the fetches; 'waited' is among them if the wait is measured.
        """
        clock = self._clock
        speed = rate(self._logged_mark, clock.mark)
        share = share_waited(self._logged_mark, clock.mark)
        self._logged_mark = clock.mark
        line: dict = {'epoch': round(clock.examples / self._counts.examples_per_epoch, 6),
                      'examples': clock.examples}
        line.update(fetched['values'])
        line[self._unit + 's_per_second'] = _rounded(speed, 3)
        if 'waited' in fetched:
            line['input_wait'] = _rounded(share, 4)
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
        return ' '.join([step, '|{bar}|'] + self._texts_of_line(value_texts))

    def _of_all(self, step: int) -> str:
        """The text of a step and the last step: `'8/10'`."""
        return '%d/%d' % (step, self._counts.last_step)

    def _texts_of_line(self, value_texts: typing.List[str]) -> typing.List[str]:
        """The texts of a line, the most important first: a narrow terminal cuts the last.

        Args:
          value_texts: the texts for the values.

        Returns:
          The texts for the values, the time left, examples a second, the wait for input, and the
          epoch. The first steps, which are not timed, have only values and epoch.
        """
        texts = list(value_texts)
        latest = self._clock.mark
        if latest is not None:
            earlier = self._mark_ten_seconds_before(latest)
            texts += self._texts_of_speed(earlier, latest)
        epoch = self._clock.examples / self._counts.examples_per_epoch
        return texts + ['epoch %.1f' % epoch]

    def _mark_ten_seconds_before(self, latest: Mark) -> Mark:
        """The newest mark that is `_RATE_SECONDS` before `latest`, or else the oldest mark.

        Marks before the returned mark are removed: nothing is measured from them any more. Later
        lines may be measured from `latest`, so it is added to the marks, unless it is the first
        mark of the session, which is among them already.
        """
        marks = self._marks
        while len(marks) > 1 and latest.seconds - marks[1].seconds >= self._RATE_SECONDS:
            marks.popleft()
        is_first_mark = latest.seconds <= marks[-1].seconds
        if not is_first_mark:
            marks.append(latest)
        return marks[0]

    def _texts_of_speed(self, earlier: Mark, latest: Mark) -> typing.List[str]:
        """The texts about the time left, the examples a second, and the wait for input.

        Args:
          earlier: the mark from which the speed is measured.
          latest: the mark of the latest step.

        Returns:
          List of texts; [] if there is no time between the marks.
        """
        speed = rate(earlier, latest)
        if speed is None:
            return []
        steps_left = self._counts.last_step - self._clock.step
        seconds_left = steps_left * self._counts.batch_size / speed
        number = '{:,.0f}'.format(speed) if speed >= 10 else '{:.2g}'.format(speed)
        texts = ['%s left' % describe_time(seconds_left), '%s %ss/s' % (number, self._unit)]
        share = share_waited(earlier, latest)
        if share is not None and 'waited' in self._fetches:
            texts.append('input wait %.0f%%' % (100 * share))
        return texts


def _rounded(value: typing.Optional[float], digits: int) -> typing.Optional[float]:
    """A number with so many digits behind the point; None for None."""
    return None if value is None else round(value, digits)


def _value_texts(values: typing.Dict[str, float]) -> typing.List[str]:
    """A text for each value, by name.

    The loss, which comes first, always has four digits, so that the line keeps its width from step
    to step.
    """
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
        """Syncs the log, also where the last step was saved already; writes it as CSV as well."""
        self._log.sync()
        self._log.write_csv()


def _can_show_bar(stream: typing.Any) -> bool:
    """Whether a stream is a terminal of known size (in a container it may have 0 columns)."""
    if not stream.isatty() or os.environ.get('TERM') == 'dumb':
        return False
    try:
        return min(os.get_terminal_size(stream.fileno())) > 0
    except (AttributeError, OSError):  # no file with a size, but it says that it is a terminal
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
