"""Arguments of `build_towers` that travel together."""

import collections

from towers.errors import InvalidArgumentError


class VariablePlacement(collections.namedtuple('VariablePlacement', 'device all_reduce',
                                               defaults=(None, None))):
    """Where the shared variables live.

    Attributes:
      device: None (`/cpu:0`; the GPU when there is just one), a device name,
        `'balanced'`, `'replicated'`, or a device function. `'replicated'`: each tower has its own
        replica of every trainable variable (the model's own is the first tower's), and updates it
        with the combined gradient. The same numbers, the same checkpoints; the replicas are local
        variables, so a plain session runs `tf.local_variables_initializer()` after it has restored
        a checkpoint (`MonitoredSession` does so by itself). A program that writes weights itself
        makes the operation `built.replicas.refresh()` with its graph, and runs it after the write.
        An optimizer whose `apply_gradients` mixes variables (a global norm) is refused, since it
        would see each variable N times: mix them in `transform_gradients`. Without an optimizer no
        replicas are made.
      all_reduce: for `device='replicated'`: `'copy'` (the default: each sum is made on one
        of the towers and sent to the others), `'collective'` (TF's ring) or `'nccl'` (GPUs of one
        machine); see `all_reduce`.
    """
    __slots__ = ()


class Numerics(collections.namedtuple('Numerics', 'precision loss_scale xla check_numerics',
                                      defaults=('float32', None, False, False))):
    """The precision of the towers' numbers, and what happens to numbers that are not finite.

    Attributes:
      precision: `'float32'`; or `'bf16'` or `'fp16'`, by TensorFlow's own graph rewrite, which is
        tried out first, in a session of its own (not with check_devices=False: TF keeps the GPU
        options of a process's first session for all). The session's config has to ask for it too:
        `use_precision(config, precision, built.devices)`.
      loss_scale: `LossScale`; None: the default one with `'fp16'`, none with the others. With one,
        a step in which the gradient of at least one tower is not finite changes no weight and no
        slot, and is counted in `scaled_losses.skipped_steps`; `global_step` counts it too.
        Batch-norm statistics follow every forward pass, also in a skipped step.
        `check_numerics` then fails a step only for its loss, or at the least scale.
      xla: whether XLA compiles each tower's forward and backward pass, see `xla`; what comes after
        them (combination, update) is not compiled.
      check_numerics: a NaN or an infinity in a tower's loss or gradient fails the step, naming the
        tower and the variable; see `nonfinite`.
    """
    __slots__ = ()


VARIABLES = {'variable_device': 'device', 'all_reduce': 'all_reduce'}
NUMERICS = {field: field for field in Numerics._fields}


def with_keywords(name, kind, given, fields, keywords):
    """A group of arguments; some of its fields may be given as separate keywords.

    Args:
      name: the group's name among `build_towers`' arguments.
      kind: the group's class.
      given: an instance, or None.
      fields: dict from keywords to the fields that they stand for.
      keywords: dict of the given keywords; this function removes the keywords of the group.

    Returns:
      An instance of `kind`.

    Raises:
      InvalidArgumentError: `given` is of another type; or both `given` and a keyword are there.
    """
    single = {fields[keyword]: keywords.pop(keyword) for keyword in fields if keyword in keywords}
    if given is None:
        return kind(**single)
    if not isinstance(given, kind):
        raise InvalidArgumentError('%s=%.80r: expected a %s, or None.'
                                   % (name, given, kind.__name__))
    if single:
        raise InvalidArgumentError('%s= and %s= were both given: put the latter into the %s.' % (
            name, next(keyword for keyword in fields if fields[keyword] in single),
            kind.__name__))
    return given
