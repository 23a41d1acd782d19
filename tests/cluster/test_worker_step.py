"""`until_all_end` in every kind of cluster: a worker without data gives no gradient; the step in
which nobody has data raises everywhere, and changes nothing."""

import pytest
import tensorflow.compat.v1 as tf

import towers
from one_process import addresses, serve, together


def model_fn(numbers):
    """The gradient is the mean of the numbers; `seen` is a moving average of the means."""
    weight, seen, steps = [tf.get_variable(
        name, [], tf.float64, tf.zeros_initializer(), use_resource=resource, trainable=name == 'w')
                           for name, resource in (('w', True), ('seen', True), ('steps', False))]
    for update in (tf.assign(seen, .5 * seen + tf.reduce_mean(numbers)), tf.group(tf.assign(
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
        cluster_of = serve(len(batches), 2)
    else:
        workers = addresses(len(batches))
        cluster_of = lambda rank: towers.Cluster('ring', workers, rank=rank)

    def work(rank):
        with tf.Graph().as_default():
            data = tf.data.Dataset.from_tensor_slices(tf.constant(
                batches[rank], tf.float64 if model is None else tf.int32))
            feed = towers.until_all_end(data.batch(1))
            cluster = cluster_of(rank)._replace(active=feed.active)
            built = towers.build_towers(model or model_fn,
                                        feed.inputs,
                                        towers.Objective(
                                            tf.train.MomentumOptimizer(1., 0.5),
                                            transform_gradients=None if model is None else clipped),
                                        1,
                                        'mean',
                                        global_step=tf.train.get_or_create_global_step(),
                                        cluster=cluster)
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


@pytest.mark.parametrize('kind, batches', [('ring', [[1.], [4., 6., 8.]])] + [
    pytest.param(*case, marks=pytest.mark.slow) for case in [
        ('ps', [[1.], [4., 6., 8.]]), ('ps', [[1., 2., 3.], [4.]]), ('ring', [[1., 2., 4.]])]])
@pytest.mark.slow
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
        seen = 0.
        for mean in own:
            seen = .5 * seen + mean
        assert (values['seen'], values['steps']) == (seen, len(own))


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
@pytest.mark.parametrize('kind, ends_first', [('ring', 1), ('ps', 0)])
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
    with pytest.raises(towers.errors.InvalidArgumentError, match='end each with its own data. Leave'):
        towers.Cluster('ps', ['a:1', 'b:1'], ['c:1'], synchronous=False, active=tf.constant(1.))


def test_after_the_last_batch_comes_the_first_one_which_counts_nothing():
    feed = towers.until_all_end(tf.data.Dataset.range(5).batch(2))
    with tf.Session() as session:
        session.run(feed.initializer)
        found = [session.run([feed.inputs, feed.active]) for _ in range(6)]
    assert [(batch.tolist(), active) for batch, active in found] == [
        ([0, 1], 1.), ([2, 3], 1.), ([4], 1.)] + [([0, 1], 0.)] * 3


def rates_of_steps(dataset):
    """What a ring of one trains on, in a session that nobody tells to begin the data."""
    feed = towers.until_all_end(dataset)
    cluster = towers.Cluster('ring', addresses(1), active=feed.active)
    built = towers.build_towers(
        lambda numbers: tf.reduce_mean(tf.cast(numbers, tf.float32)) * tf.get_variable('w', []),
        feed.inputs, tf.train.GradientDescentOptimizer(1.), 1, 'mean', remainder='weight',
        cluster=cluster)
    seen = []
    with towers.join(cluster, built) as member, member.session() as session:
        while not session.should_stop():
            seen.append(float(session.run([built.gradients[0][0], built.train_op])[0]))
    return seen


@pytest.mark.slow
def test_a_monitored_session_begins_the_data():
    assert rates_of_steps(tf.data.Dataset.range(5).batch(2)) == [.5, 2.5, 4.]


@pytest.mark.slow
def test_a_worker_without_any_data_is_told_so():
    with pytest.raises(towers.errors.InputError, match='this worker gave to until_all_end has no '
                                                       'batch: expected one at least'):
        rates_of_steps(tf.data.Dataset.range(1).batch(2, drop_remainder=True))


@pytest.mark.slow
def test_a_batch_without_an_example_is_an_error_of_its_own(graph):
    numbers = tf.placeholder_with_default(tf.zeros([0]), [None])
    cluster = towers.Cluster('ring', addresses(1))
    built = towers.build_towers(
        lambda x: tf.reduce_mean(x) * tf.get_variable('w', []), numbers,
        tf.train.GradientDescentOptimizer(1.), 1, 'mean', remainder='weight', cluster=cluster)
    with pytest.raises(towers.errors.InputError, match='^a batch for 1 towers needs at least 1 '
                       'examples and has 0, on this worker: .* goes on by until_all_end'):
        with towers.join(cluster, built) as member, member.session() as session:
            session.run(built.train_op)
