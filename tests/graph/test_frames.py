"""towers.frames: where loops and branches of control flow v1 begin and end, in clones as well."""

import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

from towers.graph.frames import Frames
from towers.graph.graph_walk import step_operations


@pytest.fixture(params=['made', 'imported'])
def frames(request):
    """(`Frames`, {name: operation}) of x, a loop within a branch, and what takes the result."""
    with samples.switched('control_flow_v2', False), tf.Graph().as_default() as made:
        x = tf.placeholder(tf.float32, [], name='x')

        def branch():
            return tf.while_loop(lambda total: total < 9.,
                                 lambda total: tf.add(total, x, name='turn'), [x * 2.])
        result = tf.cond(x > 0., branch, lambda: tf.negative(x, name='other'), name='cond')
        tf.identity(result, name='result')
    graph = made
    if request.param == 'imported':
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(made.as_graph_def(), name='')
    operations = step_operations([graph.get_tensor_by_name('result:0')])
    return Frames(operations), {op.name.split('/')[-1]: op for op in operations}


def test_what_is_within_neither_waits_for_the_outside_nor_always_runs(frames):
    found, by_name = frames
    assert not found.is_outside(by_name['turn'])  # of a loop
    assert found.is_outside(by_name['other'])  # of a branch
    leaves = by_name['result'].inputs[0].op
    assert leaves.type == 'Merge'
    for name in ('turn', 'other'):
        assert not found.always_runs(by_name[name])
        assert found.ends(by_name[name]) == [leaves]
    for name in ('x', 'result'):
        assert found.is_outside(by_name[name]) and found.always_runs(by_name[name])
        assert found.ends(by_name[name]) == [by_name[name]]
