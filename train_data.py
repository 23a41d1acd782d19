"""The data of train.py: which set, which examples to leave out, what `--mode=diagnose` runs."""

import contextlib
import re
import sys
import traceback

import tensorflow.compat.v1 as tf

import datasets
from datasets.epochs import Epochs
from datasets.pipeline import epoch_order
from towers.reason import reason_of
from towers.run import diagnosis
from train_flags import FLAGS

# What a step ends in whose input cannot be made.
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


def staging():
    """`stage_inputs` of `build_towers`: synthetic images stay on the towers' devices."""
    if FLAGS.dataset == 'synthetic' and not FLAGS.cluster:
        return 'first'
    return FLAGS.stage_inputs


def whole_batch(built):
    """The batch that the towers work on: `(images, labels)`."""
    parts = [tower.inputs for tower in built.towers]
    return tuple(tf.concat(part, 0) if len(part) > 1 else part[0] for part in zip(*parts))


# ---- Bad examples -------------------------------------------------------------------------------

def prepare_skipping(dataset, folder, position):
    """Finds out which test images to leave out, and what the run has left out before."""
    if not _can_skip(dataset):
        return
    if FLAGS.mode == 'train' and not FLAGS.plan_only:
        dataset.skipped.resume(folder, position.examples)
    if FLAGS.skip_bad and not FLAGS.plan_only:  # all of them: evaluation is exact
        dataset.find_bad('test', [(-1, number) for number in range(dataset.num_examples['test'])])


@contextlib.contextmanager
def skipping(dataset, job, session, workers=1):
    """Steps whose input may fail: the bad examples are found and left out, or named and raised.

    Args:
      workers: how many share the batches out.
    """
    try:
        yield
    except _INPUT_ERRORS:
        if not _can_skip(dataset):
            raise
        first = session.run_step_fn(
            lambda step_context: int(step_context.session.run(job.examples_seen)))
        # With staged inputs it may be a batch later than that of the step; and two more are made
        # ahead, whose bad examples come to light in time.
        found = dataset.find_bad('train', _upcoming(dataset, first, workers))
        if not found:
            with naming_bad_test_images(dataset):
                raise
        session.run_step_fn(
            lambda step_context: step_context.session.run(job.iterator.initializer))


def tell_skipped(dataset):
    """Prints what was left out."""
    text = dataset.skipped.describe() if _can_skip(dataset) else ''
    if text:
        print(text)


def _can_skip(dataset):
    return hasattr(dataset, 'find_bad')


def _upcoming(dataset, first, workers):
    """[(place in the stream, number of the example there)], those of two steps of all workers."""
    batch_size = workers * FLAGS.batch_size
    length = Epochs(dataset.num_examples['train'], batch_size, FLAGS.remainder).length
    total = dataset.num_examples['train']
    with tf.Graph().as_default():
        epoch = tf.placeholder(tf.int64, [])
        order = epoch_order(total, FLAGS.seed)(epoch)
        with tf.Session() as session:
            orders = {}
            found = []
            for place in range(first, first + 2 * batch_size):
                of = place // length
                if of not in orders:
                    orders[of] = session.run(order, {epoch: of})
                found.append((place, int(orders[of][place % length % total])))
            return found


@contextlib.contextmanager
def naming_bad_test_images(dataset):
    """An evaluation whose input may fail: the error names the image."""
    try:
        yield
    except _INPUT_ERRORS:
        if _can_skip(dataset) and not FLAGS.skip_bad:
            dataset.find_bad('test', [(-1, number)
                                      for number in range(dataset.num_examples['test'])])
        raise


# ---- A pipeline of the user's own ---------------------------------------------------------------

def is_own():
    """Whether the data are those of a user's own function."""
    return ':' in FLAGS.dataset


def ended(steps, begin, wanted):
    """The error of training data that ended before the run.

    Args:
      steps: how many the run has done.
      begin: how many it had done when it was started.
      wanted: how many it is to do.
    """
    what = 'train_batches of %s' % FLAGS.dataset
    if steps == begin:
        return datasets.OwnDataError('%s gave no batch for step %d of %d: expected batches without '
                                     'end: add .repeat()' % (what, steps + 1, wanted))
    return datasets.OwnDataError('%s ended after %d of %d steps: add .repeat()' % (
        what, steps, wanted))


def ended_on_worker():
    """The same of a worker whose chief still wants steps of it."""
    return datasets.OwnDataError('train_batches of %s ended before the chief did: add .repeat()'
                                 % FLAGS.dataset)


def own_failure(error):
    """What TensorFlow raised for the user's own pipeline, as an `OwnDataError`; None for the rest.
    """
    text = getattr(error, 'message', None) or str(error)
    if not is_own() or 'IteratorGetNext' not in text:
        return None
    if isinstance(error, tf.errors.OutOfRangeError):
        return datasets.OwnDataError('train_batches of %s ended: expected batches without end: add '
                                     '.repeat()' % FLAGS.dataset)
    found = re.search(r'assertion failed: \[(.*? of %s .*?)\]' % re.escape(FLAGS.dataset), text)
    if found:
        return datasets.OwnDataError(found.group(1))
    failure = datasets.OwnDataError('--dataset=%s: a batch could not be made: %s' % (
        FLAGS.dataset, reason_of(error)))
    failure.__cause__ = error
    return failure


def show_cause(error):
    """Prints where the user's own code raised what an `OwnDataError` is about."""
    cause = error.__cause__
    if isinstance(cause, tf.errors.OpError):
        # That of a Python function in the pipeline is a part of the text.
        found = re.search(r'\nTraceback .*?(?=\n\s*\n\s*\n|\n\s*\[\[|\Z)', cause.message or '',
                          re.S)
        sys.stderr.write(found.group().strip('\n') + '\n' if found else '')
    elif cause is not None:
        frames = cause.__traceback__
        while frames is not None and _is_importing(frames.tb_frame):
            frames = frames.tb_next
        traceback.print_exception(type(cause), cause, frames)


def _is_importing(frame):
    """Whether it is on the way to the user's code: of `datasets.own`, or of Python's import."""
    return (frame.f_globals.get('__name__') in (datasets.own.__name__, 'importlib')
            or frame.f_code.co_filename.startswith('<frozen importlib'))


# ---- Which side holds the run back --------------------------------------------------------------

def diagnose(dataset, classifier, build_job, session_config):
    """Measures the pipeline, the towers, and both: a `diagnosis.Diagnosis` to be printed."""
    def trial(stage_inputs):
        tf.set_random_seed(FLAGS.seed)
        job = build_job(stage_inputs)
        return diagnosis.Trial(job.train_op, [job.iterator.initializer], session_config(job.built),
                               job.built)

    def batches():
        return dataset.train_batches(batch_size=FLAGS.batch_size, seed=FLAGS.seed,
                                     **classifier.image_format)
    stages = None
    if hasattr(dataset, 'stages'):
        def stages():
            return dataset.stages(FLAGS.batch_size, FLAGS.seed, **classifier.image_format)
    return diagnosis.diagnose(
        trial, batches, FLAGS.devices or FLAGS.num_towers, FLAGS.batch_size, stages,
        FLAGS.diagnose_seconds, staging())
