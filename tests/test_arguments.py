"""Wrong arguments of the public calls: one typed error each, and nothing made before it."""

import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from public_calls import (CALLS, OTHERS, Given, Reached, arguments_of, call, cluster, model_fn,
                          public)

import towers


class Odd:
    """Compares, converts and is called by nobody."""

    def __repr__(self):
        return 'Odd()'


# What people pass by mistake, of any kind.
ODD = [Odd(), 'two words', '', -1, 0, 1.5, float('nan'), b'bytes', [], {}, [None], True,
       tf.train.AdamOptimizer, np.array([1, 2]), lambda: None, {'a': [1]}]


# Functions of the caller's, which are called: what they do is theirs.
_FUNCTIONS = {('Objective', 'transform_gradients'), ('Objective', 'var_list'),
              ('build_towers', 'model_fn'),
              ('export_saved_model', 'build'), ('Evaluation', 'model_fn'),
              ('training_session', 'say'), ('check_towers', 'model_fn'),
              ('memory_report', 'build'), ('fit_batch_size', 'build')}
# Numbers are inputs like any others; TensorFlow says what the model cannot do with them. And with
# reuse=True the graph has to have the variables.
_FINE = {('build_towers', 'inputs'), ('build_towers', 'reuse')}


@pytest.mark.parametrize('name', sorted(CALLS))
@pytest.mark.slow
def test_odd_arguments_end_in_typed_errors(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some are good names of directories
    failures, graph = [], None
    for argument in arguments_of(name, getattr(towers, name)):
        for odd in ODD:
            if callable(odd) and (name, argument) in _FUNCTIONS:
                continue
            if graph is None:  # what went well may have made operations, so the next gets another
                graph = tf.Graph()
                with graph.as_default():
                    function, right = CALLS[name](Given(tmp_path / 'folder'))
                before = len(graph.get_operations())
            failure = None
            try:
                with graph.as_default():
                    call(name, function, dict(right, **{argument: odd}))
            except Reached:  # it was taken
                pass
            except towers.TowersError:
                if len(graph.get_operations()) == before:
                    continue
                failure = '%d operations were made' % (len(graph.get_operations()) - before)
            except Exception as error:  # pylint: disable=broad-except
                failure = '%s: %.100s' % (type(error).__name__, error)
            graph = None
            if failure and (name, argument) not in _FINE:
                failures.append('%s=%r: %s' % (argument, odd, failure))
    assert not failures, '\n'.join(failures)


def test_every_public_function_has_its_odd_arguments():
    others = [name for names in OTHERS.values() for name in names]
    assert public() == set(CALLS) | set(others) and not set(CALLS) & set(others)


def error_of(call, *given, **named):
    before = len(tf.get_default_graph().get_operations())
    with pytest.raises(towers.TowersError) as caught:
        call(*given, **named)
    assert len(tf.get_default_graph().get_operations()) == before
    return str(caught.value)


def build(**named):
    return towers.build_towers(model_fn, np.ones([4, 2], np.float32), named.pop(
        'optimizer', tf.train.GradientDescentOptimizer(0.1)), 2, **named)


def test_what_the_errors_say():
    assert error_of(build, optimizer=tf.train.AdamOptimizer).endswith(
        ' is a class: pass an instance, such as tf.train.AdamOptimizer(0.001).')
    assert error_of(build, global_step=3) == (
        'global_step=3 of type int: expected a variable, such as '
        'tf.train.get_or_create_global_step().')
    assert error_of(towers.Numerics, loss_scale=128.) == (
        'loss_scale=128.0 of type float: expected a LossScale, such as '
        'LossScale(initial=2. ** 15), or None.')
    step = tf.train.get_or_create_global_step()
    assert error_of(lambda: towers.training_session(
        'run', step, tf.train.StopAtStepHook(3)).__enter__()).endswith(
            ': expected a list of hooks, even for one: [hook].')
    for number in (0, -1, 'two', None, 1.5, True):
        assert error_of(towers.split_batch, np.ones([4, 2]), number) == (
            'num_shards=%r: expected a whole number of at least 1.' % (number,))


def test_a_step_of_another_graph_and_one_that_is_no_number():
    with tf.Graph().as_default():
        other = tf.train.get_or_create_global_step()
    vector = tf.get_variable('vector', [2])
    assert error_of(build, global_step=other) == (
        "global_step is the variable 'global_step:0' of another graph than the default one.")
    assert error_of(build, global_step=vector) == (
        "global_step is the variable 'vector' of shape (2,) and type float32: expected one number.")


@pytest.mark.parametrize('two', [np.int32(2), np.int64(2), np.uint8(2)])
def test_numbers_of_numpys_are_numbers(two, tmp_path):
    given = Given(tmp_path)
    assert towers.resolve_devices(two) == ('/device:CPU:0', '/device:CPU:1')
    assert towers.session_config(two, intra_op_threads=two).intra_op_parallelism_threads == 2
    assert len(towers.split_batch(np.ones([4, 2]), two).inputs) == 2
    towers.LossScale(np.float32(8), growth_steps=two, factor=np.float64(2))
    towers.WeightAverages(np.float32(0.9), given.step)
    towers.CheckpointHook(tmp_path, given.step, save_steps=two, keep=two)
    built = towers.build_towers(model_fn, given.x, given.optimizer, two,
                                numerics=towers.Numerics(check_numerics=np.bool_(True)))
    assert len(built.towers) == 2


@pytest.mark.parametrize('call, text', [
    (lambda: towers.default_summaries(towers.BuiltTowers), 'expected what build_towers returned'),
    (lambda: towers.free_ports(-1), 'count=-1: expected a whole number of at least 1.'),
    (lambda: towers.files_of_worker('train.csv', cluster()), 'expected a list of names'),
    (lambda: towers.Cluster(workers='127.0.0.1:1'), "expected a list of addresses, 'host:port'")],
    ids=['summaries', 'ports', 'files', 'workers'])
def test_what_is_something_else(call, text):
    assert text in error_of(call)


def test_what_a_function_that_builds_returns(graph):
    """Of a step whose memory is asked for: with its input's initializers, in a list."""
    built = Given('').built
    for returned, text in (
            (built, 'expected (built, start), what build_towers returned and a list'),
            ((built, built.train_op), 'expected a list of operations, even for one'),
            ((built, [3]), 'expected a list of operations, such as [iterator.initializer]')):
        for call_of in (towers.fit_batch_size, towers.memory_report):
            with pytest.raises(towers.InvalidArgumentError) as caught:
                call_of(lambda batch_size: returned, 4)
            assert text in str(caught.value) and 'build(4)' in str(caught.value)


def test_functions_that_take_something_else(graph):
    """Each is told before anything is made."""
    none, one, three = (lambda: 0), (lambda a: a), (lambda a, b, c: 0)
    x = np.ones([4, 2], np.float32)
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    for argument, wrong, text in (
            ('var_list', none, 'a function from all trainable variables to such a list.'),
            ('transform_gradients', none, 'a function from (gradient, variable) pairs to such')):
        for value in (wrong, three, list):
            got = error_of(towers.Objective, optimizer, **{argument: value})
            assert got.startswith('%s=%.80r: expected ' % (argument, value)) and text in got
    assert 'make_optimizer=%.80r: expected a function' % one in error_of(
        towers.check_towers, model_fn, x, make_optimizer=one)
    assert error_of(lambda: towers.export_saved_model(one, 'model.ckpt-1', 'exported')).startswith(
        'build=<function')
    assert not graph.get_operations()


def test_a_loss_of_another_graph(graph):
    with tf.Graph().as_default():
        loss = tf.ones([], name='foreign')
    with pytest.raises(towers.ModelFunctionError) as caught:
        towers.build_towers(lambda x: loss, np.ones([2]), None, 2)
    assert str(caught.value) == (
        "the model function returned the loss 'foreign:0' of another graph: make it of "
        'the inputs that it is called with.')


def test_graphs_are_not_made_eagerly():
    if not tf.__version__.startswith('2'):
        pytest.skip('TF 1.15 executes eagerly for the whole process or not at all')
    assert 'executing eagerly' in _eager_error(
        lambda: towers.Evaluation(lambda x: x, tf.data.Dataset.range(3).batch(1)))
    assert 'executing eagerly' in _eager_error(build)
    assert 'executing eagerly' in _eager_error(lambda: towers.combine_gradients(
        [[(tf.ones([]), tf.Variable(1.))]]))


def _eager_error(call):
    """The error of a call outside of any graph, which a thread of its own is."""
    found = []

    def run():
        try:
            call()
        except towers.TowersError as error:
            found.append(str(error))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]
