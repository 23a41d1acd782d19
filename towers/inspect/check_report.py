"""The report of `check_towers`: the numbers of two runs, their differences, the likely cause."""

import typing

import numpy as np

from towers.errors import counted

INITIAL_VALUE, LOSS, GRADIENT, VARIABLE, SLOT = KINDS = (
    'initial value', 'loss', 'gradient', 'variable', 'slot')
"""What is compared, in the order in which a step computes it."""


Arrays = typing.Dict[str, np.ndarray]
"""Arrays by the name of their variable on one device."""


class Numbers(typing.NamedTuple):
    """The numbers of some steps.

    Attributes:
      losses: by `'of step 1'`, `'of step 2'` and so on; of several losses by `'of step 1 of
        generator'` and the like.
      gradients: the gradients of the first step, by the names of their variables.
      variables: the variables after the last step, without slots.
      slots: the optimizers' slots after the last step.
      sum_of_losses: the sum of the towers' losses in the first step; of one device 0.
      initial_values: of the variables whose initial value is of a part of the batch: None for each.
    """

    losses: typing.Dict[str, typing.Any]
    gradients: Arrays
    variables: Arrays
    slots: Arrays
    sum_of_losses: float = 0.
    initial_values: typing.Dict[str, None] = {}

    def of_kind(self, what: str) -> typing.Dict[str, typing.Any]:
        """The values of a kind, as `Difference.what` calls it."""
        by_kind = {INITIAL_VALUE: self.initial_values, LOSS: self.losses,
                   GRADIENT: self.gradients, VARIABLE: self.variables, SLOT: self.slots}
        return by_kind[what]

    def loss_of_first_step(self) -> float:
        """The sum of the losses of the first step."""
        total = 0.
        for name, value in self.losses.items():
            if name == 'of step 1' or name.startswith('of step 1 '):
                total += float(value)
        return total


class Traits(typing.NamedTuple):
    """What a model's forward pass has.

    Attributes:
      coarsest: the name of the floating type with the fewest digits that it computes in.
      random: the types of its random operations.
      batch_norm: whether it has batch norm.
      updated: names of the variables that its updates write.
    """

    coarsest: str
    random: typing.List[str]
    batch_norm: bool
    updated: typing.Set[str]


class Difference(typing.NamedTuple):
    """How far a value on the towers is from that on one device.

    Attributes:
      what: `'initial value'`, `'loss'`, `'gradient'`, `'variable'` or `'slot'`.
      name: the variable's or the loss's name.
      relative: the largest difference over the largest absolute value; inf where one side lacks it.
    """

    what: str
    name: str
    relative: float


class LeftOut(typing.NamedTuple):
    """A variable that is not compared.

    Attributes:
      name: the variable's name on one device.
      why: in a few words.
    """

    name: str
    why: str


_NO_GRADIENT = 'its gradient is zero but for rounding'
_SHARD_VARIANCE = 'a moving variance, under same_shards'


class _Rounding(typing.NamedTuple):
    """How exact a floating type is."""

    tolerance: float  # the relative difference that some steps may make
    noise: float  # of the largest gradient: what rounding alone may make


# Sums in another order differ in the last digits, and steps make that grow.
_ROUNDING = {'float64': _Rounding(1e-9, 1e-14), 'float32': _Rounding(1e-4, 1e-6),
             'float16': _Rounding(2e-2, 2e-3), 'bfloat16': _Rounding(0.1, 2e-2)}


