"""The towers of a build, and what they were made of."""

import collections


class TowerSet(collections.namedtuple('TowerSet', [
        'request', 'batch', 'towers', 'recorded', 'losses', 'gradients', 'roles', 'recomputed',
        'how_built', 'cuts', 'slots', 'copies'], defaults=(None, (), ()))):
    """The towers of a build, one for each of the request's parts, and what they were made of: the
    `Request` and the `CutBatch`; the `Recorded` call, the `Losses` and a list of `Recomputed` of
    tower 0; `TowerGradients`, `Roles`.

    `how_built` is the plan's line about calls and copies, `cuts` are `StageCuts` or None, `slots`
    a list of the variables that the model function's own optimizers have made, `copies` a list of
    the functions from a tensor of tower 0 to its copy in each further tower.
    """
    __slots__ = ()
