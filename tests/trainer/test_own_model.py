"""`train.py` with a model of one's own, `--model=module:function`, on data of any structure."""

import csv
import json
import types

from absl.testing import flagsaver
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import datasets
import towers
from towers.errors import InvalidArgumentError
from trainer.flags import FLAGS
from trainer.own_model import OwnModel, step_failure
from train_runs import metrics, names_that_differ, values_of

NAME = 'own_tagger_of_a_test'
MODULE = '''
import numpy as np
import tensorflow.compat.v1 as tf
import towers

numbers = np.random.RandomState(0)
COUNTS = 1 + numbers.randint(5, size=50)
WORDS = numbers.randint(6, size=(50, 5)) * (np.arange(5) < COUNTS[:, None])
TAGS = WORDS // 2

def sentences(data_dir):
    def examples(begin, end):
        return tf.data.Dataset.from_tensor_slices((
            {'words': WORDS[begin:end], 'count': COUNTS[begin:end]}, TAGS[begin:end]))

    def train_batches(batch_size, seed, first_example):
        return examples(0, 43).repeat().skip(first_example).batch(batch_size, drop_remainder=True)
    return {'num_examples': {'train': 43, 'test': 7}, 'train_batches': train_batches,
            'eval_batches': lambda batch_size: examples(43, 50).batch(batch_size)}

def tag(features, labels, mode):
    logits = tf.nn.embedding_lookup(tf.get_variable('w', [6, 3]), features['words'])
    tags = tf.argmax(logits, 2)
    predictions = {'tags': tags, 'name': tf.as_string(features['count'])}
    if mode == 'infer':
        assert labels is None
        return {'predictions': predictions}
    mask = tf.sequence_mask(features['count'], 5, tf.float32)
    losses = mask * tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return towers.ModelOutput(
        towers.batch_sum(tf.reduce_sum(losses)) / towers.batch_sum(tf.reduce_sum(mask)),
        metrics={'accuracy': tf.metrics.accuracy(labels, tags, mask)})

def pixels(images, labels, mode):
    logits = tf.matmul(tf.reshape(images, [-1, 64]), tf.get_variable('w', [64, 10]))
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels, logits=logits))

def two(features, labels): return 0.
def broken(features, labels, mode): return features['no such word']
def outside(features, labels, mode):
    return tf.reduce_sum(tf.gather(tf.get_variable('w', [3]), 3 + labels))
def total(features, labels, mode):
    return {'predictions': {'total': tf.sparse.reduce_sum(features)}}
number = 3
'''
SHORT = ['--batch_size=10', '--optimizer=sgd', '--base_learning_rate=1', '--reduction=mean',
         '--summary_steps=0', '--log_every=1', '--dataset=%s:sentences' % NAME]


@pytest.fixture(scope='module')
def started(runner, tmp_path_factory):
    """Function that runs train.py with a model of the module."""
    folder = tmp_path_factory.mktemp('own')
    (folder / (NAME + '.py')).write_text(MODULE)

    def run(name, model, *flags, status=0):
        return runner.run(folder / name, ['--model=%s:%s' % (NAME, model)] + SHORT + list(flags),
                          status, 'import os; os.chdir(%r)' % str(folder))
    return run


