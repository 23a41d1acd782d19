"""`TowersReport`: the verdict of `check_towers`, the first difference, and its likely cause.

Its test is tests/inspect/test_check.py.
"""

import typing

from towers.errors import counted
from towers.inspect.comparison import (
    GRADIENT,
    INITIAL_VALUE,
    NO_GRADIENT,
    SHARD_VARIANCE,
    SLOT,
    VARIABLE,
    Difference,
    LeftOut,
    Numbers,
    compare,
    is_finite,
    largest_value,
    not_compared,
)


class Traits(typing.NamedTuple):
    """Facts about a model that explain differences.

    Attributes:
      coarsest: the name of the floating type with the fewest digits in its forward pass.
      random: the types of its random operations.
      updated: names of the variables that its updates write.
    """

    coarsest: str
    random: typing.List[str]
    updated: typing.Set[str]


class _Rounding(typing.NamedTuple):
    """How exact a floating type is.

    Attributes:
      tolerance: the relative difference that counts as equal after some steps.
      noise: the largest gradient that may come from rounding only, over the largest gradient.
    """

    tolerance: float
    noise: float


# Sums in another order differ in the last digits, and each step makes the difference larger.
_ROUNDING = {'float64': _Rounding(1e-9, 1e-14), 'float32': _Rounding(1e-4, 1e-6),
             'float16': _Rounding(2e-2, 2e-3), 'bfloat16': _Rounding(0.1, 2e-2)}


class CheckedRuns(typing.NamedTuple):
    """The runs that `check_towers` has compared with one device.

    Attributes:
      towers: the number of towers of all workers.
      workers: the number of workers; 1 without a cluster.
      steps: the number of steps.
      reduction: as given to `check_towers`.
      parts: the number of parts that a batch is cut into.
      same_shards: whether all parts have the same examples.
    """

    towers: int
    workers: int
    steps: int
    reduction: str
    parts: int
    same_shards: bool


class TowersReport(typing.NamedTuple):
    """The result of `check_towers`; print it.

    Attributes:
      equal: whether everything is finite and agrees to within the tolerance.
      worst: the `Difference` with the largest relative value.
      tolerance: the relative difference that counts as equal.
      first: the first `Difference` beyond the tolerance, in the order in which a step computes
        values; None when equal.
      cause: the likely cause, one sentence; None when equal.
      compared: the number of values that were compared.
      towers: the number of towers of all workers.
      steps: the number of steps.
      reduction: as given to `check_towers`.
      not_finite: the first `Difference`, in the order in which a step computes values, with a NaN
        or an infinity on either side; None where all values are finite.
      left_out: list of `LeftOut`: the variables that are not compared, as their slots are not.
      workers: the number of workers; 1 without a cluster.
      proof: the plan's line `one device`, a text that begins with `proven` or `not proven`; None
        for one tower. With a cluster it is about all workers.
    """

    equal: bool
    worst: Difference
    tolerance: float
    first: typing.Optional[Difference]
    cause: typing.Optional[str]
    compared: int
    towers: int
    steps: int
    reduction: str
    not_finite: typing.Optional[Difference]
    left_out: typing.List[LeftOut]
    workers: int
    proof: typing.Optional[str]

    def __str__(self):
        """The proof, the verdict in one line, and what was left out."""
        lines = [self._verdict()]
        if self.proof is not None:
            lines.insert(0, self.proof)
        for why in (NO_GRADIENT, SHARD_VARIANCE):
            names = [variable.name for variable in self.left_out if variable.why == why]
            if names:
                lines.append('not compared (%s): %s' % (why, ', '.join(names)))
        return '\n'.join(lines)

    def _verdict(self) -> str:
        """A line that says whether both sides are equal; if not, the first difference and its
        likely cause."""
        workers = '' if self.workers == 1 else ' of %d workers' % self.workers
        ran = '%s%s against one device on the full batch, %d steps, reduction %s' % (
            counted(self.towers, 'tower'), workers, self.steps, self.reduction)
        if self.not_finite is not None:
            return 'NOT finite: %s %s holds a NaN or an infinity: %s. Likely cause: %s' % (
                self.not_finite.what, self.not_finite.name, ran, self.cause)
        if self.first is not None:
            return 'NOT equal: %s %s differs by %.1e (allowed %.1e): %s. Likely cause: %s' % (
                self.first.what, self.first.name, self.first.relative, self.tolerance, ran,
                self.cause)
        return 'equal to within %.1e (largest: %s %s): %s; %d values compared' % (
            self.worst.relative, self.worst.what, self.worst.name, ran, self.compared)


