"""The way from an iterator of `tf.data` to the inputs of a program, to be gone once more.

For staged inputs the next batch is read ahead: the operations between the iterators and the inputs
are found, refused where they cannot read ahead, and imported again on other values.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InputError
from towers.graph.graph_walk import functions_of, is_random, reachable_from, step_operations

_OTHER_READS = ('IteratorGetNextSync', 'IteratorGetNextAsOptional', 'QueueDequeue', 'ReaderRead',
                'MultiDeviceIteratorGetNextFromShard', 'Unstage')
# What TensorFlow marks as stateful, and what gives the same for the same batch whenever it runs.
_WHENEVER = frozenset([
    'Assert', 'Print', 'PrintV2', 'PyFunc', 'EagerPyFunc', 'HashTable', 'HashTableV2',
    'LookupTableFind', 'LookupTableFindV2', 'LookupTableSize', 'LookupTableSizeV2', 'If', 'Case',
    'While', 'PartitionedCall', 'StatefulPartitionedCall', 'SymbolicGradient', 'RemoteCall'])

_LOOPS = ('Enter', 'RefEnter', 'While', 'StatelessWhile', 'For')


def way_of(inputs):
    """`(reads, region)`: the get_nexts, and the operations between them and the inputs."""
    leaves = [leaf for leaf in tf.nest.flatten(inputs, expand_composites=True) if leaf is not None]
    for leaf in leaves:
        if not isinstance(leaf, tf.Tensor):
            raise _cannot('%.80r is no tensor that comes from an iterator' % (leaf,))
    known = step_operations(leaves)
    reads = sorted((op for op in known if op.type == 'IteratorGetNext'), key=lambda op: op.name)
    for op in known:
        if op.type.startswith(_OTHER_READS):
            raise _cannot('%r reads them by %s' % (op.name, op.type))
    if not reads:
        raise _cannot('they come from no iterator')
    for read in reads:
        if compat.in_control_flow(read):
            raise _cannot('%r reads them within a tf.cond or tf.while_loop' % read.name)
        fed = [op.name for op in step_operations([read.inputs[0]])
               if op.type.startswith('Placeholder')]
        if fed:
            raise _cannot('which iterator it is depends on what is fed to %r' % fed[0])
    iterators = {iterator_of(read.inputs[0]) for read in reads}
    if None in iterators:
        raise _cannot('which iterator it is that %r reads does not stand in the graph'
                      % next(read.name for read in reads if iterator_of(read.inputs[0]) is None))
    check_one_can_begin_anew(iterators, initializers(reads))
    after = reachable_from(reads, known, control=True)
    region = [op for op in known if op.name in after and op not in reads]
    for op in region:
        # `prime` and `read` would run in one frame, or a loop in a branch that is not taken.
        loops = [each for each in [op] + _inside(op) if each.type in _LOOPS]
        if loops:
            raise _cannot('%r (%s), between the iterator and the inputs, is a tf.while_loop or '
                          'holds one, as tf.map_fn and tf.scan do' % (op.name, loops[0].type))
    for op in known:
        if is_random(op) or functions_of(op.node_def) and any(
                is_random(inner) for name in functions_of(op.node_def)
                for inner in compat.function_operations(op.graph, name).values()):
            raise _cannot('%r draws random numbers for them, and would draw others' % op.name)
    for leaf in leaves:
        if leaf.op.name not in after and any(
                op.op_def.is_stateful or op.type.startswith(('Placeholder', 'Variable'))
                for op in step_operations([leaf])):
            raise _cannot('%r does not come from the iterator' % leaf.name)
    iterator_parts = step_operations([read.inputs[0] for read in reads])
    for op in sorted(set(known) - set(iterator_parts) - set(reads), key=lambda op: op.name):
        found = [op] * _depends_on_the_step(op) or [
            inner for inner in _inside(op)
            if inner.type != 'Placeholder' and _depends_on_the_step(inner)]  # an argument, there
        if found:
            raise _cannot('%r (%s), on the way from the iterator, reads or writes what may be '
                          'another value in another step' % (op.name, found[0].type),
                          'Do that within the model function (a dataset.map would read it ahead, '
                          'too)')
    return reads, region


def on_the_way(inputs):
    """All operations that a nest of inputs is computed by, the iterators' among them; a list."""
    return step_operations([leaf for leaf in tf.nest.flatten(inputs, expand_composites=True)
                            if isinstance(leaf, tf.Tensor)])


def _inside(op):
    """The operations in the functions that an operation calls, and in those that these call."""
    found, waiting, seen = [], [op.node_def], set()
    while waiting:
        names = functions_of(waiting.pop()) - seen
        seen |= names
        for name in names:
            body = list(compat.function_operations(op.graph, name).values())
            found += body
            waiting += [each.node_def for each in body]
    return found


def _depends_on_the_step(op):
    """Whether an operation may give something else, or do something twice, a step earlier."""
    return op.type.startswith(('Placeholder', 'Variable', 'VarHandle')) or (
        op.op_def.is_stateful and op.type not in _WHENEVER)


