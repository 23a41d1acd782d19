"""Draws the graph that `build_towers` makes for one dense layer on two towers, as an SVG picture.

    python docs/draw_graph.py > docs/dense_on_two_towers.svg

The operations are those of a real build whose values the update or the loss is computed from.
Constants, and operations that hand a value on, are left out: an arrow goes past them.
"""

import collections
import html

import tensorflow.compat.v1 as tf

import towers

HANDED_ON = ('Identity', 'NoOp', 'PlaceholderWithDefault')
COLUMNS = collections.OrderedDict([
    ('tower_0', 'tower 0, /cpu:0'), ('shared', 'for all towers, /cpu:0'),
    ('tower_1', 'tower 1, /cpu:1')])
WIDTH, HEIGHT, GAP = 128, 24, 20
COLORS = {'shared': '#d9a441', 'forward': '#4f9d69', 'backward': '#5b7db1'}


def build() -> towers.BuiltTowers:
    """Builds one dense layer with a squared loss on two towers."""
    images = tf.placeholder(tf.float32, [4, 3], name='images')
    labels = tf.placeholder(tf.float32, [4, 2], name='labels')

    def model_fn(images, labels):
        weights = tf.get_variable('weights', [3, 2])
        return tf.reduce_mean(tf.square(tf.matmul(images, weights) - labels))

    return towers.build_towers(model_fn, (images, labels), tf.train.GradientDescentOptimizer(.1),
                               devices=2, reduction='mean')


def is_drawn(op: tf.Operation, train_op: tf.Operation) -> bool:
    """Says whether an operation has a box of its own."""
    return op is train_op or op.type not in HANDED_ON and not is_constant(op)


def is_constant(op: tf.Operation) -> bool:
    """Says whether an operation has the same value in every step."""
    if op.type in ('Const', 'VarHandleOp', 'VariableV2') or not op.inputs:
        return op.type in ('Const', 'Shape')
    return all(is_constant(tensor.op) for tensor in op.inputs)


def sources_of(op: tf.Operation, train_op: tf.Operation) -> list:
    """Lists the drawn operations whose values an operation takes, past those that hand them on."""
    sources = []
    stack = [tensor.op for tensor in op.inputs]
    if op is train_op:
        stack += op.control_inputs
    while stack:
        source = stack.pop()
        if is_drawn(source, train_op):
            sources.append(source)
        elif not is_constant(source):
            stack.extend(tensor.op for tensor in source.inputs)
    return sources


def drawn_operations(train_op: tf.Operation) -> list:
    """Lists the train op and all operations that it is computed from and that have a box."""
    found = {}
    stack = [train_op]
    while stack:
        op = stack.pop()
        if op.name not in found:
            found[op.name] = op
            stack.extend(sources_of(op, train_op))
    return list(found.values())


def levels_of(drawn: list, train_op: tf.Operation) -> dict:
    """Gives each operation its row: {name: one more than the lowest row of its sources}."""
    levels = {}

    def level(op):
        if op.name not in levels:
            levels[op.name] = 1 + max([level(each) for each in sources_of(op, train_op)] or [-1])
        return levels[op.name]

    for op in drawn:
        level(op)
    return levels


def column_and_color(op: tf.Operation, built: towers.BuiltTowers) -> tuple:
    """Tells the column of an operation, and the color of its part of the step."""
    for tower in built.towers:
        if op.name in tower.forward:
            return 'tower_%d' % tower.index, COLORS['forward']
        if op.name in tower.backward:
            return 'tower_%d' % tower.index, COLORS['backward']
    return 'shared', COLORS['shared']


def draw(built: towers.BuiltTowers) -> str:
    """Draws the step of a build: the text of an SVG file."""
    drawn = drawn_operations(built.train_op)
    levels = levels_of(drawn, built.train_op)
    cells = collections.defaultdict(list)
    for op in sorted(drawn, key=lambda each: each.name):
        column, _ = column_and_color(op, built)
        cells[column, levels[op.name]].append(op)
    boxes_across = {column: max(len(ops) for (each, _), ops in cells.items() if each == column)
                    for column in COLUMNS}
    left_edge = GAP
    places = {}
    titles = []
    for column, title in COLUMNS.items():
        width = boxes_across[column] * (WIDTH + GAP)
        titles.append((left_edge, title))
        for (each, level), ops in cells.items():
            if each == column:
                for number, op in enumerate(ops):
                    places[op.name] = (left_edge + number * (WIDTH + GAP),
                                       40 + level * (HEIGHT + GAP))
        left_edge += width + GAP
    bottom = max(y for _, y in places.values()) + HEIGHT + GAP
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" '
        'font-size="11">' % (left_edge, bottom),
        '<rect width="100%" height="100%" fill="white"/>',
        '<marker id="head" markerWidth="7" markerHeight="7" refX="6" refY="3" orient="auto">'
        '<path d="M0,0 L7,3 L0,6 z" fill="#777"/></marker>']
    for x, title in titles:
        lines.append('<text x="%d" y="24" font-weight="bold">%s</text>' % (x, title))
    for op in drawn:
        for source in sources_of(op, built.train_op):
            lines.append(
                '<line x1="%d" y1="%d" x2="%d" y2="%d" stroke="#777" stroke-width=".8" '
                'marker-end="url(#head)"/>' % (
                    places[source.name][0] + WIDTH // 2, places[source.name][1] + HEIGHT,
                    places[op.name][0] + WIDTH // 2, places[op.name][1]))
    for op in drawn:
        x, y = places[op.name]
        _, color = column_and_color(op, built)
        label = op.type if op is not built.train_op else 'train_op'
        lines.append(
            '<g><title>%s</title><rect x="%d" y="%d" width="%d" height="%d" rx="4" fill="%s"/>'
            '<text x="%d" y="%d" text-anchor="middle" fill="white">%s</text></g>' % (
                html.escape(op.name), x, y, WIDTH, HEIGHT, color, x + WIDTH // 2, y + 16,
                html.escape(label.replace('ResourceApplyGradientDescent', 'ApplyGradientDescent'))))
    return '\n'.join(lines + ['</svg>'])


if __name__ == '__main__':
    tf.disable_v2_behavior()
    print(draw(build()))
