"""The data set of the flags, and the errors of its input pipeline.

An error of the input comes out of a step, as a `tf.errors.OpError` with a text of TensorFlow's. The
functions below turn it into the error of this program that names the data set, the function or the
example, and says what to do; they return None for an error that the input did not cause. Its test
is tests/trainer/test_trainer_data.py.

Words of `towers.errors`: `is_of_input` tells whether a step failed since its batch could not be
made, and `reason_of` gives the text of an error in one line.
"""

import contextlib
import itertools
import re
import sys
import traceback
import typing

import tensorflow.compat.v1 as tf

import datasets
from datasets.held_out import with_unlabelled, with_validation
from towers.errors import counted, is_of_input, reason_of
from trainer import own_model
from trainer.flags import FLAGS

# TensorFlow's errors of a step whose batch cannot be made.
INPUT_ERRORS = (tf.errors.InvalidArgumentError, tf.errors.DataLossError, tf.errors.UnknownError,
                tf.errors.NotFoundError, tf.errors.FailedPreconditionError)
# A traceback in the text of such an error. It ends before two empty lines, before TensorFlow's name
# of the operation, which begins with '[[', or with the text.
_TRACEBACK_IN_TEXT = re.compile(r'\nTraceback .*?(?=\n\s*\n\s*\n|\n\s*\[\[|\Z)', re.DOTALL)


def make_dataset() -> typing.Any:
    """The data set of the flags.

    Raises:
      InvalidArgumentError, DatasetError: as `datasets.get_dataset`.
    """
    options = _options_of_files()
    dataset = datasets.get_dataset(FLAGS.dataset, FLAGS.data_dir or None, FLAGS.num_classes,
                                   FLAGS.background_class, **options)
    if options.get('bad_list'):
        print('left out       %s that %s lists' % (
            counted(dataset.left_out, 'example'), FLAGS.bad_examples), flush=True)
    # `contradictions` refuses `unlabelled` in any mode but predict, which holds no examples out.
    if FLAGS.unlabelled:
        return with_unlabelled(dataset, FLAGS.unlabelled)
    # Modes that run steps of training hold examples out. --mode=eval and predict take the true test
    # set, with which the run has made no choices; check_data reads all examples.
    if FLAGS.validation and FLAGS.mode not in ('eval', 'predict', 'check_data'):
        return with_validation(dataset, FLAGS.validation)
    return dataset


def _options_of_files() -> dict:
    """The arguments of `datasets.get_dataset` that only data sets of image files take."""
    options: dict = {}
    if FLAGS.dataset in ('imagenet', 'tfrecords', 'folder'):
        options['augment'] = FLAGS.augment
        if FLAGS.mode != 'check_data':  # this mode writes the list
            options['bad_list'] = FLAGS.bad_examples or None
    return options


def test_numbers(dataset: typing.Any) -> typing.Iterable[int]:
    """The numbers of the test examples, in the order in which an evaluation gives them.

    The numbers have gaps where `bad_examples` are left out. Only a data set of image files leaves
    examples out.

    Args:
      dataset: the data set of the flags.
    """
    if hasattr(dataset, 'numbers'):  # a data set of image files
        return dataset.numbers['test']
    return itertools.count()


# ---- errors of the input -------------------------------------------------------------------------

def is_own_dataset() -> bool:
    """Whether --dataset names a function of the user's own, `module:function`."""
    return ':' in FLAGS.dataset


def data_ended(when: str, at_once: bool = False) -> datasets.OwnDataError:
    """The `OwnDataError` for training data that ended before the run.

    Args:
      when: the text that says after how many steps it ended, such as `'5 of 100 steps'`.
      at_once: whether the data gave not a single batch since the run was started.
    """
    advice = 'Add .repeat()'
    if at_once:
        advice = ('Are there examples, after those that the run has seen? Look for them, and add '
                  '.repeat()')
    return datasets.OwnDataError(
        'train_batches of %s ended after %s: expected batches without end. %s' % (
            FLAGS.dataset, when, advice))