class CheckedRuns(typing.NamedTuple):
    """What `check_towers` ran beside one device.

    Attributes:
      towers: how many towers, of all workers.
      workers: how many workers; 1 without a cluster.
      steps: how many steps.
      reduction: as given.
      parts: into how many parts a batch is cut.
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
      compared: number of values compared.
      towers: how many towers were run.
      steps: how many steps.
      reduction: as given.
      not_finite: the first `Difference` of which either side holds a NaN or an infinity, in the
        order in which a step computes things; None where all values are finite.
      left_out: list of `LeftOut`: the variables that are not compared; nor are their slots.
      workers: how many workers the towers were of; 1 without a cluster.
      proof: the plan's line about one device, a text that begins with `proven` or `not proven`; or
        None, for one tower or with a cluster.
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
        for why in (_NO_GRADIENT, _SHARD_VARIANCE):
            names = [variable.name for variable in self.left_out if variable.why == why]
            if names:
                lines.append('not compared (%s): %s' % (why, ', '.join(names)))
        return '\n'.join(lines)

    def _verdict(self) -> str:
        """Whether both sides are equal, and else the first difference and its likely cause."""
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
    """The report of two runs.

    Args:
      one: the numbers of one device.
      many: the numbers of the towers.
      traits: what is to be known of the model.
      ran: what was run.
      tolerance: largest relative difference that counts as equal; None for that of the types.
      proof: the plan's line about one device; or None.
    """
    rounding = _ROUNDING[traits.coarsest]
    if tolerance is None:
        tolerance = rounding.tolerance
    # The largest element of a gradient that rounding alone may make. A bias in front of a batch
    # norm has the gradient zero, computed as the remainder of a sum. (Adam's step is as large for
    # it as for any other gradient, which shows in the moving mean.)
    largest = max([_largest(gradient) for gradient in one.gradients.values()], default=0.)
    noise = rounding.noise * largest
    left_out = _not_compared(one, many, noise, ran.same_shards)
    differences = _compare(one, many, noise, [variable.name for variable in left_out])
    first = None
    not_finite = None
    for difference in reversed(differences):
        if not difference.relative <= tolerance:  # NaN is not
            first = difference
        if not (_is_finite(one, difference) and _is_finite(many, difference)):
            not_finite = difference
    cause = None
    if not_finite is not None:
        cause = _cause_of_not_finite(one, many, not_finite)
    elif first is not None:
        cause = _likely_cause(first, one, many, traits, ran.parts)
        if is_certain(proof) and not traits.random and first.what != INITIAL_VALUE:
            cause += (' The plan says that equality is proven: this is an error of towers itself, '
                      'please report it with the model.')
    return TowersReport(
        equal=first is None and not_finite is None,
        worst=max(differences, key=lambda difference: difference.relative),
        tolerance=tolerance, first=first, cause=cause, compared=len(differences),
        towers=ran.towers, steps=ran.steps, reduction=ran.reduction, not_finite=not_finite,
        left_out=left_out, workers=ran.workers, proof=proof)


def is_certain(proof: typing.Optional[str]) -> bool:
    """Whether a plan's line says that equality is proven, without a condition."""
    return proof is not None and proof.startswith('proven: ')


# ---- the comparison ------------------------------------------------------------------------------

def _not_compared(one: Numbers, many: Numbers, noise: float, same_shards: bool
                  ) -> typing.List[LeftOut]:
    """The variables left out of the comparison, by name: those whose gradient is noise; and where
    the batch repeats one shard, moving variances.

    Args:
      one: the numbers of one device.
      many: the numbers of the towers.
      noise: the largest element of a gradient that rounding alone may make.
      same_shards: whether the batch repeats one shard.
    """
    reasons = {}
    for name, gradient in one.gradients.items():
        if name not in many.gradients or not noise:
            continue
        if _largest(gradient) <= noise and _largest(many.gradients[name]) <= noise:
            reasons[name] = _NO_GRADIENT
    if same_shards:
        for name in set(one.variables) | set(many.variables):
            if name.endswith('moving_variance'):
                reasons[name] = _SHARD_VARIANCE
    return [LeftOut(name, why) for name, why in sorted(reasons.items())]


def _compare(one: Numbers, many: Numbers, noise: float, left_out: typing.Sequence[str]
             ) -> typing.List[Difference]:
    """The differences of two runs, in the order in which a step computes the values.

    Args:
      one: the numbers of one device.
      many: the numbers of the towers.
      noise: the largest element of a gradient that rounding alone may make.
      left_out: names of variables whose gradients, values and slots are not compared.
    """
    differences = []
    for what in KINDS:
        on_one = one.of_kind(what)
        on_many = many.of_kind(what)
        for name in sorted(set(on_one) | set(on_many)):
            if _is_of(name, left_out):
                continue
            relative = float('inf')
            if name in on_one and name in on_many:
                relative = _relative_difference(what, name, one, many, noise)
            differences.append(Difference(what, name, relative))
    return differences


def _is_of(name: str, variables: typing.Iterable[str]) -> bool:
    """Whether a name is one of some variables', or of a slot of one."""
    return any(name == variable or name.startswith(variable + '/') for variable in variables)


def _relative_difference(what: str, name: str, one: Numbers, many: Numbers, noise: float) -> float:
    """The `Difference.relative` of a value that both runs have.

    Args:
      what: `'loss'`, `'gradient'` and so on, as in `Difference.what`.
      name: of the value.
      one: the numbers of one device.
      many: the numbers of the towers.
      noise: the largest element of a gradient that rounding alone may make.
    """
    values = [one.of_kind(what)[name], many.of_kind(what)[name]]
    if what == GRADIENT:
        return _relative(values[0], values[1], noise)
    if what in (VARIABLE, SLOT):
        variable = name if what == VARIABLE else name.rsplit('/', 1)[0]
        gradients = [one.gradients.get(variable), many.gradients.get(variable)]
        values = _without_noise(values, gradients, noise)
    return _relative(values[0], values[1], noise=0.)


