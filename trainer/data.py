"""The data of train.py: which data set, bad examples in it, errors of a user's own pipeline."""

import contextlib
import itertools
import re
import sys
import traceback

import tensorflow.compat.v1 as tf

import datasets
from datasets.bad_examples import lines_of_changes
from datasets.epochs import Epochs
from datasets.stream_probe import StreamOrder
from towers.errors import InputError, MeasurementError
from towers.tensorflow_errors import is_of_input, reason_of
from trainer.flags import FLAGS

# TensorFlow's errors of a step whose batch cannot be made.
_INPUT_ERRORS = (tf.errors.InvalidArgumentError, tf.errors.DataLossError, tf.errors.UnknownError,
                 tf.errors.NotFoundError, tf.errors.FailedPreconditionError)


def make_dataset():
    """The data set of the flags."""
    options = {}
    if FLAGS.dataset in ('imagenet', 'tfrecords', 'folder'):
        options = dict(augment=FLAGS.augment, convert=FLAGS.convert_colors, skip_bad=(
            FLAGS.skip_bad if FLAGS.mode != 'check_data' else 10 ** 12))
    return datasets.get_dataset(FLAGS.dataset, FLAGS.data_dir or None, FLAGS.num_classes,
                                FLAGS.background_class, **options)


def whole_batch(built):
    """The batch of all towers, from their shards: tensors `(images, labels)`, [batch, …] each."""
    parts = [tower.inputs for tower in built.towers]
    return tuple(tf.concat(part, 0) if len(part) > 1 else part[0] for part in zip(*parts))


# ---- Bad examples -------------------------------------------------------------------------------

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
    except _INPUT_ERRORS:
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
    if not (_can_skip(dataset) and isinstance(error, _INPUT_ERRORS) and is_of_input(error)):
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
      trial: function of a `say`, to be called with each text for the screen; those that an earlier
        attempt has said are not said again.
      keep: go on leaving out what was met, as many as --skip_bad allows: no run follows.

    Raises:
      BadExampleError: an example is bad, and none may be left out; or all of them are.
      OwnDataError: the user's own pipeline failed.
      Exception: what the trial raises for another reason.
    """
    said = 0
    with contextlib.nullcontext() if keep or not _can_skip(dataset) else (
            dataset.skipped.forgetting()):
        while True:
            number = 0

            def say(text):
                nonlocal said, number
                number += 1
                if number > said:
                    said = number
                    print(text, flush=True)
            try:
                return trial(say)
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


def _can_skip(dataset):
    """Whether the data set can find bad examples: data sets of image files can."""
    return hasattr(dataset, 'find_bad')


def _epochs(setup, workers):
    return Epochs(setup.dataset.num_examples['train'], workers * setup.batch_size, FLAGS.remainder)


def _probe(setup, workers):
    """The `StreamProbe` of the run."""
    return setup.dataset.stream_probe(FLAGS.seed, _epochs(setup, workers).length,
                                      **setup.classifier.image_format)


@contextlib.contextmanager
def naming_bad_test_images(dataset):
    """A block of an evaluation whose input may fail: the error then names the bad image.

    Raises:
      BadExampleError: a test image is bad.
      tf.errors.OpError: the evaluation failed for another reason.
    """
    try:
        yield
    except _INPUT_ERRORS:
        if _can_skip(dataset) and not FLAGS.skip_bad:
            dataset.find_bad('test', range(dataset.num_examples['test']))
        raise


class SavingEvaluation:
    """The evaluation of a run, which gives itself up where going on would lose trained steps.

    That is at a signal that ends the run, and at an error of the test set. `EvaluationHook` then
    stops the session, which saves.

    Attributes:
      metrics: those of the evaluation.
      failure: the error, to be raised when the session has saved; or None.
    """

    def __init__(self, evaluation, dataset, stopped):
        """
        Args:
          evaluation: `Evaluation` of the test set.
          dataset: whose test set that is.
          stopped: function without arguments that tells whether a signal has come.
        """
        self.metrics, self.failure = evaluation.metrics, None
        self._evaluation, self._dataset, self._stopped = evaluation, dataset, stopped

    def check_examples(self, session):
        """As of the `Evaluation`."""
        self._evaluation.check_examples(session)

    def run(self, session):
        """As of the `Evaluation`; None where it was given up."""
        try:
            with naming_bad_test_images(self._dataset):
                return self._evaluation.run(session, self._stopped)
        except (datasets.DatasetError, InputError) as error:
            self.failure = error
        except _INPUT_ERRORS as error:
            self.failure = own_failure(error) or error
        return None


# ---- A pipeline of the user's own ---------------------------------------------------------------

def is_own():
    """Whether --dataset names a function of the user's own, `module:function`."""
    return ':' in FLAGS.dataset