def report_on(one: Numbers, many: Numbers, traits: Traits, ran: CheckedRuns,
              tolerance: typing.Optional[float], proof: typing.Optional[str]) -> TowersReport:
    """Compares the numbers of two runs, and reports on them.

    Args:
      one: the numbers of one device.
      many: the numbers of the towers.
      traits: facts about the model.
      ran: the runs.
      tolerance: largest relative difference that counts as equal; None for the tolerance of the
        model's coarsest floating type.
      proof: the plan's line `one device`; or None.
    """
    rounding = _ROUNDING[traits.coarsest]
    if tolerance is None:
        tolerance = rounding.tolerance
    largest_gradient = max([largest_value(gradient) for gradient in one.gradients.values()],
                           default=0.)
    # The gradient of a bias in front of a batch norm is 0, but it is computed as the remainder of a
    # sum, which is rounding. Adam's step by it is as large as by any other gradient.
    noise = rounding.noise * largest_gradient
    left_out = not_compared(one, many, noise, ran.same_shards)
    # In the order in which a step computes the values, so that a cause comes before its effects.
    differences = compare(one, many, noise, [variable.name for variable in left_out])
    not_finite = _first_not_finite(differences, one, many)
    first = _first_beyond(differences, tolerance)
    cause: typing.Optional[str] = None
    if not_finite is not None:
        cause = _cause_of_not_finite(one, many, not_finite)
    elif first is not None:
        cause = _cause_of_difference(first, one, many, traits, ran, proof)
    return TowersReport(
        equal=first is None and not_finite is None,
        worst=max(differences, key=lambda difference: difference.relative),
        tolerance=tolerance, first=first, cause=cause, compared=len(differences),
        towers=ran.towers, steps=ran.steps, reduction=ran.reduction, not_finite=not_finite,
        left_out=left_out, workers=ran.workers, proof=proof)


def _first_not_finite(differences: typing.Iterable[Difference], one: Numbers,
                      many: Numbers) -> typing.Optional[Difference]:
    """The first difference whose value has a NaN or an infinity on either side; None if all values
    are finite. `one` and `many` are the numbers of one device and of the towers."""
    for difference in differences:
        if not is_finite(one, difference) or not is_finite(many, difference):
            return difference
    return None


def _first_beyond(differences: typing.Iterable[Difference],
                  tolerance: float) -> typing.Optional[Difference]:
    """The first difference that is larger than the tolerance; None if no difference is."""
    for difference in differences:
        is_within = difference.relative <= tolerance  # false for NaN
        if not is_within:
            return difference
    return None


def is_certain(proof: typing.Optional[str]) -> bool:
    """Whether the plan's line `one device` says that equality is proven, without a condition."""
    return proof is not None and proof.startswith('proven: ')


# ---- causes --------------------------------------------------------------------------------------

# How the plan's line `one device` begins.
_NOT_PROVEN = 'not proven: '
_CONDITIONAL = 'proven, '


def _cause_of_difference(first: Difference, one: Numbers, many: Numbers, traits: Traits,
                         ran: CheckedRuns, proof: typing.Optional[str]) -> str:
    """The text about the likely cause of a difference.

    If the plan says that there can be no difference, the text asks the user to report an error.

    Args:
      first: the first difference beyond the tolerance.
      one: the numbers of one device.
      many: the numbers of the towers.
      traits: facts about the model.
      ran: the runs.
      proof: the plan's line `one device`; or None.
    """
    cause = _likely_cause(first, one, many, traits, ran.parts, proof)
    # The plan proves steps, not initial values; and random numbers differ in each run.
    is_covered_by_proof = not traits.random and first.what != INITIAL_VALUE
    if is_certain(proof) and is_covered_by_proof:
        cause += (' The plan says that equality is proven: this is an error of towers itself, '
                  'please report it with the model.')
    return cause


