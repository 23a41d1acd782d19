"""Evaluations of a run: the best checkpoint, the end of a run that gets no better, evaluators."""

import json
import os
import signal

import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

from datasets import BadExampleError
from towers.errors import InvalidArgumentError
from towers.run.evaluation_hook import EvaluationHook
from train_runs import newest, steps_saved
from trainer import evaluator
from trainer.best import RunEvaluation

ACCURACIES = [.5, .7, float('nan'), .7, .6, .8, .1]  # of steps 2, 4, 6, …


class Evaluation:
    metrics = {'accuracy': None, 'loss': None}

    def __init__(self, step):
        self.step = step

    def check_examples(self, session):
        pass

    def run(self, session, unused_stopped):
        accuracy = ACCURACIES[session.run(self.step) // 2 - 1]
        return {'accuracy': accuracy, 'loss': -accuracy, 'examples': 3}


def evaluations(folder, metric, first, last):
    """Evaluations of a process that goes on from step `first`: `since_best` of each; its log."""
    log = folder / 'metrics.jsonl'
    lines = [line for line in log.read_text().splitlines() if json.loads(line)['step'] <= first
             ] if log.exists() else []
    log.write_text(''.join(line + '\n' for line in lines))
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.train.get_or_create_global_step()
        best = RunEvaluation(Evaluation(step), str(folder), step, metric)
        found = []
        for number in range(first + 2, last + 1, 2):
            session.run(step.assign(number))
            results = best.run(session)
            found.append(results['since_best'])
            value = results['accuracy']
            with open(str(log), 'a') as opened:
                opened.write(json.dumps({'step': number - 1, 'loss': 1.}) + '\n')
                opened.write(json.dumps({'step': number, 'test_accuracy': value,
                                         'test_loss': -value}).replace('NaN', 'null') + '\n')
    return found, best.text


def kept(folder):
    return steps_saved(folder / 'best'), newest(folder / 'best')


@pytest.mark.parametrize('metric', first_fast(1, ['-loss', 'accuracy', 'loss']))
def test_the_best_one_is_kept_and_evaluations_since_then_are_counted(tmp_path, metric):
    found, text = evaluations(tmp_path, metric, 0, 14)
    assert found == [0, 0, 1, 2, 3, 0, 1]  # of equal ones the first is the best
    assert kept(tmp_path) == ([12], 12)
    assert text == '%s %s at step 12: %s' % (
        metric.lstrip('-'), '0.8' if metric == 'accuracy' else '-0.8',
        os.path.join(str(tmp_path), 'best', 'model.ckpt-12'))


@pytest.mark.slow
def test_a_run_that_goes_on_from_an_earlier_step_keeps_what_it_would_have_kept(tmp_path):
    folder = tmp_path / 'killed'
    folder.mkdir()
    (tmp_path / 'whole').mkdir()
    whole, _ = evaluations(tmp_path / 'whole', 'accuracy', 0, 10)
    evaluations(folder, 'accuracy', 0, 12)
    assert kept(folder) == ([12], 12)
    for first in (0, 2, 6):
        assert evaluations(folder, 'accuracy', first, 10)[0] == whole[first // 2:]
    assert evaluations(folder, 'accuracy', 0, 10)[0] == whole
    assert kept(folder) == kept(tmp_path / 'whole') == ([4], 4)


def test_steps_between_evaluations_that_change_do_not_count_them_anew(tmp_path):
    (tmp_path / 'metrics.jsonl').write_text(''.join(
        '{"step": %d, "test_accuracy": %s}\n' % each for each in ((1, .9), (2, '"much"'), (3, 'null'))))
    assert evaluations(tmp_path, 'accuracy', 4, 8)[0] == [3, 4]


def test_a_signal_or_a_bad_test_set_gives_an_evaluation_up_and_stops_the_session():
    step = tf.train.get_or_create_global_step()
    train_op, evaluation, found = tf.assign_add(step, 1), Evaluation(step), []

    def give_up(session, stopped):
        assert stopped()
        found.append(int(session.run(step)))
        if len(found) == 2:
            raise BadExampleError('a.jpg is empty')
    evaluation.run = give_up
    for _ in range(2):
        tested = RunEvaluation(evaluation, 'run', step, stopped=lambda: True)
        with tf.train.MonitoredSession(hooks=[EvaluationHook(tested, step, 2)]) as session:
            while not session.should_stop():
                session.run(train_op)
    assert found == [2, 2] and str(tested.failure) == 'a.jpg is empty'


def test_a_metric_that_the_model_has_not():
    with pytest.raises(InvalidArgumentError, match=(
            '^--keep_best=-top5: the model has no such metric; it has accuracy, loss.$')):
        RunEvaluation(Evaluation(None), 'run', None, '-top5')


# ---- train.py as an evaluator: which checkpoints it evaluates, what it writes, and its end -------

@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / 'run')


class Chief:
    """Saves checkpoints in a folder."""

    def __init__(self, folder):
        self._prefix = os.path.join(folder, 'model.ckpt')
        os.makedirs(folder)
        with tf.Graph().as_default() as self._graph:
            self._values = [tf.train.get_or_create_global_step(),
                            tf.get_variable('examples_seen', [], tf.int64)]
            self._saver = tf.train.Saver()
            self._session = tf.Session()

    def save(self, step):
        """Saves a checkpoint of a run of 20 examples a step; its prefix."""
        with self._graph.as_default():
            for variable, value in zip(self._values, (step, 20 * step)):
                variable.load(value, self._session)
            return self._saver.save(self._session, self._prefix, step, write_meta_graph=False)


def lines(folder):
    with open(os.path.join(folder, evaluator.FILE)) as log:
        return [json.loads(line) for line in log]


def evaluated(folder, steps, last):
    """Steps that were evaluated while the chief saved more: `steps` is a list of lists."""
    found, chief = [], Chief(folder)
    steps = iter(steps)

    def save_next():
        for step in next(steps, ()):
            chief.save(step)

    def evaluate(prefix):
        found.append(int(prefix.rpartition('-')[2]))
        save_next()
        if found[-1] == last:
            evaluator.say_ended(folder, last)
        return {'accuracy': found[-1] / 100., 'examples': 360}
    save_next()
    evaluator.evaluate_checkpoints(evaluate, folder, pause=0.01)
    return found


def test_each_checkpoint_is_evaluated_once_and_the_last_one_ends_it(folder, capsys):
    assert evaluated(folder, [[10], [15, 20], [30]], 30) == [10, 20, 30]
    found = lines(folder)
    assert [(line['step'], line['test_accuracy'], line['test_examples']) for line in found] == [
        (10, .1, 360), (20, .2, 360), (30, .3, 360)]
    assert all(line['wall_time'] > 1e9 for line in found)
    assert capsys.readouterr().out.splitlines() == [
        'waiting        for checkpoints in %s; the results go to %s/evaluator.jsonl' % (
            folder, folder), 'evaluated      the last step, 30: ended']


def test_one_that_is_replaced_while_it_is_read_is_passed_over(folder, capsys):
    chief = Chief(folder)
    chief.save(10)

    def evaluate(prefix):
        if prefix.endswith('-10'):
            chief.save(20)
            for name in tf.io.gfile.glob(prefix + '.*'):
                os.remove(name)
            raise tf.errors.NotFoundError(None, None, 'gone')
        return {'accuracy': 1.}
    evaluator.say_ended(folder, 20)
    evaluator.evaluate_checkpoints(evaluate, folder, pause=0.01)
    assert 'passed over    model.ckpt-10: replaced while it was read' in capsys.readouterr().out
    assert [line['step'] for line in lines(folder)] == [20]


def test_started_again_it_adds_no_line_twice_and_says_what_it_cuts(folder, capsys):
    assert evaluated(folder, [[10], [20]], 20) == [10, 20]
    with open(os.path.join(folder, evaluator.FILE), 'a') as log:
        log.write('{"step": 30}\n')
    evaluator.evaluate_checkpoints(lambda prefix: {'accuracy': .2}, folder)
    assert [line['step'] for line in lines(folder)] == [10, 20]
    assert 'cut the lines of steps 30 to 30 from ' in capsys.readouterr().out


@pytest.mark.parametrize('has_checkpoint', [False, True])
def test_sigterm_ends_it_at_once(folder, has_checkpoint, monkeypatch):
    former = signal.getsignal(signal.SIGTERM)
    if has_checkpoint:
        Chief(folder).save(10)
    monkeypatch.setattr(evaluator.time, 'sleep',
                        lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        evaluator.evaluate_checkpoints(lambda prefix: os.kill(os.getpid(), signal.SIGTERM), folder)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is former
    assert not os.path.exists(os.path.join(folder, evaluator.FILE))


@pytest.mark.slow
@pytest.mark.parametrize('end', [
    [], ['--keep_best=-accuracy', '--stop_after=1', '--train_steps=80']])
def test_an_evaluator_beside_a_run(runner, tmp_path, end):
    """It is there before the run, has the run's numbers, and ends by itself."""
    folder = str(tmp_path / 'run')
    flags = ['--train_steps=40', '--save_steps=20', '--config={"keep": 9}', '--summary_steps=0',
             '--eval_steps=20'] + end
    evaluator = runner.start(folder, flags + ['--job_name=evaluator'])
    run = runner.run(folder, flags)
    assert evaluator.status() == 0, evaluator.stdout + evaluator.stderr
    with open(os.path.join(folder, 'metrics.jsonl')) as log:
        of_run = {line['step']: line['test_accuracy'] for line in map(json.loads, log)
                  if 'test_accuracy' in line}
    last = max(of_run)
    assert 'evaluated      the last step, %d: ended' % last in evaluator.stdout
    found = {line['step']: line['test_accuracy'] for line in lines(folder)}
    assert last in found and set(found) <= {0, 20, 40}
    assert all(found[step] == of_run[step] for step in set(found) - {0})
    if '--stop_after=1' in end:  # a run that ended so stays ended
        for again in (run, runner.run(folder, flags)):
            assert again.stdout.endswith(' at step 20: %s/best/model.ckpt-20\n' % folder)
        assert newest(folder) == 40
