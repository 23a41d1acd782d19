"""What may not be in one graph, or in one run, with inputs that are staged, since it would be
another batch than it looks like.

A step takes a batch that was read in the step before it. So

* what a run computes from the program's own `get_next()`, such as an accuracy of the towers'
  predictions by the labels of the batch, reads another batch than the one that it trains on;
* two builds that both read ahead from one iterator take batches from each other;
* the saved state of an iterator is one batch ahead of what was trained on;
* an initializer that is made after the build leaves a batch of the old data in the buffers;
* what a run is fed for the batch is not what it trains on, which was read a step ago;
* a run in which all towers are fed by hand would take a batch and train on nothing of it.

The second to the fourth are seen in the graph, and TensorFlow is told what may not be fed. Which
operations are in one run, only the run knows:
`session.run` leaves out whatever is not fetched, or is computed from what is fed. What tells is a
`TemporaryVariable`, which lives in the container of its run, by its name: two of one name in one
run are an error, whichever comes first, and so is the end of one that nobody has made. The error's
text holds the name of the variable, which therefore says what is wrong and what to do.
"""

import collections
import re

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InputError
from towers.graph.graph_walk import step_operations
from towers.tower import staged_owner
from towers.tower.input_way import (check_one_can_begin_anew, initializers_of, iterator_of,
                                    on_the_way)

_MARK = 'stage_inputs: '
# The names stand in a path of the runtime's, so that they have no slash. Nor do they have
# `IteratorGetNext`, by which programs tell an error of the data, to go on with the next batch.
_BOTH = (_MARK + 'a run that takes the batch which was staged a step ago also reads another one '
         'from %s, by the get_next() that build_towers was given. Take labels and other inputs of '
         'the step from built.towers[i].inputs, or compute what needs them within the model '
         'function; or leave stage_inputs out.')
# TensorFlow 2 begins its text with the operation's name, a page of stack traces before the reason.
_IN_SHORT = 'stage_inputs.take_labels_from_built.towers.i.inputs_not_from_get_next'
_FED_IN_SHORT = 'stage_inputs.all_towers_are_fed_by_hand'
_ALL_FED = (_MARK + 'all towers of %s are fed by hand in a run of the train op, which would take a '
            'batch and not train on it. Feed the input of a build without stage_inputs.')
_IN_ERROR = re.compile(re.escape(_MARK) + r'.*?(?=/frame:|/N\d+tensorflow)', re.DOTALL)


def guard_reads(reads):
    """Makes a run of the staged inputs fail that reads from the iterators besides.

    Args:
      reads: the program's own `IteratorGetNext`s, which staged inputs do not use.

    Returns:
      An operation for whatever takes a batch to wait for.
    """
    iterators = sorted({iterator_of(read.inputs[0]) for read in reads})
    name = _BOTH % _quoted(iterators)
    guard = _temporary(name, _IN_SHORT).op
    with tf.get_default_graph().colocate_with(guard):  # a container is of one device
        other = _temporary(name, _IN_SHORT).op  # one: a run may read from all of them
    for read in reads:
        compat.add_control_inputs(read, [other])
    return guard


def check_alone(inputs):
    """Checks that nothing else in the graph depends on the place in the data.

    Args:
      inputs: nest of what is to be staged.

    Raises:
      InputError: another build reads ahead from one of their iterators; or its state is saved.
    """
    graph = tf.get_default_graph()
    iterators = {iterator_of(op.inputs[0]) for op in on_the_way(inputs)
                 if op.type == 'IteratorGetNext'} - {None}
    for name, guard in _guarded(graph):
        if name in iterators:
            raise InputError(
                '%sthe inputs come from %s, from which another build reads ahead (%r): they would '
                'take batches from each other. Leave stage_inputs out of both builds, or give '
                'each an iterator of its own.' % (_MARK, _quoted([name]),
                                                  guard.name.rpartition('/')[0]))
    _check_not_saved(graph, iterators)


