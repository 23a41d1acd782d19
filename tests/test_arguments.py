"""Wrong arguments of the public calls: one typed error each, and nothing made before it."""

import contextlib
import inspect
import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import towers
from towers.arguments import checked_path, safe_say

# ---- the public functions, each with arguments that are right ------------------------------------

class Reached(towers.TowersError):
    """The arguments were taken, and the call is about to do its work."""


def model_fn(x):
    return tf.reduce_mean(x * tf.get_variable('w', [2]))


def reached(*unused_given, **unused_named):
    """A function of the caller's, in which a call ends that would take long."""
    raise Reached


def say_nothing(unused_line):
    pass


class Given:
    """What each call needs to go well; it is of a graph."""

    def __init__(self, folder):
        self.step = tf.train.get_or_create_global_step()
        self.x = tf.ones([4, 2])
        self.loss = tf.reduce_mean(self.x)
        self.optimizer = tf.train.GradientDescentOptimizer(0.1)
        self.folder = str(folder)
        self.counts = dict(batch_size=4, examples_per_epoch=8)

    @property
    def built(self):
        return towers.build_towers(model_fn, self.x, self.optimizer, 2)

    @property
    def dataset(self):
        return tf.data.Dataset.from_tensors(np.ones([4, 2], np.float32))

    def evaluation(self, trained):
        return towers.Evaluation(model_fn, self.dataset, trained=trained)


def cluster(job='worker'):
    return towers.Cluster('ps', ['127.0.0.1:1'], ['127.0.0.1:2'], job)


class Ending(tf.train.SessionRunHook):
    """In which a call ends that would make a session."""
    begin = reached


class Session:
    """A session that runs nothing."""
    run = reached


