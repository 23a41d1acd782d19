"""Draws the report of a step of two towers whose second stage is too long, as a picture.

    python docs/draw_report.py docs/step_report.png

It needs Chromium. The step is a real one, on six virtual CPUs.
"""

import os
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import tensorflow.compat.v1 as tf

import towers

EXAMPLES, WIDTH = 512, 1000
DEVICES = [['/cpu:0', '/cpu:1', '/cpu:2'], ['/cpu:3', '/cpu:4', '/cpu:5']]
WINDOW = '1100,980'  # points
FULL = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE, output_partition_graphs=True)


def layer(x: tf.Tensor, number: int, width: int) -> tf.Tensor:
    """Adds a dense layer with a name scope of its own."""
    with tf.variable_scope('layer_%d' % number):
        return tf.nn.relu(tf.matmul(x, tf.get_variable('weights', [x.shape[-1], width])))


def model_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Seven layers in three stages: one, five, and one small one."""
    with towers.stage(0):
        x = layer(x, 0, WIDTH)
    with towers.stage(1):
        for number in range(1, 6):
            x = layer(x, number, WIDTH)
    with towers.stage(2):
        return tf.reduce_mean(tf.square(layer(x, 6, 100) - y))


def written_report(path: str) -> None:
    """Runs some steps, and writes the report of the last one."""
    draw = np.random.RandomState(0)
    batch = (tf.constant(draw.randn(EXAMPLES, 100), tf.float32),
             tf.constant(draw.randn(EXAMPLES, 100), tf.float32))
    built = towers.build_towers(
        model_fn, batch, tf.train.MomentumOptimizer(.01, .9), DEVICES, reduction='mean',
        pipeline=towers.Pipeline(4))
    metadata = tf.RunMetadata()
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        for _ in range(5):
            session.run(built.train_op)
        session.run(built.train_op, options=FULL, run_metadata=metadata)
    print(towers.step_report(built, metadata, path))


def main(picture: str) -> None:
    """Writes the report, and has Chromium draw it."""
    tf.disable_v2_behavior()
    chromium = shutil.which('chromium') or shutil.which('google-chrome')
    if chromium is None:
        raise SystemExit('This needs Chromium.')
    with tempfile.TemporaryDirectory() as folder:
        page = os.path.join(folder, 'step.html')
        written_report(page)
        subprocess.run(
            [chromium, '--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars',
             '--screenshot=%s' % os.path.abspath(picture), '--window-size=%s' % WINDOW,
             'file://%s' % page], stderr=subprocess.DEVNULL, check=True)


if __name__ == '__main__':
    main(sys.argv[1])
