"""towers.tower_collections: each tower sees its own collections; the graph keeps one device's."""

import pytest
import tensorflow.compat.v1 as tf

from towers import SharedVariableError, VariablePlacement, build_towers, session_config
from towers.tower.graph_collections import TowerCollections

slow = pytest.mark.slow
LOSSES, UPDATES = tf.GraphKeys.LOSSES, tf.GraphKeys.UPDATE_OPS
TABLES, SUMMARIES = tf.GraphKeys.TABLE_INITIALIZERS, tf.GraphKeys.SUMMARIES
REGULARIZATION = tf.GraphKeys.REGULARIZATION_LOSSES


class Towers:
    """Plays towers one after the other: `added` is what `leave_tower` said of each."""

    def __init__(self, graph):
        self.graph = graph
        self.collections = TowerCollections(graph)
        self.added = []

    def tower(self, call, shared=()):
        index = len(self.added)
        self.collections.enter_tower(index, shared)
        start = len(self.graph.get_operations())
        joined = set()

        def create(next_creator, **kwargs):
            variable = next_creator(**kwargs)
            joined.update((key, id(variable)) for key in self.graph.get_all_collection_keys()
                          if variable in self.graph.get_collection(key))
            return variable
        with tf.name_scope('tower_%d' % index), tf.variable_creator_scope(create):
            result = call()
        self.added.append(self.collections.leave_tower(
            index, self.graph.get_operations()[start:], joined))
        return result


def add(key, value=1.):
    tensor = tf.constant(value)
    tf.add_to_collection(key, tensor)
    return tensor


def test_each_tower_sees_what_was_before_and_its_own(graph):
    before = add(LOSSES)
    towers = Towers(graph)
    seen = []

    def call():
        own = add(LOSSES)
        seen.append(tf.get_collection(LOSSES))
        return own
    own = [towers.tower(call) for _ in range(3)]
    assert seen == [[before, own[0]], [before, own[1]], [before, own[2]]]
    assert [added[LOSSES] for added in towers.added] == [[each] for each in own]
    towers.collections.finish()
    assert tf.get_collection(LOSSES) == [before, own[0]]  # as one device leaves it


def test_what_was_there_before_and_is_put_there_again_is_the_towers_too(graph):
    before = add(UPDATES)
    towers = Towers(graph)
    for _ in range(2):
        towers.tower(lambda: tf.add_to_collection(UPDATES, before))
    assert towers.added[0][UPDATES] == [before]
    towers.collections.finish()
    assert tf.get_collection(UPDATES) == [before, before]


def test_shared_entries_of_the_first_tower_stay_visible(graph):
    towers = Towers(graph)
    l2, of_activation = towers.tower(lambda: (add(REGULARIZATION), add(REGULARIZATION)))
    seen = towers.tower(lambda: tf.get_collection(REGULARIZATION), shared=[l2])
    assert seen == [l2] and towers.added[1][REGULARIZATION] == []
    towers.collections.finish()
    assert tf.get_collection(REGULARIZATION) == [l2, of_activation]


@pytest.mark.parametrize('use_resource', [True, pytest.param(False, marks=slow)])
def test_variables_are_of_all_towers(graph, use_resource):
    towers = Towers(graph)
    w = towers.tower(lambda: tf.get_variable('w', [], use_resource=use_resource))
    assert towers.tower(tf.global_variables) == towers.tower(tf.trainable_variables) == [w]
    assert towers.added[1][tf.GraphKeys.GLOBAL_VARIABLES] == []
    towers.collections.finish()
    assert tf.global_variables() == [w]


def test_what_has_to_be_initialized_is_kept_of_every_tower(graph):
    towers = Towers(graph)
    initializers = [towers.tower(lambda: add(TABLES)) for _ in range(3)]
    others = [towers.tower(lambda: add(SUMMARIES)) for _ in range(2)]
    towers.collections.finish()
    assert tf.get_collection(TABLES) == initializers
    assert tf.get_collection(SUMMARIES) == []  # of towers 3 and 4: tower 0 had none
    assert [len(added.get(SUMMARIES, [])) for added in towers.added] == [0, 0, 0, 1, 1]
    assert others[0] is not others[1]


