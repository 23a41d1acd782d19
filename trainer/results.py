"""Evaluation, predictions and a SavedModel from the newest checkpoint of a run.

Each of the three builds a graph of its own, restores the checkpoint into it, with the moving
averages of the weights if the checkpoint has them, and writes only outside of the run's folder. The
test of this module is tests/trainer/test_trainer_results.py.
"""

import contextlib
import csv
import json
import typing

import tensorflow.compat.v1 as tf

import towers
from towers.errors import counted, shown
from towers.run.evaluation import Evaluation
from towers.run.weights import averages_in, export_saved_model
from towers.safe_files import written_whole
from trainer.arguments import session_config
from trainer.best import SINCE_BEST
from trainer.confusion import ConfusionMatrix
from trainer.data import is_own_dataset, test_numbers
from trainer.flags import FLAGS, train_dir
from trainer.job import Setup, make_evaluation, show
from trainer.own_model import is_own_model, named, rows
from trainer.pictures import check_can_write
from trainer.run_settings import check_classes


def evaluate_or_predict(setup: Setup) -> None:
    """Does --mode=eval or --mode=predict: shows the plan, evaluates or predicts, and exports.

    With --plan_only it only shows the plan.

    Args:
      setup: the model and its data.

    Raises:
      CheckpointError: there is no checkpoint, or it is damaged or of another model.
      DatasetError: the data set has other classes than the run was trained on.
      MissingPackageError: the picture of --confusion needs matplotlib.
    """
    check_classes(setup.dataset)
    if not FLAGS.plan_only:
        # Called for their errors alone, before the network is built, which takes long.
        check_can_write(FLAGS.confusion)
        newest_or_refuse()
    with tf.Graph().as_default():
        tf.set_random_seed(FLAGS.seed)
        evaluation = make_evaluation(setup, mode='eval' if FLAGS.mode == 'eval' else 'infer')
        show(evaluation.built)
        if FLAGS.plan_only:
            return
        if FLAGS.mode == 'eval':
            evaluate(evaluation, setup, with_confusion=bool(FLAGS.confusion))
        else:
            predict(evaluation, setup)
    if FLAGS.export_dir:
        export(setup.model)


def report(throughput: typing.Any, results: dict, setup: Setup) -> None:
    """Prints the results of the test set, and the speed.

    Args:
      throughput: the `Throughput` of the training; or None.
      results: the dict that `Evaluation.run` returned.
      setup: the model and its data.
    """
    unit = setup.model.unit
    num_examples = results['examples']
    # The number of examples, and the number of evaluations since the best, are no metrics.
    names_of_metrics = set(results) - {'examples', SINCE_BEST}
    if not is_own_model():  # a classifier has an accuracy; a model of the user's may have only this
        names_of_metrics.discard('loss')
    for name in sorted(names_of_metrics):
        print('%-14s %s on %s' % (
            'test ' + name, _value_text(results[name]), counted(num_examples, unit)))
    if is_own_dataset():
        _report_missing_examples(num_examples, setup)
    if throughput is not None:
        print('speed          {:,.0f} {}s/s'.format(
            throughput.examples / throughput.seconds, unit))


def _report_missing_examples(num_examples: int, setup: Setup) -> None:
    """Says if fewer examples came than the user's own function has promised for the test set.

    Args:
      num_examples: how many examples came.
      setup: the model and its data.
    """
    promised = setup.dataset.num_examples['test']
    if num_examples < promised:
        print('%-14s num_examples of %s says %d for test, and %d came' % (
            'test %ss' % setup.model.unit, FLAGS.dataset, promised, num_examples))


def _value_text(value: float) -> str:
    """A result as text: with four decimals; a very small one with three digits."""
    if value == 0 or abs(value) >= 0.001:
        return '%.4f' % value
    return '%.3g' % value


def evaluate(evaluation: Evaluation, setup: Setup, prefix: typing.Optional[str] = None,
             with_confusion: bool = False) -> dict:
    """Evaluates a checkpoint on the test set, prints the results, and returns them.

    Args:
      evaluation: an evaluation of the model of `setup`.
      setup: the model and its data.
      prefix: the prefix of the checkpoint; None for the newest one.
      with_confusion: whether to show and write the confusion matrix as well.
    """
    with restored_session(evaluation.built, prefix) as session:
        # A dict: only an evaluation with the argument `stopped` may be given up, and return None.
        results: typing.Any = evaluation.run(session)
        report(throughput=None, results=results, setup=setup)
        if with_confusion:
            _report_confusion(evaluation, session, setup)
        return results


def _report_confusion(evaluation: Evaluation, session: tf.Session, setup: Setup) -> None:
    """Prints the accuracies by class and the confusion matrix, and writes it to --confusion.

    The test set is read once more, for the predictions.

    Args:
      evaluation: an evaluation of the model of `setup`.
      session: a session with the restored weights.
      setup: the model and its data.
    """
    classes = getattr(setup.dataset, 'classes', None)
    matrix = ConfusionMatrix(setup.dataset.num_classes, classes)
    for batch in evaluation.predict(session):
        matrix.add(batch['label'], batch['predicted'])
    print(matrix)
    matrix.write(FLAGS.confusion)
    print('confusion      %s' % FLAGS.confusion)


