"""How busy the stages of a pipeline were, from the trace of a step."""

import tensorflow.compat.v1 as tf

from benchmarks import stage_use


def metadata(*kernels):
    """`RunMetadata` of `(device, name, begin, end)`s, in microseconds."""
    found = tf.RunMetadata()
    for device in sorted({kernel[0] for kernel in kernels}):
        stats = found.step_stats.dev_stats.add(
            device='/job:localhost/replica:0/task:0/device:' + device)
        for on, name, begin, end in kernels:
            if on == device:
                stats.node_stats.add(
                    node_name=name, timeline_label='%s = %s()' % (name, name.split('/')[-1]),
                    all_start_micros=1000 + begin, op_start_rel_micros=5,
                    op_end_rel_micros=5 + end - begin)
    return found


def test_a_device_is_busy_while_a_kernel_computes():
    step = stage_use.traced_step(metadata(
        ('CPU:0', 'tower_0/MatMul', 0, 1000), ('CPU:0', 'tower_0/Relu', 500, 1500),
        ('CPU:1', 'edge_7/_Recv', 0, 1500), ('CPU:1', 'tower_0/MatMul_1', 1500, 2500),
        ('CPU:1', 'tower_0/gradients/MatMul_1_grad', 2500, 3500), ('CPU:1', 'b/_Send', 3500, 3600),
        ('CPU:0', 'tower_0/gradients/MatMul_grad', 3500, 4000)))
    assert step['milliseconds'] == 4
    assert step['use'] == {'CPU:0': 2 / 4, 'CPU:1': 2 / 4}
    assert step['rows'] == [
        ['CPU:0', 'forward', [[0, 1.5]]], ['CPU:0', 'backward', [[3.5, 4]]],
        ['CPU:1', 'forward', [[1.5, 2.5]]], ['CPU:1', 'backward', [[2.5, 3.5]]]]
