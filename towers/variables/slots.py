"""Variables that a build makes besides the model's: slots of an optimizer, and local variables.

Its tests are `tests/variables/test_new_variables.py` and `tests/reduce/test_replicas.py`.
"""

import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.placement.variable_device import Placement, only_device


@contextlib.contextmanager
def new_slots(placement: Placement,
              variables: typing.Iterable[tf.Variable]) -> typing.Iterator[typing.List[tf.Variable]]:
    """The context of `apply_gradients`, in which slots are put beside their variables.

    Optimizers of TF colocate their slots with the variable. Optimizers that make their slots with
    `get_variable` under the variable's name (BERT's: `<variable>/adam_m`) name no device: here such
    a slot is put on the variable's device.

    Args:
      placement: the devices of the variables.
      variables: the variables that gradients are applied to.

    Yields:
      A list, to which the slots are added as they are made.
    """
    trained = graph_walk.variables_by_name(variables)
    created = []

    def create(next_creator: typing.Callable, **kwargs: typing.Any) -> tf.Variable:
        """A creator that makes a slot on the device of the variable whose name it has."""
        owner = owner_by_name(kwargs.get('name') or '', trained)
        if owner is None:  # it belongs to no variable, as Adam's power of beta
            slot = next_creator(**kwargs)
        else:
            with placement.scope_of(owner):
                slot = next_creator(**kwargs)
        created.append(slot)
        return slot

    with tf.variable_creator_scope(create):
        yield created


def owner_by_name(name: str,
                  by_name: typing.Dict[str, tf.Variable]) -> typing.Optional[tf.Variable]:
    """Finds the variable that a slot belongs to: its name is in the slot's name.

    `dense/kernel` is in `dense/kernel/Adam`, and in `scope/dense/kernel/Adam`, where a scope was
    open around `apply_gradients`. There the order of search is: scope/dense/kernel, scope/dense,
    scope, dense/kernel, dense, kernel.

    Args:
      name: the name of the slot.
      by_name: {name: variable}.

    Returns:
      The variable; None if there is none.
    """
    parts = name.split('/')[:-1]  # without the slot's own name, such as `Adam`
    for start in range(len(parts)):
        for end in range(len(parts), start, -1):
            owner = by_name.get('/'.join(parts[start:end]))
            if owner is not None:
                return owner
    return None


def local_variable(like: tf.Variable, name: str, initial_value: typing.Any, value: typing.Any,
                   device: typing.Optional[str], **options: typing.Any) -> tf.Variable:
    """Makes a local variable, outside of all name scopes.

    Args:
      like: a variable of the same dtype and kind.
      name: the name of the new variable.
      initial_value: any value of the new variable's shape and dtype, with which it is made.
      value: the tensor that the new variable's initializer assigns. It is not the `initial_value`,
        since TensorFlow would then copy the operations that compute it onto the variable's device.
      device: the new variable's device; or None.
      **options: other arguments of `tf.Variable`.
    """
    with tf.control_dependencies(None), tf.name_scope(None), only_device(device):
        variable = tf.Variable(
            initial_value, name=name, collections=[tf.GraphKeys.LOCAL_VARIABLES],
            dtype=like.dtype.base_dtype, use_resource=like.op.type == 'VarHandleOp',
            # An initial value without a full static shape is refused where the shape is validated.
            validate_shape=like.get_shape().is_fully_defined(), **options)
        compat.initialize_with(variable, value)
    return variable