def test_a_collection_of_the_models_own(graph):
    towers = Towers(graph)
    first = towers.tower(lambda: add('endpoints'))
    towers.tower(lambda: add('endpoints'))
    towers.collections.finish()
    assert tf.get_collection('endpoints') == [first]


def test_entries_that_are_no_operations(graph):
    towers = Towers(graph)
    seen = [towers.tower(lambda: [tf.add_to_collection('notes', {'a': 1}),
                                  tf.get_collection('notes')][1]) for _ in range(2)]
    assert seen == [[{'a': 1}], [{'a': 1}]]
    towers.collections.finish()
    assert tf.get_collection('notes') == [{'a': 1}]


def test_keys_that_hold_tensorflows_own_stores_are_left_alone(graph):
    tf.get_variable('w', [])  # makes the variable store, under a key that is no string
    towers = Towers(graph)
    towers.tower(lambda: tf.get_variable('v', []))
    towers.collections.undo()
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        assert tf.get_variable('w', []) is not None


def test_undo_puts_all_back(graph):
    before = add(LOSSES)
    towers = Towers(graph)
    towers.tower(lambda: [add(LOSSES), add(TABLES), add('new'), tf.get_variable('w', [])])
    towers.collections.enter_tower(1)
    add(LOSSES)
    add(UPDATES)
    towers.collections.undo()
    assert tf.get_collection(LOSSES) == [before]
    for key in (TABLES, 'new', UPDATES, tf.GraphKeys.GLOBAL_VARIABLES,
                tf.GraphKeys.TRAINABLE_VARIABLES):
        assert tf.get_collection(key) == []


def test_undo_before_the_first_tower(graph):
    before = add(LOSSES)
    TowerCollections(graph).undo()
    assert tf.get_collection(LOSSES) == [before]


# ---- with models --------------------------------------------------------------------------------

BATCH = [1., 2., 3., 6.]


def model_fn(x):
    w = tf.get_variable('w', [], initializer=tf.ones_initializer(),
                        regularizer=lambda w: 10. * tf.square(w))
    tf.losses.mean_squared_error(tf.zeros_like(x), x * w)
    tf.losses.add_loss(tf.reduce_mean(x * w))
    count = tf.get_variable('count', [], trainable=False, initializer=tf.zeros_initializer())
    tf.add_to_collection(UPDATES, tf.assign_add(count, 1.))
    tf.summary.scalar('mean', tf.reduce_mean(x))
    tf.add_to_collection('shards', x)
    return tf.losses.get_total_loss()


@pytest.mark.parametrize('towers', [
    pytest.param(1, marks=slow), 2, pytest.param(4, marks=slow)])
def test_total_losses_and_updates_are_those_of_one_device(towers):
    with tf.Graph().as_default() as one:
        model_fn(tf.constant(BATCH))
        expected = {key: len(one.get_collection(key)) for key in one.get_all_collection_keys()
                    if isinstance(key, str)}
    built = build_towers(model_fn, tf.constant(BATCH), tf.train.GradientDescentOptimizer(0.),
                         towers, 'mean')
    graph = tf.get_default_graph()
    assert {key: len(graph.get_collection(key)) for key in expected} == expected
    assert tf.get_collection('shards') == [built.towers[0].inputs]
    with tf.Session(config=session_config(towers)) as session:
        session.run(tf.global_variables_initializer())
        # mean(x^2) = 12.5, mean(x) = 3, 10 w^2 once; no tower counts another's losses.
        assert session.run(built.loss) == 25.5
        assert session.run(built.regularization_loss) == 10.
        session.run(built.train_op)
        assert session.run(built.variables[1]) == 1.  # one update a step
        session.run([update for tower in built.towers for update in tower.updates])
        assert session.run(built.variables[1]) == 1. + towers
        # One summary, of the first tower.
        summary = tf.Summary.FromString(session.run(tf.summary.merge_all()))
        assert [value.simple_value for value in summary.value] == [{1: 3., 2: 1.5, 4: 1.}[towers]]