def check_sizes(batches, what, takes_any_size):
    """Raises `OwnDataError` for batches of unknown height or width that the network cannot take.

    Args:
      batches: `tf.data.Dataset` of images and labels.
      what: the name of the user's function that made them.
      takes_any_size: whether the network takes images of unknown sizes.
    """
    if takes_any_size or not is_own():
        return
    shape = tf.data.get_output_shapes(batches)[0]
    unknown = [name for name, side in zip(('height', 'width'), shape.as_list()[1:3])
               if side is None]
    if unknown:
        raise datasets.OwnDataError(
            '%s of %s gives images of unknown %s, shape %s, which --model=%s needs to know: '
            'tf.image.resize them to one size, or call set_shape in a map where they have one.' % (
                what, FLAGS.dataset, ' and '.join(unknown), shape, FLAGS.model))


def ended(steps, begin, wanted):
    """The `OwnDataError` of training data that ended before the run.

    Args:
      steps: steps that the run has done.
      begin: steps that it had done when it was started.
      wanted: the last step of the run.
    """
    what = 'train_batches of %s' % FLAGS.dataset
    if steps == begin:
        return datasets.OwnDataError('%s gave no batch for step %d of %d: there are no examples, '
                                     'or none after those that the run has seen: expected batches '
                                     'without end. Look for the examples, and add .repeat()' % (
                                         what, steps + 1, wanted))
    return datasets.OwnDataError('%s ended after %d of %d steps: add .repeat()' % (
        what, steps, wanted))


def ended_on_worker():
    """The `OwnDataError` of training data that ended on a worker before the chief stopped."""
    return datasets.OwnDataError('train_batches of %s ended before the chief did: add .repeat()'
                                 % FLAGS.dataset)


def own_failure(error):
    """The `OwnDataError` for an error of TensorFlow in the user's own pipeline.

    Args:
      error: `tf.errors.OpError` of a step.

    Returns:
      It, or None for an error of another kind.
    """
    text = getattr(error, 'message', None) or str(error)
    if not is_own() or 'IteratorGetNext' not in text:
        return None
    if isinstance(error, tf.errors.OutOfRangeError):
        return datasets.OwnDataError('train_batches of %s ended, or has no examples: expected '
                                     'batches without end: add .repeat()' % FLAGS.dataset)
    found = re.search(r'assertion failed: \[(.*? of %s .*?)\]' % re.escape(FLAGS.dataset), text)
    if found:
        return datasets.OwnDataError(found.group(1))
    failure = datasets.OwnDataError('--dataset=%s: a batch could not be made: %s' % (
        FLAGS.dataset, reason_of(error)))
    failure.__cause__ = error
    return failure


def unknown_failure(error):
    """The `BadExampleError` for an error of TensorFlow in the input, of which no example is bad.

    Args:
      error: `tf.errors.OpError` of a step.

    Returns:
      It, or None for an error of another kind.
    """
    if is_own() or not is_of_input(error):
        return None
    return datasets.BadExampleError(
        'a batch of --dataset=%s could not be made: %s. Looked at one by one, its examples are '
        'good: was a file out of reach for a while, or replaced? Start the same command again; '
        '--mode=check_data reads them all.' % (FLAGS.dataset, reason_of(error).rstrip('.')))


def show_cause(error):
    """Prints to standard error the traceback in the user's own code that caused an `OwnDataError`.
    """
    cause = error.__cause__
    if isinstance(cause, tf.errors.OpError):
        # The traceback of a Python function in the pipeline is a part of the error's text.
        found = re.search(r'\nTraceback .*?(?=\n\s*\n\s*\n|\n\s*\[\[|\Z)', cause.message or '',
                          re.S)
        sys.stderr.write(found.group().strip('\n') + '\n' if found else '')
    elif cause is not None:
        frames = cause.__traceback__
        while frames is not None and _is_importing(frames.tb_frame):
            frames = frames.tb_next
        traceback.print_exception(type(cause), cause, frames)


def _is_importing(frame):
    """Whether a frame is of the import of the user's code: of `datasets.own`, or of Python's own.
    """
    return (frame.f_globals.get('__name__') in (datasets.own.__name__, 'importlib')
            or frame.f_code.co_filename.startswith('<frozen importlib'))
