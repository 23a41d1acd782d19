"""Random programs: where the verdict is 'proven', shards give what the batch gives, in numbers.

    PROOF_SEED=1234 python -m pytest tests/proof/test_random_graphs.py    the same programs again
    PROOF_GRAPHS=5000 …                                                   so many programs
"""

import os
import time

import numpy as np
import pytest
import random_graphs
import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof.analysis import analyse
from towers.proof.batch_norms import find_batch_norms
from towers.proof.states import Kind
from towers.proof.question import Question
from towers.proof.verdict import verdict_of

SHARDS = [(4, 4), (3, 5), (1, 7), (6, 2)]  # numbers of examples
IN_A_GRAPH = 10  # programs
TOLERANCE = 1e-7

MEAN_OF_TOWERS = Question(adds_shards=False, static_size=None, part_name='tower')
SUM_OF_TOWERS = MEAN_OF_TOWERS._replace(adds_shards=True)


def check(seed, count):
    """Compares programs of a seed: `(how many were proven, [text of each false proof])`."""
    proven, false_proofs = 0, []
    for place in range(0, count, IN_A_GRAPH):
        with tf.Graph().as_default():
            found = check_graph(seed + place)
        proven += found[0]
        false_proofs += found[1]
    return proven, false_proofs


def check_graph(seed):
    """Compares the programs of one graph."""
    rng = np.random.RandomState(seed)
    inputs = random_graphs.make_inputs()
    programs, made = [], []
    for number in range(IN_A_GRAPH):
        with tf.variable_scope('program_%d' % number):
            program = random_graphs.Program(rng, inputs)
            program.apply_some(rng.randint(2, 9))
            made.append(program.loss())
            programs.append(program)
    operations = tf.get_default_graph().get_operations()
    analysis = analyse(operations, list(inputs.values()), made)
    norms = find_batch_norms(analysis, operations)
    proven = []
    for loss, program in zip(made, programs):
        is_sum = analysis.state(loss).kind is Kind.SUM
        question = SUM_OF_TOWERS if is_sum else MEAN_OF_TOWERS
        if verdict_of([loss], analysis, norms, question).is_proven:
            gradients = [tf.convert_to_tensor(gradient) for gradient in tf.gradients(
                loss, program.weights) if gradient is not None]
            proven.append((loss, program, [loss] + gradients, is_sum))
    values = random_graphs.draw_values(rng)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        wrong = [fault_of(session, fetches, is_sum, inputs, values)
                 for _, _, fetches, is_sum in proven]
    return len(proven), ['seed %d, %s of %s: %s' % (seed, loss.name, program.names, fault)
                         for (loss, program, _, _), fault in zip(proven, wrong) if fault]


def fault_of(session, fetches, is_sum, inputs, values):
    """How shards differ from the batch, in words; None if they do not, or there is no number."""
    def run(first, end):
        return session.run(fetches, {inputs[name]: values[name][first:end] for name in inputs})
    try:
        batch = run(0, random_graphs.EXAMPLES)
    except tf.errors.InvalidArgumentError:  # a reshape that does not fit, and is no proof's matter
        return None
    if not all(np.isfinite(value).all() for value in batch):
        return None
    for sizes in SHARDS:
        parts = [run(0, sizes[0]), run(sizes[0], sum(sizes))]
        weights = [1., 1.] if is_sum else [size / float(sum(sizes)) for size in sizes]
        for place, (whole, one, other) in enumerate(zip(batch, *parts)):
            combined = weights[0] * one + weights[1] * other
            error = np.abs(whole - combined).max() / max(1., np.abs(whole).max())
            if not error < TOLERANCE:
                return '%s of shards %s differs by %.1e' % (
                    'gradient %d' % place if place else 'loss', sizes, error)
    return None


# ---- batches of static size ----------------------------------------------------------------------

SHARD = random_graphs.EXAMPLES // 2  # examples of a static batch


def check_static(seed, count):
    """Compares programs built for a shard with those built for the batch: as `check`. A proof under
    a condition counts where the condition is true."""
    proven, false_proofs = 0, []
    for place in range(0, count, IN_A_GRAPH):
        found = check_static_graph(seed + place)
        proven += found[0]
        false_proofs += found[1]
    return proven, false_proofs


def build_static(seed, examples):
    """`(graph, inputs, [(program, loss)])`, for a batch of static size."""
    with tf.Graph().as_default() as graph:
        inputs = random_graphs.make_inputs(examples)
        made = []
        for number in range(IN_A_GRAPH):
            rng = np.random.RandomState((seed + 7919 * number) % 2 ** 32)
            with tf.variable_scope('program_%d' % number):
                program = random_graphs.Program(rng, inputs)
                program.apply_some(rng.randint(2, 9))
                made.append((program, program.loss()))
    return graph, inputs, made


