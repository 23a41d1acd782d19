"""--mode=find_rate: the loss over a rising learning rate, from which to choose a rate.

The learning rate range test (Smith 2015, arXiv 1506.01186, section 3.3): a new model is trained for
some steps, in which the rate of the optimizer grows by a constant factor from `LEAST` to `MOST`.
The test stops where the loss has grown to four times its smallest value, or is no number. Losses
are smoothed as fastai's finder does, by an average with bias correction.

Nothing is saved: no checkpoint, no line of `metrics.jsonl`.
"""

import math
import typing

import tensorflow.compat.v1 as tf

from towers.nonfinite import explained
from trainer.arguments import session_config
from trainer.data import naming_failures
from trainer.flags import FLAGS
from trainer.job import Job, Setup, build_job
from trainer.pictures import check_can_write, new_axes, write_picture, write_table

LEAST = 1e-6
MOST = 10.
_SMOOTHING = .9  # the weight of the former average in the smoothed loss
_DIVERGED = 4.  # a loss that is so many times the smallest loss has diverged
_LINES = 12  # lines of the curve on the screen
_BAR = 40  # characters of the longest bar


class Trial(typing.NamedTuple):
    """A step of the test.

    Attributes:
      rate: the learning rate of the optimizer.
      loss: the loss of the step; after `smoothed` the smoothed loss.
    """
    rate: float
    loss: float


def find_rate(setup: Setup) -> None:
    """Runs the test; prints the curve and a proposal, and writes the option rate_plot.

    Args:
      setup: the model, its data, and a batch size.

    Raises:
      MissingPackageError: the picture needs matplotlib.
    """
    check_can_write(FLAGS.rate_plot)
    print('trying         rates from %g to %g in %d steps of %d examples, without saving' % (
        LEAST, MOST, FLAGS.rate_steps, setup.batch_size), flush=True)
    with tf.Graph().as_default():
        tf.set_random_seed(FLAGS.seed)
        rate = tf.placeholder(tf.float32, [], 'rate')
        job = build_job(setup, with_evaluation=False, learning_rate=rate)
        with naming_failures():
            trials = smoothed(_losses(job, rate))
    print(curve(trials))
    print(describe_proposal(trials))
    if FLAGS.rate_plot:
        write_trials(trials, FLAGS.rate_plot)
        print('rates          %s' % FLAGS.rate_plot)


def rates(steps: int) -> typing.List[float]:
    """The learning rates for a number of `steps`, from `LEAST` to `MOST`.

        rate_t = LEAST (MOST / LEAST)^(t / (steps - 1)),    t = 0 … steps - 1
    """
    factor = (MOST / LEAST) ** (1 / (steps - 1))
    return [LEAST * factor ** step for step in range(steps)]


def _losses(job: Job, rate: tf.Tensor) -> typing.Iterator[Trial]:
    """Runs a step for each rate, and yields its `Trial`; stops at a loss that is no number.

    Args:
      job: the training, with newly initialized variables.
      rate: the placeholder of its learning rate.
    """
    with tf.Session(config=session_config(job.built)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer(),
                     tf.tables_initializer()])
        session.run(job.iterator.initializer)
        for value in rates(FLAGS.rate_steps):
            try:
                loss, _ = session.run([job.built.loss, job.train_op], {rate: value})
            except tf.errors.OpError as error:
                # With check_numerics the step fails by itself at a NaN in a loss or a gradient.
                is_nonfinite = explained(error) is not None
                if is_nonfinite:
                    return
                raise
            if not math.isfinite(loss):  # without check_numerics
                return
            yield Trial(value, float(loss))


def smoothed(trials: typing.Iterable[Trial]) -> typing.List[Trial]:
    """The trials with smoothed losses, up to the one at which the loss has diverged.

        average_t = 0.9 average_(t-1) + 0.1 loss_t,    smoothed_t = average_t / (1 - 0.9^t)

    Args:
      trials: the trials with the losses of the steps, in order.

    Returns:
      List of trials with smoothed losses; it ends with the first loss that is more than four times
      the absolute value of the smallest loss so far.
    """
    smoothed_trials: typing.List[Trial] = []
    average = 0.
    least = math.inf
    for step, trial in enumerate(trials, 1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * trial.loss
        loss = average / (1 - _SMOOTHING ** step)
        smoothed_trials.append(Trial(trial.rate, loss))
        least = min(least, loss)
        if loss > _DIVERGED * abs(least):
            break
    return smoothed_trials


def proposed_rate(trials: typing.List[Trial]) -> typing.Optional[float]:
    """A tenth of the rate at which the smoothed loss is smallest.

    At that rate itself the loss is about to grow; a tenth of it is the usual choice.

    Args:
      trials: the trials with smoothed losses, in the order of their rates.

    Returns:
      The rate; None if the loss was the smallest at the first trial, or if there is one trial only.
    """
    if len(trials) < 2:
        return None
    best = min(trials, key=lambda trial: trial.loss)
    if best is trials[0]:
        return None
    return best.rate / 10


def describe_proposal(trials: typing.List[Trial]) -> str:
    """A line about the rate that the trials propose."""
    rate = proposed_rate(trials)
    if rate is None:
        return 'proposal       none: the loss never fell; is the data in order?'
    return ('proposal       a rate of %.2g, a tenth of that with the smallest loss, --lr_scaling '
            'included' % rate)


def curve(trials: typing.List[Trial]) -> str:
    """The curve of the losses as text.

    Args:
      trials: the trials, in the order of their rates.

    Returns:
      A line for every nth trial, at most twelve: the rate, the loss, and a bar whose length is
      proportional to the loss.
    """
    if not trials:
        return 'no step had a loss that is a number'
    every = max(1, math.ceil(len(trials) / _LINES))
    shown = trials[::every]
    largest_loss = max(trial.loss for trial in shown)
    lines = ['learning rate  loss (smoothed)']
    for trial in shown:
        width = 0  # also of a negative loss
        if trial.loss > 0:
            width = round(_BAR * trial.loss / largest_loss)
        lines.append('  %-11.2e  %-9.4g %s' % (trial.rate, trial.loss, '#' * width))
    return '\n'.join(lines)


def write_trials(trials: typing.List[Trial], path: str) -> None:
    """Writes the trials as a table, if the path ends in `.csv`; else as a picture."""
    if path.endswith('.csv'):
        write_table([Trial._fields] + list(trials), path)
        return
    axes = new_axes('loss over a rising learning rate', (7, 4))
    axes.semilogx([trial.rate for trial in trials], [trial.loss for trial in trials])
    axes.set_xlabel('learning rate of the optimizer')
    axes.set_ylabel('loss, smoothed')
    rate = proposed_rate(trials)
    if rate is not None:
        axes.axvline(rate, linestyle='--', color='#cc0000', label='proposal, %.2g' % rate)
        axes.legend(frameon=False)
    write_picture(axes, path)