def _without_noise(values: list, gradients: list, noise: float) -> list:
    """Values of a variable on two sides, without the elements whose gradient is rounding alone.

    The loss does not depend on these (the keys' part of the bias in front of a softmax over
    products), and an optimizer makes a step of rounding.

    Args:
      values: on both sides.
      gradients: of the variable on both sides; None where a side has none.
      noise: the largest element of a gradient that rounding alone may make.
    """
    shape = np.shape(values[0])
    if any(gradient is None or np.shape(gradient) != shape for gradient in gradients):
        return values
    sizes = np.maximum(*[np.abs(_as_numbers(gradient)) for gradient in gradients])
    is_noise = (sizes > 0) & (sizes <= noise)
    if sizes.shape != shape or not is_noise.any():
        return values
    return [np.where(is_noise, 0, _as_numbers(value)) for value in values]


def _largest(array: np.ndarray) -> float:
    """The largest absolute value in an array; 0 for an empty one."""
    return np.abs(array).max() if array.size else 0.


def _relative(one: typing.Any, many: typing.Any, noise: float) -> float:
    """The largest difference of two arrays over the largest absolute value of the first; 0 for a
    difference of at most `noise`; inf for other shapes, or other places of NaNs and infinities."""
    one = _as_numbers(one)
    many = _as_numbers(many)
    if one.shape != many.shape:
        return float('inf')
    if one.dtype.kind not in 'fiub':
        return 0. if np.array_equal(one, many) else float('inf')
    one = one.astype(np.float64)
    many = many.astype(np.float64)
    finite = np.isfinite(one)
    if not np.array_equal(finite, np.isfinite(many)):
        return float('inf')
    largest = _largest(one[finite])
    difference = _largest(one[finite] - many[finite])
    if difference <= noise:
        return 0.
    return float(difference / largest) if largest else float(difference)


def _as_numbers(value: typing.Any) -> np.ndarray:
    """An array of numpy's own real numbers: of complex ones, their two parts; of bfloat16, which to
    numpy is no number, float32."""
    value = np.asarray(value)
    if value.dtype.kind == 'c':
        return np.stack([value.real, value.imag])
    if value.dtype.name == 'bfloat16':
        return value.astype(np.float32)
    return value


def _is_finite(run: Numbers, difference: Difference) -> bool:
    """Whether one run's side of a difference holds no NaN and no infinity."""
    value = run.of_kind(difference.what).get(difference.name)
    if value is None:
        return True
    value = _as_numbers(value)
    return value.dtype.kind != 'f' or bool(np.all(np.isfinite(value)))


# ---- causes --------------------------------------------------------------------------------------

def _cause_of_not_finite(one: Numbers, many: Numbers, difference: Difference) -> str:
    """Where a NaN or an infinity comes from."""
    if _is_finite(one, difference):
        who = 'only the towers'
    elif _is_finite(many, difference):
        who = 'only one device'
    else:
        who = 'both sides, so the model itself makes it'
    return ('%s: a division by zero, a logarithm of zero or a learning rate that is too large, in '
            'the model or in what it was given.' % who)


def _likely_cause(first: Difference, one: Numbers, many: Numbers, traits: Traits, num_parts: int
                  ) -> str:
    """The cause that a report gives for the first difference.

    Args:
      first: the difference.
      one: the numbers of one device.
      many: the numbers of the towers.
      traits: of the model.
      num_parts: into how many parts a batch is cut.
    """
    if first.what == INITIAL_VALUE:
        return ("the initial value of %s is computed from the batch, and towers have that of tower "
                "0's part of it: compute it from the whole batch, before build_towers, or start "
                'from a checkpoint of one device.' % first.name)
    if first.relative == float('inf') and first.what in (VARIABLE, SLOT, GRADIENT):
        return ('%s %s exists on one side only: an unshared variable, or one whose name depends '
                'on the tower.' % (first.what, first.name))
    if _sums_over_batch(one.loss_of_first_step(), many.sum_of_losses, num_parts):
        return ('the loss sums over the batch (the towers\' losses add up to the full one): return '
                'the mean over examples.')
    if traits.random:
        return ('random numbers in the model (%s), such as dropout: each tower draws its own. '
                'Check it with dropout off.' % ', '.join(traits.random))
    if traits.batch_norm:
        return ('batch norm: each tower normalizes with the statistics of its own shard. Check '
                'with same_shards=True, where these agree, or with batch norm in inference mode.')
    if first.name in traits.updated:
        return ("an update (UPDATE_OPS) of %s: towers have that of tower 0's examples, unless "
                "update_ops='all' has every tower write." % first.name)
    return ('something that mixes the examples of a batch other than by the mean of a loss, such '
            'as a statistic of the batch, or a loss divided by a count that differs by shard.')


def _sums_over_batch(loss: float, sum_of_losses: float, num_parts: int) -> bool:
    """Whether the loss of the batch is nearer to the sum of the towers' losses than to their mean.
    """
    from_mean = abs(sum_of_losses / num_parts - loss)
    return loss != 0 and abs(sum_of_losses - loss) < 0.5 * from_mean
