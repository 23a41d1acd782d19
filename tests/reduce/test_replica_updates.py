"""VariablePlacement('replicated') under optimizers that look at more than each gradient."""

import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import two_layers
from sample_models import kind_of_variables  # noqa: F401, a fixture

VECTORS = samples.vectors(12)


class Changed(tf.train.MomentumOptimizer):
    """Changes its gradients before it applies them."""

    def __init__(self, change):
        super(Changed, self).__init__(0.1, 0.9)
        self._change = change

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return super(Changed, self).apply_gradients(
            self._change(list(grads_and_vars)), global_step, name)


def decayed(is_decayed):
    return lambda: Changed(lambda pairs: [
        (gradient + 0.5 * variable if is_decayed(variable) else gradient, variable)
        for gradient, variable in pairs])


def build(optimizer, num_towers=2, **options):
    return towers.build_towers(two_layers, VECTORS, optimizer(), num_towers, 'mean',
                               variables=towers.VariablePlacement('replicated'), **options)


@pytest.mark.parametrize('is_decayed', [
    lambda v: v.op.name.endswith('body'), lambda v: v.name.endswith('dy:0'),
    pytest.param(lambda v: v.name.split('/')[0].startswith('body'), marks=pytest.mark.slow),
    pytest.param(lambda v: len(v.shape) > 1, marks=pytest.mark.slow)])
def test_replicas_are_chosen_by_name_as_variables(is_decayed, kind_of_variables):  # noqa: F811
    ours = samples.check_against_one_device(
        two_layers, VECTORS, decayed(is_decayed), 3, reduction='mean',
        variables=towers.VariablePlacement('replicated'))
    assert len(ours.built.replicas.variables) == 4


def by_list(pairs):
    own = [v.op.name for v in tf.trainable_variables()]
    return [(g + v if v.op.name in own else g, v) for g, v in pairs]


def by_another_rate(pairs):
    return [(g * (2. if v.op.name == 'body' else 3.), v) for g, v in pairs]


def by_another_variable(pairs):
    of = {v.op.name: v for _, v in pairs}
    return [(g + tf.reduce_sum(of['head' if v.op.name == 'body' else 'body']), v)
            for g, v in pairs]


def by_another_output(pairs):
    rates = tf.unstack(tf.constant([2., 3.], pairs[0][0].dtype))
    return [(g * rates[0 if v.op.name == 'body' else 1], v) for g, v in pairs]


def with_noise(pairs):
    return [(g + tf.random_normal(g.shape, dtype=g.dtype, seed=1), v) for g, v in pairs]


def by_the_norm_of_all(pairs):
    clipped, _ = tf.clip_by_global_norm([g for g, _ in pairs], 0.1)
    return list(zip(clipped, [v for _, v in pairs]))


@pytest.mark.parametrize('change, text', [
    (by_list, r'body otherwise than to its replica body_replica_1/body: operation .* against '),
    (by_another_rate, r'replica body_replica_1/body: operation .*\(Const\) against .*\(Const\)\.'),
    (by_another_variable, r'replica body_replica_1/body: variable head against body\.'),
    (by_another_output, r'replica body_replica_1/body: \S*unstack:0 against \S*unstack:1\.'),
    (with_noise, r'replica body_replica_1/body: operation .*RandomStandardNormal'),
    (by_the_norm_of_all, r'from the gradients of variables and replicas\. .*transform_gradients=')])
def test_an_optimizer_that_treats_replicas_otherwise_is_refused(
        change, text, kind_of_variables):  # noqa: F811
    with pytest.raises(towers.SharedVariableError, match=text):
        build(lambda: Changed(change))


def test_a_norm_over_all_gradients_that_a_transformation_has_changed_is_refused():
    with pytest.raises(towers.SharedVariableError, match='gradients of variables and replicas'):
        build(lambda: Changed(by_the_norm_of_all), transform_gradients=lambda pairs: [
            (2. * gradient, variable) for gradient, variable in pairs])


def test_a_norm_of_each_gradient_is_not():
    samples.check_against_one_device(
        two_layers, VECTORS, lambda: Changed(lambda pairs: [
            (tf.clip_by_norm(gradient, 0.1), variable) for gradient, variable in pairs]),
        2, reduction='mean', variables=towers.VariablePlacement('replicated'))


class Clips(tf.train.GradientDescentOptimizer):
    """Clips what tf.trainable_variables() lists after a step, which replicas are not in."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        applied = super(Clips, self).apply_gradients(grads_and_vars, global_step, name)
        with tf.control_dependencies([applied]):
            return tf.group(*[tf.assign(v, tf.clip_by_value(v, -.1, .1))
                              for v in tf.trainable_variables()])


def test_an_optimizer_that_writes_the_models_own_alone_is_refused(
        kind_of_variables):  # noqa: F811
    with pytest.raises(towers.SharedVariableError, match='writes one of them, and nothing alike'):
        build(lambda: Clips(0.1))


def test_the_loss_of_a_scaled_build_is_looked_at_too():
    scale = towers.LossScale(initial=8)
    with pytest.raises(towers.SharedVariableError, match='body_replica_1/body'):
        build(lambda: Changed(by_another_rate), numerics=towers.Numerics(loss_scale=scale))
    with tf.Graph().as_default():
        build(lambda: Changed(list), numerics=towers.Numerics(loss_scale=scale))
