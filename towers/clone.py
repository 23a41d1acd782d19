"""Further towers as clones of the first one's finished graph, instead of a call each.

Building a tower by calling the model function and differentiating what it made takes Python as long
as the model is large, again for every tower. The graphs that come out differ in names, devices,
seeds and shards only. So the operations that the first tower's outputs need, forward and backward,
are copied by `tf.import_graph_def`:

    tower_0/…   ->  tower_k/…                     names, frames of loops, texts that hold names
    shard 0     ->  shard k                       and its weight
    tower 0's device  ->  tower k's               where it was the tower's scope that said so
    seed        ->  a seed of tower k             of each random op
    variables and what else is from outside       stay what they are
"""

import re
import zlib

import tensorflow.compat.v1 as tf

from towers import cannot_clone, compat, graph_walk, nonfinite
from towers.cannot_clone import CannotClone
from towers.errors import CloneError
from towers.stateless_random import key_of
from towers.tower_device import TowerDevice, follows_tower, moved, overlaps

COPIES = ('auto', 'clone', 'reuse')


def build_all(builder, devices, prefix, shards, factor, copies):
    """Builds all towers, the first by a call of the model function.

    Args:
      builder: a `TowerBuilder`.
      devices: the towers' devices.
      prefix: of their name scopes.
      shards, factor: as for `TowerBuilder.tower`.
      copies: `'auto'`, `'clone'` or `'reuse'`, see `build_towers`.

    Returns:
      `(towers, how)`: a list of `Tower`, and in words how they were built.

    Raises:
      CloneError: `copies='clone'`, and they cannot be clones.
    """
    def call(index):
        return builder.tower(index, devices[index], '%s_%d' % (prefix, index), shards, factor)

    count, because = len(devices), ''
    towers = []
    try:
        if copies != 'reuse' and count > 1:
            cannot_clone.check_shards(shards)
        with graph_walk.Recording(tf.get_default_graph()) as made:
            towers.append(call(0))
        if copies != 'reuse' and count > 1:
            cloner = Cloner(towers[0], made.operations, shards,
                            {loss.op.name for loss in builder.weight_losses},
                            builder.random_keys)
            towers += [cloner.tower(index, devices[index], '%s_%d' % (prefix, index))
                       for index in range(1, count)]
            return towers, '1 call of the model function, %d clone%s of its graph' % (
                count - 1, '' if count == 2 else 's')
    except CannotClone as reason:
        if copies == 'clone':
            raise CloneError(
                "copies='clone', but %s. Pass copies='auto', which calls the model function for "
                'every tower where it has to.' % reason) from None
        because = ': %s' % reason
    towers += [call(index) for index in range(len(towers), count)]
    return towers, '%d call%s of the model function%s' % (count, '' if count == 1 else 's', because)