# From a `Given`: the function and arguments that are right; None for one that a test would have to
# run, and `reached` for what would be called next.
CALLS = {
    'build_towers': lambda given: (towers.build_towers, dict(
        model=model_fn, inputs=given.x, optimizer=given.optimizer, devices=2)),
    'split_batch': lambda given: (towers.split_batch, dict(inputs=given.x, num_shards=2)),
    'staged': lambda given: (towers.staged, dict(dataset=given.dataset, devices=2)),
    'combine_gradients': lambda given: (towers.combine_gradients, dict(tower_gradients=[[]])),
    'resolve_devices': lambda given: (towers.resolve_devices, dict(devices=2)),
    'session_config': lambda given: (towers.session_config, dict(devices=2)),
    'use_precision': lambda given: (towers.use_precision, dict(
        config=tf.ConfigProto(), precision='float32', devices=2)),
    'LossScale': lambda given: (towers.LossScale, {}),
    'Numerics': lambda given: (towers.Numerics, {}),
    'VariablePlacement': lambda given: (towers.VariablePlacement, {}),
    'Memory': lambda given: (towers.Memory, {}),
    'Pipeline': lambda given: (towers.Pipeline, {}),
    'Objective': lambda given: (towers.Objective, dict(optimizer=given.optimizer)),
    'scale_learning_rate': lambda given: (towers.scale_learning_rate, dict(
        base=0.1, num_towers=2, rule='sqrt')),
    'LearningRate': lambda given: (towers.LearningRate, dict(base=0.1)),
    'WeightAverages': lambda given: (towers.WeightAverages, dict(
        decay=0.9, global_step=given.step)),
    'SummaryHook': lambda given: (towers.SummaryHook, dict(
        summaries=towers.default_summaries(given.built), global_step=given.step,
        logdir=given.folder)),
    'default_summaries': lambda given: (towers.default_summaries, dict(built=given.built)),
    'CheckpointHook': lambda given: (towers.CheckpointHook, dict(
        directory=given.folder, global_step=given.step, save_steps=3)),
    'EvaluationHook': lambda given: (towers.EvaluationHook, dict(
        evaluation=given.evaluation(given.built), global_step=given.step)),
    'Evaluation': lambda given: (towers.Evaluation, dict(
        model_fn=model_fn, dataset=given.dataset, trained=given.built)),
    'StopOnSignalHook': lambda given: (towers.StopOnSignalHook, {}),
    'StopTogetherHook': lambda given: (towers.StopTogetherHook, dict(
        cluster=cluster(), built=given.built._replace(machines=Session()))),
    'out_of_memory_explained': lambda given: (towers.out_of_memory_explained, dict(
        built=given.built)),
    'newest_checkpoint': lambda given: (towers.newest_checkpoint, dict(directory=given.folder)),
    'tidy_directory': lambda given: (towers.tidy_directory, dict(
        directory=given.folder, newest=None)),
    'check_fits': lambda given: (towers.check_fits, dict(prefix=given.folder + '/none')),
    'init_from': lambda given: (towers.init_from, dict(path=given.folder + '/none')),
    'export_saved_model': lambda given: (towers.export_saved_model, dict(
        build=model_fn, checkpoint=given.folder + '/none', directory=given.folder)),
    'hold_directory': lambda given: (towers.hold_directory, dict(directory=given.folder)),
    'training_session': lambda given: (towers.training_session, dict(
        directory=given.folder, global_step=given.step, hooks=[Ending()], say=say_nothing)),
    'check_towers': lambda given: (towers.check_towers, dict(
        model_fn=reached, inputs=np.ones([4, 2], np.float32))),
    'audit': lambda given: (towers.audit, dict(built=given.built)),
    'step_report': lambda given: (towers.step_report, dict(
        built=given.built, run_metadata=tf.RunMetadata(), path=given.folder + '/step.html')),
    'StepReportHook': lambda given: (towers.StepReportHook, dict(
        built=given.built, step=3, path=given.folder + '/step.html')),
    'BatchAxis': lambda given: (towers.BatchAxis, dict(tensor=given.x, axis=0)),
    'memory_account': lambda given: (towers.memory_account, dict(built=given.built)),
    'measure_memory': lambda given: (towers.measure_memory, dict(
        built=given.built, session=Session())),
    'memory_report': lambda given: (towers.memory_report, dict(build=reached, batch_size=4)),
    'largest_batch': lambda given: (towers.largest_batch, dict(
        built=given.built, memory_limit=10 ** 5, most=8)),
    'fit_batch_size': lambda given: (towers.fit_batch_size, dict(build=reached, first=4)),
    'until_all_end': lambda given: (towers.until_all_end, dict(
        dataset=tf.data.Dataset.range(3).batch(1))),
    'free_ports': lambda given: (towers.free_ports, dict(count=1)),
    'Cluster': lambda given: (towers.Cluster, dict(workers=['127.0.0.1:1', '127.0.0.1:2'])),
    'join': lambda given: (towers.join, dict(cluster=cluster(), built=given.built)),
    'serve': lambda given: (towers.serve, dict(cluster=cluster(), say=say_nothing)),
    'replicate_model_fn': lambda given: (towers.replicate_model_fn, dict(
        model_fn=lambda features, labels: None, devices=2)),
    'TowerOptimizer': lambda given: (towers.TowerOptimizer, dict(
        optimizer_or_optimizer_fn=given.optimizer)),
    'ParallelModel': lambda given: (towers.ParallelModel, dict(model=None)),
    'stage': lambda given: (towers.stage, dict(number=0)),
    'mend_slim': lambda given: (towers.mend_slim, {}),
    'visible_gpus': lambda given: (towers.visible_gpus, {}),
}

# What is public and in no call of the above, and why.
OTHERS = {
    'what calls return, made by nobody else': [
        'Audit', 'BuiltTowers', 'CutBatch', 'Damaged', 'DeviceAccount', 'Devices', 'Difference',
        'Feed', 'FittedBatch', 'HeldTensor', 'InitialValues', 'LeftOut', 'MeasuredMemory', 'Member',
        'MemoryAccount', 'Newest', 'Placement', 'Plan', 'PlannedTower', 'Replicas', 'StagedInputs',
        'StepReport', 'Tower', 'TowersReport', 'Transfers', 'VariableRole', 'Wait', 'WatchedLosses'],
    'called in model functions, with a tensor': ['batch_concat', 'batch_mean', 'batch_sum'],
    'checked when a model function returns it': ['ModelOutput'],
    'checked by the build that it is given to': ['Shards']}

