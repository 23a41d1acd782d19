"""What train.py makes of the newest checkpoint: an evaluation, predictions, a SavedModel."""

import contextlib
import csv

import tensorflow.compat.v1 as tf

import towers
from towers.run.averages import averages_in
from towers.run.export import export_saved_model
from towers.safe_files import written_whole
from trainer.data import is_own
from trainer.flags import FLAGS, train_dir
from trainer.job import make_evaluation
from trainer.resources import session_config


def report(throughput, evaluation, dataset):
    """Prints the test accuracy, and images a second.

    Args:
      throughput: `Throughput`; or None.
      evaluation: dict that `Evaluation.run` returned.
      dataset: whose test set that was.
    """
    print('test accuracy  %.4f on %d images' % (evaluation['accuracy'], evaluation['examples']))
    said = dataset.num_examples['test']
    if is_own() and evaluation['examples'] < said:
        print('test images    num_examples of %s says %d for test, and %d came' % (
            FLAGS.dataset, said, evaluation['examples']))
    if throughput is not None:
        print('speed          {:,.0f} images/s'.format(throughput.examples / throughput.seconds))


def evaluate(evaluation, dataset, prefix=None):
    """Evaluates a checkpoint, or the newest one, on the test set of a data set; prints the results,
    and returns them as `Evaluation.run` does."""
    with restored_session(evaluation.built, prefix) as session:
        results = evaluation.run(session)
        report(None, results, dataset)
        return results


def evaluate_in_graph(setup, prefix):
    """As `evaluate`, in a graph of its own."""
    with tf.Graph().as_default():
        return evaluate(make_evaluation(setup), setup.dataset, prefix)


def predict(evaluation, numbers):
    """Writes --predictions: a row for each test image, with its number, label, prediction and the
    probability of the prediction.

    Args:
      evaluation: `Evaluation`.
      numbers: those of its images in the test set, in order; an iterable.
    """
    with restored_session(evaluation.built) as session, \
            written_whole(FLAGS.predictions, advice='Give another --predictions.',
                          may_be_stream=True, newline='') as table:
        rows = csv.writer(table)
        rows.writerow(['image', 'label', 'predicted', 'probability'])
        count, numbers = 0, iter(numbers)
        for batch in evaluation.predict(session):
            for label, predicted, probability in zip(batch['label'], batch['predicted'],
                                                     batch['probability']):
                rows.writerow([next(numbers), label, predicted, '%.6f' % probability])
                count += 1
    print('predictions    %s, %d images' % (FLAGS.predictions, count))


@contextlib.contextmanager
def restored_session(built, prefix=None):
    """A session with the weights of the newest checkpoint, or with their moving averages if the
    checkpoint has some.

    Args:
      built: `BuiltTowers`.
      prefix: of another checkpoint than the newest; or None.

    Raises:
      CheckpointError: there is no checkpoint, or it is damaged or of another model.
    """
    prefix = prefix or newest_or_refuse()
    names, averages = averages_in(prefix, tf.global_variables())
    towers.check_fits(prefix, names)
    saver = tf.train.Saver(names)
    with tf.Session(config=session_config(built)) as session:
        saver.restore(session, prefix)
        print('checkpoint     %s%s' % (prefix, ', moving averages' if averages else ''), flush=True)
        yield session


def newest_or_refuse():
    """The prefix of the newest checkpoint of --train_dir, which is only read.

    Raises:
      CheckpointError: there is none, or it is damaged.
    """
    newest = towers.newest_checkpoint(train_dir(), FLAGS.recover)
    if newest is None:
        raise towers.CheckpointError('%s holds no checkpoint: train first, or give the --train_dir '
                                     'of a run.' % train_dir())
    return newest.prefix


def export(classifier):
    """Writes the SavedModel of the newest checkpoint, without towers."""
    print('SavedModel     %s' % export_saved_model(classifier.serving, newest_or_refuse(),
                                                   FLAGS.export_dir))
