"""trainer.plan_text: the short form has what was chosen and what asks for attention."""

import numpy as np
import tensorflow.compat.v1 as tf

import towers
from trainer.plan_text import short_plan


def test_the_short_form():
    x, y = np.ones([8, 3], np.float32), np.ones([8, 1], np.float32)

    def model_fn(x, y):
        tf.get_variable('unused', [2])
        return tf.losses.mean_squared_error(y, tf.matmul(x, tf.get_variable('w', [3, 1])))
    batch = (tf.placeholder_with_default(x, [None, 3]), tf.placeholder_with_default(y, [None, 1]))
    built = towers.build_towers(model_fn, batch, tf.train.GradientDescentOptimizer(.5),
                                ['/cpu:0', '/cpu:1'])
    lines = short_plan(built.plan, towers.audit(built)).splitlines()
    assert lines[0] == '2 towers, a batch of any size, a remainder is refused, on /cpu:0, /cpu:1'
    assert lines[1] == '  variables        2 (2 trainable), 5 parameters, 20 bytes, on /cpu:0'
    assert [line[:15].strip() for line in lines[2:] if line.startswith('  ') and line[2] != ' '] == [
        'reduction', 'learning rate', 'one device', 'no gradient']
    assert lines[-2].startswith('audit: every promise kept; ')
    assert lines[-2].endswith(' MB a step are sent between devices')
    assert lines[-1] == '--plan shows all of the plan and of the audit'
    assert len(lines) <= 10 < len(str(built.plan).splitlines())
