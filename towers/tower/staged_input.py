"""Each tower's next shard, on its device before the tower needs it.

Every tower has a buffer on its device (TF's `Stage` and `Unstage`). A step takes batch t out of the
buffers and, while the towers work on it, reads batch t + 1 from the program's own iterator, cuts
it, and puts the shards in. In the step's graph:

    prime    if a buffer is empty: get_next, cut, put in          (the first step; after the end)
    take     each tower's shard out of its buffer                 (after `prime`)
    read     get_next_as_optional; if there is a batch, cut it and put it in      (after `prime`)

The train op waits for `read`. So step t trains on batch t as without buffers: batches go through in
order; after the last one is trained on, `prime` meets the end of the data and raises
`OutOfRangeError` with nothing done; a run of something else than the train op takes a batch out of
the buffers and puts none in. Running the iterator's initializer empties the buffers. A buffer
belongs to its session: the batch in it is not trained on yet when a run stops, and the run that
resumes reads it again.

The graph from the iterator to the inputs is imported once for `prime` and once for `read`. Branches
are made of `Switch` and `Merge`, since `tf.cond` makes other operations in other versions.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InputError
from towers.graph.graph_walk import functions_of, is_random, reachable_from, step_operations
from towers.tower.shards import Shards, sparse_placeholder, split_batch, with_sparse_tensors

StagedInputs = collections.namedtuple('StagedInputs', 'read staged work')
"""How the inputs get to the towers ahead of time.

Fields:
  read: the operation that reads the next batch from the iterator; None with `'first'`, where the
    towers are given the first batch over and over.
  staged: the operation after which the next batch is on the towers' devices; or None.
  work: the operation after which the rest of the step is done.
