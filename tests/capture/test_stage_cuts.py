"""A model's graph cut into stages by itself: by what its operations cost, and on its devices."""

import collections
import contextlib
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import switched
from towers.graph.graph_walk import Recording, step_operations
from towers.optimizers import number_of_slots
from towers.capture.stage_costs import Piece, StageCost, cut_evenly, kept_bytes

X = np.random.RandomState(0).rand(16, 6)
slow = pytest.mark.slow
CPUS = ['/device:CPU:%d' % index for index in range(4)]


def model(x, layers=8):
    """Residual layers: little crosses between two of them, twice as much within one."""
    for index in range(layers):
        w = tf.get_variable('w%d' % index, [6, 6], tf.float64,
                            tf.random_normal_initializer(stddev=.5, seed=index))
        x = x + tf.tanh(tf.matmul(x, w))
    return {'loss': tf.reduce_mean(tf.square(tf.reduce_sum(x, 1) - 1)), 'predictions': x}


def build(devices, model_fn=model, momentum=0., **options):
    optimizer = (tf.train.MomentumOptimizer(.01, momentum) if momentum else
                 tf.train.GradientDescentOptimizer(.01))
    return towers.build_towers(model_fn, tf.constant(X), optimizer, devices, 'mean', **options)


def trained(devices, **options):
    with tf.Graph().as_default():
        built = build(devices, lambda x: model(x, 4), .9, **options)
        assert not towers.audit(built).broken
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            for _ in range(2):
                session.run(built.train_op)
            return session.run(tf.global_variables() + [built.predictions])


@pytest.mark.parametrize('devices, options', [
    ('/cpu:0+/cpu:1', {}), pytest.param('/cpu:0+/cpu:1,/cpu:2+/cpu:3', dict(
        micro_batches=2, memory=towers.Memory(recompute='auto')), marks=slow)])
def test_the_numbers_are_those_of_one_device(devices, options):
    options = dict(options)
    pipeline = towers.Pipeline(options.pop('micro_batches', 1), stages='auto')
    one, found = trained(1), trained(devices, pipeline=pipeline, **options)
    for a, b in zip(one, found):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-11)


@pytest.mark.slow
def test_stages_are_even_and_cut_between_layers():
    with tf.Graph().as_default():
        built = build([CPUS[:2]], momentum=.9, pipeline=towers.Pipeline(stages='auto'))
        of_stage = collections.OrderedDict()
        for variable in sorted(built.variables, key=lambda v: int(v.op.name[1:])):
            of_stage.setdefault(variable.device, []).append(variable.op.name)
        assert list(of_stage) == CPUS[:2]
        assert [len(names) for names in of_stage.values()] == [4, 4]
        assert {slot.device for slot in built.slots} == set(CPUS[:2])
        # A layer is a product, a tanh and a sum; TF 1.15 calls the sums add, and so does 2.
        first, second = re.match(r'/cpu:0 (\d+)%, after add\S* .* /cpu:1 (\d+)%$',
                                 built.plan.line('stages')).groups()
        assert abs(int(first) - 50) <= 7 and abs(int(second) - 50) <= 7
        crossing = [pair for pair in towers.audit(built).transfers
                    if pair.source == CPUS[0] and pair.target == CPUS[1]]
        assert len(crossing) == 1


def test_what_follows_a_stage_that_the_model_says_goes_there():
    def says_one(x):
        for index in range(6):
            w = tf.get_variable('w%d' % index, [6, 6], tf.float64)
            with towers.stage(1) if index == 0 else contextlib.nullcontext():
                x = tf.tanh(tf.matmul(x, w))
        return tf.reduce_mean(tf.square(x))
    built = towers.build_towers(says_one,
                                tf.constant(X),
                                tf.train.GradientDescentOptimizer(.1),
                                '/cpu:0+/cpu:1',
                                'mean',
                                pipeline=towers.Pipeline(stages='auto', micro_batches=2))
    first = built.towers[0]
    assert [op.device for op in tf.get_default_graph().get_operations()
            if op.type == 'MatMul' and op.name in first.forward] == CPUS[1:2] * 6


@pytest.mark.parametrize('rest', [0, 4])
def test_a_model_that_says_stages_itself(rest):
    """What it leaves is cut; where it leaves nothing, an error says so."""
    def says_all(words):
        with towers.stage(0):
            rows = tf.get_variable('rows', [4, 6], tf.float64, tf.ones_initializer())
            x = tf.nn.embedding_lookup(rows, words)
        with towers.stage(1):
            x = tf.reduce_mean(tf.matmul(x, rows, transpose_b=True))
        for _ in range(rest):
            x = tf.tanh(x)
        return x

    def built():
        return towers.build_towers(says_all, tf.range(8) % 4, tf.train.GradientDescentOptimizer(.1),
                                   [CPUS[:2]], 'mean', pipeline=towers.Pipeline(stages='auto'))
    if rest:
        assert re.match(r'/cpu:0: \d+ operations, /cpu:1: \d+ operations; only what the model has '
                        'put in no towers.stage is cut by itself', built().plan.line('stages'))
    else:
        with pytest.raises(towers.ModelFunctionError, match='for 0 operations of the model that '
                           'may be put anywhere'):
            built()