def check_iterators(graph):
    """Checks what the graph does with the iterators that staged inputs come from.

    For when a session begins, when all operations are there.

    Raises:
      InputError: one of them is saved, or has an initializer that was made after the build, which
        would not empty the buffers.
    """
    of_builds = {}
    for name, guard in _guarded(graph):
        of_builds.setdefault(guard, set()).add(name)
    for iterators in of_builds.values():
        _check_not_saved(graph, iterators)
        begin = initializers_of(iterators, graph)
        check_one_can_begin_anew(iterators, begin)
        for op in begin:
            if not staged_owner.empties(op):
                raise InputError(
                    '%s%r, which initializes %s, was made after build_towers: after it the towers '
                    'would be given a batch of the old data. Make it before; or leave stage_inputs '
                    'out.' % (_MARK, op.name, _quoted(iterators)))


def _check_not_saved(graph, iterators):
    for op in graph.get_operations():
        if op.type == 'SerializeIterator' and iterator_of(op.inputs[0]) in iterators:
            raise InputError(
                '%sthe state of %s is saved (by %r), and would be one batch ahead of what was '
                'trained on: a run that resumes would leave that batch out. Save the number of '
                'batches that were trained on, and begin with dataset.skip; or leave stage_inputs '
                'out.' % (_MARK, _quoted([iterator_of(op.inputs[0])]), op.name))


def _guarded(graph):
    """[(name of an iterator, the guard of the build that reads ahead from it)]."""
    return [(iterator_of(op.inputs[0]), other) for op in graph.get_operations()
            if op.type == 'IteratorGetNext' for other in op.control_inputs
            if other.type == 'TemporaryVariable'
            and other.get_attr('var_name').startswith(_MARK.encode())]


def prevent_feeding(inputs):
    """Makes a run fail that is fed a batch, or anything that it is computed from.

    Args:
      inputs: nest of what is staged.
    """
    graph = tf.get_default_graph()
    for op in on_the_way(inputs):
        for tensor in op.outputs:
            graph.prevent_feeding(tensor)


Use = collections.namedtuple('Use', 'mark check')
"""Whether a run uses what was taken.

Fields:
  mark: the operation that all use waits for.
  check: the operation that fails in a run without `mark`, once it waits for all use.
"""


def mark_use(tensors, name):
    """Makes it known whether a run uses any of these, or is fed in their place.

    Args:
      tensors: list of tensors.
      name: the prefix of the towers' names.

    Returns:
      `(list of the same tensors, to be used in their place; Use)`.
    """
    text = _ALL_FED % repr(name)
    with tf.device('/cpu:0'):
        mark = _temporary(text, 'used').op
        with tf.get_default_graph().colocate_with(mark):
            # It ends the variable that it is told the name of, not the one that it is given.
            other = _temporary(mark.name.replace('/', '.'), 'any')
            check = tf.raw_ops.DestroyTemporaryVariable(
                ref=other, var_name=text, name=_FED_IN_SHORT)
    marked = []
    for tensor in tensors:
        with tf.device(tensor.device), tf.control_dependencies([mark]):
            marked.append(tf.identity(tensor))
    return marked, Use(mark, check.op)


def check_after(use, passes, work):
    """Makes the check of a `Use` wait for a forward and backward pass.

    Args:
      use: `Use`.
      passes: the tensors of the pass.
      work: the operation after it.
    """
    is_used = any(op is use.mark for op in step_operations(passes))
    # A model that uses nothing of its inputs does not do so since it is fed.
    compat.add_control_inputs(use.check, [work if is_used else use.mark])


def _temporary(var_name, name):
    return tf.raw_ops.TemporaryVariable(shape=[], dtype=tf.bool, var_name=var_name, name=name)


def _quoted(names):
    return ', '.join(repr(name.replace('/', '.')) for name in names)


def explained(error):
    """The `InputError` for what a run with staged inputs failed with; None for any other error.

    The graph of the run is the default one.

    Args:
      error: what `session.run` raised.
    """
    found = isinstance(error, (tf.errors.AlreadyExistsError, tf.errors.NotFoundError)) and \
        _IN_ERROR.search(str(error))
    if isinstance(error, tf.errors.InvalidArgumentError) and staged_owner.TURNS in str(error):
        return InputError(staged_owner.TURNS)
    fed = isinstance(error, ValueError) and re.search(r'Tensor .* may not be fed', str(error))
    if fed and _guarded(tf.get_default_graph()):
        return InputError(
            '%s%s: the step trains on a batch that was read a step ago, not on what is fed now. '
            'Feed built.towers[i].inputs, a shard each; or leave stage_inputs out.'
            % (_MARK, fed.group()))
    return InputError(found.group()) if found else None
