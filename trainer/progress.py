"""Progress of a run: a bar on a terminal, else lines; and the lines of `metrics.jsonl`."""

import collections
import os
import time
import typing

import tensorflow.compat.v1 as tf

from towers.checkpoint.files import list_checkpoints
from towers.errors import counted
from trainer.metrics_log import MetricsLog
from trainer.process import OutputStream, progress_stream
from trainer.speed import StepClock, rate, share_waited

Throughput = collections.namedtuple('Throughput', 'examples seconds')
"""Examples of some steps, and the seconds that they took."""

_SHORT = {'learning_rate': 'lr'}  # names on the screen


class ProgressHook(tf.train.SessionRunHook):
    """Shows step, loss, time left, examples per second and input wait; writes `metrics.jsonl`.

    Where standard output and standard error are terminals it shows a bar, redrawn a few times a
    second; else it writes a line every `log_every` steps to standard output, for `| tee log` and
    `> log`. If the lines can no longer be written, the run goes on without them. Rates are of the
    last ten seconds, without evaluations and checkpoints.

    `metrics.jsonl` has a line for each multiple of `log_every` steps, and for the last step. After
    a kill it has the lines of a run that was never killed: which steps have a line depends on the
    step alone, and a run that goes on from a step cuts the lines of later ones. For that the line
    of a step has to be on the disk before its checkpoint is: give `listener` to the hook that
    saves, and put this hook and the hook that evaluates before it in the list of hooks.

    The values are fetched with every step, since TensorFlow optimises the graph once for each set
    of fetches, some 10 s for InceptionResNet-v2 on two CPU towers.

    Attributes:
      listener: a `CheckpointSaverListener`.
    """

    _REDRAW_SECONDS = 0.2
    _RATE_SECONDS = 10.

    def __init__(self, values, counts, path, log_every=100, stream=None, input_wait=None,
                 unit='image'):
        """
        Args:
          values: list of pairs of a name and a scalar tensor: `loss`, `learning_rate`, ….
          counts, path, log_every: `StepCounts`; of the file; steps from one line to the next.
          stream: text stream, for the bar or for lines; None: `progress_stream()`.
          input_wait: scalar tensor, the seconds that a step waits for its batch; or None.
          unit: the name of an example.
        """
        self._fetches = {'values': collections.OrderedDict(values)}
        if input_wait is not None:
            self._fetches['waited'] = input_wait
        self._counts, self._log_every, self._unit = counts, log_every, unit
        self._clock, self._log = StepClock(counts), MetricsLog(path)
        self.listener = _Saves(self._clock, self._log)
        self._stream = OutputStream(progress_stream() if stream is None else stream,
                                    on_lost=lambda error: None)
        self._on_terminal, self._bar = _can_show_bar(self._stream), None
        self._marks = collections.deque()  # of the last seconds
        self._first_mark = self._logged_mark = self._shown_at = None
        self._is_first_session, self._logs, self._shows = True, False, False

    @property
    def throughput(self) -> typing.Optional[Throughput]:
        """`Throughput` of all steps of the session after the second; None before the third."""
        begin, end = self._first_mark, self._clock.mark
        if rate(begin, end) is None:
            return None
        return Throughput(end.examples - begin.examples, end.seconds)

    def after_create_session(self, session, coord):
        """Takes over the restored step, cuts the lines of steps after it, and draws the bar."""
        self._clock.restart(session)
        self._first_mark = self._logged_mark = self._shown_at = None
        self._marks.clear()
        step = self._clock.step
        is_new = self._is_first_session and step == 0 and not list_checkpoints(
            os.path.dirname(os.path.abspath(self._log.path)))
        self._is_first_session = False
        told = self._log.resume(step, is_new)
        if told is not None:
            self.write(told)
        if self._on_terminal:
            if self._bar is None:
                from tqdm import tqdm  # pylint: disable=import-outside-toplevel
                self._bar = tqdm(total=max(self._counts.last_step, step), initial=step,
                                 file=self._stream, dynamic_ncols=True, mininterval=0,
                                 bar_format=self._bar_format([]))
            self._draw([])

    def before_run(self, run_context):
        """Fetches the values; writes the line of the step before, should this one fail."""
        self._log.flush()
        step, shown_at = self._clock.step + 1, self._shown_at
        self._logs = step % self._log_every == 0 or step == self._counts.last_step
        self._shows = shown_at is None or self._logs or (
            self._on_terminal and time.perf_counter() - shown_at >= self._REDRAW_SECONDS)
        return tf.train.SessionRunArgs(self._fetches)

    def after_run(self, run_context, run_values):
        """Counts the step; shows it, and puts its line into the log, if it is due."""
        clock, found = self._clock, run_values.results
        clock.count(found.get('waited', 0.))
        if self._first_mark is None and clock.mark is not None:
            self._first_mark = self._logged_mark = clock.mark
            self._marks.append(clock.mark)
        if not self._shows:
            return
        clock.read(run_context.session)
        if self._logs:
            self._log_step(found)
        shown = ['%s %s' % (_SHORT.get(name, name),
                            '%.4g' % value if at else ('%#.4g' % value).rstrip('.'))
                 for at, (name, value) in enumerate(found['values'].items())]
        if self._on_terminal:
            self._draw(shown)
        else:
            self.write('step ' + '  '.join([self._of_all(clock.step)] + self._fields(shown)))
        self._shown_at = time.perf_counter()

    def end(self, session):
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

    def evaluated(self, step, results, seconds=0.):
        """Writes a line with the results of an evaluation of the current step, and adds them to the
        step's line; leaves its seconds out of the rates."""
        self._clock.away(seconds)
        self._log.add(step, {'test_' + name: value for name, value in results.items()})
        shown = ', '.join('%s %.4g' % item for item in results.items() if item[0] != 'examples')
        self.write('step %s  test %s on %s' % (
            self._of_all(step), shown, counted(int(results['examples']), 'example')))

    def _log_step(self, found):
        """Puts the line of a step into the log, which keeps it back for an evaluation."""
        clock = self._clock
        speed, share = rate(self._logged_mark, clock.mark), share_waited(
            self._logged_mark, clock.mark)
        self._logged_mark = clock.mark
        line = {'epoch': round(clock.examples / self._counts.examples_per_epoch, 6),
                'examples': clock.examples}
        line.update(found['values'])
        line[self._unit + 's_per_second'] = None if speed is None else round(speed, 3)
        if 'waited' in found:
            line['input_wait'] = None if share is None else round(share, 4)
        line['wall_time'] = round(time.time(), 3)
        self._log.add(clock.step, line)

    def _draw(self, shown):
        """Redraws the bar, with a list of texts for the values."""
        self._bar.n = self._clock.step
        self._bar.bar_format = self._bar_format(shown)
        self._bar.refresh()

    def _bar_format(self, shown):
        """tqdm's format of the bar, with a list of texts for the values."""
        width = 2 * len(str(self._counts.last_step)) + 1
        return ' '.join([self._of_all(self._clock.step).rjust(width), '|{bar}|']
                        + self._fields(shown))

    def _of_all(self, step):
        """`'8/10'`, step and last step."""
        return '%d/%d' % (step, self._counts.last_step)

    def _fields(self, shown):
        """List of the texts of a line: a narrow terminal cuts off what matters least."""
        marks, mark, fields = self._marks, self._clock.mark, list(shown)
        # Keeps, as the first, the latest mark that is at least `_RATE_SECONDS` old.
        while len(marks) > 1 and mark.seconds - marks[1].seconds >= self._RATE_SECONDS:
            marks.popleft()
        speed = rate(marks[0], mark) if marks else None
        if speed is not None:
            left = self._counts.last_step - self._clock.step
            fields.append('%s left' % describe_time(left * self._counts.batch_size / speed))
            fields.append(('{:,.0f} {}s/s' if speed >= 10 else '{:.2g} {}s/s').format(
                speed, self._unit))
            if 'waited' in self._fetches:
                fields.append('input wait %.0f%%' % (100 * share_waited(marks[0], mark)))
            if mark != marks[-1]:
                marks.append(mark)
        return fields + ['epoch %.1f' % (self._clock.examples / self._counts.examples_per_epoch)]


