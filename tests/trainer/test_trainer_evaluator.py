"""train.py as an evaluator: which checkpoints it evaluates, what it writes, and its end."""

import json
import os
import signal

import pytest
import tensorflow.compat.v1 as tf

from trainer import evaluator


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


def test_started_again_it_adds_no_line_twice(folder):
    assert evaluated(folder, [[10], [20]], 20) == [10, 20]
    evaluator.evaluate_checkpoints(lambda prefix: {'accuracy': .2}, folder)
    assert [line['step'] for line in lines(folder)] == [10, 20]


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
    [], ['--keep_best=-accuracy', '--stop_after=1'], ['--config={"stop_at_accuracy": 0.01}']])
def test_an_evaluator_beside_a_run(runner, tmp_path, end):
    """It is there before the run, has the run's numbers, and ends by itself."""
    folder = str(tmp_path / 'run')
    flags = ['--train_steps=40', '--save_steps=20', '--config={"keep": 9}', '--summary_steps=0',
             '--eval_steps=20'] + end
    evaluator = runner.start(folder, flags + ['--job_name=evaluator'])
    runner.run(folder, flags)
    assert evaluator.status() == 0, evaluator.stdout + evaluator.stderr
    with open(os.path.join(folder, 'metrics.jsonl')) as log:
        of_run = {line['step']: line['test_accuracy'] for line in map(json.loads, log)
                  if 'test_accuracy' in line}
    last = max(of_run)
    assert 'evaluated      the last step, %d: ended' % last in evaluator.stdout
    found = {line['step']: line['test_accuracy'] for line in lines(folder)}
    assert last in found and set(found) <= {0, 20, 40}
    assert all(found[step] == of_run[step] for step in set(found) - {0})