def test_tables_of_every_tower_are_initialized():
    def lookup(words):
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(['a', 'b'], [1., 2.]), -1.)
        w = tf.get_variable('w', [], initializer=tf.ones_initializer())
        return tf.reduce_mean(table.lookup(words) * w)
    built = build_towers(lookup, tf.constant(['a', 'b', 'b', 'c']),
                         tf.train.GradientDescentOptimizer(1.), 2)
    assert len(tf.get_collection(TABLES)) == 2
    with tf.Session(config=session_config(2)) as session:
        session.run([tf.global_variables_initializer(), tf.tables_initializer()])
        assert session.run([tower.loss for tower in built.towers]) == [1.5, 0.5]


@pytest.mark.parametrize('failing_call', [
    pytest.param(0, marks=slow), 1, pytest.param(2, marks=slow)])
def test_an_error_in_any_tower_leaves_no_entry(graph, failing_call):
    kept = add(LOSSES)
    tf.get_variable('outside', [])
    keys = lambda: {key: graph.get_collection(key) for key in graph.get_all_collection_keys()
                    if isinstance(key, str) and graph.get_collection(key)}  # noqa: E731
    before = keys()
    calls = []

    def failing(x):
        loss = model_fn(x)
        calls.append(None)
        if len(calls) > failing_call:
            raise KeyboardInterrupt  # no Exception even
        return loss
    with pytest.raises(KeyboardInterrupt):
        build_towers(failing, tf.constant(BATCH[:3]), tf.train.GradientDescentOptimizer(0.), 3,
                     copies='reuse')
    assert keys() == before and tf.get_collection(LOSSES) == [kept]


def kernel_put_there(x):
    w = tf.get_variable('w', [], initializer=tf.constant_initializer(2.))
    tf.add_to_collection('kernels', w)
    return x * w


def kernel_if_new(x):
    w = tf.get_variable('w', [], initializer=tf.constant_initializer(2.))
    if not any(each is w for each in tf.get_collection('kernels')):
        tf.add_to_collection('kernels', w)
    return x * w


def kernel_joins(x):
    w = tf.get_variable('w', [], initializer=tf.constant_initializer(2.), collections=[
        tf.GraphKeys.GLOBAL_VARIABLES, 'kernels'])
    if not any(each is w for each in tf.get_collection('kernels')):
        tf.add_to_collection('kernels', w)
    return x * w


def kernel_among_the_trainable(x):
    w = tf.get_variable('w', [], initializer=tf.constant_initializer(2.), trainable=False)
    tf.add_to_collections([tf.GraphKeys.TRAINABLE_VARIABLES, 'kernels'], w)
    for each in tf.trainable_variables()[1:]:
        tf.add_to_collection('kernels', each)
    return x * w


@pytest.mark.parametrize('options', [
    dict(copies='reuse'), pytest.param(dict(variables=VariablePlacement('replicated')), marks=slow),
    pytest.param(dict(remainder='weight'), marks=slow)], ids=['reuse', 'replicated', 'uneven'])
@pytest.mark.parametrize('layer', [kernel_put_there, kernel_if_new, kernel_joins,
                                   kernel_among_the_trainable])
