"""How the operations of a loss are put together, in full depth, to be compared among workers.

Each operation has a digest of itself and of the digests of its inputs (a Merkle tree), down to the
variables, which count by their names: a weight of a loss is tied to the head that it weighs. The
digest of a sum is the sum of those of its terms, so that they may be added up in any order, nested
or not. In a loop of control flow v1 the way back is cut: what its body computes, the labels of
`forward_digest` tell.
"""

import hashlib

_MASK = (1 << 64) - 1
_BACK = 'NextIteration'  # all loops of control flow v1 pass it
_REDUCES = frozenset(['Sum', 'Mean', 'Max', 'Min', 'Prod'])  # they take values in any order
_JOINS = frozenset(['Pack', 'Concat', 'ConcatV2'])
_MOST_TERMS = 16  # which are told apart


def order_of(forms, inputs, ends, sums, any_order):
    """What is to be compared of the order of operations; see `difference_of_order`.

    Args:
      forms: dict from keys of operations to texts; the first word is the type.
      inputs: dict from keys to lists of `(key, output)`.
      ends: list of `(key, output)`: the losses.
      sums, any_order: types that take their inputs in any order; a sum of sums is one sum.

    Returns:
      List of `[digest, names of variables]` of the outermost terms; a single one without names if
      there are too many.
    """
    kinds = {key: form.split(' ', 1)[0] for key, form in forms.items()}
    values = {}  # digests, by keys

    def value(source):
        return _number('%x:%s' % (values[source[0]], source[1]))

    def digest(key):
        kind, taken = kinds[key], [] if kinds[key] == _BACK else inputs[key]
        if kind in sums:
            return sum(values[source] for source, _ in taken) & _MASK
        texts = ['%x' % value(each) for each in taken]
        if kind in _REDUCES and taken and kinds[taken[0][0]] in _JOINS:
            texts[0] = ' '.join(sorted('%x' % value(each) for each in inputs[taken[0][0]]))
        return _number(' '.join([forms[key]] + (sorted(texts) if kind in any_order else texts)))

    stack = [key for key, _ in ends]
    while stack:
        key = stack[-1]
        missing = [] if key in values or kinds[key] == _BACK else [
            source for source, _ in inputs[key] if source not in values]
        if missing:
            stack.extend(missing)
            continue
        stack.pop()
        if key not in values:
            values[key] = digest(key)
    terms, stack = [], [key for key, _ in ends]
    while stack and len(terms) + len(stack) <= _MOST_TERMS:
        key = stack.pop()
        if kinds[key] in sums:
            stack.extend(source for source, _ in inputs[key])
        else:
            terms.append(key)
    if stack:
        return [['%x' % (sum(values[key] for key, _ in ends) & _MASK), []]]
    return sorted(['%x' % values[key], _variables(key, forms, kinds, inputs)] for key in terms)


def difference_of_order(own, other):
    """How a worker's `order_of`, `other`, differs from worker 0's: a clause, or None."""
    mine, yours = [[tuple(each[0:1]) for each in terms] for terms in (own, other)]
    if sorted(mine) == sorted(yours):
        return None
    names = sorted({name for digest, names in other if (digest,) not in mine for name in names})
    return ('its model is another one: its loss is computed by the same operations as that of '
            'worker 0, which are arranged in another way%s. Have the model function put them '
            'together alike on every worker, in an order such as that of sorted(names), and not '
            'in that of a set' % (' where it reads %s' % ', '.join(
                [repr(str(name)) for name in names[:4]] + ['…'] * (len(names) > 4))
                                  if names else ''))


def _number(text):
    return int(hashlib.sha1(text.encode('utf-8')).hexdigest()[:16], 16)


def _variables(key, forms, kinds, inputs):
    """The first names of the variables that a term is computed from."""
    stack, seen, names = [key], {key}, set()
    while stack:
        key = stack.pop()
        if kinds[key] == 'variable':
            names.add(forms[key].split(' ', 1)[1])
        for source, _ in inputs[key]:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return sorted(names)[:8]