def predict(evaluation: Evaluation, setup: Setup) -> None:
    """Writes the file --predictions, with a row for each test example.

    A row has the example's number, its file and its label if there are any, its predictions, and
    the name of the predicted class if classes have names.

    Args:
      evaluation: an evaluation of the model of `setup`, which makes predictions.
      setup: the model and its data.

    Raises:
      ModelFunctionError: there is not one prediction for each example.
    """
    unit = setup.model.unit
    # Of a data set in files: function from a split and the number of an example to its file.
    file_of = getattr(setup.dataset, 'where', None)
    first_columns = [unit]
    if file_of is not None:
        first_columns.append('file')
    numbers = iter(test_numbers(setup.dataset))
    num_rows = 0
    with restored_session(evaluation.built) as session, \
            written_whole(FLAGS.predictions, advice='Give another --predictions.',
                          newline='') as table:
        writer = csv.writer(table)
        for batch in evaluation.predict(session):
            columns = _columns(batch, setup)
            if num_rows == 0:
                writer.writerow(first_columns + list(columns))
            for values in zip(*columns.values()):
                number = next(numbers)
                row: list = [number]
                if file_of is not None:
                    row.append(shown(file_of('test', number)))
                writer.writerow(row + [_cell(value) for value in values])
                num_rows += 1
    print('predictions    %s, %s' % (FLAGS.predictions, counted(num_rows, unit)))


def _columns(batch: typing.Any, setup: Setup) -> typing.Dict[str, list]:
    """The columns of --predictions for a batch: labels, predictions, names of classes.

    Args:
      batch: what `Evaluation.predict` gives for a batch: of an `OwnModel` the list `[labels,
        predictions]`, of a `Classifier` one dict of both.
      setup: the model and its data.

    Returns:
      {name of a column: list of its values}.

    Raises:
      ModelFunctionError: there is not one prediction for each example.
    """
    if is_own_model():
        labels, predictions = batch
        leaves = named(labels, 'label') + named(predictions, 'prediction')
    else:
        leaves = named(batch, 'prediction')
    columns = {name: rows(values) for name, values in leaves}
    if FLAGS.unlabelled:  # then each image has the label 0, which means nothing
        columns.pop('label', None)
    classes = getattr(setup.dataset, 'classes', None)  # names, of a data set that has them
    # Only of a `Classifier` is it known which prediction is the number of a class: 'predicted'.
    if classes is not None and not is_own_model():
        columns['class'] = [shown(classes[number]) for number in columns['predicted']]
    sizes = [len(column) for column in columns.values()]
    if len(set(sizes)) > 1:
        raise towers.ModelFunctionError(
            'the predictions %s of a batch have %s rows: expected one for each example, '
            '[batch, …].' % (', '.join(columns), ', '.join(map(str, sizes))))
    return columns


def _cell(value: typing.Any) -> typing.Any:
    """The cell of the table for a prediction, an array: a number, a text, or a JSON list."""
    plain = _plain(value.tolist() if hasattr(value, 'tolist') else value)
    if isinstance(plain, list):
        return json.dumps(plain)
    return plain


def _plain(value: typing.Any) -> typing.Any:
    """A value, or a nest of lists, with floats rounded to six digits, and bytes as text."""
    if isinstance(value, list):
        return [_plain(member) for member in value]
    if isinstance(value, bytes):
        return value.decode('utf-8', 'replace')
    if isinstance(value, float):
        return float('%.6g' % value)
    return value


@contextlib.contextmanager
def restored_session(built: towers.BuiltTowers,
                     prefix: typing.Optional[str] = None) -> typing.Iterator[tf.Session]:
    """A context with a session that has the weights of a checkpoint; or the moving averages of the
    weights, if the checkpoint has these.

    Args:
      built: towers of the same graph, for which the session is configured.
      prefix: the prefix of the checkpoint; None for the newest one.

    Raises:
      CheckpointError: there is no checkpoint, or it is damaged or of another model.
    """
    prefix = prefix or newest_or_refuse()
    # {name in the checkpoint: variable}; for a weight with a moving average the average's name.
    variables_by_name, num_averages = averages_in(prefix, tf.global_variables())
    towers.check_fits(prefix, variables_by_name)
    saver = tf.train.Saver(variables_by_name)
    with tf.Session(config=session_config(built)) as session:
        saver.restore(session, prefix)
        # Checkpoints have neither local variables nor tables.
        session.run([tf.local_variables_initializer(), tf.tables_initializer()])
        weights = ', moving averages' if num_averages else ''
        print('checkpoint     %s%s' % (prefix, weights), flush=True)
        yield session


def newest_or_refuse() -> str:
    """The prefix of the newest checkpoint of --train_dir. With the option recover, damaged
    checkpoints are passed over.

    Raises:
      CheckpointError: there is no checkpoint; or it is damaged, and recover was not given.
    """
    newest = towers.newest_checkpoint(train_dir(), FLAGS.recover)
    if newest is None:
        raise towers.CheckpointError('%s holds no checkpoint: train first, or give the --train_dir '
                                     'of a run.' % train_dir())
    return newest.prefix


def export(model: typing.Any) -> None:
    """Writes the SavedModel of the newest checkpoint, without towers, to --export_dir.

    `model` is a `Classifier` or an `OwnModel`.
    """
    print('SavedModel     %s' % export_saved_model(model.serving, newest_or_refuse(),
                                                   FLAGS.export_dir))