def test_l2_loss_of_a_collection_of_variables_is_counted_once(graph, layer, options):
    def model(x):
        loss = tf.reduce_mean(layer(x))
        return loss + tf.add_n([tf.nn.l2_loss(each) for each in tf.get_collection('kernels')])
    batch = BATCH[:3] if 'remainder' in options else BATCH
    built = build_towers(model, tf.constant(batch), tf.train.GradientDescentOptimizer(1.), 2,
                         'mean', **options)
    assert [each.op.name for each in tf.get_collection('kernels')] == ['w']
    assert [each.op.name for each in tf.trainable_variables()] == ['w']
    with tf.Session(config=session_config(2)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        mean = sum(batch) / len(batch)
        # As on one device: mean(2 x) + 2^2 / 2, and mean(x) + 2.
        assert session.run([built.loss, built.gradients[0][0]]) == pytest.approx(
            [2. * mean + 2., mean + 2.], rel=1e-6)


@pytest.mark.parametrize('reads', [False, True])
def test_a_kept_variable_that_only_the_first_call_puts_into_a_collection(graph, reads):
    kept = []

    def model(x):
        if not kept:
            kept.append(tf.Variable(2., name='w'))
            tf.add_to_collection('kernels', kept[0])
        loss = tf.reduce_mean(x * kept[0])
        return loss + sum(map(tf.nn.l2_loss, tf.get_collection('kernels'))) if reads else loss

    def build():
        return build_towers(model, tf.constant(BATCH), tf.train.GradientDescentOptimizer(1.), 2,
                            copies='reuse')
    if not reads:
        assert build().variables == tf.get_collection('kernels')
        return
    with pytest.raises(SharedVariableError) as caught:
        build()
    assert str(caught.value) == (
        "the first call of the model function put variable 'w' into the collection 'kernels', that "
        'of tower 1 did not, and uses the variable 1 times instead of 2. Put it there in every '
        'call, or name the collection where the variable is made (collections=[…]).')


# ---- updates from before the towers --------------------------------------------------------------

def counted(name):
    """Registers an update that counts, as a batch norm registers its own."""
    count = tf.get_variable(name, [], initializer=tf.zeros_initializer(), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(count, 1.))


def model_that_counts(x):
    counted('inside')
    return tf.reduce_mean(x) * tf.get_variable('w', [], initializer=tf.ones_initializer())


@pytest.mark.parametrize('copies', ['clone', pytest.param('reuse', marks=slow)])
@pytest.mark.parametrize('update_ops, before, inside, line', [
    ('first', 1., 1., '1 update ops of tower 0 ride on the train op, 1 from before the towers too'),
    ('all', 1., 2., '1 update ops of every tower ride on the train op, 1 from before the towers '
                    'too'),
    ('none', 0., 0., "nobody's 1 update ops run, 1 from before the towers run neither")])
def test_updates_from_before_the_towers_ride_on_the_train_op(copies, update_ops, before, inside,
                                                             line):
    counted('before')
    built = build_towers(model_that_counts, tf.ones([4]), tf.train.GradientDescentOptimizer(1.), 2,
                         copies=copies, update_ops=update_ops)
    assert built.plan.batch_norm == line
    counts = {v.op.name: v for v in tf.global_variables() if not v.trainable}
    with tf.Session(config=session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        assert session.run(counts) == {'before': before, 'inside': inside}


def test_updates_of_an_earlier_build_are_that_ones():
    counted('before')
    first = build_towers(model_that_counts, tf.ones([4]), tf.train.GradientDescentOptimizer(1.), 2)
    counted('between')
    with tf.variable_scope('more'):
        second = build_towers(model_that_counts, tf.ones([4]),
                              tf.train.GradientDescentOptimizer(1.), 2, name='second')
    counts = {v.op.name: v for v in tf.global_variables() if not v.trainable}
    with tf.Session(config=session_config(first.devices)) as session:
        session.run(tf.global_variables_initializer())
        session.run(first.train_op)
        assert session.run(counts) == {
            'before': 1., 'between': 0., 'inside': 1., 'more/inside': 0.}
        session.run(second.train_op)
        assert session.run(counts) == {
            'before': 2., 'between': 1., 'inside': 1., 'more/inside': 1.}
