"""Optimizers that decay the weights themselves, without an L2 loss: AdamW, LARS and LAMB.

LARS and LAMB are momentum and Adam with a separate learning rate for each layer: in large batches
the gradients of some layers are large compared with their weights, the gradients of other layers
small. Both optimizers scale each variable's step in proportion to the norm of the variable.

A variable of one dimension (a bias, a scale or offset of batch norm) is neither decayed, nor is its
step scaled. Each part of a partitioned variable counts as a variable.
"""

import typing

import tensorflow.compat.v1 as tf


class AdamWOptimizer(tf.train.AdamOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv 1711.05101, algorithm 2).

    For a variable w of two dimensions or more:

        w <- w - learning_rate * weight_decay * w

    and then the step of `tf.train.AdamOptimizer`. A variable of one dimension has only the step of
    `tf.train.AdamOptimizer`. The learning rate is the paper's eta * alpha, as in PyTorch and Keras.
    All rows of a variable with a sparse gradient are decayed.
    """

    def __init__(self, learning_rate: typing.Any = 0.001, weight_decay: float = 0.01,
                 beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8,
                 name: str = 'AdamW'):
        """`weight_decay` is the paper's lambda; `tf.train.AdamOptimizer` has the other arguments.
        """
        super(AdamWOptimizer, self).__init__(learning_rate, beta1, beta2, epsilon, name=name)
        self._weight_decay = weight_decay

    # The four methods by which TensorFlow's optimizers update a variable: resource variables and
    # reference variables (`var`), with dense and with sparse gradients.

    def _resource_apply_dense(self, grad: tf.Tensor, handle: tf.Variable):
        with self._after_decay(handle, grad):
            return super(AdamWOptimizer, self)._resource_apply_dense(grad, handle)

    def _resource_apply_sparse(self, grad: tf.Tensor, handle: tf.Variable, indices: tf.Tensor):
        with self._after_decay(handle, grad):
            return super(AdamWOptimizer, self)._resource_apply_sparse(grad, handle, indices)

    def _apply_dense(self, grad: tf.Tensor, var: tf.Variable):
        with self._after_decay(var, grad):
            return super(AdamWOptimizer, self)._apply_dense(grad, var)

    def _apply_sparse(self, grad: tf.IndexedSlices, var: tf.Variable):
        with self._after_decay(var, grad.values):
            return super(AdamWOptimizer, self)._apply_sparse(grad, var)

    def _after_decay(self, variable: tf.Variable, gradient: tf.Tensor) -> typing.ContextManager:
        """A context whose operations run after the decay of a variable.

        The decay itself runs after the gradient, which is computed from the weights before the
        decay.

        Args:
          variable: the variable; it is decayed only if it has at least two dimensions.
          gradient: its gradient; of a sparse gradient the values.
        """
        if not _is_decayed(variable):
            return tf.control_dependencies([])  # waits for nothing
        with tf.control_dependencies([gradient]):
            # `_lr_t` is Adam's learning rate as a tensor.
            factor = tf.cast(self._lr_t, gradient.dtype) * self._weight_decay
            decay = tf.assign_sub(variable, factor * variable.read_value())
        return tf.control_dependencies([decay])


class _Layerwise:
    """A mix-in that replaces the update of an optimizer of TensorFlow by `_update`.

    A sparse gradient is made dense: all rows are decayed, and count in the norms.
    """

    def _update(self, gradient: tf.Tensor, variable: tf.Variable) -> tf.Operation:
        """Makes the operation that updates a variable and its slots with a dense gradient."""
        raise NotImplementedError

    def _resource_apply_dense(self, grad: tf.Tensor, handle: tf.Variable):
        return self._update(grad, handle)

    def _resource_apply_sparse(self, grad: tf.Tensor, handle: tf.Variable, indices: tf.Tensor):
        return self._update(tf.math.unsorted_segment_sum(grad, indices, tf.shape(handle)[0]),
                            handle)

    _apply_dense = _resource_apply_dense  # for reference variables, of TensorFlow 1

    def _apply_sparse(self, grad: tf.IndexedSlices, var: tf.Variable):
        return self._resource_apply_sparse(grad.values, var, grad.indices)


class LARSOptimizer(_Layerwise, tf.train.MomentumOptimizer):
    """Momentum with layer-wise adaptive rates (You et al. 2017, arXiv 1708.03888, algorithm 1).

    For a variable w with the gradient g, of two dimensions or more:

        local = trust_coefficient * |w| / (|g| + weight_decay * |w|)
        v <- momentum * v + learning_rate * local * (g + weight_decay * w)
        w <- w - v

    For a variable of one dimension, local is 1 and there is no decay. The paper does not say what
    local is where |w| or |g| is 0: here it is 1, as in `tf.contrib.opt.LARSOptimizer`. The gradient
    has to be the gradient of the mean loss: with a sum over towers, the decay would count less.
    """

    def __init__(self, learning_rate: typing.Any, momentum: float = 0.9,
                 weight_decay: float = 1e-4, trust_coefficient: float = 0.001, name: str = 'LARS'):
        """`weight_decay` is the paper's beta, `trust_coefficient` its eta; a learning rate may be a
        number, a scalar tensor, or a function that returns either."""
        super(LARSOptimizer, self).__init__(learning_rate, momentum, name=name)
        self._weight_decay = weight_decay
        self._trust_coefficient = trust_coefficient

    def _update(self, gradient: tf.Tensor, variable: tf.Variable) -> tf.Operation:
        """Makes the update of the class's formula, for a variable and its slot.

        The norms of 16-bit numbers are float32, and so is the rate that they give the variable.
        """
        step = tf.cast(self._learning_rate_tensor, gradient.dtype) * gradient
        if _is_decayed(variable):
            value = variable.read_value()
            value_norm = _norm(value)
            gradient_norm = _norm(gradient)
            ratio = self._trust_coefficient * value_norm / (
                gradient_norm + self._weight_decay * value_norm)
            local = _where_both(value_norm, gradient_norm, ratio)
            rate = tf.cast(self._learning_rate_tensor, local.dtype)
            decayed = gradient + self._weight_decay * value
            step = tf.cast(rate * local, gradient.dtype) * decayed
        velocity = self.get_slot(variable, 'momentum')
        step += self._momentum * velocity.read_value()
        return tf.group(tf.assign(velocity, step), tf.assign_sub(variable, step))


class LAMBOptimizer(_Layerwise, tf.train.AdamOptimizer):
    """Adam with layer-wise adaptive rates (You et al. 2019, arXiv 1904.00962, algorithm 2).

    For a variable w with the gradient g, at step t from 1, of two dimensions or more:

        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon)
        w <- w - learning_rate * |w| / |r + weight_decay * w| * (r + weight_decay * w)

    For a variable of one dimension, w <- w - learning_rate * r. Where one of the two norms is 0
    their ratio is 1, as in the authors' program. The paper's function phi is the identity.
    """

    def __init__(self, learning_rate: typing.Any, beta1: float = 0.9, beta2: float = 0.999,
                 epsilon: float = 1e-6, weight_decay: float = 0.01, name: str = 'LAMB'):
        """`weight_decay` is the paper's lambda; the learning rate is as for `LARSOptimizer`."""
        super(LAMBOptimizer, self).__init__(learning_rate, beta1, beta2, epsilon, name=name)
        self._weight_decay = weight_decay

    def _update(self, gradient: tf.Tensor, variable: tf.Variable) -> tf.Operation:
        """Makes the update of the class's formula, for a variable and its two slots."""
        beta1_power, beta2_power = self._get_beta_accumulators()
        bias1 = tf.cast(1 - beta1_power, gradient.dtype)
        bias2 = tf.cast(1 - beta2_power, gradient.dtype)
        m_slot = self.get_slot(variable, 'm')
        v_slot = self.get_slot(variable, 'v')
        m = self._beta1 * m_slot.read_value() + (1 - self._beta1) * gradient
        v = self._beta2 * v_slot.read_value() + (1 - self._beta2) * tf.square(gradient)
        step = m / bias1 / (tf.sqrt(v / bias2) + self._epsilon)
        rate = tf.cast(self._lr_t, gradient.dtype)
        if _is_decayed(variable):
            value = variable.read_value()
            step += self._weight_decay * value
            value_norm = _norm(value)
            step_norm = _norm(step)
            ratio = _where_both(value_norm, step_norm, value_norm / step_norm)
            rate *= tf.cast(ratio, gradient.dtype)
        return tf.group(tf.assign(m_slot, m), tf.assign(v_slot, v),
                        tf.assign_sub(variable, rate * step))


def _is_decayed(variable: tf.Variable) -> bool:
    """Whether a variable is decayed, and its step scaled: it has at least two dimensions."""
    return variable.shape.ndims > 1


def _norm(tensor: tf.Tensor) -> tf.Tensor:
    """The square root of the sum of the squares of a tensor, a scalar.

    For 16-bit numbers, whose squares overflow, it is a float32.
    """
    if tensor.dtype.size < 4:
        tensor = tf.cast(tensor, tf.float32)
    return tf.sqrt(tf.reduce_sum(tf.square(tensor)))


def _where_both(first: tf.Tensor, second: tf.Tensor, ratio: tf.Tensor) -> tf.Tensor:
    """The ratio of two norms if both, `first` and `second`, are above 0; else 1."""
    return tf.where(tf.logical_and(first > 0, second > 0), ratio, tf.ones_like(ratio))
