"""towers.compat: what it says of the TensorFlow that is there."""

import tensorflow.compat.v1 as tf

from towers import compat


def test_version():
    assert compat.TF_VERSION == tuple(int(part) for part in tf.__version__.split('.')[:2])


def test_what_the_runtime_makes_of_a_product_is_a_product():
    for op_type in ('MatMul', '_MklMatMul', '_MklNativeMatMul', '_FusedMatMul',
                    '_MklNativeFusedMatMul'):
        assert compat.computed_operation(op_type) == 'MatMul', op_type
