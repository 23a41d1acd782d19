"""Questions about a finished piece of graph: what was made here, and what depends on what."""


class Recording:
    """The operations that a block of code adds to a graph.

    >>> with Recording(graph) as made:
    ...     loss = model_fn(images)
    >>> made.operations        # in the order in which they were made
    """

    def __init__(self, graph):
        self._graph = graph
        self.operations = []

    def __enter__(self):
        self._start = len(self._graph.get_operations())
        return self

    def __exit__(self, *unused_exception):
        self.operations = self._graph.get_operations()[self._start:]


def reachable_from(sources, operations):
    """The names of those operations that depend on any of the source operations.

    Args:
      sources: operations.
      operations: the operations to look at, in any order. (The order in which they were made is
        no help: TF 1's `tf.cond` and `tf.while_loop` make the operation that brings in a tensor
        from outside after the one that takes it.)

    Returns:
      A set of operation names, the sources' among them. Only data edges count.
    """
    takers = {}
    for op in operations:
        for tensor in op.inputs:
            takers.setdefault(tensor.op.name, []).append(op.name)
    stack = [op.name for op in sources]
    reached = set(stack)
    while stack:
        for name in takers.get(stack.pop(), ()):
            if name not in reached:
                reached.add(name)
                stack.append(name)
    return reached


def ancestors(tensors):
    """The set of names of all operations that the tensors are computed from, theirs included."""
    stack = [tensor.op for tensor in tensors]
    seen = {op.name for op in stack}
    while stack:
        for tensor in stack.pop().inputs:
            if tensor.op.name not in seen:
                seen.add(tensor.op.name)
                stack.append(tensor.op)
    return seen


def is_random(op):
    """Whether an operation draws random numbers, hence differs from tower to tower."""
    return (op.type in _RANDOM or op.type.startswith(_RANDOM_PREFIXES)
            or op.type.endswith('CandidateSampler'))


_RANDOM = frozenset(['TruncatedNormal', 'ParameterizedTruncatedNormal', 'Multinomial',
                     'RngReadAndSkip'])
_RANDOM_PREFIXES = ('Random', 'StatefulRandom', 'StatefulUniform', 'StatefulStandardNormal',
                    'StatefulTruncatedNormal', 'SampleDistortedBoundingBox')


def step_operations(fetches):
    """All operations that a run of these fetches executes, by data and by control edges.

    Returns:
      A list of operations, in no particular order.
    """
    stack = [getattr(fetch, 'op', fetch) for fetch in fetches]
    seen = {op.name: op for op in stack}
    while stack:
        op = stack.pop()
        for other in [tensor.op for tensor in op.inputs] + list(op.control_inputs):
            if other.name not in seen:
                seen[other.name] = other
                stack.append(other)
    return list(seen.values())
