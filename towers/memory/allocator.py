"""TensorFlow's best-fit allocator: how many bytes it hands out for a request.

It serves GPUs always, and CPUs where `TF_CPU_ALLOCATOR_USE_BFC` is set. A request is rounded up to
256 bytes and gets the smallest free chunk that is large enough; the chunk is cut only if it is at
least twice as large (or 128 MB larger) than the request. So up to half of a chunk is lost for as
long as it is held: neither the step's tensors nor other requests can use it (`bfc_allocator.cc`).
"""

import bisect

_UNIT = 256
_BINS = 21
_MOST_LOST = 128 << 20
_FIRST_REGION = 1 << 20


class _Chunk:
    __slots__ = ('size', 'place', 'before', 'after', 'free')

    def __init__(self, size, place):
        self.size, self.place = size, place
        self.before = self.after = None
        self.free = True

    def __lt__(self, other):
        return (self.size, self.place) < (other.size, other.place)


class BestFitAllocator:
    """A pool that grows, as with `allow_growth`.

    Attributes:
      in_use: bytes of the chunks that are handed out.
      peak: the most that `in_use` was.
      reserved: bytes of the regions taken from the device.
    """

    def __init__(self):
        self.in_use = self.peak = self.reserved = 0
        self._region = _FIRST_REGION
        self._bins = [[] for _ in range(_BINS)]

    def allocate(self, size):
        """The chunk for a request of `size` bytes, to be given back by `free`."""
        size = -(-max(size, 1) // _UNIT) * _UNIT
        chunk = self._found(size)
        if chunk is None:
            self._extend(size)
            chunk = self._found(size)
        self.in_use += chunk.size
        self.peak = max(self.peak, self.in_use)
        return chunk

    def free(self, chunk):
        """Takes a chunk back and joins it with free neighbours."""
        self.in_use -= chunk.size
        chunk.free = True
        if chunk.after is not None and chunk.after.free:
            self._remove(chunk.after)
            self._join(chunk, chunk.after)
        if chunk.before is not None and chunk.before.free:
            before = chunk.before
            self._remove(before)
            self._join(before, chunk)
            chunk = before
        bisect.insort(self._bin(chunk.size), chunk)

    def _found(self, size):
        for number in range(_bin_number(size), _BINS):
            chunks = self._bins[number]
            wanted = _Chunk(size, -1)
            place = bisect.bisect_left(chunks, wanted)
            if place < len(chunks):
                chunk = chunks.pop(place)
                if chunk.size >= 2 * size or chunk.size - size >= _MOST_LOST:
                    rest = _Chunk(chunk.size - size, chunk.place + size)
                    rest.before, rest.after = chunk, chunk.after
                    if chunk.after is not None:
                        chunk.after.before = rest
                    chunk.after, chunk.size = rest, size
                    bisect.insort(self._bin(rest.size), rest)
                chunk.free = False
                return chunk
        return None

    def _extend(self, size):
        doubled = False
        while self._region < size:
            self._region *= 2
            doubled = True
        bisect.insort(self._bin(self._region), _Chunk(self._region, self.reserved))
        self.reserved += self._region
        if not doubled:
            self._region *= 2

    def _bin(self, size):
        return self._bins[_bin_number(size)]

    def _remove(self, chunk):
        chunks = self._bin(chunk.size)
        del chunks[bisect.bisect_left(chunks, chunk)]

    @staticmethod
    def _join(one, other):
        one.size += other.size
        one.after = other.after
        if other.after is not None:
            other.after.before = one


def _bin_number(size):
    return min(_BINS - 1, (size // _UNIT).bit_length() - 1)


def handed_out(run, of_allocator, kept=()):
    """The most bytes that the allocators of a step's devices hand out.

    The step is replayed twice: in the second step, variables are where the first step put them.

    Args:
      run: `simulation.Run`.
      of_allocator: function from a device to the key of its allocator; None for an allocator that
        hands out exactly the requested bytes.
      kept: list of `(device, bytes)`: memory from before the first step that stays.

    Returns:
      dict from the allocator's key to bytes.
    """
    pools, chunks, contents = {}, {}, {}

    def pool(device):
        key = of_allocator(device)
        if key is None:
            return None
        return pools.setdefault(key, BestFitAllocator())
    for device, size in kept:
        if size and pool(device) is not None:
            pool(device).allocate(size)
    events = []
    for buffer in run.buffers:
        if buffer.size and pool(buffer.device) is not None:
            events.append((buffer.since, True, buffer))
            if buffer.until is not None:
                events.append((buffer.until, False, buffer))
    events.sort(key=lambda event: event[0])
    for turn in range(2):
        for each in pools.values():
            each.peak = each.in_use
        for _, begins, buffer in events:
            if not begins:
                pool(buffer.device).free(chunks.pop(buffer))
            elif buffer.what == 'variable' and turn:
                chunks[buffer] = contents[buffer.variable]
            else:
                chunks[buffer] = pool(buffer.device).allocate(buffer.size)
        for buffer in list(chunks):  # left at the end: the variables, and fed values
            chunk = chunks.pop(buffer)
            if buffer.what in ('variable', 'update'):
                contents[buffer.variable] = chunk
            else:
                pool(buffer.device).free(chunk)
    return {key: each.peak for key, each in pools.items()}
