"""One view of all runs: a bar on a terminal, a line an evaluation anywhere else."""

import os
import sys
import time

from trainer.progress import describe_time


class Display:
    """Counts the examples of all runs together, so that the time left is that of the whole set."""

    def __init__(self, num_runs, examples, stream=None):
        """
        Args:
          num_runs: how many runs there are.
          examples: of each of them.
          stream: None for standard error.
        """
        self._num_runs, self._examples = num_runs, examples
        self._stream = stream or sys.stderr
        self._bar = None
        if self._stream.isatty() and os.environ.get('TERM') != 'dumb':
            from tqdm import tqdm  # pylint: disable=import-outside-toplevel
            self._bar = tqdm(total=num_runs * examples, file=self._stream, unit=' examples',
                             dynamic_ncols=True, unit_scale=True, smoothing=0.02)
        self._done = 0  # examples of the runs before this one
        self._seen = self._evaluated = 0  # of this one
        self._began, self._new = time.time(), 0
        self._title = ''

    def passed_over(self, number, run):
        """A run that was finished before."""
        self._title = self._name(number, run)
        self._done += self._examples
        if self._bar is not None:
            self._bar.initial += self._examples
            self._bar.n = self._done
            self._bar.refresh()
        self.say('%s: finished already' % self._title)

    def begin(self, number, run):
        """The next run starts."""
        self._title = self._name(number, run)
        self._seen = self._evaluated = None
        if self._bar is not None:
            self._bar.set_description(self._title + ', starting')
        else:
            self.say('%s: starting' % self._title)

    def show(self, lines):
        """What there is of the run's metrics.jsonl by now: a list of dicts."""
        seen = lines[-1].get('examples', 0) if lines else 0
        evaluated = [line for line in lines if 'test_accuracy' in line]
        if self._seen is None:  # where it goes on from is not this session's work
            self._seen, self._evaluated = seen, len(evaluated)
        self._new += max(seen - self._seen, 0)
        self._seen = seen
        latest = ''
        if evaluated:
            latest = 'test accuracy %.4f, loss %.4g' % (
                evaluated[-1]['test_accuracy'], evaluated[-1]['test_loss'])
        if self._bar is not None:
            self._bar.set_description(self._title + (', starting' if not seen else ''))
            self._bar.set_postfix_str(latest)
            self._bar.n = self._done + seen
            self._bar.refresh()
        elif len(evaluated) > self._evaluated:
            self.say('%s: %s of %s examples, %s%s' % (
                self._title, '{:,}'.format(seen), '{:,}'.format(self._examples), latest,
                self._left()))
        self._evaluated = len(evaluated)

    def finished(self):
        """The run has ended well."""
        self._end()

    def failed(self, reason):
        """The run has ended in an error; the others go on."""
        self.say('%s: FAILED, %s' % (self._title, reason))
        self._end()

    def say(self, text):
        """Writes a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._stream.write(text + '\n')
            self._stream.flush()

    def close(self):
        """Leaves the bar as it is on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _name(self, number, run):
        return '[%d/%d] %s' % (number + 1, self._num_runs, run.label)

    def _end(self):
        self._done += self._examples
        self._seen = 0
        if self._bar is not None:
            self._bar.n = self._done
            self._bar.refresh()

    def _left(self):
        """Time left by the mean speed so far, starts of runs included."""
        if not self._new:
            return ''
        left = self._num_runs * self._examples - self._done - self._seen
        return ', %s left' % describe_time((time.time() - self._began) / self._new * left)
