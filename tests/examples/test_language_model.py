"""examples/language_model.py: it learns a text, and every tower keeps its own state."""


import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from examples import language_model

SIZE, STREAMS, STEPS = 7, 4, 3


def trained(devices):
    """Losses of three steps from the same weights, and the state after them in all towers."""
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        text = np.random.RandomState(0).randint(SIZE, size=[STREAMS, 3 * STEPS + 1])
        x, y = (tf.placeholder(tf.int32, [STREAMS, STEPS]) for _ in range(2))
        built = towers.build_towers(language_model.make_model_fn(SIZE), (x, y),
                                    tf.train.GradientDescentOptimizer(0.5), devices, 'mean')
        numbers = np.random.RandomState(1)
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            for variable in tf.trainable_variables():
                variable.load(numbers.randn(*variable.shape.as_list()) * 0.3, session)
            losses = [session.run([built.loss, built.train_op], {
                x: text[:, at:at + STEPS], y: text[:, at + 1:at + 1 + STEPS]})[0]
                      for at in range(0, 3 * STEPS, STEPS)]
            state = {variable.op.name: session.run(variable) for variable in tf.local_variables()}
        return losses, state


@pytest.mark.slow
def test_states_of_the_towers_are_the_parts_of_that_of_one_device():
    losses_1, state_1 = trained(1)
    losses_2, state_2 = trained(2)
    np.testing.assert_allclose(losses_2, losses_1, rtol=1e-5)
    assert set(state_1) == {'cell', 'hidden'}
    assert set(state_2) == {'cell', 'cell_tower_1', 'hidden', 'hidden_tower_1'}
    for name in state_1:
        assert abs(state_1[name]).max() > 0.01
        np.testing.assert_allclose(
            np.concatenate([state_2[name], state_2[name + '_tower_1']]), state_1[name], atol=1e-5)
