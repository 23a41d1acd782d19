"""`until_all_end` in every kind of cluster: a worker without data gives no gradient; the step in
which nobody has data raises everywhere, and changes nothing."""

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.data_end import after, of_batches, raise_at_end
from towers.cluster.member import start_server
from one_process import addresses, together


def test_it_is_raised_in_each_step_that_is_over():
    is_over, noted = tf.placeholder(tf.bool, []), tf.Variable(False, use_resource=True)
    ended = raise_at_end(is_over, noted)
    variable = tf.Variable(1., use_resource=True)
    [(waiting, _), (rows, _)] = after(ended, [
        (tf.constant(2.), variable), (tf.IndexedSlices(tf.constant([3.]), tf.constant([0])), None)])
    update = tf.assign_add(variable, waiting)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        assert session.run([update, rows.values], {is_over: False})[1] == [3.]
        assert session.run([variable, noted]) == [3., False]
        for _ in range(2):
            for fetched in (update, rows.values):
                with pytest.raises(tf.errors.OutOfRangeError):
                    session.run(fetched, {is_over: True})
        assert session.run([variable, noted]) == [3., True]


def test_a_batch_that_is_computed_again_has_no_rows_and_nothing_infinite():
    active = tf.placeholder(tf.float32, [])
    dense = tf.get_variable('dense', [2], tf.float64)
    table = tf.get_variable('table', [4, 2])
    given = [(tf.constant([float('inf'), 3.], tf.float64), dense),
             (tf.IndexedSlices(tf.constant([[1., 2.], [3., 4.]]), tf.constant([3, 0]),
                               tf.constant([4, 2])), table)]
    (of_dense, first), (of_table, second) = of_batches(given, active)
    assert (first, second) == (dense, table) and of_dense.dtype == tf.float64
    fetches = of_dense, of_table.indices, of_table.values, of_table.dense_shape
    with tf.Session() as session:
        found = [[each.tolist() for each in session.run(fetches, {active: number})]
                 for number in (1., 0.)]
    assert found == [[[float('inf'), 3.], [3, 0], [[1., 2.], [3., 4.]], [4, 2]],
                     [[0., 0.], [], [], [4, 2]]]


def model_fn(numbers):
    """The gradient is the mean of the numbers; the moving average is their sum of means."""
    weight, seen, steps = [tf.get_variable(
        name, [], tf.float64, tf.zeros_initializer(), use_resource=resource, trainable=name == 'w')
                           for name, resource in (('w', True), ('seen', True), ('steps', False))]
    for update in (tf.assign_add(seen, tf.reduce_mean(numbers)), tf.group(tf.assign(
            steps, steps + 1.))):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    return tf.reduce_mean(numbers) * weight


class Ends(tf.train.SessionRunHook):
    """Begins the data; keeps the variables' values at the end."""

    def __init__(self, feed):
        self._begin, self.values = feed.initializer, None

    def begin(self):
        self._variables = {each.op.name: each for each in tf.global_variables()}

    def after_create_session(self, session, coord):
        session.run(self._begin)

    def end(self, session):
        self.values = session.run(self._variables)


def trained(kind, batches, model=None):
    """[(steps that each worker has done, its variables at the end)]: batches of one number."""
    def clipped(pairs):
        gradients, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 1.)
        return list(zip(gradients, [variable for _, variable in pairs]))
    if kind == 'ps':
        workers, ps = addresses(len(batches), 2)
        servers = [start_server(each, each.session_config(tf.ConfigProto())) for each in (
            towers.Cluster('ps', workers, ps, 'ps', rank) for rank in range(2))]
        assert servers
    else:
        workers, ps = addresses(len(batches)), []

    def work(rank):
        with tf.Graph().as_default():
            data = tf.data.Dataset.from_tensor_slices(tf.constant(
                batches[rank], tf.float64 if model is None else tf.int32))
            feed = towers.until_all_end(data.batch(1))
            cluster = towers.Cluster(kind, workers, ps, rank=rank, active=feed.active)
            built = towers.build_towers(
                model or model_fn, feed.inputs, tf.train.MomentumOptimizer(1., 0.5), 1,
                'mean', global_step=tf.train.get_or_create_global_step(), cluster=cluster,
                transform_gradients=None if model is None else clipped)
            counted = tf.get_variable('counted', [], tf.int32, tf.zeros_initializer(),
                                      collections=[tf.GraphKeys.LOCAL_VARIABLES])
            # As programs do that run averages of the weights after the step: also where the
            # updates are left out.
            updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS) if built.updates_here else []
            with tf.control_dependencies(updates + [built.train_op]):
                train_op = tf.assign_add(counted, 1)
            hook, done = Ends(feed), 0
            with towers.join(cluster, built, on_lost=lambda error: None) as member:
                with member.session([hook]) as session:
                    while True:
                        assert session.run(train_op) == done + 1
                        done += 1
                        assert done < 9
            return done, hook.values
    return together(work, len(batches))


