"""Random small programs of the operations that the table of rules knows.

A program begins with some tensors of the batch, weights and sizes, applies random operations to
what it has, and ends in a scalar. What TensorFlow refuses (shapes that do not fit) is left out.
"""

import tensorflow.compat.v1 as tf

EXAMPLES = 8


def make_inputs(examples=None):
    """Placeholders of the batch, of a static number of examples or of any: {name: tensor}."""
    return {'x': tf.placeholder(tf.float64, [examples, 4], 'x'),
            'seq': tf.placeholder(tf.float64, [examples, 3, 4], 'seq'),
            'weight': tf.placeholder(tf.float64, [examples], 'weight'),
            'ids': tf.placeholder(tf.int32, [examples], 'ids'),
            'words': tf.placeholder(tf.int32, [examples, 3], 'words')}


def draw_values(rng):
    """Values of the inputs for a batch: {name: array}."""
    return {'x': rng.randn(EXAMPLES, 4), 'seq': rng.randn(EXAMPLES, 3, 4),
            'weight': rng.uniform(.2, 2., EXAMPLES), 'ids': rng.randint(0, 4, EXAMPLES),
            'words': rng.randint(0, 4, [EXAMPLES, 3])}


class Program:
    """The tensors of a program, and the operations that add to them."""

    def __init__(self, rng, inputs):
        self.rng = rng
        self.names = []  # of the operations applied
        self.weights = [
            tf.get_variable('w%d' % place, shape, tf.float64, tf.constant_initializer(
                rng.randn(*shape) if shape else rng.randn())) for place, shape in enumerate(
                    [[4], [4, 4], [3, 4], [], [20, 4], [1, 4]])]
        self.floats = list(inputs[name] for name in ('x', 'seq', 'weight')) + [
            tf.convert_to_tensor(weight) for weight in self.weights]
        self.integers = [inputs['ids'], inputs['words']]
        self.examples = tf.shape(inputs['x'])[0]
        self.sizes = [self.examples, tf.shape(inputs['seq'])[1], tf.constant(2)]

    # ---- choices

    def one_of(self, things):
        return things[self.rng.randint(len(things))]

    def a_float(self):
        """A tensor of floats, one of the last ones by preference."""
        if self.rng.rand() < .6:
            return self.one_of(self.floats[-4:])
        return self.one_of(self.floats)

    def an_axis(self, x):
        rank = x.shape.ndims
        return self.rng.randint(rank) if rank else 0

    def some_axes(self, x):
        axes = [axis for axis in range(x.shape.ndims) if self.rng.rand() < .5]
        return axes or [self.an_axis(x)] if x.shape.ndims else []

    # ---- running

    def apply_some(self, count):
        """Applies random operations until so many have given a result."""
        done = 0
        for _ in range(5 * count):
            if done == count:
                return
            name = self.one_of(OPERATIONS)
            try:
                found = getattr(self, name)()
            except (ValueError, TypeError, LookupError, tf.errors.InvalidArgumentError):
                continue
            for tensor in found if isinstance(found, list) else [found]:
                if tensor.shape.ndims is None or tensor.shape.ndims > 5:
                    continue
                (self.floats if tensor.dtype.is_floating else self.integers).append(tensor)
            self.names.append(name)
            done += 1

    def loss(self):
        """A scalar of what the program has."""
        terms = [self.scalar(self.a_float()) for _ in range(self.rng.randint(1, 4))]
        how = self.rng.rand()
        if how < .7:
            return tf.add_n(terms)
        if how < .85:
            return terms[0] * self.scalar(self.one_of(self.floats[3:9])) + terms[-1]
        return self.one_of([tf.square, tf.abs, tf.tanh])(terms[0]) + terms[-1]

    def scalar(self, x):
        how = self.rng.rand()
        if how < .6:
            return tf.reduce_mean(x)
        if how < .8:
            return tf.reduce_sum(x) / self.count(tf.size(x) if how < .7 else self.examples)
        if how < .9:
            return tf.reduce_mean(tf.reduce_sum(x, self.some_axes(x)))
        return tf.reduce_sum(x)

    def count(self, size):
        return tf.cast(size, tf.float64)

    # ---- operations: each returns a tensor, or a list of them

    def unary(self):
        x = self.a_float()
        return self.one_of([
            tf.tanh, tf.square, tf.abs, tf.sigmoid, tf.nn.relu, tf.negative, tf.identity,
            tf.stop_gradient, tf.sign, tf.sin, tf.ones_like, tf.zeros_like,
            lambda x: tf.sqrt(tf.abs(x) + .1), lambda x: tf.exp(tf.tanh(x)),
            lambda x: tf.cast(tf.cast(x * 3, tf.int32), tf.float64)])(x)

    def binary(self):
        x, y = self.a_float(), self.a_float()
        return self.one_of([
            tf.add, tf.subtract, tf.multiply, tf.maximum, tf.squared_difference,
            lambda x, y: x / (tf.abs(y) + 1), lambda x, y: tf.cast(x > y, tf.float64),
            lambda x, y: tf.where_v2(x > y, x, y),
            lambda x, y: tf.where(tf.reduce_mean(x) > 0., y, 2. * y)])(x, y)

    def with_weight(self):
        x, w = self.a_float(), tf.convert_to_tensor(self.one_of(self.weights[:4]))
        return self.one_of([tf.add, tf.multiply, lambda x, w: x - tf.tanh(w)])(x, w)

    def by_size(self):
        x, size = self.a_float(), self.count(self.one_of(self.sizes))
        return self.one_of([lambda: x / size, lambda: x * size, lambda: x + size,
                            lambda: x / (1. + size), lambda: x * (1. / size)])()

    def new_size(self):
        size, other = self.one_of(self.sizes), self.one_of(self.sizes)
        self.sizes.append(self.one_of([
            lambda: size * 2, lambda: size + other, lambda: size * other, lambda: size // 2,
            lambda: tf.size(self.a_float()), lambda: tf.maximum(size, other),
            lambda: tf.shape(self.a_float())[0], lambda: tf.shape(self.a_float())[-1],
            lambda: tf.reduce_prod(tf.shape(self.a_float()))])())
        return []

    def reduction(self):
        x = self.a_float()
        function = self.one_of([
            tf.reduce_mean, tf.reduce_mean, tf.reduce_sum, tf.reduce_sum, tf.reduce_max,
            tf.reduce_min, tf.reduce_prod, tf.reduce_logsumexp])
        return function(x, self.some_axes(x), keepdims=self.rng.rand() < .3)

    def along_an_axis(self):
        x = self.a_float()
        axis = self.an_axis(x)
        return self.one_of([
            lambda: tf.nn.softmax(x, axis=axis), lambda: tf.nn.l2_normalize(x, axis),
            lambda: tf.cumsum(x, axis), lambda: tf.cumprod(x, axis), lambda: tf.reverse(x, [axis]),
            lambda: tf.roll(x, 1, axis), lambda: tf.sort(x, axis), lambda: tf.nn.top_k(x, 2)[0],
            lambda: tf.nn.log_softmax(x)])()

    def normalized(self):
        x = self.a_float()
        mean, variance = tf.nn.moments(x, self.some_axes(x), keep_dims=True)
        return (x - mean) / tf.sqrt(variance + .1)

    def reshaped(self):
        x = self.a_float()
        shape = x.shape.as_list()
        lengths = [tf.shape(x)[axis] if length is None else length
                   for axis, length in enumerate(shape)]
        self.rng.shuffle(lengths)
        return tf.reshape(x, self.one_of([
            [-1], [self.examples, -1], [-1, 4], [-1, 2], lengths, [-1] + lengths[1:],
            lengths[:-2] + [-1], [4, -1], [self.examples, 4, -1], [-1, self.examples],
            [self.examples * 3, -1], [3, self.examples, -1], [-1, 3, 4], [-1, 2, 2]]))

    def transposed(self):
        x = self.a_float()
        return tf.transpose(x, self.rng.permutation(x.shape.ndims))

    def expanded(self):
        x = self.a_float()
        return tf.expand_dims(x, self.rng.randint(x.shape.ndims + 1))

    def squeezed(self):
        x = self.a_float()
        ones = [axis for axis, length in enumerate(x.shape.as_list()) if length == 1]
        return tf.squeeze(x, [self.one_of(ones)]) if self.rng.rand() < .8 else tf.squeeze(x)

    def joined(self):
        x, y = self.a_float(), self.a_float()
        y = self.one_of([x, tf.tanh(x), y])
        return self.one_of([lambda: tf.concat([x, y], self.an_axis(x)),
                            lambda: tf.stack([x, y], self.rng.randint(x.shape.ndims + 1))])()

    def apart(self):
        x = self.a_float()
        axis = self.an_axis(x)
        return list(self.one_of([lambda: tf.split(x, 2, axis), lambda: tf.split(x, [1, -1], axis),
                                 lambda: tf.unstack(x, axis=axis)])())[:2]

    def sliced(self):
        x = self.a_float()
        size = self.one_of(self.sizes)
        return self.one_of([
            lambda: x[0], lambda: x[:, 0], lambda: x[..., 0], lambda: x[:, 1:], lambda: x[1:],
            lambda: x[..., :2], lambda: x[:, None], lambda: x[None], lambda: x[:, ::2],
            lambda: x[..., None, :1], lambda: x[:size], lambda: x[:, :size], lambda: x[-1],
            lambda: tf.slice(x, [0, 1], [-1, -1]), lambda: x[::-1], lambda: x[:, ::-1]])()

    def repeated(self):
        x = self.a_float()
        multiples = [1] * x.shape.ndims
        multiples[self.an_axis(x)] = self.one_of([2, 3, self.examples])
        return tf.tile(x, multiples)

    def padded(self):
        x = self.a_float()
        widths = [[0, 0] for _ in range(x.shape.ndims)]
        widths[self.an_axis(x)] = [1, 1]
        return tf.pad(x, widths)

    def filled(self):
        size = self.one_of(self.sizes)
        return self.one_of([
            lambda: tf.ones([size, 4], tf.float64), lambda: tf.zeros([size], tf.float64),
            lambda: tf.fill([size], tf.convert_to_tensor(self.weights[3])),
            lambda: tf.cast(tf.range(size), tf.float64), lambda: tf.eye(size, dtype=tf.float64),
            lambda: tf.tile(self.weights[5], [size, 1]),
            lambda: tf.broadcast_to(self.weights[0], [size, 4])])()

    def product(self):
        x, y = self.a_float(), self.one_of([self.a_float(), self.weights[1]])
        flip, flop = self.rng.rand() < .4, self.rng.rand() < .4
        return tf.matmul(x, y, transpose_a=flip, transpose_b=flop)

    def contracted(self):
        x, y = self.a_float(), self.one_of([self.a_float(), self.weights[1], self.weights[0]])
        equations = {(2, 2): ['bi,bi->b', 'bi,bj->ij', 'bi,ci->bc', 'bi,ij->bj', 'bi,bi->i',
                              'ib,ij->bj'],
                     (3, 2): ['bti,ij->btj', 'bti,bi->bt', 'bti,tj->bij', 'tbi,bi->tb'],
                     (3, 3): ['bti,bsi->bts', 'bti,bti->ti', 'bti,cti->bc'],
                     (2, 1): ['bi,i->b', 'bi,b->i', 'bi,b->bi'], (3, 1): ['bti,i->bt', 'bti,b->ti']}
        return tf.einsum(self.one_of(equations[x.shape.ndims, len(y.shape)]), x, y)

    def tensordot(self):
        x, y = self.a_float(), self.one_of([self.weights[1], self.weights[2], self.a_float()])
        return tf.tensordot(x, y, [[self.an_axis(x)], [self.rng.randint(len(y.shape))]])

    def looked_up(self):
        places = self.one_of(self.integers)
        return self.one_of([
            lambda: tf.gather(self.weights[4], places),
            lambda: tf.gather(self.weights[4], tf.range(self.one_of(self.sizes))),
            lambda: tf.one_hot(places, 4, dtype=tf.float64),
            lambda: tf.gather(self.a_float(), places),
            lambda: tf.gather(self.a_float(), places, axis=-1),
            lambda: tf.gather(self.a_float(), places, batch_dims=1, axis=1),
            lambda: tf.gather(self.a_float(), tf.range(self.examples)),
            lambda: tf.gather_nd(self.a_float(), tf.stack([tf.range(self.examples), places], 1)),
            lambda: tf.sequence_mask(places, 4, tf.float64),
            lambda: tf.cast(places, tf.float64)])()

    def whole_numbers(self):
        x = self.a_float()
        return self.one_of([lambda: tf.argmax(x, self.an_axis(x), output_type=tf.int32),
                            lambda: tf.range(self.examples) % 4,
                            lambda: tf.math.mod(self.one_of(self.integers) + 1, 4)])()

    def masked(self):
        x = self.a_float()
        keep = self.one_of(self.integers) > self.rng.randint(3)
        return self.one_of([
            lambda: tf.boolean_mask(x, keep), lambda: tf.boolean_mask(x, x > 0.),
            lambda: tf.gather(x, tf.where(keep)[:, 0]), lambda: tf.cast(tf.where(keep), tf.float64),
            lambda: tf.where(keep, x, tf.zeros_like(x))])()

    def by_class(self):
        x, places = self.a_float(), self.one_of(self.integers)
        return self.one_of([
            lambda: tf.math.unsorted_segment_sum(x, places, 4),
            lambda: tf.math.unsorted_segment_sum(x, tf.range(self.examples), self.examples),
            lambda: tf.math.unsorted_segment_max(x, places, 4),
            lambda: tf.scatter_nd(places[..., None], x, [4] + x.shape.as_list()[1:]),
            lambda: tf.scatter_nd(places[..., None], tf.ones_like(x), [4]),
            lambda: tf.scatter_nd(tf.stack([places, places], -1), x[..., 0], [4, 4])])()

    def convolved(self):
        x = self.a_float()
        return tf.nn.conv1d(x, self.weights[1][None], 1, 'SAME')

    def mapped(self):
        x, w = self.a_float(), self.weights[1]
        return self.one_of([
            lambda: tf.map_fn(lambda e: tf.tanh(e) * w[0, 0], x),
            lambda: tf.map_fn(lambda e: tf.nn.softmax(e, 0), x),
            lambda: tf.map_fn(lambda e: tf.reduce_mean(x) * e, x),
            lambda: tf.map_fn(lambda e: e[0] * e[1], (x, self.a_float()), dtype=tf.float64),
            lambda: tf.scan(lambda state, e: tf.tanh(state + e), x),
            lambda: tf.scan(lambda state, e: tf.tanh(e), x)])()

    def looped(self):
        x = self.a_float()
        limit = self.one_of([3, self.one_of(self.sizes), self.one_of(self.sizes)])
        body = self.one_of([
            lambda i, h: (i + 1, tf.tanh(h) * .9), lambda i, h: (i + 1, h + tf.reduce_mean(h)),
            lambda i, h: (i + 1, h * self.weights[3]),
            lambda i, h: (i + 1, tf.cond(self.weights[3] > 0., lambda: h * 2., lambda: h)),
            lambda i, h: (i + 1, h * tf.cond(tf.reduce_max(h) > 1., lambda: tf.constant(
                .5, tf.float64), lambda: tf.constant(2., tf.float64)))])
        return tf.while_loop(lambda i, h: i < limit, body, (0, x))[1]

    def over_time(self):
        x = tf.transpose(self.a_float(), [1, 0, 2])
        w = self.weights[1]
        return tf.scan(lambda state, e: tf.tanh(tf.matmul(e + state, w)), x)

    def branched(self):
        x, y = self.a_float(), self.a_float()
        condition = self.one_of([
            lambda: self.weights[3] > 0., lambda: self.examples > 4, lambda: tf.reduce_mean(y) > 0.,
            lambda: tf.reduce_any(y > 1.)])()
        return tf.cond(condition, lambda: tf.tanh(x), lambda: x * 2.)

    def clipped_gradient(self):
        @tf.custom_gradient
        def clip(t):
            return tf.identity(t), lambda g: tf.clip_by_norm(g, .05)
        x = self.one_of([self.a_float(), tf.convert_to_tensor(self.weights[1])])
        found = clip(x)
        found.set_shape(x.shape)
        return found

    def gradient(self):
        x = self.a_float()
        y = self.one_of([tf.reduce_sum, tf.reduce_mean])(self.one_of([tf.square, tf.sin])(x))
        return tf.gradients(y, x)[0]


OPERATIONS = ['unary'] * 3 + ['binary'] * 3 + ['with_weight'] * 3 + ['reduction'] * 3 + [
    'by_size', 'new_size', 'along_an_axis', 'along_an_axis', 'normalized', 'reshaped', 'reshaped',
    'transposed', 'expanded', 'squeezed', 'joined', 'apart', 'sliced', 'sliced', 'repeated',
    'padded', 'filled', 'product', 'product', 'contracted', 'tensordot', 'looked_up', 'looked_up',
    'whole_numbers', 'masked', 'by_class', 'convolved', 'mapped', 'looped', 'over_time',
    'branched', 'clipped_gradient', 'gradient']
