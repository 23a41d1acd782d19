"""What a loss is computed by, to be compared among workers: another loss trains without an error.

Workers with the same variables add up their gradients, whatever losses these are of. So the forward
pass of the first tower is described, from the losses back to the tower's inputs, the variables and
the sources of data: types of operations, their attributes and single numbers of a floating type,
and how they are put together. Arrays and integers may be data, or a worker's number. Names,
devices, seeds, and what only passes a value on or looks at it, do not count; nor does what was made
before the towers, such as a pipeline, but for such single numbers.

An operation is told apart by what it is computed from, a few operations deep (the labels of
Weisfeiler and Lehman), which loops do not disturb. Sums end that: their terms may be added up in
any order, such as that of a set.

Constants and attributes may follow the shapes of the inputs. Where those differ among workers, the
types alone are compared; where a dimension is known to one worker alone, TensorFlow itself makes
other operations, and nothing is.
"""

import collections
import hashlib
import zlib

from towers.cluster.forward_nodes import FunctionNodes, GraphNodes
from towers.cluster.forward_order import difference_of_order, order_of
from towers.graph.library import Library
from towers.graph.nests import leaves_of
from towers.graph.op_types import SUMS
from towers.tower.objectives import flat

_DEPTH = 3  # how many operations deep a label looks
_MOST_TEXTS = 400  # different ones that travel; of more, the digest alone tells
_LONGEST = 100  # characters of a text
_MOST_SAID = 4  # differences in a message
_SUMS = SUMS - {'Sub'}
_ANY_ORDER = frozenset(['Mul', 'Maximum', 'Minimum', 'Equal', 'LogicalAnd', 'LogicalOr'])


def forward_digest(built):
    """What is to be compared of the losses, a dict of JSON's types; see `difference_of_forward`.

    Args:
      built: `BuiltTowers`.

    Returns:
      Dict: `inputs` and `captured`, lists of shapes, of the first tower's inputs and of what else
      it takes from outside; `types`, dict from types to numbers of operations; `numbers`, list of
      `[text, how often]`, or None if there are too many; `digest`; `order`, see `order_of`.
    """
    tower = built.towers[0]
    losses = [each for each in flat(tower.data_loss) + flat(built.regularization_loss)
              if each is not None]
    graph = losses[0].graph
    inputs = leaves_of(tower.inputs)
    library = Library(graph)
    nodes, found = GraphNodes(graph, inputs, library), _Found(_Functions(library))
    labels = found.labels(nodes, [(loss.op.name, loss.value_index) for loss in losses])
    texts = sorted(found.texts.items())
    captured = {str(shape): shape for shape in map(_shape, nodes.captured)}
    return {'inputs': sorted((_shape(tensor) for tensor in inputs), key=str),
            'captured': sorted(captured.values(), key=str),
            'types': dict(found.types),
            'numbers': [list(each) for each in texts] if len(texts) <= _MOST_TEXTS else None,
            'digest': _hashed(labels), 'order': found.order}


def difference_of_forward(own, other):
    """How a worker's `forward_digest`, `other`, differs from worker 0's: a clause, or None."""
    if not own or not other or _known(own['inputs']) != _known(other['inputs']):
        return None
    ours, theirs = own['captured'], other['captured']
    if len(ours) == len(theirs) and _known(ours) != _known(theirs):
        return None
    mine, yours = [collections.Counter(each['types']) for each in (own, other)]
    if mine != yours:
        return ('its model is another one: its loss is computed by %s than that of worker 0. Have '
                'the model function make the same operations on every worker' % ', '.join(
                    _few(['%d %s more' % pair for pair in _counts(yours - mine)])
                    + _few(['%d %s fewer' % pair for pair in _counts(mine - yours)])))
    if own['inputs'] != other['inputs'] or ours != theirs:
        return None
    if own['digest'] == other['digest']:
        return difference_of_order(own['order'], other['order'])
    mine, yours = [collections.Counter(dict(each['numbers'] or ())) for each in (own, other)]
    if mine != yours and own['numbers'] is not None and other['numbers'] is not None:
        return 'its loss is computed with other numbers: %s, and that of worker 0 %s' % tuple(
            ', '.join(_few([name for _, name in _counts(each)])) or 'fewer'
            for each in (yours - mine, mine - yours))
    return ('its model is another one: its loss is computed by as many operations as that of '
            'worker 0, which are put together otherwise, or have other numbers')