@pytest.mark.slow
@pytest.mark.parametrize('kind, batches', [
    ('ps', [[1.], [4., 6., 8.]]), ('ps', [[1., 2., 3.], [4.]]), ('ps', [[1., 2., 4.]]),
    pytest.param('ps', [[1., 2.], [4.], [7., 6., 9.]], marks=pytest.mark.slow),
    ('ring', [[1., 2., 4.]]), ('ring', [[1.], [4., 6., 8.]]),
    pytest.param('ring', [[1., 2., 3.], [4.]], marks=pytest.mark.slow)])
def test_all_end_in_the_step_without_data_which_changes_nothing(kind, batches):
    weight, momentum, last = 0., 0., max(map(len, batches))
    for step in range(last):
        present = [each[step] for each in batches if step < len(each)]
        momentum = 0.5 * momentum + sum(present) / len(present)
        weight -= momentum
    results = trained(kind, batches)
    assert [done for done, _ in results] == [last] * len(batches)
    for rank, (_, values) in enumerate(results):
        assert values['w'] == pytest.approx(weight, rel=1e-12)
        assert values['w/Momentum'] == pytest.approx(momentum, rel=1e-12)
        assert values['global_step'] == last
        # A worker's first batch, again and again, is not in what it keeps of its own batches.
        own = batches[0 if kind == 'ps' else rank]
        assert (values['seen'], values['steps']) == (sum(own), len(own))


def looked_up(rows):
    """Each row of a table times its own number, and a part that is infinite for row 1 once that row
    is below -0.25: by 0 it would be NaN."""
    table = tf.get_variable('table', [4], tf.float64, tf.zeros_initializer())
    scale = tf.get_variable('scale', [], tf.float64, tf.ones_initializer())
    of_rows = tf.gather(table, rows)
    steep = tf.where_v2(of_rows < -.25, tf.fill(tf.shape(rows), tf.constant(
        float('inf'), tf.float64)), tf.ones_like(of_rows))
    only_1 = tf.where_v2(tf.equal(rows, 1), steep, tf.ones_like(steep))
    return tf.reduce_mean(of_rows) + tf.reduce_mean(only_1) * scale


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['ring', 'ps'])
@pytest.mark.parametrize('ends_first', [1, 0])
def test_rows_of_a_worker_without_data_are_not_updated(kind, ends_first):
    """By hand: of both rows the gradient is .5; then of row 0 alone, 1, and row 1 stays.
    Clipping to a norm of 1 sees sqrt(.5 + 1), and then sqrt(1 + 1), with the scale's gradient."""
    batches = {ends_first: [1], 1 - ends_first: [0, 0, 0]}
    results = trained(kind, [batches[0], batches[1]], looked_up)
    rows, moved, scale, of_scale = [0., 0.], [0., 0.], 1., 0.
    for given in ([.5, .5], [1., None], [1., None]):
        norm = sum(each ** 2 for each in given if each is not None) + 1.
        for row, gradient in enumerate(given):
            if gradient is not None:
                moved[row] = .5 * moved[row] + gradient / max(norm ** .5, 1.)
                rows[row] -= moved[row]
        of_scale = .5 * of_scale + 1. / max(norm ** .5, 1.)
        scale -= of_scale
    for done, values in results:
        assert done == 3
        assert values['table'].tolist() == pytest.approx(rows + [0., 0.], rel=1e-12)
        assert values['table/Momentum'].tolist() == pytest.approx(moved + [0., 0.], rel=1e-12)
        assert values['scale'] == pytest.approx(scale, rel=1e-12)


def test_asynchronous_workers_are_told_that_each_ends_by_itself():
    with pytest.raises(towers.errors.InvalidArgumentError, match='ends with its own data. Leave'):
        towers.Cluster('ps', ['a:1', 'b:1'], ['c:1'], synchronous=False, active=tf.constant(1.))