"""

_OTHER_READS = ('IteratorGetNextSync', 'IteratorGetNextAsOptional', 'QueueDequeue', 'ReaderRead',
                'MultiDeviceIteratorGetNextFromShard', 'Unstage')


def staged_shards(inputs, devices, remainder, keeps_first, name, called='towers'):
    """As `split_batch`, but each shard comes out of a buffer on its tower's device.

    Args:
      inputs, remainder, called: as for `split_batch`; the inputs come from iterators of
        `tf.data`.
      devices: the towers' devices.
      keeps_first: leave the first batch in the buffers, and give it to every step: to measure how
        fast towers are with inputs in their own memory.
      name: prefix of the names of the operations.

    Returns:
      `(shards, staged)`: `Shards`, and `StagedInputs` in which `work` is still None.

    Raises:
      InputError: inputs that come from no iterator, or by operations that cannot read ahead.
    """
    inputs = with_sparse_tensors(inputs)
    reads, region = _way_of(inputs)
    graph = tf.get_default_graph()
    with tf.name_scope(name + '_staged') as scope, tf.device(None), \
            graph.colocate_with(None, ignore_existing=True):
        # The shapes and types of what is staged, from a cut that no step runs.
        cut = split_batch(inputs, len(devices), remainder, called=called)
        buffers = _Buffers(cut, devices, scope.replace('/', '_'))
        with tf.device('/cpu:0'):
            empty = tf.reduce_any(tf.stack([tf.equal(size, 0) for size in buffers.sizes()]),
                                  name='empty')
            not_empty, is_empty = _switch(empty, empty)
            handles = {read: _switch(read.inputs[0], empty)[1] for read in reads}
            with tf.control_dependencies([is_empty]):
                first = {read: tf.raw_ops.IteratorGetNext(
                    iterator=handles[read], output_types=[out.dtype for out in read.outputs],
                    output_shapes=[out.shape for out in read.outputs], name='first')
                         for read in reads}
                with tf.control_dependencies([buffers.clear()]):
                    put = buffers.put(split_batch(
                        _inputs_from(first, inputs, region, is_empty, 'prime'), len(devices),
                        remainder,
                        called=called))
            with tf.control_dependencies([put]):
                primed = tf.identity(is_empty)
            primed = tf.raw_ops.Merge(inputs=[primed, not_empty]).output.op
        taken = buffers.take(primed, keeps_first)
        shards, read, staged = _shards_of(cut, taken), None, None
        if not keeps_first:
            read, staged = _read_next(inputs, reads, region, buffers, primed, remainder,
                                      len(devices), called)
    handles = {read.inputs[0].name: read.inputs[0] for read in reads}
    for name in sorted(handles):
        for user in handles[name].consumers():
            if user.type == 'MakeIterator':  # the buffers hold a batch of the old data
                with tf.device(None), tf.control_dependencies(None):
                    compat.add_control_inputs(user, [buffers.clear()])
    return shards, StagedInputs(read, staged, None)


def _read_next(inputs, reads, region, buffers, primed, remainder, num_shards, called):
    """Reads the next batch: `(operation that reads, operation after which it is staged)`."""
    with tf.device('/cpu:0'):
        with tf.control_dependencies([primed]):
            optionals = [tf.raw_ops.IteratorGetNextAsOptional(
                iterator=read.inputs[0], output_types=[out.dtype for out in read.outputs],
                output_shapes=[out.shape for out in read.outputs], name='next') for read in reads]
        has = [tf.raw_ops.OptionalHasValue(optional=optional) for optional in optionals]
        has_all = has[0] if len(has) == 1 else tf.reduce_all(tf.stack(has))
        ended, goes_on = _switch(has_all, has_all)
        with tf.control_dependencies([goes_on]):
            values = {read: tf.raw_ops.OptionalGetValue(
                optional=_switch(optional, has_all)[1],
                output_types=[out.dtype for out in read.outputs],
                output_shapes=[out.shape for out in read.outputs], name='value')
                      for read, optional in zip(reads, optionals)}
            put = buffers.put(split_batch(_inputs_from(values, inputs, region, goes_on, 'ahead'),
                                          num_shards, remainder, called=called))
        with tf.control_dependencies([put]):
            goes_on = tf.identity(goes_on)
        staged = tf.raw_ops.Merge(inputs=[goes_on, ended], name='staged').output.op
        last = optionals[0].op
        if len(optionals) > 1:
            with tf.control_dependencies([optional.op for optional in optionals]):
                last = tf.no_op('next_read')
    return last, staged


def _switch(data, pred):
    """`data` twice: alive where `pred` is false, and where it is true.

    Operations that wait for the `Switch` itself run in either case; they wait for the identities.
    """
    found = tf.raw_ops.Switch(data=data, pred=pred)
    return tf.identity(found.output_false), tf.identity(found.output_true)


class _Buffers:
    """A buffer a tower, and one on the CPU for tensors of no tower or that no GPU can hold."""

    def __init__(self, cut, devices, name):
        self._devices = list(devices) + ['/cpu:0']
        self._names = ['%s%d' % (name, index) for index in range(len(self._devices))]
        self.places = []  # (buffer, position in it) of each tensor of `_tensors(cut)`
        self.dtypes = [[] for _ in self._devices]
        for index, tensor in _tensors(cut):
            if index is None or tensor.dtype in (tf.string, tf.variant, tf.resource):
                index = len(devices)
            self.places.append((index, len(self.dtypes[index])))
            self.dtypes[index].append(tensor.dtype)

    def _each(self, make):
        """List of `make(index, keywords)` for each buffer that holds anything, on its device."""
        made = []
        for index, device in enumerate(self._devices):
            if self.dtypes[index]:
                with tf.device(device):
                    made.append((index, make(index, dict(
                        shared_name=self._names[index], container='', capacity=0,
                        memory_limit=0))))
        return made

    def sizes(self):
        return [size for _, size in self._each(lambda index, how: tf.raw_ops.StageSize(
            dtypes=self.dtypes[index], **how))]

    def clear(self):
        return tf.group(*[op for _, op in self._each(lambda index, how: tf.raw_ops.StageClear(
            dtypes=self.dtypes[index], **how))])

    def put(self, shards):
        values = [[] for _ in self._devices]
        for (index, _), (_, tensor) in zip(self.places, _tensors(shards)):
            values[index].append(tensor)
        return tf.group(*[op for _, op in self._each(lambda index, how: tf.raw_ops.Stage(
            values=values[index], **how))])

    def take(self, primed, keeps_first):
        """Takes one batch out of the buffers: its tensors, in the order of `_tensors`.

        All buffers give their part or none does, so that they always hold the same batch.
        """
        def of_one(index, how):
            if keeps_first:
                return tf.raw_ops.StagePeek(index=0, dtypes=self.dtypes[index], **how)
            return tf.raw_ops.Unstage(dtypes=self.dtypes[index], **how)
        with tf.control_dependencies([primed]):
            taken = dict(self._each(of_one))
        # A run of one tower alone must not leave the others a batch behind.
        with tf.control_dependencies([tensors[0].op for tensors in taken.values()]):
            found = []
            for index, position in self.places:
                with tf.device(self._devices[index]):
                    found.append(tf.identity(taken[index][position]))
        return found


def _tensors(shards):
    """[(tower, tensor)] of all tensors of `Shards`; sizes, weights and batch size have no tower."""
    found = []
    for index, nest in enumerate(shards.inputs):
        found += [(index, leaf) for leaf in tf.nest.flatten(nest, expand_composites=True)
                  if leaf is not None]
    seen = set()
    for value in list(shards.sizes) + list(shards.weights) + [shards.batch_size]:
        if isinstance(value, tf.Tensor) and id(value) not in seen:
            seen.add(id(value))
            found.append((None, value))
    return found


def _shards_of(cut, taken):
    """`Shards` as `cut`, of the tensors that came out of the buffers."""
    instead = {}
    for (_, old), new in zip(_tensors(cut), taken):
        new.set_shape(old.shape)
        instead[id(old)] = new

    def leaf(old):
        if old is None:
            return None
        if isinstance(old, tf.SparseTensor):
            static = old.shape.as_list() if old.shape.ndims is not None else None
            return sparse_placeholder(*[instead[id(part)] for part in (
                old.indices, old.values, old.dense_shape)], static=static)
        new = instead[id(old)]
        with tf.device(new.device):
            return tf.placeholder_with_default(new, old.shape)
    inputs = [tf.nest.pack_sequence_as(nest, [leaf(old) for old in tf.nest.flatten(nest)])
              for nest in cut.inputs]
    return Shards(inputs, [instead.get(id(size), size) for size in cut.sizes],
                  [instead.get(id(weight), weight) for weight in cut.weights],
                  instead.get(id(cut.batch_size), cut.batch_size))


# ---- From the iterator to the inputs ------------------------------------------------------------

def _way_of(inputs):
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
    after = reachable_from(reads, known, control=True)
    region = [op for op in known if op.name in after and op not in reads]
    for op in region:
        if op.type in ('Enter', 'RefEnter'):  # `prime` and `read` would run in one frame
            raise _cannot('%r, between the iterator and the inputs, is of a tf.while_loop'
                          % op.name)
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
    return reads, region


def _cannot(because):
    return InputError(
        'stage_inputs: the next batch of these inputs cannot be read ahead, since %s. Do that '
        'within the dataset (dataset.map), and pass what the get_next() of its iterator returns; '
        'or leave stage_inputs out.' % because)


def _inputs_from(values, inputs, region, pivot, name):
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
