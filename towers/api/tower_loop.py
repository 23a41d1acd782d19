"""The loop over towers: the first by a call of the model function, the others as its clones."""

import tensorflow.compat.v1 as tf

from towers.clone.cloner import Cloner
from towers.clone.limits import CannotClone, check_shards
from towers.errors import CloneError
from towers.graph.graph_walk import Recording

COPIES = ('auto', 'clone', 'reuse')


def build_each_tower(builder, request, shards):
    """Builds all towers.

    Args:
      builder: a `TowerBuilder`.
      request: `Request`.
      shards: `Shards`.

    Returns:
      `(towers, how)`: a list of `Tower`, one for each of the request's parts, and in words how they
      were built.

    Raises:
      CloneError: `copies='clone'`, and the towers cannot be clones.
    """
    towers, because = [], ''
    count = len(request.parts)
    clones = count > 1 and request.copies != 'reuse'
    try:
        if clones:
            check_shards(shards)
            if not request.first_scope:
                raise CannotClone('the first tower has no name scope of its own')
            if builder.replicates:
                raise CannotClone('every tower reads its own replicas of the variables')
        with Recording(tf.get_default_graph()) as made:
            towers.append(_called(builder, request, shards, 0))
        if clones:
            towers += _clones(builder, request, shards, towers[0], made.operations)
    except CannotClone as reason:
        if request.copies == 'clone':
            raise CloneError(
                "copies='clone', but %s. Pass copies='auto', which calls the model function for "
                'every tower where it has to.' % reason) from None
        because = ': %s' % reason
    if len(towers) < count or count == 1:
        how = '%d call%s of the model function%s' % (count, '' if count == 1 else 's', because)
    else:
        how = '1 call of the model function, %d clone%s of its graph' % (
            count - 1, '' if count == 2 else 's')
    towers += [_called(builder, request, shards, index) for index in range(len(towers), count)]
    builder.finish(towers, shards.weights[0])
    return towers, how


def _called(builder, request, shards, index):
    """Tower number `index`, by a call of the model function."""
    _say(request, index)
    part = request.parts[index]
    with Recording(tf.get_default_graph()) as made:
        tower = builder.tower(index, part.device, part.scope, shards, request.factor)
    builder.own_seeds.note(index, made.operations)
    return tower._replace(index=part.tower, micro_batch=part.micro_batch)


def _clones(builder, request, shards, first, made):
    """All towers but the first, as clones of it.

    Raises:
      CannotClone: clones would differ from calls of the model function; none was made.
    """
    cloner = Cloner(first, made, shards, builder)
    clones = []
    for index, part in list(enumerate(request.parts))[1:]:
        _say(request, index)
        clone = cloner.tower(index, part.device, part.scope)
        clones.append(clone._replace(index=part.tower, micro_batch=part.micro_batch))
    return clones


def _say(request, index):
    if request.on_tower is not None:
        request.on_tower(index, len(request.parts))
