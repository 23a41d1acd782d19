"""The gradients over several machines, as an optimizer gets them."""

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import ClusterError


class SecondOrder(tf.train.GradientDescentOptimizer):
    """Divides the gradient by 1 + the second derivative; one that is None counts as 0."""

    def compute_gradients(self, loss, var_list=None, **options):
        pairs = super(SecondOrder, self).compute_gradients(loss, var_list, **options)
        second = tf.gradients([gradient for gradient, _ in pairs], var_list)
        return [(gradient / (1. + (0. if each is None else each)), variable)
                for (gradient, variable), each in zip(pairs, second)]


def built_with(cluster=None):
    """The gradient is 4 w, the second derivative 4; the rate is 1/10, and w begins with 1."""
    return towers.build_towers(
        lambda x: tf.reduce_mean(x) * tf.square(tf.get_variable(
            'w', [], tf.float64, tf.ones_initializer())),
        tf.constant([1., 3.], tf.float64),
        SecondOrder(tf.constant(.1, tf.float64)), 2, 'mean', cluster=cluster, check_devices=False)


def test_on_one_machine_they_can_be_differentiated(graph):
    built = built_with()
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        assert session.run(built.variables[0]) == pytest.approx(1. - .1 * 4. / 5.)


@pytest.mark.parametrize('kind, rank', [('ring', 0), ('ps', 0), ('ps', 1)])
def test_on_several_a_second_derivative_is_refused(kind, rank, graph):
    """It was None on parameter servers, and this worker's own by Horovod."""
    cluster = towers.Cluster(kind, ['a:1', 'b:1'], ['c:1'] if kind == 'ps' else (), rank=rank)
    with pytest.raises(ClusterError, match='gradient over several machines, is taken: it would be'):
        built_with(cluster)