def check_static_graph(seed):
    """Compares the programs of one graph."""
    shard, inputs, programs = build_static(seed, SHARD)
    batch, inputs_of_batch, same_programs = build_static(seed, random_graphs.EXAMPLES)
    checked = []
    with shard.as_default():
        operations = shard.get_operations()
        analysis = analyse(operations, list(inputs.values()), [loss for _, loss in programs])
        norms = find_batch_norms(analysis, operations)
        for number, (program, loss) in enumerate(programs):
            question = Question(adds_shards=analysis.state(loss).kind is Kind.SUM,
                                static_size=SHARD, part_name='tower')
            verdict = verdict_of([loss], analysis, norms, question)
            if not verdict.text.startswith('proven, if') or 'but for' in verdict.text:
                continue
            of_plain = Question(question.adds_shards, None, 'tower')
            is_plain = verdict_of(
                [loss], analysis._replace(with_size_constants=None), norms, of_plain).is_proven
            size_constants = {} if is_plain else analysis.with_size_constants.size_constants
            other = same_programs[number][1]
            if is_true(size_constants, loss, other):
                checked.append((program, loss, other, 'the loss is a sum' in verdict.text))
    values = random_graphs.draw_values(np.random.RandomState(seed % 2 ** 32))
    false_proofs = []
    of_parts = [values_of(shard, inputs, [loss for _, loss, _, _ in checked], values, begin)
                for begin in (0, SHARD)]
    [of_batch] = [values_of(batch, inputs_of_batch, [loss for _, _, loss, _ in checked], values, 0)]
    for place, (program, loss, _, is_sum) in enumerate(checked):
        whole, one, other = of_batch[place], of_parts[0][place], of_parts[1][place]
        if whole is None or one is None or other is None or not np.isfinite(whole):
            continue
        combined = (one + other) * (1. if is_sum else .5)
        if not abs(whole - combined) / max(1., abs(whole)) < TOLERANCE:
            false_proofs.append('seed %d, %s of %s: %r, not %r' % (
                seed, loss.name, program.names, combined, whole))
    return len(checked), false_proofs


def is_true(size_constants, loss, other):
    """Whether a loss of a shard becomes that of the batch if constants are read so."""
    of_batch = {op.name: op for op in other.graph.get_operations()}
    for name in graph_walk.ancestors([loss]):
        op, same = loss.graph.get_operation_by_name(name), of_batch.get(name)
        if same is None or same.type != op.type:
            return False
        if [tensor.name for tensor in op.inputs] != [tensor.name for tensor in same.inputs]:
            return False
        if op.type == 'Const':
            value = tf.get_static_value(op.outputs[0])
            if name in size_constants:
                value = tf.make_ndarray(size_constants[name].of_batch(random_graphs.EXAMPLES))
            if not np.array_equal(value, tf.get_static_value(same.outputs[0])):
                return False
        elif op.type != 'Placeholder' and attributes(op) != attributes(same):
            return False
    return loss.name == other.name


def attributes(op):
    """The attributes of an operation, but for shapes."""
    return {name: op.node_def.attr[name].SerializeToString() for name in op.node_def.attr
            if not name.startswith('_') and 'shape' not in name}


def values_of(graph, inputs, losses, values, begin):
    """The values of losses for the examples from `begin` on; None of one that raises."""
    size = inputs['x'].shape.as_list()[0]
    feed = {inputs[name]: values[name][begin:begin + size] for name in inputs}
    found = []
    with tf.Session(graph=graph) as session:
        with graph.as_default():
            session.run(tf.global_variables_initializer())
        for loss in losses:
            try:
                found.append(session.run(loss, feed))
            except tf.errors.InvalidArgumentError:
                found.append(None)
    return found


@pytest.fixture(autouse=True)
def control_flow_v1():
    was_v2 = tf.control_flow_v2_enabled()
    tf.disable_control_flow_v2()
    yield
    if was_v2:
        tf.enable_control_flow_v2()


def check_some(count):
    seed = int(os.environ.get('PROOF_SEED', time.time() % 1e6 * 1000 % 2 ** 30))
    count = int(os.environ.get('PROOF_GRAPHS', count))
    proven, false_proofs = check(seed, count)
    assert not false_proofs, 'seed %d: %s' % (seed, '\n'.join(false_proofs))
    assert proven > count // 20, 'seed %d: so few were proven: %d of %d' % (seed, proven, count)


@pytest.mark.slow
def test_what_is_proven_of_a_few_random_programs_is_so():
    check_some(40)


@pytest.mark.slow
def test_what_is_proven_of_many_random_programs_is_so():
    check_some(400)


@pytest.mark.slow
def test_what_is_proven_under_a_condition_is_so_where_it_is_true():
    seed = int(os.environ.get('PROOF_SEED', time.time() % 1e6 * 1000 % 2 ** 30))
    proven, false_proofs = check_static(seed, int(os.environ.get('PROOF_GRAPHS', 40)))
    assert not false_proofs, '\n'.join(false_proofs)
    assert proven > 0