def _counts(counter):
    return [(count, name) for name, count in sorted(counter.items())]


def _few(texts):
    return texts[:_MOST_SAID] + ['…'] * (len(texts) > _MOST_SAID)


def _shape(tensor):
    shape = tensor.get_shape()
    return None if shape.ndims is None else shape.as_list()


def _known(shapes):
    """Which dimensions of some shapes are known, without an order of the shapes."""
    return sorted(str(shape and [size is None for size in shape]) for shape in shapes)


def _hashed(texts):
    return hashlib.sha1(' '.join(sorted(texts)).encode('utf-8')).hexdigest()[:16]


class _Found:
    """Adds up what is found in a graph and in the functions that it calls.

    Attributes:
      types: `Counter` of types of operations.
      texts: `Counter` of constants, with the type that takes them, and of attributes.
      order: of a graph, see `order_of`.
    """

    def __init__(self, functions):
        self.types, self.texts = collections.Counter(), collections.Counter()
        self.order = []
        self._functions = functions

    def labels(self, nodes, ends):
        """The labels of the operations that some outputs are computed from: a list of strings.

        Args:
          nodes: `GraphNodes` or `FunctionNodes`.
          ends: list of `(key of a node, output)`.
        """
        stack = [nodes.source(end)[0] for end in ends]
        forms, inputs = {}, {}
        while stack:
            key = stack.pop()
            if key in forms:
                continue
            node = nodes.node(key)
            form, taken = [node.type] + node.attributes, node.inputs
            if node.functions:
                bodies = [self._functions.of(name) for name in node.functions]
                taken = _passed_on(node, bodies)
                for body in bodies:
                    form.append(body.digest)
                    self.types.update(body.found.types)
                    self.texts.update(body.found.texts)
            inputs[key] = [nodes.source(each) for each in taken]
            forms[key] = ' '.join(form)
            self._count(node, [nodes.number(source) for source, _ in inputs[key]])
            stack.extend(source for source, _ in inputs[key])
        self.order = order_of(forms, inputs, [nodes.source(end) for end in ends], _SUMS, _ANY_ORDER
                              ) if isinstance(nodes, GraphNodes) else []
        return list(_deep(forms, inputs).values())

    def _count(self, node, numbers):
        if node.is_counted:
            self.types[node.type] += 1
            if node.settings:
                self.texts[('%s %s' % (node.type, ' '.join(node.settings)))[:_LONGEST]] += 1
        for number in numbers:
            if number is not None:
                self.texts[('%s by %s' % (node.type, number))[:_LONGEST]] += 1


def _deep(forms, inputs):
    """Labels, by keys, that stand for an operation and those that it is computed from."""
    kinds = {key: form.split(' ', 1)[0] for key, form in forms.items()}
    labels = first = {key: '%x' % zlib.crc32(form.encode('utf-8')) for key, form in forms.items()}
    for _ in range(_DEPTH):
        deeper = {}
        for key, kind in kinds.items():
            taken = [] if kind in _SUMS else [
                '%s:%s' % (labels[source], output) for source, output in inputs[key]]
            text = ' '.join([first[key]] + (sorted(taken) if kind in _ANY_ORDER else taken))
            deeper[key] = '%x' % zlib.crc32(text.encode('ascii'))
        labels = deeper
    return labels


Body = collections.namedtuple('Body', 'digest found taken')
"""A function: what its outputs are computed by, and the positions of the arguments they take."""


class _Functions:
    """The functions of a graph, by name; each is looked at once."""

    def __init__(self, library):
        self._library, self._known = library, {}

    def of(self, name):
        """`Body` of a function."""
        if name not in self._known:
            self._known[name] = Body('itself', _Found(self), set())  # of one that calls itself
            nodes = FunctionNodes(self._library.function(name), self._library)
            found = _Found(self)
            labels = found.labels(nodes, nodes.ends)
            self._known[name] = Body(_hashed(labels), found, nodes.taken)
        return self._known[name]


def _passed_on(node, bodies):
    """The inputs of a node that the functions it calls take to compute with.

    What a loop only hands on, or a branch only prints, is none of them.
    """
    first = len(node.inputs) - node.num_arguments
    taken = {first + position for body in bodies for position in body.taken}
    return [each for position, each in enumerate(node.inputs)
            if position < first or position in taken]
