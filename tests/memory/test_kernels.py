"""What memory a kernel takes for itself, and which outputs are memory of the input."""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.memory import kernels
from towers.memory.step_graph import StepGraph


def test_patches_of_as_many_images_as_fill_30_mb(monkeypatch):
    x = tf.placeholder(tf.float32, [16, 16, 16, 64])
    weights = tf.placeholder(tf.float32, [3, 3, 64, 64])
    y = tf.nn.conv2d(x, weights, [1, 1, 1, 1], 'SAME')
    monkeypatch.setattr(compat, 'uses_onednn', lambda: False)
    nodes = StepGraph(list(tf.gradients(y, [x, weights]))).nodes
    to_input, to_filter = [next(node for node in nodes if node.type == kind) for kind in (
        'Conv2DBackpropInput', 'Conv2DBackpropFilter')]
    # places 256, patch 9 * 64 = 576: 256 * 64 + 576 * 64 + 256 * 576 = 200,704 floats an image.
    images = 40  # 7,864,320 / 200,704 = 39.2
    assert kernels.scratch(to_filter) == 4 * images * 256 * 576
    # Of so few threads each has more than 65,536 floats to do: one image is laid out at a time.
    monkeypatch.setattr(kernels.os, 'cpu_count', lambda: 2)
    assert kernels.scratch(to_input) == 4 * 256 * 576
    monkeypatch.setattr(kernels.os, 'cpu_count', lambda: 4)
    assert kernels.scratch(to_input) == 4 * images * 256 * 576
    monkeypatch.setattr(compat, 'uses_onednn', lambda: True)
    assert kernels.scratch(to_filter) == 0


def test_pooling_looks_for_its_maxima_again():
    x = tf.placeholder(tf.float32, [2, 8, 8, 3])
    gradient, = tf.gradients(tf.nn.max_pool(x, [1, 2, 2, 1], [1, 2, 2, 1], 'SAME'), [x])
    node = StepGraph([gradient]).by_name[gradient.op.name]
    assert kernels.scratch(node) == 8 * 2 * 4 * 4 * 3


def test_rows_are_passed_on_and_columns_are_not():
    x = tf.placeholder(tf.float32, [4, 6])
    rows, columns = tf.split(x, 2, 0)[0], tf.split(x, 2, 1)[0]
    nodes = StepGraph([rows, columns, x[1:3], x[:, 1:3], x[::2]]).by_name
    assert {name: kernels.passes_on(node) for name, node in nodes.items()
            if node.type in kernels.CUTS} == {
                'split': True, 'split_1': False, 'strided_slice': True, 'strided_slice_1': False,
                'strided_slice_2': False}