class Cloner:
    """Makes clones of one tower."""

    def __init__(self, tower, made, shards, shared, random_keys):
        """
        Args:
          tower: the `Tower` to be cloned.
          made: the operations that building it made.
          shards: `Shards`.
          shared: names of operations of the tower that all towers use: losses of the weights.
          random_keys: dict from the names of constants that hold seeds to what they are seeds of.

        Raises:
          CannotClone: it cannot be.
        """
        self._tower = tower
        self._shards = shards
        self._shared = shared
        self._random_keys = random_keys
        self._graph = tf.get_default_graph()
        self._root = tower.name_scope
        self._in_text = re.compile(r'(?<![\w.\-])' + re.escape(self._root))
        outputs = [tower.loss, tower.data_loss, tower.predictions, tower.metrics, tower.updates,
                   [gradient for gradient, _ in tower.gradients]]
        nodes, outside = self._needed(_operations(outputs))
        self._nodes = {op.name: nodes[op.name] for op in made if op.name in nodes}
        cannot_clone.check_nodes(self._nodes.values(), self._graph)
        cannot_clone.check_outside(
            outside, made, shared, self._root,
            {leaf.op.name for leaf in _leaves(shards.inputs[0])}, self._graph)
        self._devices = self._tell_devices()
        self._make_template()

    def tower(self, index, device, scope):
        """The clone with that number, on that device: a `Tower`.

        Args:
          index: from 1.
          device: its device.
          scope: the name of its name scope.
        """
        with tf.name_scope(scope) as root:
            pass
        self._adapt_template(index, root)
        with tf.device(None), tf.device(TowerDevice(device)):
            tf.import_graph_def(self._template, self._inputs_from_outside(index), name=root)
        self._finish(device, root)
        tower = self._tower

        def clones(nest):
            return _map_leaves(lambda leaf: self._clone_of(leaf, root), nest)

        return tower._replace(
            index=index, device=device, name_scope=root, inputs=self._shards.inputs[index],
            size=self._shards.sizes[index], loss=clones(tower.loss),
            predictions=clones(tower.predictions), metrics=clones(tower.metrics),
            gradients=[(clones(gradient), variable) for gradient, variable in tower.gradients],
            updates=clones(tower.updates), data_loss=clones(tower.data_loss))

    # ---- what is copied -------------------------------------------------------------------------

    def _needed(self, operations):
        """({name: NodeDef} of what these need within the tower, names that they need outside)."""
        nodes, outside = {}, set()
        stack = [op.name for op in operations]
        while stack:
            name = stack.pop()
            if name in nodes or name in outside:
                continue
            if not name.startswith(self._root) or name in self._shared:
                outside.add(name)
                continue
            node = nodes[name] = self._graph.get_operation_by_name(name).node_def
            stack.extend(_producer(text) for text in node.input)
            stack.extend(group[len('loc:@'):] for group in _colocation(node))
        return nodes, outside

    def _tell_devices(self):
        """{name: device} of what does not simply go from this tower's device to the clone's.

        A device is a name; `('like', name)` of an operation that is to be followed; or
        `('moved', name)` where only a part of the device is the tower's.
        """
        devices = {}
        for name, node in self._nodes.items():
            if not node.device:
                devices[name] = ''
                continue
            beside = next((group[len('loc:@'):] for group in _colocation(node)
                           if group != 'loc:@' + name), None)
            follows = None if beside else follows_tower(self._graph.get_operation_by_name(name))
            if beside is None and follows is None:
                beside = self._explained(name, node)
            if beside in self._nodes:
                devices[name] = ('like', beside)
            elif not follows:
                devices[name] = node.device
            elif node.device != self._tower.device:
                devices[name] = ('moved', node.device)
        return devices

    def _explained(self, name, node):
        """What TensorFlow has put an operation beside by way of the device's name, if anything."""
        if not overlaps(node.device, self._tower.device):
            return None
        op = self._graph.get_operation_by_name(name)
        for tensor in op.inputs:
            if tensor.dtype == tf.resource:
                return tensor.op.name  # reads of variables
        if op.type == 'NoOp' and op.control_inputs:
            return op.control_inputs[0].name  # tf.group, on the device of what it groups
        raise CannotClone('operation %s was put on %s by a device function, or by the name of '
                          "an operation's device" % (name, node.device))

    # ---- the graph to be imported ---------------------------------------------------------------

    def _make_template(self):
        """The copied nodes as a `GraphDef`, and where it has to be adapted to a tower."""
        self._template = tf.GraphDef()
        self._template.versions.CopyFrom(self._graph.graph_def_versions)
        self._outside = {}      # 'name:0' of a tensor from outside -> its key in the input map
        self._controls = []     # (name, names of operations from outside that it waits for)
        self._colocated = []    # (name, its colocation groups)
        self._texts = []        # (function that sets a text, the text in the first tower)
        self._seeds, self._keys, self._messages = [], [], []
        for name, original in self._nodes.items():
            node = self._template.node.add()
            node.CopyFrom(original)
            node.name = name[len(self._root):]
            if self._in_text.search(node.name):
                self._texts.append((_setter(node, 'name'), node.name))
            node.device = ''
            self._take_inputs(node, name, original)
            groups = _colocation(node)
            if groups:
                del node.attr['_class']
                self._colocated.append((name, groups))
            self._note_attributes(node, name)
        if self._template.ByteSize() >= 2 ** 31 - 2 ** 20:
            raise CannotClone('its graph is larger than 2 GB')

    def _take_inputs(self, node, name, original):
        del node.input[:]
        waits_for = []
        for text in original.input:
            producer = _producer(text)
            if producer in self._nodes:
                text = text.replace(self._root, '', 1)
                if self._in_text.search(text):
                    self._texts.append((_element_setter(node.input, len(node.input)), text))
            elif text.startswith('^'):
                waits_for.append(producer)
                continue
            else:
                tensor = text if ':' in text else text + ':0'
                text = self._outside.setdefault(tensor, '__outside__/%d:0' % len(self._outside))
            node.input.append(text)
        if waits_for:
            self._controls.append((name, waits_for))

    def _note_attributes(self, node, name):
        if cannot_clone.has_seed(node):
            self._seeds.append((node.attr['seed2'], node.attr['seed'].i, node.attr['seed2'].i))
        if name in self._random_keys:
            self._keys.append((node.attr['value'].tensor, self._random_keys[name]))
        if node.op == 'CheckNumerics':
            self._messages.append((node.attr['message'], node.attr['message'].s.decode()))
            return
        if node.op == 'Const' and node.attr['dtype'].type == tf.string.as_datatype_enum:
            strings = node.attr['value'].tensor.string_val  # of an assertion, say
            self._note_texts((_element_setter(strings, i), text) for i, text in enumerate(strings))
        for value in node.attr.values():
            # Frames of loops, names of TensorArrays and of what else is told apart by them.
            if value.WhichOneof('value') == 's' and value.s:
                self._note_texts([(_setter(value, 's'), value.s)])
        if '_XlaScope' in node.attr:  # XLA makes one cluster of what has one scope
            value = node.attr['_XlaScope']
            value.s += b'_' + self._root.encode()
            self._texts.append((_setter(value, 's'), value.s))

    def _note_texts(self, texts):
        for setter, text in texts:
            try:
                decoded = text.decode()
            except UnicodeDecodeError:
                continue
            if self._in_text.search(decoded):
                self._texts.append((setter, text))

    def _adapt_template(self, index, root):
        for setter, text in self._texts:
            setter(self._in_text.sub(root, text) if isinstance(text, str)
                   else self._in_text.sub(root, text.decode()).encode())
        for value, seed, seed2 in self._seeds:
            # Not by the op's name: two ops with equal seeds have equal numbers in the clone too.
            value.i = zlib.crc32(('%d %d tower %d' % (seed, seed2, index)).encode()) or 1
        for tensor, random_op in self._keys:
            key = key_of(self._in_text.sub(root, random_op), self._graph.seed)
            tensor.CopyFrom(tf.make_tensor_proto(key, tf.int64, []))
        for value, message in self._messages:
            value.s = nonfinite.message_of_tower(message, index).encode()

    def _inputs_from_outside(self, index):
        """{key in the template: tensor}: shards and their weights become those of the clone."""
        exchanged = dict(zip(
            (leaf.name for leaf in _leaves(self._shards.inputs[0])),
            _leaves(self._shards.inputs[index])))
        if isinstance(self._shards.weights[0], tf.Tensor):
            exchanged[self._shards.weights[0].name] = self._shards.weights[index]
        # Each of these tensors is the only one of its operation.
        self._exchanged = {_producer(first): other.op for first, other in exchanged.items()}
        return {key: exchanged.get(name) if name in exchanged
                else self._graph.get_tensor_by_name(name) for name, key in self._outside.items()}

    # ---- the imported graph ---------------------------------------------------------------------

    def _finish(self, device, root):
        """What an import cannot be told: devices, colocations and control inputs from outside."""
        for name in self._devices:
            compat.set_device(self._clone(name, root), self._device_of(name, device))
        for name, groups in self._colocated:
            compat.set_colocation(self._clone(name, root), [
                ('loc:@' + self._clone(group[len('loc:@'):], root).name).encode()
                for group in groups])
        for name, waits_for in self._controls:
            compat.add_control_inputs(self._clone(name, root), [
                self._clone(other, root) for other in waits_for])

    def _device_of(self, name, device):
        said = self._devices.get(name, ('moved', self._tower.device))
        while isinstance(said, tuple) and said[0] == 'like':
            said = self._devices.get(said[1], ('moved', self._tower.device))
        return moved(said[1], self._tower.device, device) if isinstance(said, tuple) else said

    def _clone(self, name, root):
        """The operation that another one of that name is in the clone: itself, from outside."""
        if name in self._nodes:
            return self._graph.get_operation_by_name(self._in_text.sub(root, name))
        return self._exchanged.get(name) or self._graph.get_operation_by_name(name)

    def _clone_of(self, leaf, root):
        """The same for a tensor or an operation; what assigning to a variable gives is the latter.
        """
        clone = self._clone(leaf.op.name if hasattr(leaf, 'op') else leaf.name, root)
        if isinstance(leaf, tf.Operation):
            return clone
        if isinstance(leaf, compat.VARIABLE_TYPES):
            return leaf if clone is leaf.op else clone
        if clone is leaf.op:
            return leaf
        clone = clone.outputs[leaf.value_index]
        clone.set_shape(leaf.shape)  # what Python code said of it is in no GraphDef
        return clone


