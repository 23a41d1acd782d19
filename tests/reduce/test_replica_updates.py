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
    lambda v: v.op.name.endswith('body'), pytest.param(
        lambda v: v.name.split('/')[0].startswith('body'), marks=pytest.mark.slow)])
def test_replicas_are_chosen_by_name_as_variables(is_decayed, kind_of_variables):  # noqa: F811
    ours = samples.check_against_one_device(
        two_layers, VECTORS, decayed(is_decayed), 2, reduction='mean',
        variables=towers.VariablePlacement('replicated'))
    assert len(ours.built.replicas.variables) == 2


def by_list(pairs):
    own = [v.op.name for v in tf.trainable_variables()]
    return [(g + v if v.op.name in own else g, v) for g, v in pairs]


def by_another_rate(pairs):
    return [(g * (2. if v.op.name == 'body' else 3.), v) for g, v in pairs]


def by_another_output(pairs):
    rates = tf.unstack(tf.constant([2., 3.], pairs[0][0].dtype))
    return [(g * rates[0 if v.op.name == 'body' else 1], v) for g, v in pairs]


def with_noise(pairs):
    return [(g + tf.random_normal(g.shape, dtype=g.dtype, seed=1), v) for g, v in pairs]


def by_the_norm_of_all(pairs):
    clipped, _ = tf.clip_by_global_norm([g for g, _ in pairs], 0.1)
    return list(zip(clipped, [v for _, v in pairs]))


def assert_sent(optimizer, **options):
    """The model's own variables are updated, and their values sent to the replicas."""
    ours = samples.check_against_one_device(
        two_layers, VECTORS, optimizer, 2, reduction='mean',
        variables=towers.VariablePlacement('replicated'), **options)
    assert ours.built.plan.variable_device.endswith(
        'updated once and sent to the replicas, since the optimizer cannot be repeated')
    own = {variable.op.name: variable for variable in ours.built.variables}
    for replica in ours.built.replicas.variables:
        assert ours.built.replicas.original(replica) is own[replica.op.name.split('/')[-1]]
    assert not ours.built.replicas.slots
    return ours


@pytest.mark.parametrize('change', [
    by_list, by_another_output, pytest.param(by_another_rate, marks=pytest.mark.slow),
    by_the_norm_of_all])
def test_an_optimizer_that_cannot_be_repeated_updates_the_models_own(change):
    assert_sent(lambda: Changed(change))


def test_replicas_of_an_optimizer_with_noise_stay_equal():
    built = build(lambda: Changed(with_noise))
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(built.replicas.refresh())
        session.run(built.train_op)
        for replica in built.replicas.variables:
            own, other = session.run([built.replicas.original(replica), replica])
            assert (own == other).all()


@pytest.mark.slow
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


def test_an_optimizer_that_writes_the_models_own_alone_updates_it_once():
    assert_sent(lambda: Clips(0.1))


@pytest.mark.slow
def test_the_loss_of_a_scaled_build_is_looked_at_too():
    scale = towers.LossScale(initial=8)
    for change, is_sent in ((by_another_rate, True), (list, False)):
        with tf.Graph().as_default():
            built = build(lambda: Changed(change), numerics=towers.Numerics(loss_scale=scale))
            assert ('sent to the replicas' in built.plan.variable_device) == is_sent


class BySlotsOfItsOwn(tf.train.GradientDescentOptimizer):
    """Makes slots by get_variable, so that it cannot be called a second time."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        pairs = by_another_rate(list(grads_and_vars))
        for _, variable in pairs:
            tf.get_variable(variable.op.name + '/slot', variable.shape, trainable=False)
        return super(BySlotsOfItsOwn, self).apply_gradients(pairs, global_step, name)


def test_an_optimizer_that_can_be_called_only_once_is_refused():
    with pytest.raises(towers.SharedVariableError, match=(
            r'otherwise than to its replica body_replica_1/body: operation .*\(Const\) against')):
        build(lambda: BySlotsOfItsOwn(0.1))
