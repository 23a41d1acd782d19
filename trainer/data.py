"""The data set of the flags, and errors of a pipeline of the user's own."""

import contextlib
import itertools
import re
import sys
import traceback
import typing

import tensorflow.compat.v1 as tf

import datasets
from datasets.held_out import with_unlabelled, with_validation
from towers.errors import MeasurementError, counted, is_of_input, reason_of
from trainer import own_model
from trainer.flags import FLAGS

# TensorFlow's errors of a step whose batch cannot be made.
INPUT_ERRORS = (tf.errors.InvalidArgumentError, tf.errors.DataLossError, tf.errors.UnknownError,
                tf.errors.NotFoundError, tf.errors.FailedPreconditionError)


def make_dataset():
    """The data set of the flags."""
    options = {}
    if FLAGS.dataset in ('imagenet', 'tfrecords', 'folder'):
        options = dict(augment=FLAGS.augment)
        if FLAGS.mode != 'check_data':  # which writes the list
            options['bad_list'] = FLAGS.bad_examples or None
    dataset = datasets.get_dataset(FLAGS.dataset, FLAGS.data_dir or None, FLAGS.num_classes,
                                   FLAGS.background_class, **options)
    if options.get('bad_list'):
        print('left out       %s that %s lists' % (
            counted(dataset.left_out, 'example'), FLAGS.bad_examples), flush=True)
    if FLAGS.unlabelled:
        return with_unlabelled(dataset, FLAGS.unlabelled)
    if FLAGS.validation and FLAGS.mode not in ('eval', 'predict', 'check_data'):
        return with_validation(dataset, FLAGS.validation)
    return dataset


def test_numbers(dataset):
    """The numbers of the images that an evaluation takes, in order."""
    return dataset.numbers['test'] if hasattr(dataset, 'numbers') else itertools.count()


# ---- A pipeline of the user's own ---------------------------------------------------------------

def is_own() -> bool:
    """Whether --dataset names a function of the user's own, `module:function`."""
    return ':' in FLAGS.dataset


def data_ended(when: str, at_once: bool = False) -> datasets.OwnDataError:
    """The `OwnDataError` of training data that ended before the run.

    Args:
      when: after how many steps, in words.
      at_once: whether it gave no batch since the run was started.
    """
    return datasets.OwnDataError(
        'train_batches of %s ended after %s: expected batches without end. %s' % (
            FLAGS.dataset, when, 'Are there examples, after those that the run has seen? Look for '
            'them, and add .repeat()' if at_once else 'Add .repeat()'))


def own_failure(error: tf.errors.OpError) -> typing.Optional[Exception]:
    """The `OwnDataError` or `OwnModelError` for a `tf.errors.OpError` of a step, in the user's own
    pipeline or model; None for an error of another kind."""
    text = getattr(error, 'message', None) or str(error)
    if not is_own() or 'IteratorGetNext' not in text:
        return own_model.step_failure(error)
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


def input_failure(error: tf.errors.OpError) -> typing.Optional[Exception]:
    """The `BadExampleError` for a `tf.errors.OpError` of a step, in the input of a data set of this
    program; None for an error of another kind."""
    if is_own() or not is_of_input(error):
        return None
    found = re.search(r'assertion failed: \[(.*?)\]\s', error.message + '\n')
    if found:  # the data set's own check, which names the example
        return datasets.BadExampleError(
            '%s. --mode=check_data with bad_examples of --config lists all bad examples in that '
            'file, and a run with the same option leaves them out.' % found.group(1).rstrip('.'))
    return datasets.BadExampleError(
        'a batch of --dataset=%s could not be made: %s. --mode=check_data names the examples that '
        'are bad. If it finds none, was a file out of reach for a while? Start the same command '
        'again.' % (FLAGS.dataset, reason_of(error).rstrip('.')))


@contextlib.contextmanager
def naming_failures():
    """A block of steps that train nothing; an error of the user's own data or model is named."""
    try:
        yield
    except (tf.errors.OpError, MeasurementError) as error:
        failed = error if isinstance(error, tf.errors.OpError) else error.__cause__
        failure = own_failure(failed) if isinstance(failed, tf.errors.OpError) else None
        if failure is None:
            raise
        raise failure from failure.__cause__


def show_cause(error):
    """Prints to standard error the traceback in the user's own code that caused an error of it.
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
    """Whether a frame is of the call or import of the user's code: one of ours, or of Python's own.
    """
    return (frame.f_globals.get('__name__') in (
        datasets.own.__name__, datasets.own_code.__name__, own_model.__name__, 'importlib')
            or frame.f_code.co_filename.startswith('<frozen importlib'))
