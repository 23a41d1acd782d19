"""Towers of several devices: where everything is, and that the numbers are those of one device."""

import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import switched
from towers.graph.graph_walk import step_operations
from towers.placement.devices import resolve_devices, short_name
from towers.placement.tower_device import all_devices, stages_of

X, WORDS = np.random.RandomState(0).rand(16, 6), np.arange(16) % 5
CPUS = ['/device:CPU:%d' % index for index in range(4)]


def layer(x, name):
    w = tf.get_variable(name, [6, 6], tf.float64, tf.random_normal_initializer(stddev=.5, seed=1))
    return x + tf.tanh(tf.matmul(x, w))


def model(x, words):
    """Two stages; what is made outside of them is the loss."""
    with towers.stage(0):
        x = layer(layer(x, 'a'), 'b')
    with towers.stage(1):
        rows = tf.get_variable('rows', [5, 6], tf.float64, tf.constant_initializer(.25))
        x = layer(x, 'c') * tf.nn.embedding_lookup(rows, words)
    return {'loss': tf.reduce_mean(tf.square(tf.reduce_sum(x, 1) - 1)), 'predictions': x}


def test_names_of_devices_of_towers():
    nested = resolve_devices([['/cpu:0', '/cpu:1'], ['/cpu:2', '/cpu:3']])
    assert nested == ('/device:CPU:0', '/device:CPU:2')
    assert [stages_of(each) for each in nested] == [tuple(CPUS[:2]), tuple(CPUS[2:])]
    said = resolve_devices('/cpu:0+/cpu:1,/cpu:2+/cpu:3')
    assert [each.stages for each in said] == [each.stages for each in nested]
    assert resolve_devices(nested)[1].stages == tuple(CPUS[2:])
    assert all_devices(nested) == tuple(CPUS)
    assert short_name(nested[0]) == '/cpu:0+/cpu:1'
    assert stages_of('/device:CPU:3') == ('/device:CPU:3',)
    assert towers.session_config(nested).device_count['CPU'] == 4


@pytest.mark.parametrize('devices, text', [
    ([['/cpu:0', '/cpu:1'], ['/cpu:2']], 'as many devices for each tower'),
    ([['/cpu:0', '/cpu:0']], '/cpu:0 is named 2 times'),
    # It is no way out to allow several towers on one device.
    ([['/cpu:0', '/cpu:0'], ['/cpu:1', '/cpu:2']], 'give each stage a device of its own.'),
    ([[]], '[] is not the name of one device'),
    ([['/cpu:0', '/cpu:1'], ['/cpu:1', '/cpu:2']], '/cpu:1 is named 2 times'),
    ('/cpu:0+', "'' is not the name of one device"),
    ([['/cpu:0', 3]], '3 is not the name of one device'),
    ([['/cpu:0', '/gpu:7']], '/gpu:7 does not exist')])
def test_names_that_make_no_sense(devices, text):
    with pytest.raises(towers.DeviceError) as error:
        resolve_devices(devices)
    assert text in str(error.value)


def built_on(devices, **options):
    return towers.build_towers(
        options.pop('model_fn', model), (tf.constant(X), tf.constant(WORDS)),
        tf.train.MomentumOptimizer(.1, .9), devices, 'mean',
        global_step=tf.train.get_or_create_global_step(), **options)


def trained(devices, **options):
    with tf.Graph().as_default():
        built = built_on(devices, **options)
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            for _ in range(5):
                predictions, loss, _ = session.run(
                    [built.predictions, built.loss, built.train_op])
            variables = tf.global_variables()
            found = dict(zip([v.op.name for v in variables], session.run(variables)))
    return dict(found, predictions=predictions, loss=loss)


TWO = [['/cpu:0', '/cpu:1'], ['/cpu:2', '/cpu:3']]


@pytest.mark.parametrize('devices, options', [
    (TWO, dict(pipeline=towers.Pipeline(micro_batches=2)))] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in [
            (TWO, dict(copies='reuse', variables=towers.VariablePlacement('stage'))),
            ([TWO[0]], dict(variables=towers.VariablePlacement('/cpu:0'),
                            memory=towers.Memory(accumulate=4))),
            (TWO, dict(memory=towers.Memory(recompute=['add']))),
            (TWO, dict(pipeline=towers.Pipeline(micro_batches=3), remainder='weight')),
            (TWO, dict(pipeline=towers.Pipeline(micro_batches=2, schedule='all_forward'),
                       variables=towers.VariablePlacement('balanced'))),
            ([['/cpu:1', '/cpu:0']], dict(pipeline=towers.Pipeline(micro_batches=4)))]])
def test_the_numbers_are_those_of_one_device(devices, options):
    one, found = trained(1), trained(devices, **options)
    assert set(one) == set(found)
    for name, value in one.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.slow
