"""The numbers of two runs, and how far they are from each other.

The `Numbers` of a run are its losses, gradients, variables and slots: `one` are the numbers of one
device, `many` the numbers of the towers. `compare` gives a `Difference` for each value. Elements
whose gradient is nothing but rounding are not compared, since an optimizer may make a step of the
rounding. Its test is tests/inspect/test_check.py.
"""

import typing

import numpy as np

INITIAL_VALUE = 'initial value'
LOSS = 'loss'
GRADIENT = 'gradient'
VARIABLE = 'variable'
SLOT = 'slot'
KINDS = (INITIAL_VALUE, LOSS, GRADIENT, VARIABLE, SLOT)
"""The kinds of values that are compared, in the order in which a step computes them."""


_FIRST_STEP = 'of step 1'
"""The name of the loss of the first step, where there is one loss."""

Arrays = typing.Dict[str, np.ndarray]
"""Arrays by the name of their variable on one device."""


class Numbers(typing.NamedTuple):
    """The numbers of some steps.

    Attributes:
      losses: the losses by `'of step 1'`, `'of step 2'` and so on; where there are several losses
        by `'of step 1 of generator'` and the like.
      gradients: the gradients of the first step, by the names of their variables.
      variables: the variables after the last step, without slots.
      slots: the optimizers' slots after the last step.
      sum_of_losses: the sum of the towers' losses in the first step; 0 for one device.
      initial_values: the names of variables whose initial value is computed from tower 0's part of
        the batch, each with None.
    """

    losses: typing.Dict[str, typing.Any]
    gradients: Arrays
    variables: Arrays
    slots: Arrays
    sum_of_losses: float = 0.
    initial_values: typing.Dict[str, None] = {}

    def of_kind(self, what: str) -> typing.Dict[str, typing.Any]:
        """The values of one of `KINDS`, by name."""
        by_kind = {INITIAL_VALUE: self.initial_values, LOSS: self.losses,
                   GRADIENT: self.gradients, VARIABLE: self.variables, SLOT: self.slots}
        return by_kind[what]

    def loss_of_first_step(self) -> float:
        """The loss of the first step; where there are several losses, their sum."""
        total = 0.
        for name, value in self.losses.items():
            if name == _FIRST_STEP or name.startswith(_FIRST_STEP + ' '):
                total += float(value)
        return total


class Difference(typing.NamedTuple):
    """How far a value on the towers is from the same value on one device.

    Attributes:
      what: `'initial value'`, `'loss'`, `'gradient'`, `'variable'` or `'slot'`.
      name: the name of the variable or the loss.
      relative: the largest difference over the largest absolute value on one device; inf where one
        side lacks the value.
    """

    what: str
    name: str
    relative: float


class LeftOut(typing.NamedTuple):
    """A variable that is not compared.

    Attributes:
      name: the variable's name on one device.
      why: the reason, in a few words.
    """

    name: str
    why: str


NO_GRADIENT = 'its gradient is zero but for rounding'
SHARD_VARIANCE = 'a moving variance, under same_shards'


def not_compared(one: Numbers, many: Numbers, noise: float, same_shards: bool
                 ) -> typing.List[LeftOut]:
    """The variables that are not compared: variables whose gradient is noise, and the moving
    variances if the batch repeats one shard.

    Args:
      one: the numbers of one device.
      many: the numbers of the towers.
      noise: the largest gradient that may come from rounding only.
      same_shards: whether the batch repeats one shard.
    """
    reason_of = dict.fromkeys(_names_without_gradient(one, many, noise), NO_GRADIENT)
    # Fused batch norm estimates a variance by the number of examples, which is smaller in a shard.
    if same_shards:
        for name in one.variables.keys() | many.variables.keys():
            if name.endswith('moving_variance'):
                reason_of[name] = SHARD_VARIANCE
    return [LeftOut(name, reason) for name, reason in sorted(reason_of.items())]


def _names_without_gradient(one: Numbers, many: Numbers, noise: float) -> typing.List[str]:
    """List of the names of the variables whose gradient is noise in both runs; the arguments are
    those of `not_compared`."""
    if noise == 0:
        return []  # all gradients are exactly 0, as at a minimum, and not rounding
    names = []
    for name in one.gradients.keys() & many.gradients.keys():
        largest_gradient = max(largest_value(one.gradients[name]),
                               largest_value(many.gradients[name]))
        if largest_gradient <= noise:
            names.append(name)
    return names


def compare(one: Numbers, many: Numbers, noise: float, left_out: typing.Sequence[str]
             ) -> typing.List[Difference]:
    """The differences of two runs, in the order in which a step computes the values.

    Args:
      one: the numbers of one device.
      many: the numbers of the towers.
      noise: the largest gradient that may come from rounding only.
      left_out: names of variables whose gradients, values and slots are not compared.
    """
    differences = []
    for what in KINDS:
        on_one = one.of_kind(what)
        on_many = many.of_kind(what)
        for name in sorted(on_one.keys() | on_many.keys()):
            if _is_of(name, left_out):
                continue
            if name in on_one and name in on_many:
                relative = _relative_difference(what, name, one, many, noise)
            else:
                relative = float('inf')
            differences.append(Difference(what, name, relative))
    return differences


