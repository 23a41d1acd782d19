"""What train.py makes of the newest checkpoint: an evaluation, predictions, a SavedModel."""

import contextlib
import csv
import json

import tensorflow.compat.v1 as tf

import towers
from towers.errors import counted, shown
from towers.run.weights import averages_in, export_saved_model
from towers.safe_files import written_whole
from trainer.arguments import session_config
from trainer.best import SINCE_BEST
from trainer.data import is_own, test_numbers
from trainer.flags import FLAGS, train_dir
from trainer.job import make_evaluation, show
from trainer.own_model import is_own_model, named, rows
from trainer.run_settings import check_classes


def evaluate_or_predict(setup):
    """Shows the plan of an evaluation; unless --plan_only, evaluates or predicts, and exports."""
    check_classes(setup.dataset)
    if not FLAGS.plan_only:
        newest_or_refuse()  # before a network is built for nothing
    with tf.Graph().as_default():
        tf.set_random_seed(FLAGS.seed)
        evaluation = make_evaluation(setup, mode='eval' if FLAGS.mode == 'eval' else 'infer')
        show(evaluation.built)
        if FLAGS.plan_only:
            return
        if FLAGS.mode == 'eval':
            evaluate(evaluation, setup)
        else:
            predict(evaluation, setup)
    if FLAGS.export_dir:
        export(setup.model)


def report(throughput, evaluation, setup):
    """Prints the results of the test set, as `Evaluation.run` returned them, and examples a second
    where the `Throughput` is known."""
    unit, said = setup.model.unit, setup.dataset.num_examples['test']
    names = sorted(set(evaluation) - {'examples', SINCE_BEST})
    for name in names if is_own_model() else [each for each in names if each != 'loss']:
        print('%-14s %s on %s' % (
            'test ' + name, _value_text(evaluation[name]), counted(evaluation['examples'], unit)))
    if is_own() and evaluation['examples'] < said:
        print('%-14s num_examples of %s says %d for test, and %d came' % (
            'test %ss' % unit, FLAGS.dataset, said, evaluation['examples']))
    if throughput is not None:
        print('speed          {:,.0f} {}s/s'.format(
            throughput.examples / throughput.seconds, unit))


def _value_text(value):
    """A result as text: four decimals, or three digits of one that is 0 with these."""
    return '%.4f' % value if value == 0 or abs(value) >= 0.001 else '%.3g' % value


def evaluate(evaluation, setup, prefix=None):
    """Evaluates a checkpoint, or the newest one, on the test set; prints the results, and returns
    them as `Evaluation.run` does."""
    with restored_session(evaluation.built, prefix) as session:
        results = evaluation.run(session)
        report(None, results, setup)
        return results


def predict(evaluation, setup):
    """Writes --predictions: a row for each test example, with its number, its file if it has one,
    its label, its predictions, and the name of the predicted class if it has one.

    Raises:
      ModelFunctionError: predictions that are not one for each example.
    """
    unit, where = setup.model.unit, getattr(setup.dataset, 'where', None)
    classes = None if is_own_model() else getattr(setup.dataset, 'classes', None)
    with restored_session(evaluation.built) as session, \
            written_whole(FLAGS.predictions, advice='Give another --predictions.',
                          newline='') as table:
        lines = csv.writer(table)
        count, numbers = 0, iter(test_numbers(setup.dataset))
        for batch in evaluation.predict(session):
            told, predictions = batch if isinstance(batch, list) else ({}, batch)
            names, columns = zip(*[
                pair for pair in named(told, 'label') + named(predictions, 'prediction')
                if not (FLAGS.unlabelled and pair[0] == 'label')])
            columns = [rows(column) for column in columns]
            if classes is not None:
                predicted = columns[names.index('predicted')]
                names, columns = names + ('class',), columns + [
                    [shown(classes[number]) for number in predicted]]
            if len(set(map(len, columns))) > 1:
                raise towers.ModelFunctionError(
                    'the predictions %s of a batch have %s rows: expected one for each example, '
                    '[batch, …].' % (', '.join(names), ', '.join(map(str, map(len, columns)))))
            if not count:
                lines.writerow([unit] + ['file'] * bool(where) + list(names))
            for row in zip(*columns):
                number = next(numbers)
                lines.writerow([number] + ([shown(where('test', number))] if where else [])
                               + [_cell(value) for value in row])
                count += 1
    print('predictions    %s, %s' % (FLAGS.predictions, counted(count, unit)))


def _cell(value):
    """A prediction for the table: of floats six digits, of several numbers a JSON list."""
    def plain(value):
        if isinstance(value, list):
            return [plain(each) for each in value]
        if isinstance(value, bytes):
            return value.decode('utf-8', 'replace')
        return float('%.6g' % value) if isinstance(value, float) else value
    value = plain(value.tolist() if hasattr(value, 'tolist') else value)
    return json.dumps(value) if isinstance(value, list) else value


@contextlib.contextmanager
def restored_session(built, prefix=None):
    """A session with the weights of the newest checkpoint, or with their moving averages if the
    checkpoint has some; or with those of another checkpoint.

    Raises:
      CheckpointError: there is no checkpoint, or it is damaged or of another model.
    """
    prefix = prefix or newest_or_refuse()
    names, averages = averages_in(prefix, tf.global_variables())
    towers.check_fits(prefix, names)
    saver = tf.train.Saver(names)
    with tf.Session(config=session_config(built)) as session:
        saver.restore(session, prefix)
        session.run([tf.local_variables_initializer(), tf.tables_initializer()])
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


def export(model):
    """Writes the SavedModel of the newest checkpoint, without towers."""
    print('SavedModel     %s' % export_saved_model(model.serving, newest_or_refuse(),
                                                   FLAGS.export_dir))
