"""Workers whose gradients would meet those of other variables are told apart before they start."""

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.fingerprint import difference, fingerprint
from towers.errors import ClusterError
from one_process import addresses, together

SERVED = dict(kind='ps', ps=['c:1', 'd:1'])


def of_worker(rank, names, trained=None, sparse=(), kind='ring', **fields):
    """What a worker says of a model whose variables it makes in the order of their names."""
    with tf.Graph().as_default():
        cluster = towers.Cluster(kind, ['a:1', 'b:1'], rank=rank, **fields)
        return fingerprint(cluster, build(cluster, names, trained, sparse), 4)


def build(cluster, names, trained=None, sparse=()):
    def model_fn(x):
        variables = {name: tf.get_variable(name, [3]) for name in names}
        return sum(tf.reduce_mean(tf.gather(variables[name], [0, 2]) if name in sparse
                                  else x * variables[name])
                   for name in names if name in (trained or names))
    return towers.build_towers(model_fn, tf.ones([4, 3]), tf.train.GradientDescentOptimizer(0.5),
                               1, 'mean', cluster=cluster)


@pytest.mark.slow
def test_another_order_of_variables():
    own, other = [of_worker(rank, names) for rank, names in enumerate([
        ['shop', 'user', 'city', 'item'], ['shop', 'city', 'item', 'user']])]
    assert own['gradients'] == [[name, 'dense float32'] for name in (
        'shop', 'user', 'city', 'item')]
    assert difference(own, other) == (
        "its variables are in another order: 'city' is before 'user', and on worker 0 behind it. "
        'Gradients travel in this order: make the variables, or list them in var_list, in one '
        'order on all workers, such as that of sorted(names), and not in that of a set')
    assert difference(own, of_worker(1, ['shop', 'user', 'city', 'item'])) is None


@pytest.mark.parametrize('synchronous', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_on_parameter_servers_the_order_does_not_matter(synchronous):
    own, other = [of_worker(rank, names, synchronous=synchronous, **SERVED) for rank, names in
                  enumerate(['wvu', 'uwv'])]
    kind = 'dense float32' if synchronous else 'float32'
    assert own['gradients'] == [[name, kind] for name in 'uvw']
    assert difference(own, other) is None


@pytest.mark.parametrize('fields', [{}] + [
    pytest.param(fields, marks=pytest.mark.slow)
    for fields in (SERVED, dict(SERVED, synchronous=False))])
def test_other_variables_that_have_a_gradient(fields):
    own, other = [of_worker(rank, 'wab', trained, **fields) for rank, trained in
                  enumerate(['wa', 'wb'])]
    kind = 'float32' if 'synchronous' in fields else 'dense float32'
    assert difference(own, other) == (
        "it trains other variables, or trains them otherwise: the gradient of 'a' is missing, and "
        'that of worker 0 %s. Have the loss computed from the same variables in the same way on '
        'every worker, with the same var_list' % kind)
    assert "the gradient of 'b' is %s, and that of worker 0 missing." % kind in difference(
        of_worker(0, 'wab', 'w', **fields), other)


@pytest.mark.parametrize('fields', [{}] + [
    pytest.param(fields, marks=pytest.mark.slow)
    for fields in (SERVED, dict(SERVED, synchronous=False))])
def test_a_dense_gradient_and_a_sparse_one(fields):
    own, other = of_worker(0, 'wa', sparse='a', **fields), of_worker(1, 'wa', **fields)
    why = difference(own, dict(other, forward=own['forward']))  # the loss is another one, too
    if 'synchronous' in fields:  # each worker applies its own
        assert why is None
    else:
        assert "of 'a' is dense float32, and that of worker 0 sparse float32." in why


@pytest.mark.slow
def test_a_worker_of_a_ring_with_another_order_is_refused():
    """Before the first step, in which the two would add up gradients of different variables."""
    workers, said = addresses(2), []

    def work(rank):
        with tf.Graph().as_default():
            cluster = towers.Cluster('ring', workers, rank=rank)
            built = build(cluster, ['wv', 'vw'][rank])
            with pytest.raises(ClusterError) as caught:
                with towers.join(cluster, built, start_timeout=3., say=said.append):
                    pass
            return str(caught.value)
    for text in together(work, 2):
        assert "its variables are in another order: 'v' is before 'w'" in text