class _Saves(tf.train.CheckpointSaverListener):
    """Brings the log to the disk before each checkpoint, whose time it leaves out of the clock."""

    def __init__(self, clock, log):
        self._clock, self._log, self._began = clock, log, None

    def before_save(self, session, global_step_value):
        """Syncs the log, before the variables are read."""
        self._began = time.perf_counter()
        self._log.sync()

    def after_save(self, session, global_step_value):
        """Tells the clock how long the checkpoint took."""
        self._clock.away(time.perf_counter() - self._began)

    def end(self, session, global_step_value):
        """Syncs the log, also where the last step was saved already."""
        self._log.sync()


def _can_show_bar(stream):
    """Whether a stream is a terminal of known size (in a container it may have 0 columns)."""
    if not stream.isatty() or os.environ.get('TERM') == 'dumb':
        return False
    try:
        return min(os.get_terminal_size(stream.fileno())) > 0
    except (AttributeError, OSError):  # a program's own stream, which says that it is a terminal
        return True


def describe_time(seconds: float) -> str:
    """A number of seconds as text: `'0:34'`, `'1:02:03'` or `'3 d 04:05'`."""
    minutes, seconds = divmod(int(round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return '%d d %02d:%02d' % (hours // 24, hours % 24, minutes)
    return '%d:%02d:%02d' % (hours, minutes, seconds) if hours else '%d:%02d' % (minutes, seconds)