@pytest.mark.slow
def test_a_loop_is_in_one_stage():
    """With what TensorFlow keeps beside its parts; else no session could place it."""
    def looping(x):
        w = tf.get_variable('w', [6, 6], tf.float64, tf.random_normal_initializer(stddev=.5))
        return tf.reduce_mean(tf.while_loop(lambda i, _: i < 3, lambda i, each: (
            i + 1, tf.tanh(each) + tf.sigmoid(each)), (tf.constant(0), tf.matmul(x, w)))[1])
    with switched('control_flow_v2', False):
        report = towers.check_towers(looping, X, devices=['/cpu:0+/cpu:1'], steps=1,
                                      pipeline=towers.Pipeline(stages='auto'))
        built = towers.build_towers(looping, tf.constant(X), tf.train.GradientDescentOptimizer(.1),
                                    '/cpu:0+/cpu:1', pipeline=towers.Pipeline(stages='auto'))
    assert report.equal, report
    operations = tf.get_default_graph().get_operations()
    assert len({op.device for op in operations if op.name.startswith('while/')}) == 1
    assert not towers.audit(built).broken


def tied(ids):
    """A language model that looks up in the first layer what its last one multiplies by."""
    table = tf.get_variable('table', [9, 8], tf.float64,
                            tf.random_normal_initializer(stddev=.5, seed=1))
    x = tf.nn.embedding_lookup(table, ids)
    for index in range(4):
        w = tf.get_variable('w%d' % index, [8, 8], tf.float64,
                            tf.random_normal_initializer(stddev=.5, seed=index))
        x = x + tf.tanh(tf.matmul(x, w))
    averages = tf.train.ExponentialMovingAverage(.5)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, averages.apply(tf.trainable_variables()))
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=ids, logits=tf.matmul(x, table, transpose_b=True)))


@slow
def test_a_tied_embedding_and_averages_of_weights():
    """A lookup is where the variable is: this one goes where it is first looked up."""
    def trained_on(devices, **options):
        with tf.Graph().as_default():
            built = towers.build_towers(
                tied, np.arange(12) % 9, tf.train.GradientDescentOptimizer(.5), devices, 'mean',
                **options)
            devices = {v.op.name: v.device for v in tf.global_variables()}
            config = towers.session_config(built.devices)
            config.operation_timeout_in_ms = 60000
            with tf.Session(config=config) as session:
                session.run(tf.global_variables_initializer())
                for _ in range(3):
                    session.run(built.train_op)
                values = session.run({v.op.name: v for v in tf.global_variables()})
            return devices, values, [op.device for op in tf.get_default_graph().get_operations()
                                     if re.match(r'MatMul(_\d)?$', op.name)]
    _, one, _ = trained_on(1)
    where, found, layers = trained_on([CPUS[:3]],
                                      pipeline=towers.Pipeline(stages='auto', micro_batches=3))
    assert layers == sorted(layers) and layers[0] < layers[-1]
    for name in ('table', 'w0', 'w3'):
        assert where[name] == where[name + '/ExponentialMovingAverage']
    assert where['table'] == CPUS[0]
    assert (where['w0'], where['w3']) == (layers[0], layers[3])
    for name in one:
        np.testing.assert_allclose(found[name], one[name], rtol=0, atol=1e-12, err_msg=name)


def test_stages_that_are_not_cut_by_themselves():
    with pytest.raises(towers.InvalidArgumentError, match="expected 'auto', for as many as"):
        towers.Pipeline(stages=['stem', 'head'])


def test_an_initial_value_that_reads_another_variable():
    """Its parts are with that variable, or with what that is initialized by."""
    def initialized(x):
        w = tf.Variable(tf.ones([6, 6], tf.float64), name='w')
        v = tf.Variable(w.initial_value * .5, name='v')
        for weights in (w, w, w, v, v, v):
            x = tf.tanh(tf.matmul(x, weights))
        return tf.reduce_mean(x)
    built = towers.build_towers(initialized, tf.constant(X), tf.train.GradientDescentOptimizer(.1),
                                [CPUS[:2]], pipeline=towers.Pipeline(stages='auto'),
                                variables=towers.VariablePlacement('stage'))
    assert {variable.device for variable in built.variables} == set(CPUS[:2])
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        w, v = session.run(list(built.variables))
        session.run(built.train_op)
    np.testing.assert_array_equal(w, np.ones([6, 6]))
    np.testing.assert_array_equal(v, w * .5)


# ---- costs, by numbers made by hand --------------------------------------------------------------

def weights(name, shape):
    return tf.get_variable(name, shape, tf.float32, tf.ones_initializer())


def dense_net(x):
    w = weights('w', [6, 8])
    net = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, w), weights('b', [8])), name='relu')
    net = tf.reshape(net, [-1, 2, 4])
    net = tf.tanh(tf.reshape(net, [-1, 8]) * 3., name='tanh')
    net = tf.add(net, tf.square(net), name='sum')
    return tf.reduce_mean(tf.matmul(net, weights('v', [8, 1])), name='loss')