def iterator_of(handle):
    """The name of the iterator that a handle is of; None if it is not known.

    It is its operation's, or the `shared_name` by which several operations of one device are the
    same iterator.
    """
    op = handle.op
    while op.type in ('Identity', 'IteratorToStringHandle') or op.type.startswith(
            'IteratorFromStringHandle'):
        op = op.inputs[0].op
    if op.type not in ('Iterator', 'IteratorV2', 'OneShotIterator'):
        return None
    shared, container = [op.get_attr(each).decode() for each in ('shared_name', 'container')]
    if not shared:
        return op.name
    place = tf.DeviceSpec.from_string(op.device)
    return ''.join(['shared_name=%s' % shared] + [', %s=%s' % each for each in (
        ('container', container), ('job', place.job), ('task', place.task),
        ('device', '%s:%d' % (place.device_type or 'CPU', place.device_index or 0)))
                                                 if each[1] not in ('', None, 'CPU:0')])


def check_one_can_begin_anew(iterators, initializers_of_them):
    """Checks that not one of several iterators may be initialized again without the others.

    A batch of all of them is in the buffers: that of the others would be lost.

    Raises:
      InputError: it may.
    """
    if len(iterators) > 1 and initializers_of_them:
        raise _cannot('they come from several iterators (%s), of which one could be initialized '
                      'again without the others; make one iterator of tf.data.Dataset.zip of the '
                      'datasets' % ', '.join(sorted(iterators)))


def initializers(reads):
    """The operations that initialize the iterators of some reads; a list."""
    return initializers_of({iterator_of(read.inputs[0]) for read in reads}, reads[0].graph)


def initializers_of(iterators, graph):
    """The operations that initialize the iterators of some names; a list."""
    return [op for op in graph.get_operations() if op.type == 'MakeIterator'
            and iterator_of(op.inputs[1]) in iterators]


def _cannot(because, advice='Do that within the dataset (dataset.map)'):
    return InputError(
        'stage_inputs: the next batch of these inputs cannot be read ahead, since %s. %s, and pass '
        'what the get_next() of its iterator returns; or leave stage_inputs out.'
        % (because, advice))


def inputs_from(values, inputs, region, pivot, name):
    """The inputs, computed from other values in place of those that the iterators give.

    Args:
      values: dict from `IteratorGetNext`s to lists of tensors in place of their outputs.
      inputs: nest of tensors.
      region: the operations between the iterators and the inputs; they are imported once more.
      pivot: tensor that is alive in the branch in which the imported operations run.
      name: name scope of the imported operations.
    """
    exchanged = {out.name: value for read, new in values.items()
                 for out, value in zip(read.outputs, new)}
    if region:
        exchanged.update(_imported(region, exchanged, pivot, name))
    flat = []
    for leaf in tf.nest.flatten(inputs, expand_composites=True):
        new = leaf if leaf is None else exchanged.get(leaf.name, leaf)  # a constant stays
        if new is not leaf:
            new.set_shape(leaf.shape)
        flat.append(new)
    return tf.nest.pack_sequence_as(inputs, flat, expand_composites=True)


def _imported(region, exchanged, pivot, name):
    """{name of a tensor of the region: the imported one}, which reads the `exchanged` tensors."""
    inside = {op.name for op in region}
    graph_def, outside, waiting = tf.GraphDef(), {}, {}
    for op in region:
        node = graph_def.node.add()
        node.CopyFrom(op.node_def)
        node.attr.pop('_class', None)  # operations that it is colocated with may be outside
        del node.input[:]
        for tensor in op.inputs:
            if tensor.op.name in inside:
                node.input.append(tensor.name)
            else:
                outside['%s_outside_%d:0' % (tensor.op.name.replace('/', '_'),
                                             tensor.value_index)] = exchanged.get(
                                                 tensor.name, tensor)
                node.input.append('%s_outside_%d:0' % (tensor.op.name.replace('/', '_'),
                                                       tensor.value_index))
        for other in op.control_inputs:
            if other.name in inside:
                node.input.append('^' + other.name)
            else:
                waiting.setdefault(op.name, []).append(other)
    graph = region[0].graph
    graph_def.versions.CopyFrom(graph.graph_def_versions)
    with tf.name_scope(None), tf.control_dependencies(None):
        scope = graph.unique_name(pivot.op.name.rsplit('/', 1)[0] + '/' + name,
                                  mark_as_used=False)
        tf.import_graph_def(graph_def, outside, name=scope)
    imported = {}
    for op in region:
        new_op = graph.get_operation_by_name('%s/%s' % (scope, op.name))
        if op.name in waiting:
            compat.add_control_inputs(new_op, [pivot.op] + [
                other for other in waiting[op.name] if other.type != 'IteratorGetNext'])
        for old, new in zip(op.outputs, new_op.outputs):
            new.set_shape(old.shape)
            imported[old.name] = new
    return imported
