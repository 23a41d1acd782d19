"""What stands for the inputs of a batch in the scratch graph."""

import tensorflow.compat.v1 as tf

from towers.proof.stand_ins import (
    LEAST_STAND_IN,
    lengths_of,
    prime_for,
    stand_in_of,
    states_of_inputs,
    static_size,
)
from towers.proof.states import Kind, Size


def test_the_prime_divides_no_length_and_no_number_of_the_program():
    assert prime_for([]) == 10007
    operations = [tf.zeros([3 * 10007]).op, tf.constant([2 * 10009]).op]
    assert prime_for(operations) == 10037


def test_lengths_that_are_not_static_are_primes_far_from_that_of_the_batch():
    each, dimension, all_, none = [
        [lengths(place) for place in (1, 2, 1)] for lengths in (
            lengths_of(kind, 10007) for kind in ('each', 'dimension', 'all', 'none'))]
    assert len(set(each)) == 3 and min(each) > 13000
    assert dimension[0] == dimension[2] != dimension[1]
    assert len(set(all_)) == 1
    assert none == [None] * 3


def test_these_primes_are_told_from_other_numbers_in_a_graph_of_a_static_batch_too():
    assert lengths_of('all', 4)(1) >= LEAST_STAND_IN


def test_an_input_has_the_examples_along_its_first_dimension():
    x = tf.placeholder(tf.float32, [8, None, 3])
    stand_in = stand_in_of(x, x, 10007, lengths_of('none', 10007))
    assert stand_in.shape.as_list() == [10007, None, 3]
    assert (stand_in.state.kind, stand_in.state.axis) == (Kind.PER_EXAMPLE, 0)


def test_the_states_of_inputs_of_all_kinds():
    tags = tf.sparse_placeholder(tf.int64, [None, 10])
    inputs = {'rate': tf.placeholder(tf.float32, []), 'any': tf.placeholder(tf.float32),
              'tags': tags, 'none': None}
    states = states_of_inputs(inputs)
    assert states[inputs['rate'].name].kind is Kind.INDEPENDENT
    assert states[inputs['any'].name].kind is Kind.UNKNOWN
    assert states[tags.indices.name].kind is Kind.INDICES
    assert states[tags.values.name].kind is Kind.ROWS
    assert states[tags.values.name].selection == states[tags.indices.name].selection
    if tags.shape.as_list()[1] is not None:  # TensorFlow 1 does not tell
        assert states[tags.dense_shape.name].sizes == (Size(0, 1), Size(10))


def test_the_static_size_is_that_of_any_input():
    inputs = [None, tf.placeholder(tf.float32, [None]), tf.placeholder(tf.float32, [8, 2])]
    assert static_size(inputs) == 8
    assert static_size(inputs[:2]) is None