def test_what_the_backward_pass_keeps():
    """As TensorFlow's gradient functions take it, without what shares memory with that."""
    with tf.Graph().as_default() as graph:
        x = tf.placeholder(tf.float32, [16, 6], name='x')
        with tf.variable_scope('', use_resource=True), Recording(graph) as made:
            loss = dense_net(x)
        gradients = tf.gradients(loss, tf.trainable_variables())
        own = {op.name for op in made.operations} | {'x'}
        taken = {tensor.op.name for op in step_operations(gradients) if op.name not in own
                 for tensor in op.inputs if tensor.op.name in own
                 and tensor.shape.num_elements() in (16 * 6, 16 * 8)}
        assert taken == {'x', 'relu', 'tanh', 'sum'}
        assert dict(kept_bytes(made.operations)) == {
            'x': 16 * 6 * 4, 'relu': 512, 'tanh': 512, 'sum': 512}


@pytest.mark.parametrize('make, slots', [
    (lambda: tf.train.MomentumOptimizer(.1, .9), 1),
    (lambda: type('Mine', (tf.train.AdamOptimizer,), {})(), 2),
    (lambda: type('Own', (tf.train.Optimizer,), {})(False, 'own'), 1),
    (lambda: type('Around', (tf.train.Optimizer,), {'_opt': tf.train.AdamOptimizer()})(
        False, 'around'), 2)])
def test_slots_of_optimizers(make, slots):
    assert number_of_slots(make()) == slots


def piece(kept=0, crossing=1, held=0, gradients=0, transient=0):
    return Piece(held, kept, gradients, transient, crossing)


def test_the_memory_of_a_stage_is_that_of_its_worst_moment():
    pieces = [piece(kept=10, transient=2, held=100, gradients=1), piece(kept=5, transient=8),
              piece(kept=1, transient=1, held=200, gradients=50)]
    # With the backward pass at the first piece: its 10, and all gradients. At the second: 10 + 5,
    # 8, and the last one's gradient. At the last: 16, 1, and that.
    assert StageCost(1, pieces).memory == 300 + max(10 + 2 + 51, 15 + 8 + 50, 16 + 1 + 50)
    assert StageCost(3, pieces).memory == 300 + max(30 + 2 + 51, 45 + 8 + 50, 48 + 1 + 50)


def test_it_is_cut_where_the_least_crosses_but_not_at_any_price():
    crossing = [9] * 100
    crossing[50], crossing[60] = 5, 1
    pieces = [piece(kept=1, crossing=each) for each in crossing]
    assert cut_evenly(pieces, [1, 1]) == [50]  # 51 is within 7 % of 50, 61 is not


def test_it_is_cut_between_layers():
    """Not between a product and its activation function, where as much crosses."""
    product, function = piece(held=1), piece(kept=1)
    assert cut_evenly([product, function] * 20, [1, 1]) == [19]
    assert cut_evenly([function, product] * 20, [1, 1]) in ([18], [20])


def test_a_stage_of_a_pipeline_keeps_as_many_micro_batches_as_stages_follow():
    pieces = [piece(kept=1) for _ in range(12)]
    assert cut_evenly(pieces, [1, 1]) == [5]
    assert cut_evenly(pieces, [2, 1]) == [3]  # 4 kept twice, 8 kept once


def test_the_costliest_of_any_stages_is_near_the_best():
    """Against all ways to cut twelve pieces of many sizes into three."""
    sizes = [7, 1, 30, 2, 2, 14, 9, 1, 1, 25, 3, 11]
    pieces = [piece(held=size) for size in sizes]

    def costliest(cuts):
        bounds = [0] + [cut + 1 for cut in cuts] + [len(sizes)]
        return max(sum(sizes[a:b]) for a, b in zip(bounds, bounds[1:]))
    best = min(costliest([a, b]) for a in range(10) for b in range(a + 1, 11))
    assert costliest(cut_evenly(pieces, [1, 1, 1])) <= 1.07 * best * 1.001


def test_a_table_that_is_looked_up_in_two_stages():
    """An operation that takes its handle, as `tf.gather_nd` makes it, runs where the table is."""
    def model_fn(ids):
        table = tf.get_variable('table', [7, 6], tf.float64, tf.random_normal_initializer(seed=1))
        rows = model(tf.gather_nd(table, ids[:, :1]), 2)['predictions']
        with tf.variable_scope('second'):
            return model(rows + tf.gather_nd(table, ids[:, 1:]), 2)

    def loss(devices, **options):
        with tf.Graph().as_default():
            built = towers.build_towers(
                model_fn, np.random.RandomState(0).randint(0, 7, [16, 2]),
                tf.train.GradientDescentOptimizer(.1), devices, 'mean', **options)
            with tf.Session(config=towers.session_config(built.devices)) as session:
                session.run(tf.global_variables_initializer())
                session.run(built.train_op)
                return session.run(built.loss)
    staged = loss([CPUS[:2]], pipeline=towers.Pipeline(2, stages='auto'))
    np.testing.assert_allclose(staged, loss(1), rtol=1e-12)