def _is_of(name: str, variables: typing.Iterable[str]) -> bool:
    """Whether a name belongs to one of these variables, or to a slot of one of them."""
    return any(name == variable or name.startswith(variable + '/') for variable in variables)


def _relative_difference(what: str, name: str, one: Numbers, many: Numbers, noise: float) -> float:
    """The `Difference.relative` of a value that both runs have.

    Args:
      what: one of `KINDS`.
      name: the name of the value.
      one: the numbers of one device.
      many: the numbers of the towers.
      noise: the largest gradient that may come from rounding only.
    """
    values = [one.of_kind(what)[name], many.of_kind(what)[name]]
    if what == GRADIENT:  # its own elements may be noise
        return _relative(values[0], values[1], noise)
    if what in (VARIABLE, SLOT):  # elements whose gradient is noise may differ by any amount
        owner = name if what == VARIABLE else _owner_of_slot(name)
        gradients = [one.gradients.get(owner), many.gradients.get(owner)]
        values = _without_noise(values, gradients, noise)
    return _relative(values[0], values[1], noise=0.)


def _owner_of_slot(name: str) -> str:
    """The name of the variable that a slot of this name belongs to: `'w'` for `'w/Momentum'`."""
    return name.rsplit('/', 1)[0]


def _without_noise(values: list, gradients: list, noise: float) -> list:
    """Both runs' values of a variable, with 0 for the elements whose gradient is only rounding.

    The loss does not depend on such elements, and yet an optimizer changes them, by the rounding.
    An example is the bias of the keys in an attention: it adds the same number to all scores of a
    query, and the softmax of these scores takes the number out again.

    Args:
      values: the value of the variable, or of a slot of it, on one device and on the towers.
      gradients: the gradient of the variable on one device, and on the towers; None where a side
        has no gradient.
      noise: the largest gradient that may come from rounding only.

    Returns:
      List of the two values. They are unchanged where the gradients do not have one element for
      each element of the value: a gradient is missing, or has another shape.
    """
    shape = np.shape(values[0])
    if any(gradient is None for gradient in gradients):
        return values
    on_one, on_many = map(_as_numbers, gradients)
    # A slot may have another shape than its variable. Of a complex gradient `_as_numbers` makes an
    # array of real numbers, with one dimension more than the value.
    if on_one.shape != shape or on_many.shape != shape:
        return values
    sizes = np.maximum(np.abs(on_one), np.abs(on_many))
    is_noise = (sizes > 0) & (sizes <= noise)  # 0 on both sides is no rounding
    if not is_noise.any():
        return values
    return [np.where(is_noise, 0, _as_numbers(value)) for value in values]


def largest_value(array: np.ndarray) -> float:
    """The largest absolute value in an array; 0 for an empty one."""
    if not array.size:
        return 0.
    return np.abs(array).max()


def _relative(one: typing.Any, many: typing.Any, noise: float) -> float:
    """The largest difference of two arrays over the largest absolute value of the first.

    Returns:
      0 for a difference of at most `noise`; inf where the shapes differ, or where NaNs and
      infinities are at different places. Strings and the like give 0 if they are equal, else inf.
    """
    one = _as_numbers(one)
    many = _as_numbers(many)
    if one.shape != many.shape:
        return float('inf')
    is_number = one.dtype.kind in 'fiub'  # float, int, unsigned int, bool
    if not is_number:
        return 0. if np.array_equal(one, many) else float('inf')
    one = one.astype(np.float64)
    many = many.astype(np.float64)
    finite = np.isfinite(one)
    if not np.array_equal(finite, np.isfinite(many)):
        return float('inf')
    largest = largest_value(one[finite])
    difference = largest_value(one[finite] - many[finite])
    if difference <= noise:
        return 0.
    if largest:  # if one device has only zeros, the difference itself counts
        difference = difference / largest
    return float(difference)


def _as_numbers(value: typing.Any) -> np.ndarray:
    """The value as an array of a real type that numpy knows.

    A complex array becomes an array of its two parts, an array of bfloat16 becomes float32; other
    arrays stay as they are.
    """
    value = np.asarray(value)
    if value.dtype.kind == 'c':  # complex
        return np.stack([value.real, value.imag])
    if value.dtype.name == 'bfloat16':
        return value.astype(np.float32)
    return value


def is_finite(run: Numbers, difference: Difference) -> bool:
    """Whether the value of a difference has no NaN and no infinity in this run; True for a value
    that the run lacks."""
    value = run.of_kind(difference.what).get(difference.name)
    if value is None:
        return True
    value = _as_numbers(value)
    return value.dtype.kind != 'f' or bool(np.all(np.isfinite(value)))
