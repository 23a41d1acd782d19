"""The best checkpoint is kept apart from the newest ones, and a run ends that gets no better."""

import json
import os

import pytest
import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from trainer.best import RunEvaluation
from train_runs import metrics, newest, steps_saved

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


def evaluated(folder, metric, first, last):
    """Evaluations of a process that goes on from step `first`: `since_best` of each; its log."""
    log = folder / 'metrics.jsonl'
    lines = [line for line in log.read_text().splitlines() if json.loads(line)['step'] <= first
             ] if log.exists() else []
    log.write_text(''.join(line + '\n' for line in lines))
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.train.get_or_create_global_step()
        best = RunEvaluation(Evaluation(step), str(folder), step, 2, metric)
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


@pytest.mark.parametrize('metric', ['accuracy', 'loss', '-loss'])
def test_the_best_one_is_kept_and_evaluations_since_then_are_counted(tmp_path, metric):
    found, text = evaluated(tmp_path, metric, 0, 14)
    assert found == [0, 0, 1, 2, 3, 0, 1]  # of equal ones the first is the best
    assert kept(tmp_path) == ([12], 12)
    assert text == '%s %s at step 12: %s' % (
        metric.lstrip('-'), '0.8' if metric == 'accuracy' else '-0.8',
        os.path.join(str(tmp_path), 'best', 'model.ckpt-12'))


def test_a_run_that_goes_on_from_an_earlier_step_keeps_what_it_would_have_kept(tmp_path):
    folder = tmp_path / 'killed'
    folder.mkdir()
    (tmp_path / 'whole').mkdir()
    whole, _ = evaluated(tmp_path / 'whole', 'accuracy', 0, 10)
    evaluated(folder, 'accuracy', 0, 12)
    assert kept(folder) == ([12], 12)
    for first in (0, 2, 6):
        assert evaluated(folder, 'accuracy', first, 10)[0] == whole[first // 2:]
    assert evaluated(folder, 'accuracy', 0, 10)[0] == whole
    assert kept(folder) == kept(tmp_path / 'whole') == ([4], 4)


def test_a_metric_that_the_model_has_not():
    with pytest.raises(InvalidArgumentError, match=(
            '^--keep_best=-top5: the model has no such metric; it has accuracy, loss.$')):
        RunEvaluation(Evaluation(None), 'run', None, 2, '-top5')


MODULE = '''
import tensorflow.compat.v1 as tf

def pixels(images, labels, mode):
    logits = tf.matmul(tf.reshape(images, [-1, 64]), tf.get_variable('w', [64, 10]))
    return tf.losses.sparse_softmax_cross_entropy(labels, logits)
'''


@pytest.mark.slow
def test_a_run_without_a_better_evaluation_ends_and_stays_ended(runner, tmp_path):
    (tmp_path / 'own_pixels_of_a_test.py').write_text(MODULE)
    flags = ['--model=own_pixels_of_a_test:pixels', '--optimizer=sgd', '--keep_best=loss',
             '--base_learning_rate=1e-30',  # too small for a weight to change
             '--stop_after=2', '--eval_steps=2', '--train_steps=50', '--summary_steps=0']
    before = 'import os; os.chdir(%r)' % str(tmp_path)
    for _ in range(2):
        run = runner.run(tmp_path / 'run', flags, before=before)
        assert newest(run.train_dir) == 6
        assert run.stdout.splitlines()[-1].startswith('best           loss ')
        assert run.stdout.endswith(' at step 2: %s/best/model.ckpt-2\n' % run.train_dir)
    assert [line['test_since_best'] for line in metrics(run.train_dir)
            if 'test_loss' in line] == [0, 1, 2]
    run = runner.run(os.path.join(run.train_dir, 'best'), flags[:1] + ['--mode=eval'],
                     before=before)
    assert 'best/model.ckpt-2\ntest loss ' in run.stdout
