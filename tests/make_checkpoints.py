"""Writes checkpoints of one small network: reference.ckpt, resource.ckpt, and v1.ckpt, one file.

    python tests/make_checkpoints.py tests/data/ckpt_tf1.15      # with TF 1.15.5
    python tests/make_checkpoints.py tests/data/ckpt_tf2.21      # with TF 2.21.0
"""

import sys

import tensorflow.compat.v1 as tf


def build(use_resource, classes=3):
    """Two layers, the first one's weights in two parts, and the slots of Momentum."""
    with tf.variable_scope('net', use_resource=use_resource):
        parts = tf.fixed_size_partitioner(2)
        weights = [tf.get_variable('conv/weights', [6, 4], partitioner=parts),
                   tf.get_variable('conv/biases', [4]),
                   tf.get_variable('logits/weights', [4, classes]),
                   tf.get_variable('logits/biases', [classes])]
    with tf.variable_scope('', use_resource=use_resource):
        step = tf.train.get_or_create_global_step()
    loss = tf.add_n([tf.reduce_sum(tf.convert_to_tensor(weight)) for weight in weights])
    return tf.train.MomentumOptimizer(.1, .9).minimize(loss, step)


def numbered(variables):
    """Ops that give variable i the values i + 0.5, i + 1.5, …, and a step the value 7."""
    ops = []
    for index, variable in enumerate(variables):
        size = variable.shape.num_elements()
        values = tf.reshape(tf.range(size, dtype=tf.float32) + index + .5, variable.shape)
        if variable.op.name == 'global_step':
            values = tf.constant(7, tf.int64)
        ops.append(tf.assign(variable, values))
    return ops


def main(folder):
    for name, use_resource, version in (('reference', False, tf.train.SaverDef.V2),
                                        ('resource', True, tf.train.SaverDef.V2),
                                        ('v1', False, tf.train.SaverDef.V1)):
        with tf.Graph().as_default(), tf.Session() as session:
            build(use_resource)
            session.run(tf.global_variables_initializer())
            session.run(numbered(tf.global_variables()))
            tf.train.Saver(write_version=version).save(
                session, '%s/%s.ckpt' % (folder, name), write_meta_graph=False, write_state=False)


if __name__ == '__main__':
    tf.disable_v2_behavior()
    main(sys.argv[1])