_CONTEXTS = ('hold_directory', 'training_session', 'out_of_memory_explained', 'join', 'stage')


def call(name, function, arguments):
    """Calls a function; where that gives a context, enters and leaves it."""
    result = function(**arguments)
    if name in _CONTEXTS:
        with contextlib.ExitStack() as stack:
            stack.enter_context(result)


def arguments_of(name, function):
    """Names of a public function's arguments, those that are given by name alone included."""
    if name == 'ParallelModel':
        function = type(function).__call__
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.name != 'cls' and each.kind in (
        each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]


def public():
    """Names of all public callables but errors."""
    return {name for name, value in vars(towers).items() if not name.startswith('_')
            and callable(value) and not (isinstance(value, type) and issubclass(value, Exception))}


# ---- wrong arguments -----------------------------------------------------------------------------

class Odd:
    """Compares, converts and is called by nobody."""

    def __repr__(self):
        return 'Odd()'


# What belongs to another graph than all builds here.
with tf.Graph().as_default():
    FOREIGN_TENSOR, FOREIGN_OPERATION = tf.ones([], name='foreign'), tf.no_op(name='foreign_op')
    FOREIGN_VARIABLE = tf.get_variable('foreign_variable', [2])
    FOREIGN_PAIR = tf.metrics.mean(tf.ones([2]))

# What people pass by mistake, of any kind.
ODD = [Odd(), 'two words', '', -1, 0, 1.5, float('nan'), b'bytes', [], {}, [None], True,
       tf.train.AdamOptimizer, np.array([1, 2]), lambda: None, {'a': [1]}, 'x' * 5000,
       ['y' * 3000] * 3, 10 ** 30, 2 ** 63, float('inf'), 1e300, 'a\0b', 'a\ud800b', 1j,
       FOREIGN_TENSOR, FOREIGN_VARIABLE, [FOREIGN_VARIABLE], {'a': FOREIGN_VARIABLE},
       FOREIGN_OPERATION, np.array(3), {1, 2}]


# Functions of the caller's, which are called: what they do is theirs.
_FUNCTIONS = {('Objective', 'transform_gradients'), ('Objective', 'var_list'),
              ('build_towers', 'model'),
              ('export_saved_model', 'build'), ('Evaluation', 'model_fn'),
              ('training_session', 'say'), ('check_towers', 'model_fn'),
              ('memory_report', 'build'), ('fit_batch_size', 'build')}
# Numbers are inputs like any others; TensorFlow says what the model cannot do with them. And with
# reuse=True the graph has to have the variables.
_FINE = {('build_towers', 'inputs'), ('build_towers', 'reuse')}


MOST_CHARACTERS = 700  # of an error: a value of the caller's is cut at 80


def failure_of(name, function, arguments, graph):
    """What is wrong with how a call takes its arguments: a text; None if they are taken, or refused
    in a line before anything is made."""
    before = len(graph.get_operations())
    try:
        with graph.as_default():
            call(name, function, arguments)
    except Reached:  # they were taken
        return None
    except towers.TowersError as error:
        text, made = str(error), len(graph.get_operations()) - before
        if len(text) > MOST_CHARACTERS or '\n' in text:
            return '%d characters: %.100s' % (len(text), text)
        return '%d operations were made: %s' % (made, text) if made else None
    except Exception as error:  # pylint: disable=broad-except
        return '%s: %.100s' % (type(error).__name__, error)
    return None