@pytest.fixture(scope='module')
def tagged(started):
    return started('two', 'tag', '--train_steps=6', '--eval_steps=3', '--export_dir=export')


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Function that makes the `OwnModel` of a function of the module."""
    (tmp_path / (NAME + '.py')).write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    with flagsaver.flagsaver():
        FLAGS(['train.py', '--dataset=%s:sentences' % NAME])
        yield lambda name: OwnModel('%s:%s' % (NAME, name), datasets.get_dataset(FLAGS.dataset))


def numbers():
    module = {}
    exec(MODULE, module)
    return module


@pytest.mark.slow
def test_tokens_are_counted_by_mask_over_all_towers(tagged, started):
    started('one', 'tag', '--train_steps=6', '--num_towers=1')
    two, one = values_of(tagged.train_dir, 6), values_of(tagged.train_dir[:-3] + 'one', 6)
    assert set(two) == {'w', 'global_step', 'examples_seen'}
    np.testing.assert_allclose(two['w'], one['w'], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_its_own_metrics_are_those_of_the_whole_test_set(tagged):
    module, w = numbers(), values_of(tagged.train_dir, 6)['w']
    words, tags, counts = (module[name][43:] for name in ('WORDS', 'TAGS', 'COUNTS'))
    mask = np.arange(5) < counts[:, None]
    accuracy = (w[words].argmax(2) == tags)[mask].mean()
    lines = metrics(tagged.train_dir)
    assert lines[-1]['test_accuracy'] == pytest.approx(accuracy, rel=1e-6)
    assert [line['step'] for line in lines if 'test_accuracy' in line] == [3, 6]
    assert 'test accuracy  %.4f on 7 examples\ntest loss      ' % accuracy in tagged.stdout
    assert 'examples_per_second' in lines[0] and ' examples/s' in tagged.stdout


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_same_to_the_bit(tagged, started):
    started('stopped', 'tag', '--train_steps=2')
    run = started('stopped', 'tag', '--train_steps=6')
    assert names_that_differ(values_of(run.train_dir, 6), values_of(tagged.train_dir, 6)) == []


@pytest.mark.slow
def test_a_row_of_predictions_an_example(tagged, started, tmp_path):
    table = str(tmp_path / 'rows.csv')
    run = started('two', 'tag', '--mode=predict', '--predictions=' + table)
    assert 'predictions    %s, 7 examples' % table in run.stdout
    with open(table, newline='') as opened:
        rows = list(csv.DictReader(opened))
    module, w = numbers(), values_of(tagged.train_dir, 6)['w']
    assert [json.loads(row['tags']) for row in rows] == w[module['WORDS'][43:]].argmax(2).tolist()
    assert [json.loads(row['label']) for row in rows] == module['TAGS'][43:].tolist()
    assert [row['name'] for row in rows] == [str(count) for count in module['COUNTS'][43:]]
    assert [row['example'] for row in rows] == [str(number) for number in range(7)]


@pytest.mark.slow
def test_an_export_takes_the_features_by_name(tagged):
    with tf.Graph().as_default(), tf.Session() as session:
        loaded = tf.saved_model.load(session, ['serve'], tagged.train_dir[:-3] + 'export/6')
        signature = loaded.signature_def['serving_default']
        assert set(signature.inputs) == {'words', 'count'}
        words = numbers()['WORDS'][:4]
        tags = session.run(signature.outputs['tags'].name, {
            signature.inputs['words'].name: words, signature.inputs['count'].name: [5] * 4})
    np.testing.assert_array_equal(tags, values_of(tagged.train_dir, 6)['w'][words].argmax(2))


def test_an_export_takes_sparse_features_of_unknown_rank_in_any_shape(model):
    def eval_batches(batch_size):
        assert batch_size == 1
        return tf.data.Dataset.from_tensors(tf.SparseTensor(
            tf.placeholder(tf.int64, [None, None]), tf.placeholder(tf.float32, [None]),
            tf.placeholder(tf.int64, [None])))
    dataset = types.SimpleNamespace(num_classes=None, eval_batches=eval_batches)
    with flagsaver.flagsaver(batch_size='auto'), tf.Graph().as_default(), tf.Session() as session:
        inputs, outputs = OwnModel('%s:total' % NAME, dataset).serving()
        for dense_shape in ([4], [2, 3, 4]):
            fed = tf.SparseTensorValue([[0] * len(dense_shape)], [5.], dense_shape)
            assert session.run(outputs['total'], {inputs['features']: fed}) == 5.


@pytest.mark.slow
def test_a_model_of_ones_own_takes_the_data_sets_that_are_known(started):
    run = started('pixels', 'pixels', '--dataset=digits', '--train_steps=2')
    assert values_of(run.train_dir, 2)['w'].shape == (64, 10)
    assert 'test loss ' in run.stdout
    run = started('pixels', 'pixels', '--dataset=digits', '--mode=predict', status=1)
    assert ("%s:pixels: the model function, without labels for the mode 'infer', raised ValueE"
            % NAME) in run.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['memory', 'diagnose'])
def test_steps_on_data_of_any_structure_are_measured(started, mode):
    started('measured', 'tag', '--mode=' + mode, *(
        ['--config={"diagnose_seconds": 0.1}'] if mode == 'diagnose' else []))


@pytest.mark.parametrize('name, text', [
    ('two', "--model=m:two cannot be called with three arguments: expected a function of "
            "(features, labels, mode), where mode is 'train', 'eval' or 'infer'."),
    ('number', "The module m has no function 'number', which --model=m:number names."),
    ('', '--model=m:: expected module:function, such as reviews:model for the function model of '
         'reviews.py.')])
def test_a_name_that_is_no_model_function(model, name, text):
    with pytest.raises(InvalidArgumentError) as error:
        model(name)
    assert str(error.value).replace(NAME, 'm') == text


@pytest.mark.slow
def test_what_the_function_raises_keeps_its_traceback(started):
    run = started('broken', 'broken', status=1)
    lines = run.stderr.splitlines()
    assert lines[0] == 'Traceback (most recent call last):'
    assert '%s.py", line ' % NAME in lines[1] and lines[1].endswith(', in broken')
    assert lines[-2:] == [
        "KeyError: 'no such word'", "train.py: --model=%s:broken: the model function raised "
        "KeyError: 'no such word'" % NAME]


@pytest.mark.slow
def test_a_step_that_fails_names_the_line_of_the_function(started):
    line = 1 + MODULE[:MODULE.index('3 + labels')].count('\n')
    run = started('outside', 'outside', status=1)
    assert '%s.py:%d: indices[' % (NAME, line) in run.stderr
    assert run.stderr.startswith('train.py: --model=%s:outside: a step failed at ' % NAME)
    assert run.stderr.count('\n') == 1


@pytest.mark.parametrize('scope', first_fast(1, ['tower_1/', 'build_2/tower_1/']))
def test_a_step_that_fails_in_a_copy_names_the_line_of_the_function(model, scope):
    """In a copy of a training, and of the evaluation beside it."""
    line = 1 + MODULE[:MODULE.index('3 + labels')].count('\n')
    model_fn = model('outside').model_fn('train')
    with tf.Graph().as_default() as graph, flagsaver.flagsaver(model='%s:outside' % NAME):
        batch = (tf.zeros([4]), tf.zeros([4], tf.int32))
        trained = towers.build_towers(model_fn, batch, tf.train.GradientDescentOptimizer(1.), 2)
        towers.build_towers(model_fn, batch, None, 2, reuse=trained)
        [failed] = [op for op in graph.get_operations()
                    if op.name.startswith(scope) and op.type in ('GatherV2', 'ResourceGather')]
        failure = step_failure(tf.errors.InvalidArgumentError(None, failed, 'indices[0] = 3'))
    assert str(failure) == '--model=%s:outside: a step failed at %s.py:%d: indices[0] = 3' % (
        NAME, NAME, line)


def test_a_step_that_fails_in_an_imported_operation_names_no_line(model):
    model('outside')
    with tf.Graph().as_default() as exported:
        tf.constant(1., name='one')
    with tf.Graph().as_default() as graph, flagsaver.flagsaver(model='%s:outside' % NAME):
        tf.import_graph_def(exported.as_graph_def(), name='imported')
        failed = graph.get_operation_by_name('imported/one')
        failure = step_failure(tf.errors.InvalidArgumentError(None, failed, 'indices[0] = 3'))
    assert str(failure) == '--model=%s:outside: a step failed: indices[0] = 3' % NAME