def _leaves(nest):
    return [leaf for leaf in tf.nest.flatten(nest, expand_composites=True) if leaf is not None]


def _operations(nest):
    """The operations of all tensors and operations in a nest."""
    found = []

    def note(leaf):
        op = getattr(leaf, 'op', leaf)
        if isinstance(op, tf.Operation):
            found.append(op)
        return leaf
    _map_leaves(note, nest)
    return found


def _map_leaves(function, nest):
    """`tf.nest.map_structure` that takes sparse tensors apart, and variables not."""
    def on_leaf(leaf):
        if leaf is None or isinstance(leaf, (tf.Tensor, tf.Operation) + compat.VARIABLE_TYPES):
            return None if leaf is None else function(leaf)
        if isinstance(leaf, tf.IndexedSlices):
            return tf.IndexedSlices(*map(on_leaf, (leaf.values, leaf.indices, leaf.dense_shape)))
        if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)):
            return tf.nest.map_structure(on_leaf, leaf, expand_composites=True)
        return leaf  # a number, say
    return tf.nest.map_structure(on_leaf, nest)


def _producer(text):
    """The operation that an input of a NodeDef comes from: of 'a:1' and of '^a' it is a."""
    return text.lstrip('^').split(':')[0]


def _colocation(node):
    """The colocation groups of a NodeDef, as strings 'loc:@name'."""
    if '_class' not in node.attr:
        return []
    return [group.decode() for group in node.attr['_class'].list.s
            if group.startswith(b'loc:@')]


def _setter(message, field):
    return lambda text: setattr(message, field, text)


def _element_setter(texts, position):
    def set_element(text):
        texts[position] = text
    return set_element