def own_failure(error: tf.errors.OpError) -> typing.Optional[Exception]:
    """The error for a failure in the user's own pipeline or model.

    Args:
      error: the error that a step raised.

    Returns:
      An `OwnDataError` or `OwnModelError`; None for an error of another kind.
    """
    text = getattr(error, 'message', None) or str(error)
    is_of_iterator = 'IteratorGetNext' in text  # TensorFlow's text names the operation that failed
    if is_own_dataset() and is_of_iterator:
        return _failure_of_own_pipeline(error, text)
    return own_model.step_failure(error)


def _failure_of_own_pipeline(error: tf.errors.OpError, text: str) -> datasets.OwnDataError:
    """The error for a batch that the user's own pipeline has failed to make.

    Args:
      error: the error that the step raised.
      text: its text.
    """
    if isinstance(error, tf.errors.OutOfRangeError):
        return datasets.OwnDataError('train_batches of %s ended, or has no examples: expected '
                                     'batches without end: add .repeat()' % FLAGS.dataset)
    # The text of a check in `datasets.own` has 'of <data set> ' in it, and is the whole error. The
    # text of an assertion in the user's own pipeline has not: it becomes the reason in the error.
    found = re.search(r'assertion failed: \[(.*? of %s .*?)\]' % re.escape(FLAGS.dataset), text)
    if found:
        return datasets.OwnDataError(found.group(1))
    failure = datasets.OwnDataError('--dataset=%s: a batch could not be made: %s' % (
        FLAGS.dataset, reason_of(error)))
    failure.__cause__ = error  # for `show_cause`
    return failure


def input_failure(error: tf.errors.OpError) -> typing.Optional[Exception]:
    """The error for a failure in the input of a data set of this program.

    Args:
      error: the error that a step raised.

    Returns:
      A `BadExampleError`, which names the example if the data set's own check has found it; None
      for an error of another kind.
    """
    if is_own_dataset() or not is_of_input(error):
        return None
    # The data set's own check names the example. A ']' ends its text only before white space, or at
    # the end of the message: the name of a file may also have a ']' in it.
    found = re.search(r'assertion failed: \[(.*?)\](\s|$)', error.message)
    if found:
        return datasets.BadExampleError(
            '%s. --mode=check_data with bad_examples of --config lists all bad examples in that '
            'file, and a run with the same option leaves them out.' % found.group(1).rstrip('.'))
    return datasets.BadExampleError(
        'a batch of --dataset=%s could not be made: %s. --mode=check_data names the examples that '
        'are bad. If it finds none, was a file out of reach for a while? Start the same command '
        'again.' % (FLAGS.dataset, reason_of(error).rstrip('.')))


@contextlib.contextmanager
def naming_failures() -> typing.Iterator[None]:
    """A context for the steps of `trials` and `rate_finder`: an error in a step becomes the error
    that names the user's own data or model, if the data or the model caused it."""
    try:
        yield
    except tf.errors.OpError as error:
        failure = own_failure(error)
        if failure is None:
            raise
        # `from` keeps Python from showing `error` as well, even if `failure` has no cause.
        raise failure from failure.__cause__


def show_cause(error: Exception) -> None:
    """Prints the traceback of the user's own code that caused an error, to standard error."""
    cause = error.__cause__
    if isinstance(cause, tf.errors.OpError):
        # The traceback of a Python function in the pipeline is a part of TensorFlow's text.
        found = _TRACEBACK_IN_TEXT.search(cause.message or '')
        if found:
            sys.stderr.write(found.group().strip('\n') + '\n')
    elif cause is not None:
        # The user's code begins after the frames that call or import it.
        frames = cause.__traceback__
        while frames is not None and _calls_own_code(frames.tb_frame):
            frames = frames.tb_next
        traceback.print_exception(type(cause), cause, frames)


def _calls_own_code(frame: typing.Any) -> bool:
    """Whether a frame of a traceback calls or imports the user's code: it is in this program, or in
    Python's import system."""
    ours = (datasets.own.__name__, datasets.own_code.__name__, own_model.__name__, 'importlib')
    return (frame.f_globals.get('__name__') in ours
            or frame.f_code.co_filename.startswith('<frozen importlib'))
