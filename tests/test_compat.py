"""towers.compat: what it says of the TensorFlow that is there."""

import re
import threading

import tensorflow.compat.v1 as tf

from towers import compat
from sample_models import switched


def test_shapes_are_written_as_python_writes_tuples():
    shapes = ({'image': tf.TensorShape([4, 8]), 'other': (tf.TensorShape([]),)},
        tf.TensorShape([4]))
    assert compat.shapes_text(shapes) == '({image: (4, 8), other: (())}, (4,))'
    assert re.match(r'\(\((\?|None), 8\)\)$', compat.shapes_text((tf.TensorShape([None, 8]),)))


def test_threads_that_need_the_control_flow_of_tf_1_take_turns():
    def in_block():
        with compat.control_flow_v1():
            seen.append(tf.control_flow_v2_enabled())
    seen, thread = [], threading.Thread(target=in_block)
    with switched('control_flow_v2', True):
        with compat.control_flow_v1():
            thread.start()
            thread.join(.2)
            assert thread.is_alive() and not seen
        thread.join()
        assert seen == [False]
        assert tf.control_flow_v2_enabled()


def test_what_the_runtime_makes_of_a_product_is_a_product():
    for op_type in ('MatMul', '_MklMatMul', '_MklNativeMatMul', '_FusedMatMul',
                    '_MklNativeFusedMatMul'):
        assert compat.computed_operation(op_type) == 'MatMul', op_type
