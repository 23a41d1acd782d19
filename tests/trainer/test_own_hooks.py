"""--hooks: what the function gets, when its hooks are called, and what is refused."""

import json

import pytest

MODULE = '''
import json
import tensorflow.compat.v1 as tf


class Record(tf.train.SessionRunHook):
    def __init__(self, run):
        self.run, self.lines = run, []

    def before_run(self, run_context):
        return tf.train.SessionRunArgs({'loss': self.run.built.loss, 'rate': self.run.learning_rate})

    def after_run(self, run_context, run_values):
        self.lines.append({name: float(value) for name, value in run_values.results.items()})

    def evaluated(self, step, results, seconds):
        self.lines.append({'step': step, 'accuracy': results['accuracy']})

    def end(self, session):
        step = int(session.run(self.run.global_step))
        with open(self.run.train_dir + '/recorded.json', 'w') as file:
            json.dump([self.lines, step, self.run.last_step, self.run.settings['batch_size']], file)


class Stop(tf.train.SessionRunHook):
    def after_run(self, run_context, run_values):
        run_context.request_stop()


def hooks(run): return [Record(run)]
def stops(run): return [Stop()]
def none(run): return 3
def broken(run): return run.nothing
'''


@pytest.fixture(scope='module')
def started(runner, tmp_path_factory):
    """Function that runs train.py with hooks of the module."""
    folder = tmp_path_factory.mktemp('hooks')
    (folder / 'own_hooks_of_a_test.py').write_text(MODULE)

    def run(function, status=0):
        return runner.run(
            folder / function, ['--hooks=own_hooks_of_a_test:%s' % function, '--train_steps=4',
                                '--batch_size=20', '--eval_steps=2', '--log_every=1',
                                '--summary_steps=0'],
            status, 'import os; os.chdir(%r)' % str(folder))
    return run


@pytest.mark.slow
def test_hooks_get_the_values_of_steps_and_evaluations(started):
    run = started('hooks')
    with open(run.train_dir + '/recorded.json') as file:
        lines, step, last_step, batch_size = json.load(file)
    assert (step, last_step, batch_size) == (4, 4, 20)
    with open(run.train_dir + '/metrics.jsonl') as log:
        logged = [json.loads(line) for line in log]
    assert [line['loss'] for line in lines if 'loss' in line] == pytest.approx(
        [line['loss'] for line in logged], rel=1e-6)
    assert [line for line in lines if 'step' in line] == [
        {'step': step, 'accuracy': logged[step - 1]['test_accuracy']} for step in (2, 4)]


@pytest.mark.slow
def test_a_hook_that_stops_the_run_is_named(started):
    assert '\nstopped: by a hook of --hooks\n' in started('stops').stdout


@pytest.mark.slow
def test_what_returns_no_hooks_is_refused(started):
    for function, status, said in (
            ('none', 2, 'train.py: --hooks=own_hooks_of_a_test:none returned 3: expected a list of '
             'tf.train.SessionRunHook.\n'),
            ('broken', 1, 'train.py: --hooks=own_hooks_of_a_test:broken: broken raised '
             "AttributeError: 'Run' object has no attribute 'nothing'\n"),
            ('missing', 2, 'train.py: The module own_hooks_of_a_test has no function ')):
        assert said in started(function, status).stderr
