"""The one line that says why TensorFlow could not run a step."""

import re
import threading

import pytest
import tensorflow.compat.v1 as tf

from sample_models import switched
from towers import compat
from towers.errors import StepError
from towers.tensorflow_errors import failing_on, is_of_input, reason_of


@pytest.mark.parametrize('message', [
    'm = 9 is not in [0, 3)',
    'm = 9 is not in [0, 3)\n\t [[node GatherV2 (defined at a.py:3) ]]',
    'From /job:worker/replica:0/task:0:\nm = 9 is not in [0, 3)\n\t [[{{node GatherV2}}]]',
    'From /job:worker/replica:0/task:0:\n2 root error(s) found.\n  (0) INVALID_ARGUMENT: '
    'm = 9 is not in [0, 3)\n\t [[{{node a}}]]\n  (1) CANCELLED: stopped',
    '\n=====================\nINVALID_ARGUMENT: From /job:worker/replica:0/task:1:\n'
    '2 root error(s) found.\n  (0) INVALID_ARGUMENT: m = 9 is not in [0, 3)\n\t [[{{node a}}]]\n'
    'INVALID_ARGUMENT: From /job:ps/replica:0/task:0:\nm = 9 is not in [0, 3)',
    'Graph execution error:\n\nFrom /job:worker/replica:0/task:0:\nm = 9 is not in [0, 3)',
    "Graph execution error:\n\nDetected at node 'GatherV2' defined at (most recent call last):\n"
    '    File "a.py", line 9, in <module>\nNode: \'GatherV2\'\nm = 9 is not in [0, 3)\n'
    '\t [[{{node GatherV2}}]]',
    'Graph execution error:\n\nm = 9 is not in [0, 3)\n\t [[{{node GatherV2}}]]',
    "Graph execution error:\n\nDetected at node 'a' defined at (most recent call last):\n"
    "Node: 'a'\nDetected at node 'b' defined at (most recent call last):\nNode: 'b'\n"
    '2 root error(s) found.\n  (0) INVALID_ARGUMENT:  m = 9 is not in [0, 3)\n'
    '\t [[{{node a}}]]\n  (1) CANCELLED:  stopped\n0 successful operations.',
    '{{function_node __inference_Dataset_map_<lambda>_24}} m = 9 is not in [0, 3)\n\t '
    '[[{{node a}}]]',
    'Error in user-defined function passed to MapDataset:2 transformation with iterator: '
    'Iterator::Root::Map: m = 9 is not in [0, 3)',
    '2 root error(s) found.\n  (0) Invalid argument: m = 9 is not in [0, 3)\n'
    '\t [[{{node a}}]]\n  (1) Cancelled: stopped'])
def test_the_reason(message):
    assert reason_of(tf.errors.InvalidArgumentError(None, None, message)) == (
        'm = 9 is not in [0, 3)')


@pytest.mark.parametrize('text, expected', [
    ('rotten\n\t [[{{node Assert}}]]\n\t [[IteratorGetNext]]', True),
    ('rotten\n\t [[{{node next/IteratorGetNextAsOptional}}]]', True),
    ('rotten\n\t [[node IteratorGetNext_1 (defined at a.py:3) ]]', True),
    ('rotten\n\t [[{{node model/Assert}}]]\n\t [[IteratorGetNext/_3]]', False),
    ('rotten\n\t [[{{node model/Assert}}]]\n\t [[shards/IteratorGetNext_1/_12]]', False),
    ('rotten\n\t [[{{node model/Assert}}]]', False)])
def test_whether_it_is_of_the_input(text, expected):
    assert is_of_input(tf.errors.UnknownError(None, None, text)) == expected
    assert not is_of_input(tf.errors.ResourceExhaustedError(None, None, text))
    assert not is_of_input(RuntimeError(text))


def test_only_errors_of_the_runtime_become_others():
    with pytest.raises(KeyError):
        with failing_on('on one device'):
            raise KeyError('w')
    with pytest.raises(StepError, match='^the model failed on one device: the disk is full$'):
        with failing_on('on one device'):
            raise tf.errors.ResourceExhaustedError(None, None, 'the disk is full')


# ---- towers.compat: what it says of the TensorFlow that is there ---------------------------------

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