def _cause_of_not_finite(one: Numbers, many: Numbers, difference: Difference) -> str:
    """The cause that a report gives for a NaN or an infinity."""
    if is_finite(one, difference):
        who = 'only the towers'
    elif is_finite(many, difference):
        who = 'only one device'
    else:
        who = 'both sides, so the model itself makes it'
    return ('%s: a division by zero, a logarithm of zero or a learning rate that is too large, in '
            'the model or in what it was given.' % who)


def _likely_cause(first: Difference, one: Numbers, many: Numbers, traits: Traits, num_parts: int,
                  proof: typing.Optional[str]) -> str:
    """The cause that a report gives for the first difference: the first cause that explains it, in
    an order from the most certain cause to the least certain.

    Args:
      first: the difference.
      one: the numbers of one device.
      many: the numbers of the towers.
      traits: facts about the model.
      num_parts: the number of parts that a batch is cut into.
      proof: the plan's line `one device`; or None.
    """
    if first.what == INITIAL_VALUE:
        return ("the initial value of %s is computed from the batch, and towers have that of tower "
                "0's part of it: compute it from the whole batch, before build_towers, or start "
                'from a checkpoint of one device.' % first.name)
    # inf: one side lacks the value, or has a value of another shape
    is_on_one_side = first.relative == float('inf')
    if is_on_one_side and first.what in (VARIABLE, SLOT, GRADIENT):
        return ('%s %s exists on one side only: an unshared variable, or one whose name depends '
                'on the tower.' % (first.what, first.name))
    if _sums_over_batch(one.loss_of_first_step(), many.sum_of_losses, num_parts):
        return ('the loss sums over the batch (the towers\' losses add up to the full one): return '
                'the mean over examples.')
    if traits.random:
        return ('random numbers in the model (%s), such as dropout: each tower draws its own. '
                'Check it with dropout off.' % ', '.join(traits.random))
    proof = proof or ''
    if proof.startswith(_NOT_PROVEN):
        return 'what the plan does not prove: %s.' % proof[len(_NOT_PROVEN):]
    if 'batch norm' in proof:  # as in 'proven, but for 1 batch norm of each tower's shard'
        return ('batch norm: each tower normalizes with the statistics of its own shard. Pass '
                "batch_norm='sync', which takes those of the batch; or check the rest of the model "
                'with same_shards=True, where the statistics agree.')
    if first.name in traits.updated:
        return ("an update (UPDATE_OPS) of %s: towers have that of tower 0's examples, unless "
                "update_ops='all' has every tower write." % first.name)
    if proof.startswith(_CONDITIONAL):
        conditions = proof[len(_CONDITIONAL):].split(': the loss is ')[0]
        return 'a condition of the plan that does not hold here: %s.' % conditions
    if is_certain(proof):
        return ('not known, unless the program leaves open in which order it reads and writes a '
                'variable.')
    return ('something that mixes the examples of a batch other than by the mean of a loss, such '
            'as a statistic of the batch, or a loss divided by a count that differs by shard.')


def _sums_over_batch(loss: float, sum_of_losses: float, num_parts: int) -> bool:
    """Whether the model's loss seems to be a sum over the examples, and not their mean.

    Where two parts have the losses 3 and 5, the loss of the batch is 8 if it is a sum, and 4 if it
    is a mean. It counts as a sum if it is less than half as far from the sum as from the mean. A
    loss of 0 tells nothing.

    Args:
      loss: the loss of the batch, on one device.
      sum_of_losses: the sum of the losses of the parts.
      num_parts: the number of parts that a batch is cut into.
    """
    distance_from_sum = abs(sum_of_losses - loss)
    distance_from_mean = abs(sum_of_losses / num_parts - loss)
    return loss != 0 and distance_from_sum < 0.5 * distance_from_mean