def test_everything_is_with_its_stage():
    with tf.Graph().as_default():
        built = built_on(TWO, variables=towers.VariablePlacement('stage'))
        assert {v.op.name: v.device for v in built.variables} == {
            'a': CPUS[0], 'b': CPUS[0], 'c': CPUS[1], 'rows': CPUS[1]}
        assert {v.op.name: v.device for v in built.slots} == {
            'a/Momentum': CPUS[0], 'b/Momentum': CPUS[0], 'c/Momentum': CPUS[1],
            'rows/Momentum': CPUS[1]}
        step = step_operations([built.train_op])
        for tower, (first, second) in zip(built.towers, (CPUS[:2], CPUS[2:])):
            own = [op for op in step if tower.has(op.name)]
            tanhs = [op.device for op in own if op.type == 'Tanh']
            assert sorted(tanhs) == [first, first, second]
            gradients = collections.Counter(op.device for op in own if op.type == 'TanhGrad')
            assert gradients == {first: 2, second: 1}
            # What is outside of stages follows its data.
            assert tower.loss.op.device == tower.data_loss.op.device == second
            # One activation goes over, and one gradient comes back.
            for source, target in ((first, second), (second, first)):
                assert len({tensor.name for op in own for tensor in op.inputs
                            if tower.has(tensor.op.name) and tensor.op.device == source
                            and op.device == target and tensor.shape.ndims == 2}) == 1
        audit = towers.audit(built)
        assert not audit.broken, audit


def test_stages_outside_of_towers_and_on_one_device_are_no_scopes():
    with tf.Graph().as_default():
        with towers.stage(5):
            assert tf.no_op().device == ''
        built = built_on(1)
        assert {op.device for op in step_operations([built.train_op])
                if built.towers[0].has(op.name) and op.type == 'Tanh'} == {CPUS[0]}


def third_stage(x, words):
    with towers.stage(2):
        return model(x, words)


def plain(x, words):
    return tf.reduce_mean(layer(x, 'a')) + 0 * tf.reduce_sum(tf.cast(words, tf.float64))


def back_and_forth(x, words):
    with towers.stage(1):
        x = layer(x, 'a')
    with towers.stage(0):
        return tf.reduce_mean(layer(x, 'b')) + 0 * tf.reduce_sum(tf.cast(words, tf.float64))


@pytest.mark.parametrize('options, error, text', [
    (dict(model_fn=third_stage), towers.ModelFunctionError, 'name 3 devices for each tower'),
    (dict(model_fn=back_and_forth, pipeline=towers.Pipeline(micro_batches=2)),
     towers.ModelFunctionError, 'in a circle'),
    (dict(pipeline=towers.Pipeline(micro_batches=2), memory=towers.Memory(accumulate=2)),
     towers.InvalidArgumentError, 'micro_batches=4 alone'),
    (dict(pipeline=towers.Pipeline(micro_batches=32), remainder='weight'), towers.InputError,
     '16 examples are fewer than'),
    (dict(variables=towers.VariablePlacement('replicated')), towers.InvalidArgumentError,
     'of one device each')])
def test_misuse(options, error, text):
    with tf.Graph().as_default():
        with pytest.raises(error) as raised:
            built_on([TWO[0]], **options)
        assert text in str(raised.value)


@pytest.mark.skipif(tf.version.VERSION < '2', reason='bodies have no devices of their own there')
@pytest.mark.parametrize('pipeline', [towers.Pipeline(), towers.Pipeline(stages='auto')])
def test_control_flow_v2_beyond_the_first_stage_is_refused(pipeline):
    """Its bodies are functions, whose operations stay where they were made."""
    def loops(x, words):
        for name in 'abc':
            x = layer(x, name)
        return tf.reduce_mean(tf.while_loop(lambda i, _: i < 3, lambda i, each: (
            i + 1, tf.tanh(each)), (tf.constant(0), x))[1])

    def in_stages(x, words):
        with towers.stage(1):
            return loops(x, words)
    with tf.Graph().as_default(), switched('control_flow_v2', True):
        with pytest.raises(towers.ModelFunctionError, match='call tf.disable_control_flow_v2'):
            built_on([TWO[0]], pipeline=pipeline,
                     model_fn=loops if pipeline.stages else in_stages)


@pytest.mark.parametrize('devices, model_fn, accumulation, stages', [
    (['/cpu:0', '/cpu:1', '/cpu:2'], model, 'through 2 stages, one forward one backward; of equal '
     'stages each waits 20% of the time', '/cpu:2: no stage of the model is there'),
    pytest.param(['/cpu:0', '/cpu:1'], plain, 'a tower through one stage, one forward one backward',
                 " (stages='auto' cuts a model that names no towers.stage)",
                 marks=pytest.mark.slow)])
def test_the_plan_tells_of_stages_that_wait(devices, model_fn, accumulation, stages):
    with tf.Graph().as_default():
        plan = built_on([devices], model_fn=model_fn,
                        pipeline=towers.Pipeline(micro_batches=4)).plan
    assert plan.line('stages').endswith(stages)
    assert plan.line('accumulation').endswith(accumulation)


def test_a_sum_of_gradients_is_where_the_first_of_the_stages_is_that_it_comes_from():
    """What comes back from the last stage crosses to the one before, and then the sum does."""
    def branched(x, words):
        with towers.stage(0):
            x = layer(x, 'a')
        with towers.stage(1):
            one = layer(x, 'b')
        with towers.stage(2):
            return tf.reduce_mean(layer(one, 'c') + layer(x, 'd'))
    built = towers.build_towers(branched, (X, WORDS), tf.train.GradientDescentOptimizer(.1),
                                ['/cpu:0+/cpu:1+/cpu:2'])
    graph = built.loss.graph
    sums = [op for op in graph.get_operations()
            if op.type == 'AddN' and built.towers[0].has(op.name)]
    # Of what stage 0 made: from stage 1, whose own layer takes it twice, and from stage 2.
    assert {op.device for op in sums
            if len({tensor.op.device for tensor in op.inputs}) > 1} == {CPUS[1]}