@pytest.mark.parametrize('name', sorted(CALLS))
@pytest.mark.slow
def test_odd_arguments_end_in_typed_errors(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some are good names of directories
    failures, graph, before = [], tf.Graph(), None
    for argument in arguments_of(name, getattr(towers, name)):
        for odd in ODD:
            if (name, argument) in _FINE or callable(odd) and (name, argument) in _FUNCTIONS:
                continue
            # What went well may have made operations, so the next gets another graph.
            if len(graph.get_operations()) != before:
                graph = tf.Graph()
                with graph.as_default():
                    function, right = CALLS[name](Given(tmp_path / 'folder'))
                before = len(graph.get_operations())
            failure = failure_of(name, function, dict(right, **{argument: odd}), graph)
            if failure is not None:
                failures.append('%s=%.80r: %s' % (argument, odd, failure))
    assert not failures, '\n'.join(failures)


# ---- wrong values in methods, and from functions of the caller's ---------------------------------

def build_of(given, returned):
    """Builds a model function that returns a dict with a loss, and these values."""
    def model(x):
        return dict({'loss': model_fn(x)}, **returned)
    return towers.build_towers(model, given.x, given.optimizer, 2)


def transformed(given, pairs_of):
    objective = towers.Objective(given.optimizer, transform_gradients=pairs_of)
    return towers.build_towers(model_fn, given.x, objective, 2)


# From a `Given`, a function of one value; each makes operations, so that only the error counts.
VALUES = {
    'averages of': lambda given: (
        lambda value: towers.WeightAverages(0.9, given.step).update_after(tf.no_op(), value)),
    'averages after': lambda given: (
        lambda value: towers.WeightAverages(0.9, given.step).update_after(
            value, [tf.get_variable('v', [2])])),
    'session of an evaluation': lambda given: given.evaluation(given.built).run,
    'examples seen': lambda given: towers.LearningRate(0.1).tensor,
    'results': lambda given: (lambda value: towers.SummaryHook(
        [], given.step, given.folder).evaluated(1, value)),
    'signal': lambda given: towers.StopOnSignalHook().stop,
    'account': lambda given: towers.MeasuredMemory({'': 1}, {'': ''}, 1).against,
    'TF_CONFIG': lambda given: (
        lambda value: towers.Cluster.from_tf_config(environment={'TF_CONFIG': value})),
    'environment': lambda given: (
        lambda value: towers.Cluster.from_tf_config(environment=value)),
    'config of a cluster': lambda given: cluster().session_config,
    'a loss': lambda given: (lambda value: build_of(given, {'loss': value})),
    'predictions': lambda given: (lambda value: build_of(given, {'predictions': value})),
    'metrics': lambda given: (lambda value: build_of(given, {'metrics': value})),
    'a metric': lambda given: (lambda value: build_of(given, {'metrics': {'a': value}})),
    'a pair of a metric': lambda given: (
        lambda value: build_of(given, {'metrics': {'a': (value, value)}})),
    'updates': lambda given: (lambda value: build_of(given, {'updates': value})),
    'batch_sum': lambda given: (
        lambda value: build_of(given, {'predictions': towers.batch_sum(value)})),
    'batch_concat': lambda given: (
        lambda value: build_of(given, {'predictions': towers.batch_concat(value)})),
    'transformed gradients': lambda given: (
        lambda value: transformed(given, lambda pairs: value)),
    'a transformed gradient': lambda given: (
        lambda value: transformed(given, lambda pairs: [(value, pairs[0][1])])),
    'a leaf of inputs': lambda given: (lambda value: towers.build_towers(
        lambda inputs: model_fn(inputs['x']), {'x': given.x, 'y': value}, given.optimizer, 2)),
    'a shard': lambda given: (lambda value: towers.build_towers(
        model_fn, towers.Shards([given.x, value]), given.optimizer, 2)),
    'an optimizer of several': lambda given: (lambda value: towers.build_towers(
        lambda x: {'loss': {'a': model_fn(x)}}, given.x, {'a': value}, 2))}


@pytest.mark.parametrize('name', sorted(VALUES))
@pytest.mark.slow
def test_odd_values_end_in_typed_errors(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failures = []
    for odd in ODD + [FOREIGN_PAIR]:
        with tf.Graph().as_default() as graph:
            function = VALUES[name](Given(tmp_path / 'folder'))
            failure = failure_of(name, lambda: function(odd), {}, graph)
        if failure is not None and 'operations were made' not in failure:
            failures.append('%.80r: %s' % (odd, failure))
    assert not failures, '\n'.join(failures)


def test_what_a_model_function_takes_from_another_graph():
    """Each is named, with the field where it is; a foreign value would fail in the session."""
    given = Given('')
    for returned in ({'predictions': {'a': FOREIGN_TENSOR}}, {'metrics': {'a': FOREIGN_TENSOR}},
                     {'metrics': {'a': FOREIGN_PAIR}}, {'updates': [FOREIGN_OPERATION]}):
        with tf.Graph().as_default(), pytest.raises(towers.ModelFunctionError) as caught:
            build_of(Given(''), returned)
        assert 'in its %s, which belongs to another graph' % list(returned)[0] in str(caught.value)
    for function in (towers.batch_sum, towers.batch_mean):
        with pytest.raises(towers.ModelFunctionError) as caught:
            function(FOREIGN_TENSOR)
        assert str(caught.value).startswith(
            '%s(foreign:0): the tensor is of another graph' % function.__name__)
    mark = towers.batch_sum(given.loss)  # which a later build of a finished model finds
    assert mark.op.type == 'Identity' and mark.op.inputs[0].name == given.loss.name


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


def test_names_that_no_system_opens():
    longest = 'x' * 255
    assert checked_path('d', longest + '/' + longest) == longest + '/' + longest
    assert checked_path('d', 'gs://bucket/' + 'x' * 900) == 'gs://bucket/' + 'x' * 900
    assert checked_path('d', 'm\xfcll/\u7a7a') == 'm\xfcll/\u7a7a'
    for name, text in (('run\0', 'in UTF-8 and without a NUL'), ('caf\udce9', 'in UTF-8'),
                       ('runs/' + 'x' * 256,
                        'at most 255 bytes from one / to the next, and one part has 256.'),
                       ('x/' * 3000, 'at most 4095 bytes in all, and this has 6000.'),
                       ('gs://bucket/' + 'x' * 4084, 'at most 4095 bytes in all'), (b'run', 'the name of a directory.')):
        assert text in error_of(checked_path, 'd', name)


def test_numbers_that_tensorflow_does_not_hold():
    """Counts are int64 there, or int32 in its protocol buffers, and numbers float32."""
    step = tf.train.get_or_create_global_step()
    for call, most in (
            (lambda count: towers.CheckpointHook('run', step, count), 2 ** 63 - 1),
            (lambda count: towers.CheckpointHook('run', step, keep=count), 2 ** 31 - 1),
            (lambda count: towers.session_config(2, intra_op_threads=count), 2 ** 31 - 1),
            (lambda count: towers.split_batch(np.ones([4]), count), 10000)):
        assert 'expected a whole number of at most %d.' % most in error_of(call, most + 1)
    towers.CheckpointHook('run', step, 2 ** 63 - 1, keep=2 ** 31 - 1)
    for base in (1e39, 10 ** 39, float('inf'), 1e-50):
        assert error_of(towers.LearningRate, base) == (
            'base=%.80r: expected a number above 0.' % base)
    assert 'expected a rate that fits a float32' in error_of(
        towers.LearningRate, 3e38, 4, 'linear')


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


@pytest.mark.parametrize('two', first_fast(1, [np.int32(2), np.int64(2), np.uint8(2)]))
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


def test_what_a_function_that_builds_returns(graph):
    """Of a step whose memory is asked for: with its input's initializers, in a list."""
    built = Given('').built
    for returned, text in (
            (built, 'expected (built, start), what build_towers returned and a list'),
            ((built, built.train_op), 'expected a list of operations, even for one'),
            ((built, [3]), 'expected a list of operations, even for one')):
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
    assert "'foreign:0'" in str(caught.value) and 'of this graph' in str(caught.value)


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


def test_lines_that_nobody_reads_are_no_error():
    def say(line):
        raise {'closed': ValueError, 'full': OSError}[line]
    for line in ('closed', 'full'):
        safe_say(say)(line)
    with pytest.raises(KeyError):
        safe_say(say)('other')
