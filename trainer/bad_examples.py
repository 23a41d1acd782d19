"""Bad examples: found, named, left out of training, of evaluations and of trials."""

import contextlib
import itertools

import tensorflow.compat.v1 as tf

from datasets.bad_examples import lines_of_changes
from datasets.epochs import Epochs
from datasets.stream_probe import StreamOrder
from towers.errors import MeasurementError
from towers.tensorflow_errors import is_of_input
from trainer.data import own_failure
from trainer.flags import FLAGS

# TensorFlow's errors of a step whose batch cannot be made.
INPUT_ERRORS = (tf.errors.InvalidArgumentError, tf.errors.DataLossError, tf.errors.UnknownError,
                 tf.errors.NotFoundError, tf.errors.FailedPreconditionError)


def prepare_skipping(setup, folder, position, workers=1):
    """Finds the bad test images, with --skip_bad, and those training examples that the run in a
    folder has left out before `position` and that are still bad; `dataset.skipped` then holds both.
    Prints what has become of the others.

    Args:
      setup: `Setup`.
      folder: of the run.
      position: `Position` that it goes on from.
      workers: how many workers share the stream of examples.

    Raises:
      BadExampleError: there are more bad examples than --skip_bad allows, or every test image is
        bad.
    """
    dataset = setup.dataset
    if not _can_skip(dataset):
        return
    if FLAGS.skip_bad and not FLAGS.plan_only:  # all of them: evaluation is exact
        dataset.find_bad('test', range(dataset.num_examples['test']))
    # Then, so that the list has the order of a run that was never stopped.
    if FLAGS.mode == 'train' and not FLAGS.plan_only:
        changes = dataset.skipped.resume(folder, position.examples,
                                         _probe(setup, workers).look_again)
        for line in lines_of_changes(changes):
            print(line, flush=True)


@contextlib.contextmanager
def skipping(job, session, workers=1):
    """A block of steps whose input may fail: the bad examples are found, and left out from then on.

    The block ends at the failure; run again, it goes on with the step that failed.

    Args:
      job: `Job`.
      session: the session of the steps.
      workers: how many workers share the stream of examples.

    Raises:
      BadExampleError: an example is bad, and there are more than --skip_bad allows.
      tf.errors.OpError: the step failed for another reason.
    """
    dataset = job.setup.dataset
    try:
        yield
    except INPUT_ERRORS:
        if not _can_skip(dataset):
            raise
        first = session.run_step_fn(
            lambda step_context: int(step_context.session.run(job.counts.examples)))
        # Batches that are made ahead fail in their turn.
        if not _probe(job.setup, workers).find_bad(
                first, _epochs(job.setup, workers).place_after(first, 1)):
            raise
        session.run_step_fn(
            lambda step_context: step_context.session.run(job.iterator.initializer))


def leave_out_first_bad(dataset, batch_size, error):
    """Finds the bad training example that a pipeline has met which began at the first one.

    Args:
      dataset: whose training examples.
      batch_size: about how many examples a batch has.
      error: what the step raised that would have read it.

    Returns:
      Whether there is one; it is left out from then on.

    Raises:
      BadExampleError: there are more bad examples than --skip_bad allows.
    """
    if not (_can_skip(dataset) and isinstance(error, INPUT_ERRORS) and is_of_input(error)):
        return False
    # The order of the first epoch has them all. Twice as many as were looked at before, each time:
    # so that many bad ones take few attempts.
    total, first = dataset.num_examples['train'], 0
    order = StreamOrder(total, FLAGS.seed, total)
    while first < total:
        following = min(total, max(2 * batch_size, 3 * first))
        if dataset.find_bad('train', (order.at(place).number
                                      for place in range(first, following))):
            return True
        first = following
    return False


def trying(dataset, batch_size, trial, keep=False):
    """What a trial returns: steps on the data, from the first example on, that train nothing.

    All trials pass through here. One whose input fails begins anew without the bad examples that it
    met, any number of them with --skip_bad; they are forgotten at its end, since how far it came
    depends on the machine.

    Args:
      dataset: that it reads.
      batch_size: about how many examples a batch has.
      trial: function of a `say`, to be called with each text for the screen.
      keep: go on leaving out what was met, as many as --skip_bad allows: no run follows.

    Raises:
      BadExampleError: an example is bad, and none may be left out; or all of them are.
      OwnDataError: the user's own pipeline failed.
      Exception: what the trial raises for another reason.
    """
    with contextlib.nullcontext() if keep or not _can_skip(dataset) else (
            dataset.skipped.forgetting()):
        while True:
            try:
                return trial(lambda text: print(text, flush=True))
            except (tf.errors.OpError, MeasurementError) as error:
                failed = error if isinstance(error, tf.errors.OpError) else error.__cause__
                failure = None if failed is None else own_failure(failed)
                if failure is not None:
                    raise failure from failure.__cause__
                if failed is None or not leave_out_first_bad(dataset, batch_size, failed):
                    raise


def tell_skipped(dataset):
    """Prints which examples were left out, if any."""
    text = dataset.skipped.describe() if _can_skip(dataset) else ''
    if text:
        print(text)


def test_numbers(dataset):
    """The numbers of the images that an evaluation takes, in order: without those left out."""
    return dataset.good_numbers('test') if _can_skip(dataset) else itertools.count()


@contextlib.contextmanager
def naming_bad_test_images(dataset):
    """A block of an evaluation whose input may fail: the error then names the bad image.

    Raises:
      BadExampleError: a test image is bad.
      tf.errors.OpError: the evaluation failed for another reason.
    """
    try:
        yield
    except INPUT_ERRORS:
        if _can_skip(dataset) and not FLAGS.skip_bad:
            dataset.find_bad('test', range(dataset.num_examples['test']))
        raise


def _can_skip(dataset):
    """Whether the data set can find bad examples: data sets of image files can."""
    return hasattr(dataset, 'find_bad')


def _epochs(setup, workers):
    return Epochs(setup.dataset.num_examples['train'], workers * setup.batch_size, FLAGS.remainder)


def _probe(setup, workers):
    """The `StreamProbe` of the run."""
    return setup.dataset.stream_probe(FLAGS.seed, _epochs(setup, workers).length,
                                      **setup.model.image_format)
